/* test_prefill_nonfinite.c - prefill over values that are not finite, or finite and huge: every row
 * is what the oracle says, NaN and infinities where they are seen and nowhere else. On the wgmma
 * kernels and on those of mma.sync.
 *
 * Values are written into cases already made: into Q, K or V at one place, or at every key.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "prefill_groups.h"

static bool has_infinities(kv8_dtype dtype) {
    return dtype == KV8_BF16 || dtype == KV8_F16 || dtype == KV8_E5M2;
}

/* --- one value --- */

typedef union bytes {
    const void *in;
    uint8_t *out;
} bytes;

/* Of request 0's key, every KV head. int8: the key's scale is the value, of K or of V. */
static void poke(attention_inputs *in, bool is_v, int32_t key, int32_t d, float x) {
    const attention_case *const c = in->c;
    const kv8_paged *const p = is_v ? &in->v : &in->k;
    const kv8_dtype dtype = is_v ? c->v_dtype : c->k_dtype;
    const bytes data = {.in = p->data}, scales = {.in = p->row_scale};
    const int64_t page = in->pages.page_indices[key / c->page_size], slot = key % c->page_size;
    if (page < 0 || page >= in->num_pages)
        return; /* a page that no row sees is named by nonsense */
    for (int32_t h = 0; h < c->num_kv_heads; h++) {
        if (dtype == KV8_INT8)
            case_store(KV8_F16, scales.out,
                       page * p->row_scale_stride_page + slot * p->row_scale_stride_slot +
                           h * p->row_scale_stride_head,
                       x);
        else if (isinf(x))
            case_store_infinity(
                dtype, data.out,
                page * p->stride_page + slot * p->stride_slot + h * p->stride_head + d, x < 0);
        else
            case_store(dtype, data.out,
                       page * p->stride_page + slot * p->stride_slot + h * p->stride_head + d, x);
    }
}
static void poke_query(attention_inputs *in, int32_t row, int32_t head, int32_t d, float x) {
    const bytes q = {.in = in->args.q};
    case_store(in->c->q_dtype, q.out,
               row * in->args.q_stride_row + head * in->args.q_stride_head + d, x);
}

/* --- what ails a case --- */

/* A key that every row sees without a window, and one that only some do. */
static int32_t old_key(const attention_inputs *in) {
    return in->c->kv_len[0] - in->c->qo_len[0] - 20;
}
static int32_t new_key(const attention_inputs *in) {
    return in->c->kv_len[0] - in->c->qo_len[0] / 2 - 1;
}

static void nan_in_one_query(attention_inputs *in) {
    poke_query(in, 2, 1, 3, NAN);
}
static void nan_in_every_query(attention_inputs *in) {
    for (int32_t row = 0; row < in->c->qo_len[0]; row++)
        for (int32_t h = 0; h < in->num_qo_heads; h++) poke_query(in, row, h, 0, NAN);
}
static void infinity_in_one_query(attention_inputs *in) {
    if (in->c->q_dtype != KV8_E4M3) poke_query(in, 2, 1, 3, INFINITY);
}
static void nan_in_k(attention_inputs *in) {
    poke(in, false, new_key(in), 5, NAN);
}
static void nan_in_an_old_k(attention_inputs *in) {
    poke(in, false, old_key(in), 5, NAN);
}
static void nan_in_v(attention_inputs *in) {
    poke(in, true, new_key(in), 5, NAN);
}
static void nan_in_old_and_new_v(attention_inputs *in) {
    poke(in, true, old_key(in), 6, NAN);
    poke(in, true, new_key(in), 9, NAN);
    poke(in, true, new_key(in) + 1, 9, NAN);
}
static void nan_in_every_v(attention_inputs *in) {
    for (int32_t key = 0; key < in->c->kv_len[0]; key++)
        poke(in, true, key, key % in->c->head_dim, NAN);
}
static void infinities_in_v(attention_inputs *in) {
    if (!has_infinities(in->c->v_dtype) && in->c->v_dtype != KV8_INT8) return;
    poke(in, true, old_key(in), 3, INFINITY);
    poke(in, true, old_key(in) + 1, 4, -INFINITY);
    poke(in, true, new_key(in), 3, -INFINITY);
    poke(in, true, new_key(in) + 1, 8, INFINITY);
}
/* Scores of both signs that are infinite, at keys whose V is too. */
static void infinities_in_k_and_v(attention_inputs *in) {
    const kv8_dtype v = in->c->v_dtype;
    if (!has_infinities(in->c->k_dtype) || (v != KV8_INT8 && !has_infinities(v))) return;
    poke(in, false, new_key(in), 2, INFINITY);
    poke(in, true, new_key(in), 3, INFINITY);
    poke(in, true, old_key(in), 4, INFINITY);
}
/* Finite, but the largest codes times such a scale are beyond f16. */
static void large_scales_of_v(attention_inputs *in) {
    if (in->c->v_dtype != KV8_INT8) return;
    for (int32_t key = 0; key < in->c->kv_len[0]; key++) poke(in, true, key, 0, 1000);
}
static void one_large_scale_of_v(attention_inputs *in) {
    if (in->c->v_dtype != KV8_INT8) return;
    poke(in, true, new_key(in), 0, 65504);
    poke(in, true, 1, 0, 600);
}
static void unlike_scales_of_v(attention_inputs *in) {
    if (in->c->v_dtype != KV8_INT8) return;
    for (int32_t key = 0; key < in->c->kv_len[0]; key++)
        poke(in, true, key, 0, key % 40 < 9 ? 3000.0f : 1e-3f);
}
static void (*const sicknesses[])(attention_inputs *) = {
    nan_in_one_query,      nan_in_every_query,
    infinity_in_one_query, nan_in_k,
    nan_in_an_old_k,       nan_in_v,
    nan_in_old_and_new_v,  nan_in_every_v,
    infinities_in_v,       infinities_in_k_and_v,
    large_scales_of_v,     one_large_scale_of_v,
    unlike_scales_of_v};
