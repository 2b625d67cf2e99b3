/* characters.h - UTF-8 of which nobody knows that it is whole.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CHARACTERS_H
#define KV8_SERVER_CHARACTERS_H

#include <stddef.h>

/* Length of the character that bytes[num] (num > 0) begin with (Unicode, table 3-7); 0 = not whole
 * yet; below 0, as many bytes are the beginning of one that another byte breaks off. */
int character_length(const unsigned char *bytes, size_t num);

/* Puts a '?' in the place of every byte that is of no whole character: JSON takes the text then. */
void characters_mend(char *text, size_t length);

#endif
