/* utf8.h - strict UTF-8, one character at a time: no overlong forms, no surrogates, nothing above
 * U+10FFFF. Knows bytes; knows no tokens. The public kv8_utf8_complete_length is in utf8.c too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_UTF8_H
#define KV8_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum kv8_utf8_kind {
    KV8_UTF8_CHARACTER,  /* a whole character of `length` bytes */
    KV8_UTF8_INCOMPLETE, /* the bytes end inside a character that more bytes could complete */
    KV8_UTF8_INVALID     /* `length` bytes that belong together and are no character */
} kv8_utf8_kind;

/* What stands at the start of `bytes` (length > 0). An invalid run is the longest one that some
 * character begins with ("maximal subpart"), or one byte: each becomes one U+FFFD. */
kv8_utf8_kind kv8_utf8_next(const char *bytes, size_t length, size_t *length_out);

/* true when all of it is whole characters; else *offset_out is the first byte that is not. */
bool kv8_utf8_is_valid(const char *bytes, size_t length, size_t *offset_out);

#endif
