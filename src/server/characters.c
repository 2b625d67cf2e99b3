/* characters.c - UTF-8 of which nobody knows that it is whole.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "characters.h"

#include <string.h>

int character_length(const unsigned char *bytes, size_t num) {
    const unsigned char lead = bytes[0];
    if (lead < 0x80) return 1;
    const int length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < num && i < (size_t)length; i++) {
        if (bytes[i] < (i == 1 ? low : 0x80) || bytes[i] > (i == 1 ? high : 0xbf)) return -(int)i;
    }
    return num < (size_t)length ? 0 : length;
}

void characters_mend(char *text, size_t length) {
    for (size_t i = 0; i < length;) {
        const int whole = character_length((const unsigned char *)text + i, length - i);
        const size_t bytes = whole > 0 ? (size_t)whole : whole < 0 ? (size_t)-whole : length - i;
        if (whole <= 0) memset(text + i, '?', bytes);
        i += bytes;
    }
}
