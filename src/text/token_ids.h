/* token_ids.h - a growing list of token ids on the C heap, so that a caller of the public API can
 * own it in the end (kv8_free).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TOKEN_IDS_H
#define KV8_TOKEN_IDS_H

#include <stdlib.h>

#include "base_impl.h"

typedef struct kv8_token_ids {
    int32_t *data;
    size_t count, capacity;
} kv8_token_ids;

/* Room for `more` ids beyond those there. */
static inline kv8_status kv8_token_ids_reserve(kv8_token_ids *ids, size_t more) {
    if (ids->capacity - ids->count >= more) return KV8_OK;
    size_t wanted = 0, bytes = 0;
    if (!kv8_add_size(ids->count, more, &wanted) || !kv8_mul_size(wanted, 2, &wanted) ||
        !kv8_mul_size(wanted, sizeof *ids->data, &bytes))
        return kv8_fail(KV8_ERR_NO_MEMORY, "token ids: %zu more overflow the address space", more);
    int32_t *const data = realloc(ids->data, bytes);
    if (data == NULL)
        return kv8_fail(KV8_ERR_NO_MEMORY, "token ids: no memory for %zu bytes", bytes);
    ids->data = data;
    ids->capacity = wanted;
    return KV8_OK;
}

static inline kv8_status kv8_token_ids_push(kv8_token_ids *ids, int32_t id) {
    KV8_TRY(kv8_token_ids_reserve(ids, 1));
    ids->data[ids->count++] = id;
    return KV8_OK;
}

#endif
