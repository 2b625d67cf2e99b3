/* text_buffer.h - a growing string on the C heap, always 0-terminated once something was added.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TEXT_BUFFER_H
#define KV8_TEXT_BUFFER_H

#include <stdlib.h>
#include <string.h>

#include "base_impl.h"

typedef struct kv8_text_buffer {
    char *data;
    size_t length, capacity;
} kv8_text_buffer;

static inline kv8_status kv8_text_append(kv8_text_buffer *text, const char *bytes, size_t length) {
    size_t wanted = 0;
    if (!kv8_add_size(text->length, length, &wanted) || wanted > SIZE_MAX / 2 - 1)
        return kv8_fail(KV8_ERR_NO_MEMORY, "text: %zu more bytes overflow the address space",
                        length);
    if (wanted + 1 > text->capacity) {
        const size_t capacity = wanted + 1 < 32 ? 32 : 2 * (wanted + 1);
        char *const data = realloc(text->data, capacity);
        if (data == NULL)
            return kv8_fail(KV8_ERR_NO_MEMORY, "text: no memory for %zu bytes", capacity);
        text->data = data;
        text->capacity = capacity;
    }
    if (length > 0) memcpy(text->data + text->length, bytes, length);
    text->data[wanted] = '\0';
    text->length = wanted;
    return KV8_OK;
}

static inline kv8_status kv8_text_append_string(kv8_text_buffer *text, const char *string) {
    return kv8_text_append(text, string, strlen(string));
}

static inline void kv8_text_free(kv8_text_buffer *text) {
    free(text->data);
    *text = (kv8_text_buffer){0};
}

#endif
