/* kv8/tokenizer.h - byte-level BPE from a Hugging Face tokenizer.json (o200k_harmony and kin).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TOKENIZER_H
#define KV8_TOKENIZER_H

#include <kv8/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_tokenizer kv8_tokenizer;

/* Parses tokenizer.json once. Supports what the gpt-oss converter writes: no normalizer, a Split
 * pre-tokenizer (any pattern PCRE2 compiles) + ByteLevel, a BPE model with `merges` as pairs or
 * "a b" strings and `ignore_merges` honoured, added special tokens. Anything else is
 * KV8_ERR_UNSUPPORTED naming the key. *out is NULL on failure. Immutable afterwards: any number
 * of threads may encode and decode. */
KV8_API KV8_NODISCARD kv8_status kv8_tokenizer_open(kv8_tokenizer **out, const char *path);
/* The same from the file's bytes in memory; messages begin with `name`. */
KV8_API KV8_NODISCARD kv8_status kv8_tokenizer_parse(kv8_tokenizer **out, const char *json,
                                                     size_t length, const char *name);
/* One for a model that has none, as those of random weights: every byte, harmony's control tokens,
 * and a word of its own for each other id. vocab_size is 265 to a million. */
KV8_API KV8_NODISCARD kv8_status kv8_tokenizer_create_words(kv8_tokenizer **out,
                                                            int32_t vocab_size);
KV8_API void kv8_tokenizer_close(kv8_tokenizer *tokenizer);

/* One more than the largest id. */
KV8_API int32_t kv8_tokenizer_vocab_size(const kv8_tokenizer *tokenizer);

typedef enum kv8_special {
    KV8_SPECIAL_AS_TEXT = 0, /* "<|end|>" in the text is seven plain characters */
    KV8_SPECIAL_AS_TOKENS    /* the added tokens' texts become their ids */
} kv8_special;

/* Encodes UTF-8 text (length < 2^31). *ids_out (malloc'ed, caller frees with kv8_free; never NULL)
 * and *num_out are written on success only. Invalid UTF-8 is KV8_ERR_INVALID naming the byte
 * offset. The bytes of the ids' tokens, put together, are the text again. */
KV8_API KV8_NODISCARD kv8_status kv8_tokenizer_encode(const kv8_tokenizer *tokenizer,
                                                      const char *text, size_t length,
                                                      kv8_special special, int32_t **ids_out,
                                                      size_t *num_out);

/* The bytes of one token: borrowed, length in *length_out; not always whole UTF-8. NULL for an id
 * without a token. */
KV8_API const char *kv8_tokenizer_token_bytes(const kv8_tokenizer *tokenizer, int32_t id,
                                              size_t *length_out);
/* 1 when the id is an added special token. */
KV8_API int kv8_tokenizer_is_special(const kv8_tokenizer *tokenizer, int32_t id);
/* Id of the added token with this text, or -1. */
KV8_API int32_t kv8_tokenizer_special_id(const kv8_tokenizer *tokenizer, const char *text);

/* Length of the longest prefix of bytes that does not end inside a UTF-8 character: what a stream
 * may print now. A byte that can begin or continue no character counts as complete. */
KV8_API size_t kv8_utf8_complete_length(const char *bytes, size_t length);

#ifdef __cplusplus
}
#endif
#endif
