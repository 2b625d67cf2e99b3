/* output_text.c - text as it is generated.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* memmem */
#include "output_text.h"

#include <string.h>

#include "characters.h"

static const char REPLACEMENT[] = "\xef\xbf\xbd"; /* U+FFFD */

void output_text_add_characters(output_text *text, const char *characters, size_t length) {
    for (size_t i = 0; i < length; i++)
        text->num_characters += ((unsigned char)characters[i] & 0xc0) != 0x80;
    byte_buffer_add(&text->text, characters, length);
}

static void settle(output_text *text) {
    while (text->num_pending > 0) {
        const int length =
            character_length((const unsigned char *)text->pending, text->num_pending);
        if (length == 0) return;
        if (length > 0)
            output_text_add_characters(text, text->pending, (size_t)length);
        else
            output_text_add_characters(text, REPLACEMENT, sizeof REPLACEMENT - 1);
        const size_t used = (size_t)(length > 0 ? length : -length);
        text->num_pending -= used;
        memmove(text->pending, text->pending + used, text->num_pending);
    }
}

void output_text_add(output_text *text, const char *bytes, size_t length) {
    for (size_t i = 0; i < length; i++) {
        text->pending[text->num_pending++] = bytes[i];
        settle(text);
    }
}

void output_text_finish(output_text *text) {
    if (text->num_pending > 0)
        output_text_add_characters(text, REPLACEMENT, sizeof REPLACEMENT - 1);
    text->num_pending = 0;
}

void output_text_release(output_text *text) {
    text->ready = text->text.length;
}

/* Bytes at the end of text[length] that begin `stop` without being all of it. */
static size_t unfinished(const char *text, size_t length, const char *stop, size_t stop_length) {
    size_t num = length < stop_length - 1 ? length : stop_length - 1;
    while (num > 0 && memcmp(text + length - num, stop, num) != 0) num--;
    return num;
}

const char *output_text_stop(output_text *text, const stop_strings *stops) {
    if (text->text.length == text->ready) return NULL;
    const char *const from = text->text.data + text->ready;
    const size_t length = text->text.length - text->ready;
    const char *found = NULL;
    size_t begin = 0, end = 0, held = 0;
    for (size_t i = 0; i < stops->num; i++) {
        const char *const stop = stops->strings[i];
        const size_t stop_length = strlen(stop);
        const char *const at = memmem(from, length, stop, stop_length);
        if (at == NULL) {
            const size_t tail = unfinished(from, length, stop, stop_length);
            if (tail > held) held = tail;
            continue;
        }
        const size_t at_end = (size_t)(at - from) + stop_length;
        const bool first = found == NULL || at_end < end;
        if (!first && (at_end > end || (size_t)(at - from) > begin)) continue;
        found = stop;
        begin = (size_t)(at - from);
        end = at_end;
    }
    if (found != NULL) {
        byte_buffer_cut(&text->text, text->ready + (stops->include ? end : begin));
        text->num_pending = 0;
        held = 0;
    }
    text->ready = text->text.length - held;
    return found;
}

void output_text_free(output_text *text) {
    byte_buffer_free(&text->text);
}
