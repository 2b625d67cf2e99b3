/* snapshot.h - restoring from bytes in memory: what load does once the file is mapped, and what
 * the fuzz harness and the tests that alter every byte call directly.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SNAPSHOT_H
#define KV8_SNAPSHOT_H

#include "cache_impl.h"

/* `name` stands for the file in messages. Statuses as kv8_cache_load's. */
kv8_status kv8_cache_load_bytes(kv8_cache *cache, const uint8_t *data, size_t size,
                                const char *name, kv8_seq *seq_out);

#endif
