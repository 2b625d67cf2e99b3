/* describe.c - one line about the runs of a prepared workspace: kernel, splits, bytes that must
 * move, products. What time they take at least is for whoever knows a rate:
 * kv8_machine_measure_ceilings measures them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "plan.h"

/* What a run has to read and write once, and the products it has to form. A mask is not looked
 * into: masked keys count as read. Keys that a cascade shares count once. */
typedef struct cost {
    double bytes, products;
} cost;

static cost cost_of(const kv8_attention_plan *plan, const kv8_attention_args *args,
                    const kv8_attention_cascade *cascade) {
    const kv8_attention_spec *const spec = &plan->spec;
    const double row_scale = (double)sizeof(kv8_f16);
    const double key_bytes = (double)spec->head_dim * (double)kv8_dtype_size(spec->k_dtype) +
                             (double)spec->v_head_dim * (double)kv8_dtype_size(spec->v_dtype) +
                             (spec->k_dtype == KV8_INT8 ? row_scale : 0) +
                             (spec->v_dtype == KV8_INT8 ? row_scale : 0);
    const double row_bytes = (double)spec->head_dim * (double)kv8_dtype_size(spec->q_dtype) +
                             (double)spec->v_head_dim * (double)kv8_dtype_size(spec->o_dtype) +
                             (args->lse != NULL ? (double)sizeof(float) : 0);
    cost c = {0, 0};
    for (int32_t b = 0; b < args->batch; b++) {
        const kv8_request request = kv8_request_of(spec, args, b);
        const int32_t qo_len = request.qo_len;
        if (qo_len == 0) continue;
        const kv8_key_range seen = kv8_rows_keys(spec, args, &request, 0, qo_len - 1);
        const int32_t shared = cascade->num_prefixes > 0 ? cascade->members[b].num_keys : 0;
        c.bytes += (double)(seen.end - seen.begin - shared) * spec->num_kv_heads * key_bytes +
                   (double)qo_len * spec->num_qo_heads * row_bytes;
        for (int32_t row = 0; row < qo_len; row++) {
            const kv8_key_range keys = kv8_row_keys(spec, args, &request, row);
            c.products += (double)(keys.end - keys.begin) * spec->num_qo_heads *
                          (spec->head_dim + spec->v_head_dim);
        }
    }
    for (int32_t i = 0; i < cascade->num_prefixes; i++)
        c.bytes += (double)cascade->prefixes[i].num_keys * spec->num_kv_heads * key_bytes;
    return c;
}

/* ", cascade: ..." or nothing. */
static void cascade_text(const kv8_attention_args *args, const kv8_attention_cascade *cascade,
                         char *text, size_t size) {
    text[0] = '\0';
    if (cascade->num_prefixes == 0) return;
    int32_t num_requests = 0;
    int64_t num_keys = 0;
    for (int32_t b = 0; b < args->batch; b++) num_requests += cascade->members[b].num_keys > 0;
    for (int32_t i = 0; i < cascade->num_prefixes; i++) num_keys += cascade->prefixes[i].num_keys;
    (void)snprintf(text, size, ", cascade: %d requests in %d %s read %" PRId64 " shared keys once",
                   num_requests, cascade->num_prefixes,
                   cascade->num_prefixes == 1 ? "group" : "groups", num_keys);
}

kv8_status kv8_attention_describe(const kv8_attention_plan *plan, const kv8_attention_args *given,
                                  const void *workspace, char *text, size_t size) {
    KV8_REQUIRE(plan, text);
    if (size == 0) return kv8_fail(KV8_ERR_INVALID, "text is of 0 bytes, must be at least 1");
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    const kv8_attention_prepared *prepared = NULL;
    KV8_TRY(kv8_attention_find_prepared(plan, args, workspace, &prepared));
    const kv8_attention_cascade cascade = kv8_attention_cascade_of(plan, prepared);
    const cost c = cost_of(plan, args, &cascade);
    char shared[128];
    cascade_text(args, &cascade, shared, sizeof shared);
    (void)snprintf(text, size,
                   "%s, %d threads, %" PRId64
                   " items, at most %d splits%s%s, %.3f MB to move, %.3f M products",
                   plan->choice.name, plan->num_threads, prepared->cut.num_items,
                   prepared->cut.max_splits, plan->spec.batch_invariant ? " (batch invariant)" : "",
                   shared, c.bytes / 1e6, c.products / 1e6);
    return KV8_OK;
}
