/* byte_buffer.h - bytes that grow at the end. When memory runs out it stays as it is and says so in
 * `failed`, which whoever sends the bytes looks at once.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_BYTE_BUFFER_H
#define KV8_SERVER_BYTE_BUFFER_H

#include <stdbool.h>
#include <stddef.h>

typedef struct byte_buffer {
    char *data; /* length bytes and a 0; NULL while nothing was added */
    size_t length, capacity;
    bool failed;
} byte_buffer;

void byte_buffer_add(byte_buffer *buffer, const char *bytes, size_t length);
void byte_buffer_add_string(byte_buffer *buffer, const char *string);
void byte_buffer_printf(byte_buffer *buffer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Bytes from `length` on are gone. */
void byte_buffer_cut(byte_buffer *buffer, size_t length);
void byte_buffer_free(byte_buffer *buffer);

#endif
