/* waiting.h - requests that wait, by who comes first: a binary heap whose first entry is the next.
 * Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_WAITING_H
#define KV8_WAITING_H

#include <stdbool.h>
#include <stdint.h>

/* Lower orders come first, of one order lower serials. */
typedef struct kv8_waiting {
    int64_t order;
    uint64_t serial;
    int32_t slot; /* the request */
} kv8_waiting;

bool kv8_comes_before(const kv8_waiting *a, const kv8_waiting *b);
/* heap [*num] has room for one more. */
void kv8_waiting_push(kv8_waiting *heap, int32_t *num, kv8_waiting entry);
void kv8_waiting_remove(kv8_waiting *heap, int32_t *num, int32_t idx);

#endif
