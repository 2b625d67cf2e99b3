/* tokenizer_tables.h - a loaded tokenizer: the tables, the split pattern, the added tokens. Filled
 * by tokenizer_load.c, read by tokenizer.c and harmony.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TOKENIZER_TABLES_H
#define KV8_TOKENIZER_TABLES_H

#include <kv8/tokenizer.h>

#include "bpe.h"
#include "split_pattern.h"

struct kv8_tokenizer {
    kv8_bpe bpe;
    kv8_split_pattern pattern;
    int32_t *specials; /* [num_specials] ids, longest text first */
    size_t num_specials;
    bool *is_special;       /* [bpe.num_ids] */
    bool special_lead[256]; /* the bytes a special's text begins with */
};

/* kv8_tokenizer_encode that appends. On failure ids may have grown. */
kv8_status kv8_tokenizer_append(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                                kv8_special special, kv8_token_ids *ids);

#endif
