/* append_rope_device.c - rotate, quantise and append K on a GPU: append's plan with the rotation of
 * cuda/append_rope.cu before the store.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_impl.h"

#include <kv8/attention.h>

kv8_status kv8_attention_append_rope_plan_create(kv8_append_plan **out, kv8_device *device,
                                                 const kv8_append_spec *spec) {
    *out = NULL;
    KV8_TAKE_STRUCT(kv8_append_spec, spec);
    if (spec->k_head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "append_rope: k_head_dim is %d, must be even",
                        spec->k_head_dim);
    return kv8_append_plan_create_rotating(out, device, spec);
}

kv8_status kv8_attention_append_rope_plan_run(const kv8_append_plan *plan, kv8_stream *stream,
                                              const kv8_append_args *args, const float *cos_sin) {
    if (cos_sin == NULL) return kv8_fail(KV8_ERR_INVALID, "append_rope: cos_sin is NULL");
    return kv8_append_plan_run_rotating(plan, stream, args, cos_sin);
}
