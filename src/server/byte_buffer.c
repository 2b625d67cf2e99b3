/* byte_buffer.c - bytes that grow at the end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "byte_buffer.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool reserve(byte_buffer *buffer, size_t more) {
    if (buffer->failed) return false;
    const size_t needed = buffer->length + more + 1;
    if (needed <= buffer->capacity) return true;
    size_t capacity = buffer->capacity < 64 ? 64 : buffer->capacity * 2;
    if (capacity < needed) capacity = needed;
    char *const data = realloc(buffer->data, capacity);
    buffer->failed = data == NULL;
    if (data == NULL) return false;
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void byte_buffer_add(byte_buffer *buffer, const char *bytes, size_t length) {
    if (!reserve(buffer, length)) return;
    if (length > 0) memcpy(buffer->data + buffer->length, bytes, length);
    buffer->length += length;
    buffer->data[buffer->length] = '\0';
}

void byte_buffer_add_string(byte_buffer *buffer, const char *string) {
    byte_buffer_add(buffer, string, strlen(string));
}

void byte_buffer_printf(byte_buffer *buffer, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int length = vsnprintf(NULL, 0, format, args);
    if (length >= 0 && reserve(buffer, (size_t)length)) {
        vsnprintf(buffer->data + buffer->length, (size_t)length + 1, format, again);
        buffer->length += (size_t)length;
    }
    va_end(again);
    va_end(args);
}

void byte_buffer_cut(byte_buffer *buffer, size_t length) {
    if (length >= buffer->length) return;
    buffer->length = length;
    buffer->data[length] = '\0';
}

void byte_buffer_free(byte_buffer *buffer) {
    free(buffer->data);
    *buffer = (byte_buffer){0};
}
