/* constraint.h - a grammar over the tokens of a vocabulary: which of them may come next.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CONSTRAINT_H
#define KV8_SERVER_CONSTRAINT_H

#include <pthread.h>

#include "vocabulary.h"

/* One grammar, of any number of answers. */
typedef struct constraint constraint;
/* Takes the grammar; NULL = no memory, or an entry from which nothing follows. */
constraint *constraint_create(const vocabulary *v, grammar *g, int entry);
/* One user more, one less: the last one's release destroys it. NULL is fine for a release. */
constraint *constraint_share(constraint *c);
void constraint_release(constraint *c);
/* Computes masks that answers will come to, for some milliseconds, once; other threads may follow
 * it meanwhile. */
void constraint_prepare(constraint *c);
/* Its answers have met so many states that others should begin anew. */
bool constraint_is_full(constraint *c);

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
