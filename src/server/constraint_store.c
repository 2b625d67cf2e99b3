/* constraint_store.c - constraints by what they were built of.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "constraint_store.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_KEPT = 16 };

typedef struct kept {
    char *key;
    constraint *constraint;
} kept;

struct constraint_store {
    pthread_mutex_t lock;
    kept kept[MAX_KEPT]; /* [num], the one asked for last comes first */
    size_t num;
};

constraint_store *constraint_store_create(void) {
    constraint_store *const s = calloc(1, sizeof *s);
    if (s != NULL) pthread_mutex_init(&s->lock, NULL);
    return s;
}

static void drop(constraint_store *s, size_t at) {
    free(s->kept[at].key);
    constraint_release(s->kept[at].constraint);
    s->num--;
    memmove(s->kept + at, s->kept + at + 1, (s->num - at) * sizeof *s->kept);
}

void constraint_store_destroy(constraint_store *s) {
    if (s == NULL) return;
    while (s->num > 0) drop(s, s->num - 1);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void put_first(constraint_store *s, size_t num_before, kept it) {
    memmove(s->kept + 1, s->kept, num_before * sizeof *s->kept);
    s->kept[0] = it;
}

constraint *constraint_store_find(constraint_store *s, const char *key) {
    constraint *found = NULL;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->num && found == NULL; i++) {
        if (strcmp(s->kept[i].key, key) != 0) continue;
        if (constraint_is_full(s->kept[i].constraint)) {
            drop(s, i);
            break;
        }
        put_first(s, i, s->kept[i]);
        found = constraint_share(s->kept[0].constraint);
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

void constraint_store_keep(constraint_store *s, const char *key, constraint *c) {
    char *const copy = strdup(key);
    if (copy == NULL) return;
    pthread_mutex_lock(&s->lock);
    if (s->num == MAX_KEPT) drop(s, MAX_KEPT - 1);
    put_first(s, s->num++, (kept){.key = copy, .constraint = constraint_share(c)});
    pthread_mutex_unlock(&s->lock);
}
