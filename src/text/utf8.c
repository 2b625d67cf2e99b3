/* utf8.c - strict UTF-8: the well-formed byte ranges of the Unicode standard (table 3-7).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "utf8.h"

#include <string.h>

#include <kv8/tokenizer.h>

/* Bytes of the character that `lead` begins (0: it begins none) and the range of its second byte;
 * all later bytes are 80..BF. The ranges shut out overlong forms (E0, F0), surrogates (ED) and
 * what lies above U+10FFFF (F4). */
static size_t lead_info(uint8_t lead, uint8_t *low_out, uint8_t *high_out) {
    *low_out = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    *high_out = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) return 2;
    if (lead >= 0xE0 && lead <= 0xEF) return 3;
    if (lead >= 0xF0 && lead <= 0xF4) return 4;
    return 0;
}

kv8_utf8_kind kv8_utf8_next(const char *bytes, size_t length, size_t *length_out) {
    uint8_t low, high;
    const size_t wanted = lead_info((uint8_t)bytes[0], &low, &high);
    size_t got = 1;
    for (; got < wanted && got < length; got++) {
        const uint8_t byte = (uint8_t)bytes[got];
        if (byte < low || byte > high) break;
        low = 0x80;
        high = 0xBF;
    }
    *length_out = got;
    if (got == wanted) return KV8_UTF8_CHARACTER;
    return wanted > 0 && got == length ? KV8_UTF8_INCOMPLETE : KV8_UTF8_INVALID;
}

/* true when the eight bytes are all ASCII. */
static bool is_ascii8(const char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return (word & 0x8080808080808080u) == 0;
}

bool kv8_utf8_is_valid(const char *bytes, size_t length, size_t *offset_out) {
    size_t at = 0;
    while (at < length) {
        if (length - at >= 8 && is_ascii8(bytes + at)) {
            at += 8;
            continue;
        }
        size_t used;
        if (kv8_utf8_next(bytes + at, length - at, &used) != KV8_UTF8_CHARACTER) {
            *offset_out = at;
            return false;
        }
        at += used;
    }
    return true;
}

size_t kv8_utf8_complete_length(const char *bytes, size_t length) {
    /* An unfinished character is at most three bytes long and runs to the end. */
    for (size_t back = 1; back <= 3 && back <= length; back++) {
        size_t used;
        if (kv8_utf8_next(bytes + length - back, back, &used) == KV8_UTF8_INCOMPLETE)
            return length - back;
    }
    return length;
}
