/* observer.h - what an observer is made of, for the files that count into it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_OBSERVER_H
#define KV8_OBSERVER_H

#include "base_impl.h"
#include "observe_args.h"

#include <kv8/calibrate.h>

/* K, V or Q of all layers. */
typedef struct kv8_observed {
    int32_t num_heads, head_dim;
    int32_t first, num; /* the heads that are counted */
    size_t sums_at, maxima_at;
} kv8_observed;

struct kv8_observer {
    kv8_observer_options options;
    kv8_observed tensors[KV8_OBSERVED_COUNT];
    uint64_t *sums;
    float *maxima;
    size_t num_sums, num_maxima;
    bool on;
};

/* Where the cells of a layer's head begin among the sums and among the maxima. */
size_t kv8_observer_sums_at(const kv8_observed *t, int32_t layer, int32_t head);
size_t kv8_observer_maxima_at(const kv8_observed *t, int32_t layer, int32_t head);

/* One tensor of a call. */
typedef struct kv8_observe_source {
    const void *data; /* NULL = not in this call */
    int64_t stride_row, stride_head;
} kv8_observe_source;
/* Checks args of today's size without reading any array, and tells its tensors. */
kv8_status kv8_observer_check_add(const kv8_observer *observer, int32_t layer,
                                  const kv8_observe_args *args,
                                  kv8_observe_source sources_out[KV8_OBSERVED_COUNT]);

/* Both have the same layers, heads and dims. */
kv8_status kv8_observer_check_merge(const kv8_observer *observer, const kv8_observer *from);

#endif
