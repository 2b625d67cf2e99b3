/* device_tables.h - page tables in a GPU's memory, one for each group of layers. Lists of pages
 * stay there, by sequence; the host sends what changed of them, and a kernel makes the tables of a
 * batch.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_TABLES_H
#define KV8_DEVICE_TABLES_H

#include "cache_state.h"
#include "device_staging.h"

typedef struct kv8_device_tables kv8_device_tables;

/* Bytes of the largest piece that is staged. */
size_t kv8_device_tables_staged_bytes(const kv8_cache *cache);
/* cache and staging are borrowed. */
kv8_status kv8_device_tables_create(kv8_device_tables **out, const kv8_cache *cache,
                                    kv8_staging *staging);
void kv8_device_tables_destroy(kv8_device_tables *tables);

/* Groups [first, first + num_groups), on the staging's stream; those that have these sequences'
 * lists get last_page_len alone, with lists_alone nothing. */
kv8_status kv8_device_tables_load(kv8_device_tables *tables, int32_t first, int32_t num_groups,
                                  const kv8_seq *seqs, int32_t num_seqs, bool lists_alone);
/* A group's table, at the same addresses for every load. */
kv8_page_table kv8_device_tables_get(const kv8_device_tables *tables, int32_t group);

#endif
