/* append_rope.c - rotate, quantise and append K in one pass over it; V is quantised as ever. The
 * rotation is rope_impl.h's and the store is the cache's own, so that the bytes equal those of
 * kv8_rope_apply followed by kv8_cache_append.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_impl.h"
#include "rope_impl.h"

#include <kv8/attention.h>

typedef struct rotation {
    const kv8_rope *rope;
    const float *cos_sin; /* [rows, head_dim] */
} rotation;

static void rotate_head(void *cookie, int32_t row, int32_t kv_head, float *k) {
    (void)kv_head;
    const rotation *const r = cookie;
    const int32_t head_dim = r->rope->head_dim;
    kv8_rope_rotate(r->cos_sin + (size_t)row * (size_t)head_dim, head_dim / 2, r->rope->interleaved,
                    k);
}

kv8_status kv8_attention_append_rope(kv8_cache *cache, int32_t layer, const kv8_append *append,
                                     const kv8_rope *rope, const float *cos_sin) {
    if (cache == NULL || append == NULL || rope == NULL || cos_sin == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append_rope: %s is NULL",
                        cache == NULL    ? "cache"
                        : append == NULL ? "append"
                        : rope == NULL   ? "rope"
                                         : "cos_sin");
    kv8_cache_shape shape;
    kv8_cache_get_shape(cache, &shape);
    if (shape.k_head_dim != rope->head_dim)
        return kv8_fail(KV8_ERR_INVALID, "append_rope: rope head_dim is %d, the cache's K has %d",
                        rope->head_dim, shape.k_head_dim);
    if (append->src_dtype != KV8_F32)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "append_rope: src_dtype is %s, must be f32",
                        kv8_dtype_name(append->src_dtype));
    rotation r = {.rope = rope, .cos_sin = cos_sin};
    return kv8_cache_append_prepared(cache, layer, append, rotate_head, &r);
}