enum { NUM_SICKNESSES = sizeof sicknesses / sizeof sicknesses[0] };

/* --- the walk --- */

static attention_case plain(int format, int32_t head_dim) {
    attention_case c = prefill_case(format, head_dim);
    c.group_size = 4;
    c.batch = 2;
    c.qo_len[0] = 70, c.kv_len[0] = 300;
    c.qo_len[1] = 33, c.kv_len[1] = 90;
    return c;
}
static void check(const gpu *g, const attention_case *c, void (*sicken)(attention_inputs *)) {
    static attention_inputs in;
    case_make(&in, c);
    if (sicken != NULL) sicken(&in);
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(rows * (size_t)in.v_head_dim + 1, sizeof *o);
    float *const lse = calloc(rows + 1, sizeof *lse);
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create_of(&plan, g->device, &in.spec, kernels, NULL));
    device_case_run_plan(g, &in, plan, o, lse);
    kv8_attention_device_plan_destroy(plan);
    accept_huge_lse(&in, lse);
    case_compare_within(&in, c->q_dtype == KV8_E4M3 ? case_fp8_bounds : case_16_bit_bounds,
                        KV8_ISA_BEST, o, lse);
    free(o);
    free(lse);
    case_free(&in);
}

static void sick_values(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats() * NUM_SICKNESSES; i++) {
        attention_case c = plain(i % num_formats(), i % 2 == 0 ? 64 : 128);
        c.seed = (uint64_t)i;
        check(g, &c, sicknesses[i / num_formats()]);
        c.window_left = 37;
        c.group_size = 1;
        check(g, &c, sicknesses[i / num_formats()]);
        c.window_left = 90; /* of few rows: one tile, where kernels take that */
        c.group_size = 8;
        check(g, &c, sicknesses[i / num_formats()]);
    }
}
/* The rows' keys in many splits: what one of them saw is known to the one that joins them. */
static void sick_values_of_split_rows(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats() * NUM_SICKNESSES; i++) {
        attention_case c = plain(i % num_formats(), i % 2 == 0 ? 128 : 64);
        c.qo_len[0] = 9, c.kv_len[0] = 3000;
        c.sink = SINK_WITH_INFINITIES;
        check(g, &c, sicknesses[i / num_formats()]);
    }
}
/* Weights that f16 has as 0 beside infinities. */
static void infinities_of_little_weight(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats(); i++) {
        attention_case c = plain(i, 64);
        c.sm_scale = 3;
        check(g, &c, infinities_in_v);
        c.head_dim = 128;
        check(g, &c, infinities_in_v);
    }
}
/* Beyond 2^24 products of a score and its scale are rounded by more than 1. */
static void huge_scores(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    for (int i = 0; i < num_formats() && i < FP8; i++) {
        attention_case c = plain(i, i % 2 == 0 ? 64 : 128);
        c.sm_scale = 1e9f;
        check(g, &c, NULL);
        c.sm_scale = -1e9f;
        c.qo_len[0] = 9, c.kv_len[0] = 3000;
        check(g, &c, NULL);
        check(g, &c, nan_in_v);
    }
}
/* Masks, and any two formats: mma.sync alone. */
static void sick_values_behind_masks(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const kv8_dtype all[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2, KV8_E4M3FNUZ};
    for (int i = 0; i < 5 * NUM_SICKNESSES; i++) {
        attention_case c = plain(0, i % 2 == 0 ? 80 : 64);
        c.k_dtype = all[i % 5];
        c.v_dtype = all[(i / 5 + i) % 5];
        c.mask = i % 3 == 0 ? MASK_TREE : MASK_RANDOM;
        c.causal = c.mask != MASK_TREE;
        c.seed = (uint64_t)i;
        check(g, &c, sicknesses[i / 5]);
    }
}

#define ON(GROUP, TEST) \
    { #GROUP "." #TEST, TEST, NULL, NULL, NULL }
#define ON_BOTH(GROUP)                                            \
    ON(GROUP, sick_values), ON(GROUP, sick_values_of_split_rows), \
        ON(GROUP, infinities_of_little_weight), ON(GROUP, huge_scores)

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest wgmma[] = {ON_BOTH(wgmma)};
    const struct CMUnitTest mma[] = {ON_BOTH(mma), ON(mma, sick_values_behind_masks)};
    const int failed =
        cmocka_run_group_tests_name("prefill_nonfinite_wgmma", wgmma, open_wgmma, gpu_close);
    return failed + cmocka_run_group_tests_name("prefill_nonfinite_mma", mma, open_mma, gpu_close);
}
