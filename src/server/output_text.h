/* output_text.h - text as it is generated: bytes of tokens become whole characters, stop strings
 * end it, and what could still turn out to be the beginning of one waits.
 *
 * Whoever writes it to a client sends [sent, ready). The whole text is therefore the same, however
 * it is cut into tokens and events.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_OUTPUT_TEXT_H
#define KV8_SERVER_OUTPUT_TEXT_H

#include "byte_buffer.h"

typedef struct stop_strings {
    const char **strings; /* borrowed, none empty */
    size_t num;
    bool include; /* the text keeps the one that ended it */
} stop_strings;

typedef struct output_text {
    byte_buffer text;      /* whole UTF-8 characters */
    size_t ready;          /* bytes that no stop string can take back */
    size_t sent;           /* bytes the client has */
    size_t num_characters; /* of text */
    char pending[4];       /* bytes of a character not yet whole */
    size_t num_pending;
} output_text;

/* Adds bytes; those that are no UTF-8 become U+FFFD. */
void output_text_add(output_text *text, const char *bytes, size_t length);
/* Adds whole UTF-8 characters. */
void output_text_add_characters(output_text *text, const char *characters, size_t length);
/* Everything so far may be sent: no stop string is looked for in it. */
void output_text_release(output_text *text);
/* Looks for stop strings in what is not released yet: the one that ends first ends the text, and is
 * returned; else NULL, and what cannot begin one is released. */
const char *output_text_stop(output_text *text, const stop_strings *stops);
/* Nothing more comes: an unfinished character is one U+FFFD. */
void output_text_finish(output_text *text);
void output_text_free(output_text *text);

#endif
