/* constraint.h - a grammar over the tokens of a vocabulary: which of them may come next. The tokens
 * are kept sorted by their bytes, so that those with a common beginning are stepped through once.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CONSTRAINT_H
#define KV8_SERVER_CONSTRAINT_H

#include <jansson.h>
#include <pthread.h>

#include <kv8/tokenizer.h>

#include "grammar.h"

/* --- the vocabulary, once for all grammars --- */

typedef struct vocabulary vocabulary;
/* The tokenizer is borrowed. vocab_size: the model's. eos: ids that end an answer. NULL = no
 * memory. */
vocabulary *vocabulary_create(const kv8_tokenizer *tokenizer, int32_t vocab_size,
                              const int32_t *eos, int32_t num_eos);
void vocabulary_destroy(vocabulary *v);
/* Whether it has all control tokens that a chat's grammar speaks of. */
bool vocabulary_has_control(const vocabulary *v);

/* --- a constraint, of any number of answers --- */

typedef struct constraint constraint;
/* Takes the grammar; NULL = no memory, or an entry from which nothing follows. */
constraint *constraint_create(const vocabulary *v, grammar *g, int entry);
void constraint_destroy(constraint *c);

/* Where one answer is. */
typedef struct constraint_place {
    constraint *constraint;
    int state;
} constraint_place;
constraint_place constraint_begin(constraint *c);
void constraint_take(constraint_place *place, int32_t token);
/* A kv8_token_mask; the cookie is a constraint_place. */
void constraint_mask(void *place, uint32_t *words);

#endif
