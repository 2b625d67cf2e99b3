/* own_spec.c - what every plan does first: a copy of its spec that the caller's memory does not
 * reach, with the defaults written out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "problem.h"

kv8_status kv8_attention_own_spec(kv8_attention_spec *out, float **sinks_out,
                                  const kv8_attention_spec *spec, const kv8_allocator *allocator) {
    *out = *spec;
    *sinks_out = NULL;
    out->v_head_dim = kv8_spec_v_head_dim(spec);
    out->o_dtype = kv8_spec_o_dtype(spec);
    if (spec->sm_scale == 0) out->sm_scale = (float)(1 / sqrt((double)spec->head_dim));
    out->sink_logit = NULL;
    if (spec->sink_logit == NULL) return KV8_OK;
    void *sinks = NULL;
    KV8_TRY(kv8_alloc(allocator, (size_t)spec->num_qo_heads, sizeof(float), "sink logits", &sinks));
    memcpy(sinks, spec->sink_logit, (size_t)spec->num_qo_heads * sizeof(float));
    out->sink_logit = *sinks_out = sinks;
    return KV8_OK;
}
