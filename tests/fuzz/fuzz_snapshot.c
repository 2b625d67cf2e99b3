/* fuzz_snapshot.c - restoring a snapshot from any bytes: as they are, and once more under a
 * checksum that fits, so that the checks behind it are reached. What is accepted must then work
 * like any sequence, and give every page back.
 *
 * Seeds: whole.kv8snap was written by kv8_cache_save from a cache of snapshot_shape(); torn and
 * foreign are its first half and a text.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "../support/snapshot_shape.h"
#include "snapshot.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition) {
    if (!condition) abort();
}

static void use(kv8_cache *cache, kv8_seq seq) {
    enum { MAX_LEN = 30 };
    static float k[MAX_LEN * SHAPE_HEADS * SHAPE_K_DIM], v[MAX_LEN * SHAPE_HEADS * SHAPE_V_DIM];
    int32_t length = -1;
    require(kv8_cache_seq_length(cache, seq, &length) == KV8_OK);
    require(length >= 0 && length <= MAX_LEN);
    for (int32_t layer = 0; layer < SHAPE_LAYERS; layer++) {
        const int32_t window_left = shape_layers[layer].window_left;
        const int32_t seen = window_left < 0 || length < window_left ? 0 : length - window_left;
        require(kv8_cache_read(cache, layer, seq, seen, length - seen, k, v) == KV8_OK);
        int32_t indptr[2], pages[8], last;
        require(kv8_cache_page_table(cache, layer, &seq, 1, indptr, pages, 8, &last) == KV8_OK);
    }
    require(kv8_cache_publish(cache, seq) == KV8_OK);
    const kv8_status status = kv8_cache_extend(cache, seq, 1, NULL);
    require(status == KV8_OK || length == MAX_LEN);
    require(kv8_cache_truncate(cache, seq, length) == KV8_OK);
}

static void load(kv8_cache *cache, const uint8_t *data, size_t size) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    kv8_seq seq = KV8_SEQ_NONE;
    if (kv8_cache_load_bytes(cache, data, size, "fuzz", &seq) == KV8_OK) {
        use(cache, seq);
        require(kv8_cache_seq_destroy(cache, seq) == KV8_OK);
    } else {
        require(seq == KV8_SEQ_NONE);
        require(kv8_status_message()[0] != '\0');
    }
    require(kv8_cache_get_stats(cache, &stats) == KV8_OK);
    require(stats.num_seqs == 0 && stats.pages_free == stats.pages_total);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static kv8_cache *cache;
    const kv8_cache_options options = snapshot_shape();
    if (cache == NULL) require(kv8_cache_create(&cache, &options) == KV8_OK);
    load(cache, data, size);
    XXH128_canonical_t checksum;
    if (size < sizeof checksum) return 0;
    uint8_t *const copy = malloc(size);
    require(copy != NULL);
    memcpy(copy, data, size);
    XXH128_canonicalFromHash(&checksum, XXH3_128bits(data, size - sizeof checksum));
    memcpy(copy + size - sizeof checksum, &checksum, sizeof checksum);
    load(cache, copy, size);
    free(copy);
    return 0;
}
