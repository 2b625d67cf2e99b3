/* constraint_store.h - constraints of the requests before, by what they were built of: clients ask
 * for one form again and again, and masks met once are known.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_CONSTRAINT_STORE_H
#define KV8_SERVER_CONSTRAINT_STORE_H

#include "constraint.h"

typedef struct constraint_store constraint_store;
/* NULL = no memory. */
constraint_store *constraint_store_create(void);
void constraint_store_destroy(constraint_store *s);
/* One of this key, of which the caller is a user; NULL = none is kept. */
constraint *constraint_store_find(constraint_store *s, const char *key);
/* Becomes a user of the constraint, in place of the one that was asked for longest ago. */
void constraint_store_keep(constraint_store *s, const char *key, constraint *c);

#endif
