/* plan.c - from a spec to a plan: one kernel by name, one layout of the workspace.
 *
 * A pure function of spec, machine and number of threads; nothing is measured and nothing but the
 * plan itself allocated.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

static const kv8_attention_choice choices[] = {
#define X(kernel, isa, math, codes, spare) {#kernel, isa, math, codes, spare, kernel},
#include "attention_kernels.inc"
#undef X
};

/* bf16 holds every code of the dtype exactly (int8's row scale is multiplied in elsewhere). */
static bool fits_bf16(kv8_dtype dtype) {
    return dtype == KV8_BF16 || kv8_is_float8(dtype) || dtype == KV8_INT8;
}

/* int8 in whole tiles of codes, which few rows of a head alone have. */
static bool fits_codes(const kv8_attention_spec *spec) {
    return spec->k_dtype == KV8_INT8 && spec->v_dtype == KV8_INT8 && spec->head_dim % 64 == 0 &&
           spec->v_head_dim % 64 == 0 && spec->v_head_dim <= spec->head_dim;
}

/* bf16 math only where neither Q nor K nor V is rounded by it, and, left to us, where it is faster
 * than f32; else f32. The highest rung that the spec allows. */
static kv8_status choose(kv8_attention_choice *out, const kv8_attention_spec *spec) {
    const bool exact = (spec->q_dtype == KV8_BF16 || spec->q_dtype == KV8_E4M3) &&
                       fits_bf16(spec->k_dtype) && fits_bf16(spec->v_dtype);
    bool bf16 = spec->math != KV8_MATH_F32 && exact;
    if (spec->math == KV8_MATH_AUTO && spec->isa == KV8_ISA_AVX512_BF16)
        bf16 = bf16 && kv8_machine_bf16_dots_pay();
    *out = choices[0]; /* f32, scalar */
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        if (choices[i].isa > spec->isa) continue;
        if (choices[i].math == KV8_MATH_BF16 && !bf16) continue;
        if (choices[i].codes && (!fits_codes(spec) || spec->batch_invariant)) continue;
        *out = choices[i];
    }
    if (spec->math != KV8_MATH_BF16 || out->math == KV8_MATH_BF16) return KV8_OK;
    if (!exact)
        return kv8_fail(
            KV8_ERR_UNSUPPORTED,
            "math is bf16, with q %s, k %s, v %s; supported: q bf16 or e4m3, k and v bf16 or 8 "
            "bits",
            kv8_dtype_name(spec->q_dtype), kv8_dtype_name(spec->k_dtype),
            kv8_dtype_name(spec->v_dtype));
    return kv8_fail(KV8_ERR_UNSUPPORTED, "math is bf16, which %s has no products of",
                    kv8_isa_name(spec->isa));
}

/* Places count floats at a 64-byte boundary. */
static int64_t place(int64_t *end, int64_t count) {
    const int64_t at = *end;
    *end += (int64_t)kv8_round_up((size_t)count, KV8_ALIGNMENT / sizeof(float));
    return at;
}

/* The most lanes that a row of a full item folds into, of the widest vector. */
static int32_t most_fold(const kv8_attention_plan *plan) {
    enum { WIDEST = 16 };
    int32_t fold = 1;
    while (plan->piece_keys > 0 && plan->group_size * fold * 2 <= WIDEST) fold *= 2;
    return fold;
}

/* A power of two, so that the longest request has no more than 16 pieces, and one more where it
 * begins inside one. */
static int32_t choose_piece(const kv8_attention_spec *spec) {
    enum { LEAST = 1024, MOST_PIECES = 16 };
    int64_t keys = LEAST;
    while (keys * MOST_PIECES < spec->max_kv_len) keys *= 2;
    return spec->batch_invariant ? (int32_t)kv8_min_i64(keys, 1 << 30) : 0;
}

/* Sizes fit int64: heads and dims are bounded by check.c. */
static void lay_out_scratch(kv8_attention_plan *plan) {
    const int64_t rows = plan->block_rows;
    const int32_t keys_per_unit = plan->choice.math == KV8_MATH_BF16 ? 2 : 1;
    kv8_attention_scratch *const at = &plan->scratch;
    int64_t end = 0;
    const int64_t laid_out = rows + KV8_ITEM_SPARE_LANES;
    const int64_t lanes = laid_out * most_fold(plan);
    at->q = place(&end, rows * plan->q_row);
    at->q_lanes = place(&end, laid_out * plan->q_row);
    at->lane_scale = place(&end, lanes);
    at->lane_max = place(&end, lanes);
    at->lane_sum = place(&end, lanes);
    at->k = place(&end, (int64_t)plan->q_row * KV8_TILE_KEYS);
    at->v = place(&end, (int64_t)plan->v_row * KV8_TILE_KEYS / keys_per_unit);
    at->s = place(&end, KV8_TILE_ROWS * KV8_TILE_KEYS);
    at->p = place(&end, KV8_TILE_ROWS * KV8_TILE_KEYS / 2 + plan->choice.spare);
    at->o = place(&end, rows * plan->v_row);
    at->keep = place(&end, KV8_TILE_ROWS);
    at->max = place(&end, rows);
    at->sum = place(&end, rows);
    at->scale = place(&end, rows);
    at->seen_from = place(&end, rows);
    at->seen_to = place(&end, rows);
    at->value = place(&end, plan->v_row);
    at->kept = place(&end, KV8_KEPT_ROWS * (int64_t)plan->v_row);
    at->pieces = place(&end, plan->piece_keys > 0 ? rows * (plan->v_row + 2) : 0);
    at->size = end;
}

