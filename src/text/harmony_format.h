/* harmony_format.h - the words of the format that rendering and parsing share.
 *
 * A message is <|start|> HEADER <|message|> CONTENT END, END being <|end|>, or <|call|> after a
 * call, or <|return|> where the model stops. HEADER is
 *     role [:name] [ to=recipient] [<|channel|> channel] [ <|constrain|> content type]
 * and for a tool's answer the tool's name stands in the role's place.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_HARMONY_FORMAT_H
#define KV8_HARMONY_FORMAT_H

#include <kv8/harmony.h>

#include "base_impl.h"

#define KV8_HARMONY_CONSTRAIN "<|constrain|>"

typedef struct kv8_harmony_control {
    int32_t start, message, end, call, channel, constrain, end_of_return, end_of_text;
} kv8_harmony_control;

/* The control tokens' ids. A tokenizer without one of them is KV8_ERR_UNSUPPORTED, by name. */
kv8_status kv8_harmony_control_find(const kv8_tokenizer *tokenizer,
                                    kv8_harmony_control *control_out);

/* The role's word, NULL for a tool (it stands for itself) and for what is no role. */
const char *kv8_harmony_role_word(kv8_role role);
/* "user", "user:name" -> the role; *name_out is "name" or NULL. false when it is no role. */
bool kv8_harmony_role_parse(const char *word, kv8_role *role_out, const char **name_out);

/* What the model wrote in a header. All strings lie in the buffers given to parse. */
typedef struct kv8_harmony_header {
    kv8_role role;
    const char *name, *recipient, *content_type;
    const char *rest; /* of a header that never ended: what is not header after all, else "" */
} kv8_harmony_header;

/* Reads header text (without the channel, which the caller cuts out and replaces by spaces; cut in
 * pieces here). `role_length`: the role can only stand before this offset. `after_start`:
 * <|start|> began it, so that its first word is a role or a tool; else it continues
 * "<|start|>assistant". `ended`: <|message|> came; else leftover words are `rest`. */
void kv8_harmony_header_parse(char *text, size_t role_length, bool after_start, bool ended,
                              kv8_harmony_header *header_out);

#endif
