/* tokenizer.c - text to ids and ids to bytes.
 *
 * Text is cut three times: at the special tokens (if they count), by the split pattern (a match is
 * a piece, so is the text between two matches), and inside a piece by byte-pair encoding. Reading
 * tokenizer.json is tokenizer_load.c's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tokenizer_tables.h"
#include "utf8.h"

/* PCRE2 and the merge list count in 32 bits. */
static const size_t MAX_TEXT = INT32_MAX;

int32_t kv8_tokenizer_vocab_size(const kv8_tokenizer *tokenizer) {
    return tokenizer->bpe.num_ids;
}

const char *kv8_tokenizer_token_bytes(const kv8_tokenizer *tokenizer, int32_t id,
                                      size_t *length_out) {
    const kv8_bpe *const bpe = &tokenizer->bpe;
    *length_out = 0;
    if (id < 0 || id >= bpe->num_ids || bpe->token_lengths[id] == 0) return NULL;
    *length_out = bpe->token_lengths[id];
    return bpe->bytes + bpe->token_offsets[id];
}

int kv8_tokenizer_is_special(const kv8_tokenizer *tokenizer, int32_t id) {
    return id >= 0 && id < tokenizer->bpe.num_ids && tokenizer->is_special[id];
}

int32_t kv8_tokenizer_special_id(const kv8_tokenizer *tokenizer, const char *text) {
    const size_t length = strlen(text);
    for (size_t i = 0; i < tokenizer->num_specials; i++) {
        size_t special_length;
        const char *const special =
            kv8_tokenizer_token_bytes(tokenizer, tokenizer->specials[i], &special_length);
        if (special_length == length && memcmp(special, text, length) == 0)
            return tokenizer->specials[i];
    }
    return -1;
}

/* One call's working memory. */
typedef struct encoder {
    const kv8_tokenizer *tokenizer;
    kv8_splitter splitter;
    kv8_bpe_scratch scratch;
    kv8_token_ids *ids;
} encoder;

static kv8_status encode_piece(encoder *self, const char *piece, size_t length) {
    if (length == 0) return KV8_OK;
    return kv8_bpe_encode(&self->tokenizer->bpe, &self->scratch, piece, length, self->ids);
}

/* Text without special tokens. Each stretch between two of them is a text of its own: the pattern
 * looks neither ahead nor behind beyond it. */
static kv8_status encode_plain(encoder *self, const char *text, size_t length) {
    size_t done = 0;
    while (done < length) {
        size_t begin, end;
        KV8_TRY(kv8_splitter_next(&self->splitter, text, length, done, &begin, &end));
        KV8_TRY(encode_piece(self, text + done, begin - done));
        KV8_TRY(encode_piece(self, text + begin, end - begin));
        done = end;
    }
    return KV8_OK;
}

/* The longest special token whose text stands at the start of `text`, or -1. */
static int32_t special_at(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                          size_t *length_out) {
    if (!tokenizer->special_lead[(uint8_t)text[0]]) return -1;
    for (size_t i = 0; i < tokenizer->num_specials; i++) {
        const char *const special =
            kv8_tokenizer_token_bytes(tokenizer, tokenizer->specials[i], length_out);
        if (*length_out <= length && memcmp(special, text, *length_out) == 0)
            return tokenizer->specials[i];
    }
    return -1;
}

static kv8_status encode_with_specials(encoder *self, const char *text, size_t length) {
    size_t done = 0;
    for (size_t at = 0; at < length;) {
        size_t special_length;
        const int32_t id = special_at(self->tokenizer, text + at, length - at, &special_length);
        if (id < 0) {
            at++;
            continue;
        }
        KV8_TRY(encode_plain(self, text + done, at - done));
        KV8_TRY(kv8_token_ids_push(self->ids, id));
        at += special_length;
        done = at;
    }
    return encode_plain(self, text + done, length - done);
}

kv8_status kv8_tokenizer_append(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                                kv8_special special, kv8_token_ids *ids) {
    if (text == NULL && length > 0)
        return kv8_fail(KV8_ERR_INVALID, "text is NULL but %zu bytes long", length);
    if (length > MAX_TEXT)
        return kv8_fail(KV8_ERR_INVALID, "a text of %zu bytes, the limit is %zu", length, MAX_TEXT);
    if (length == 0) return KV8_OK;
    size_t offset = 0;
    if (!kv8_utf8_is_valid(text, length, &offset))
        return kv8_fail(KV8_ERR_INVALID, "text is not valid UTF-8: byte 0x%02x at offset %zu",
                        (unsigned)(uint8_t)text[offset], offset);
    encoder self = {.tokenizer = tokenizer, .ids = ids};
    kv8_status status;
    KV8_TRY_GOTO(kv8_splitter_open(&self.splitter, &tokenizer->pattern));
    status = special == KV8_SPECIAL_AS_TOKENS ? encode_with_specials(&self, text, length)
                                              : encode_plain(&self, text, length);
fail:
    kv8_splitter_close(&self.splitter);
    kv8_bpe_scratch_release(&self.scratch);
    return status;
}

kv8_status kv8_tokenizer_encode(const kv8_tokenizer *tokenizer, const char *text, size_t length,
                                kv8_special special, int32_t **ids_out, size_t *num_out) {
    KV8_REQUIRE(tokenizer, ids_out, num_out);
    kv8_token_ids ids = {0};
    kv8_status status = kv8_token_ids_reserve(&ids, 1); /* never a NULL result */
    if (status == KV8_OK) status = kv8_tokenizer_append(tokenizer, text, length, special, &ids);
    if (status != KV8_OK) {
        free(ids.data);
        return status;
    }
    *ids_out = ids.data;
    *num_out = ids.count;
    return KV8_OK;
}