/* Appends count elements of size bytes, 64-byte aligned; false on overflow. */
static bool append(size_t *end, int64_t count, size_t size, size_t *at) {
    size_t bytes = 0;
    *at = *end;
    if (!kv8_mul_size((size_t)count, size, &bytes) || !kv8_add_size(bytes, KV8_ALIGNMENT, &bytes))
        return false;
    return kv8_add_size(*end, bytes / KV8_ALIGNMENT * KV8_ALIGNMENT, end);
}

static kv8_status lay_out_workspace(kv8_attention_plan *plan) {
    size_t end = kv8_round_up(sizeof(kv8_attention_prepared), KV8_ALIGNMENT);
    int64_t scratch_floats = 0;
    kv8_attention_cascade_bounds(plan);
    kv8_attention_cut_bounds(plan);
    if (__builtin_mul_overflow(plan->scratch.size, (int64_t)plan->num_threads, &scratch_floats) ||
        !append(&end, plan->max_items, sizeof(kv8_attention_item), &plan->items_at) ||
        !append(&end, plan->max_joins, sizeof(kv8_attention_join), &plan->joins_at) ||
        !append(&end, (int64_t)plan->cascade_size, 1, &plan->cascade_at) ||
        !append(&end, plan->max_partial_floats, sizeof(float), &plan->partials_at) ||
        !append(&end, scratch_floats, sizeof(float), &plan->scratch_at))
        return kv8_fail(KV8_ERR_INVALID,
                        "the workspace of max_batch %d, max_total_q %d, max_kv_len %d overflows",
                        plan->spec.max_batch, plan->spec.max_total_q, plan->spec.max_kv_len);
    plan->workspace_size = end;
    return KV8_OK;
}

kv8_status kv8_attention_plan_create(kv8_attention_plan **out, const kv8_attention_spec *spec,
                                     kv8_threads *threads, const kv8_allocator *allocator) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(spec);
    KV8_TAKE_STRUCT(kv8_attention_spec, spec);
    KV8_TRY(kv8_attention_check_spec(spec));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, 1, sizeof(kv8_attention_plan), "attention plan", &memory));
    kv8_attention_plan *const plan = memory;
    if (allocator != NULL) {
        plan->allocator_copy = *allocator;
        plan->allocator = &plan->allocator_copy;
    }
    plan->threads = threads;
    plan->num_threads = threads == NULL ? 1 : kv8_threads_count(threads);
    plan->spec = kv8_attention_resolve_spec(spec);
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_machine_resolve_isa(spec->isa, &plan->spec.isa));
    KV8_TRY_GOTO(choose(&plan->choice, &plan->spec));
    /* Enough to hide the widening of a tile even from AMX (256 rows: a tenth slower), few enough
     * that Q and O stay in L2. */
    const int32_t block_rows = spec->head_dim + plan->spec.v_head_dim <= 256 ? 512 : 64;
    plan->group_size = spec->num_qo_heads / spec->num_kv_heads;
    plan->block_rows =
        plan->group_size * (plan->group_size < block_rows ? block_rows / plan->group_size : 1);
    const int32_t elements = plan->choice.math == KV8_MATH_BF16 ? 2 : 1; /* per unit */
    plan->depth = (spec->head_dim + elements - 1) / elements;
    plan->q_row = (int32_t)kv8_round_up((size_t)plan->depth, KV8_TILE_PAD);
    plan->v_row = (int32_t)kv8_round_up((size_t)plan->spec.v_head_dim, KV8_TILE_PAD);
    plan->piece_keys = choose_piece(&plan->spec);
    lay_out_scratch(plan);
    KV8_TRY_GOTO(lay_out_workspace(plan));
    *out = plan;
    return KV8_OK;
fail:
    kv8_attention_plan_destroy(plan);
    return status;
}

void kv8_attention_plan_destroy(kv8_attention_plan *plan) {
    if (plan == NULL) return;
    const kv8_allocator allocator = plan->allocator_copy;
    const kv8_allocator *const from = plan->allocator == NULL ? NULL : &allocator;
    kv8_release(from, plan, 1, sizeof *plan);
}

size_t kv8_attention_workspace_size(const kv8_attention_plan *plan) {
    return plan->workspace_size;
}
