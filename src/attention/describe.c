/* describe.c - one line about a run: kernel, splits, bytes that must move, time no run can beat.
 *
 * The floor is bytes over the speed of reading memory, and that speed is measured here and now on
 * the plan's threads, in about 20 ms: no constant is assumed. Prefill has a higher floor, its
 * products; they are counted in the line, their rate is kv8_machine_measure_ceilings' business.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <string.h>

#include "plan.h"

enum { READ_BYTES = 64 << 20, READ_CHUNK = 1 << 20, READ_PASSES = 4 };

typedef struct reading {
    const uint8_t *data;
    const void *_Atomic found;
} reading;

/* Looks for a byte that is not there: the C library's memchr reads whole vectors and keeps up with
 * memory. */
static void read_chunk(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    reading *const r = cookie;
    r->found = memchr(r->data + index * READ_CHUNK, 1, READ_CHUNK);
}

/* 1e9 bytes per second. */
static kv8_status measure_read(const kv8_attention_plan *plan, double *gb_s_out) {
    void *data = NULL;
    KV8_TRY(kv8_alloc(plan->allocator, READ_BYTES, 1, "read-speed buffer", &data));
    memset(data, 2, READ_BYTES); /* pages of its own, not the one zero page */
    reading r = {.data = data};
    uint64_t best = UINT64_MAX;
    for (int pass = 0; pass < READ_PASSES; pass++) {
        const uint64_t begin = kv8_time_ns();
        kv8_threads_run(plan->threads, READ_BYTES / READ_CHUNK, read_chunk, &r);
        const uint64_t ns = kv8_time_ns() - begin;
        if (ns < best) best = ns;
    }
    kv8_release(plan->allocator, data, READ_BYTES, 1);
    *gb_s_out = (double)READ_BYTES / (double)(best > 0 ? best : 1);
    return KV8_OK;
}

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
        const int32_t qo_len = args->qo_indptr[b + 1] - args->qo_indptr[b];
        const int32_t kv_len = kv8_request_kv_len(args->pages, spec->page_size, b);
        if (qo_len == 0) continue;
        const kv8_key_range seen = kv8_rows_keys(spec, qo_len, kv_len, 0, qo_len - 1);
        const int32_t shared = cascade->num_shares > 0 ? cascade->members[b].num_keys : 0;
        c.bytes += (double)(seen.end - seen.begin - shared) * spec->num_kv_heads * key_bytes +
                   (double)qo_len * spec->num_qo_heads * row_bytes;
        for (int32_t row = 0; row < qo_len; row++) {
            const kv8_key_range keys = kv8_row_keys(spec, qo_len, kv_len, row);
            c.products += (double)(keys.end - keys.begin) * spec->num_qo_heads *
                          (spec->head_dim + spec->v_head_dim);
        }
    }
    for (int32_t i = 0; i < cascade->num_shares; i++)
        c.bytes += (double)cascade->shares[i].num_keys * spec->num_kv_heads * key_bytes;
    return c;
}

/* ", cascade: ..." or nothing. */
static void cascade_text(const kv8_attention_args *args, const kv8_attention_cascade *cascade,
                         char *text, size_t size) {
    text[0] = '\0';
    if (cascade->num_shares == 0) return;
    int32_t num_requests = 0;
    int64_t num_keys = 0;
    for (int32_t b = 0; b < args->batch; b++) num_requests += cascade->members[b].num_keys > 0;
    for (int32_t i = 0; i < cascade->num_shares; i++) num_keys += cascade->shares[i].num_keys;
    (void)snprintf(text, size, ", cascade: %d requests in %d %s read %" PRId64 " shared keys once",
                   num_requests, cascade->num_shares, cascade->num_shares == 1 ? "group" : "groups",
                   num_keys);
}

kv8_status kv8_attention_describe(const kv8_attention_plan *plan, const kv8_attention_args *given,
                                  char *text, size_t size) {
    if (plan == NULL || text == NULL || size == 0)
        return kv8_fail(KV8_ERR_INVALID, "plan is %p, text %p of %zu bytes", (const void *)plan,
                        (void *)text, size);
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    KV8_TRY(kv8_attention_check_extra_args(args));
    KV8_TRY(kv8_attention_check_args(&plan->spec, args, false));
    double gb_s = 0;
    KV8_TRY(measure_read(plan, &gb_s));
    void *memory = NULL;
    if (plan->cascade_size > 0)
        KV8_TRY(kv8_alloc(plan->allocator, plan->cascade_size, 1, "cascade", &memory));
    const kv8_attention_cascade cascade = kv8_attention_cascade_find(plan, args, memory);
    const kv8_attention_schedule cut = kv8_attention_cut(plan, args, &cascade, NULL, NULL);
    const cost c = cost_of(plan, args, &cascade);
    char shared[128];
    cascade_text(args, &cascade, shared, sizeof shared);
    kv8_release(plan->allocator, memory, plan->cascade_size, 1);
    (void)snprintf(text, size,
                   "%s, %d threads, %" PRId64
                   " items, at most %d splits%s%s, %.3f MB to move, "
                   "%.3f M products, floor %.1f us (reading at %.1f GB/s, measured now over %d "
                   "MiB)",
                   plan->choice.name, plan->num_threads, cut.num_items, cut.max_splits,
                   plan->spec.batch_invariant ? " (batch invariant)" : "", shared, c.bytes / 1e6,
                   c.products / 1e6, c.bytes / (gb_s * 1e3), gb_s, READ_BYTES >> 20);
    return KV8_OK;
}
