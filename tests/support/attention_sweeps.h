/* attention_sweeps.h - the grid no peer runs, as cases: whoever includes this says what to do with
 * each of them.
 *
 * Fields that a sweep does not walk are drawn by the case's number, so that over a sweep every
 * value of every field meets many others.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_SWEEPS_H
#define KV8_ATTENTION_SWEEPS_H

#include "attention_case.h"

/* Defined by the including test: computes the case and holds it against the oracle. many_threads:
 * the case has something to share. */
static void sweep_check(const attention_case *c, bool many_threads);

static const kv8_dtype kv_dtypes[] = {KV8_F32,      KV8_BF16, KV8_F16, KV8_E4M3,
                                      KV8_E4M3FNUZ, KV8_E5M2, KV8_INT8};
static const kv8_dtype q_dtypes[] = {KV8_BF16, KV8_F32, KV8_F16, KV8_E4M3, KV8_BF16};
static const int32_t page_sizes[] = {1, 2, 7, 16, 64};
#define COUNT(array)     ((int32_t)(sizeof(array) / sizeof(array)[0]))
#define PICK(array, rng) ((array)[rng_range(rng, 0, COUNT(array) - 1)])

/* Everything drawn; small. */
static attention_case drawn(uint64_t seed) {
    test_rng rng = {seed};
    static const int32_t groups[] = {1, 2, 3, 8}, dims[] = {45, 64, 64, 128, 16};
    attention_case c = {.seed = seed};
    c.group_size = PICK(groups, &rng);
    c.num_kv_heads = rng_range(&rng, 1, 3);
    c.head_dim = PICK(dims, &rng);
    c.v_head_dim = rng_range(&rng, 0, 3) == 0 ? PICK(dims, &rng) : 0;
    c.q_dtype = PICK(q_dtypes, &rng);
    c.k_dtype = PICK(kv_dtypes, &rng);
    c.v_dtype = PICK(kv_dtypes, &rng);
    c.page_size = PICK(page_sizes, &rng);
    c.window_left = rng_range(&rng, 0, 1) ? rng_range(&rng, 0, 80) : -1;
    c.causal = rng_range(&rng, 0, 3) != 0;
    c.soft_cap = rng_range(&rng, 0, 3) == 0 ? 5 + 20 * (float)rng_unit(&rng) : 0;
    c.sm_scale = rng_range(&rng, 0, 3) == 0 ? 0.1f : 0;
    c.sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1);
    c.scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1);
    c.layout = (layout_kind)rng_range(&rng, 0, LAYOUTS - 1);
    c.dense_table = rng_range(&rng, 0, 1);
    c.extremes = rng_range(&rng, 0, 3) == 0;
    c.batch_invariant = rng_range(&rng, 0, 3) == 0;
    c.batch = 2;
    for (int32_t b = 0; b < c.batch; b++) {
        c.qo_len[b] = rng_range(&rng, 1, 4);
        c.kv_len[b] = rng_range(&rng, 0, 150);
    }
    return c;
}

/* sink x window x every pair of KV dtypes x split keys, all at once. */
static void sink_window_dtypes_and_splits_together(void **state) {
    (void)state;
    uint64_t seed = 1;
    for (int32_t k = 0; k < COUNT(kv_dtypes); k++) {
        for (int32_t v = 0; v < COUNT(kv_dtypes); v++) {
            for (int32_t bits = 0; bits < 8; bits++) {
                attention_case c = drawn(seed++);
                if (test_is_short() && seed % 3 != 0) continue;
                c.k_dtype = kv_dtypes[k];
                c.v_dtype = kv_dtypes[v];
                c.sink = bits & 1 ? SINK_FINITE : SINK_NONE;
                c.window_left = bits & 2 ? 400 : -1;
                if (bits & 4) { /* long enough for three threads to share */
                    c.num_kv_heads = 1;
                    c.batch = 1;
                    c.batch_invariant = false;
                    c.qo_len[0] = 1 + (int32_t)(seed % 2);
                    c.kv_len[0] = 700 + (int32_t)(seed % 500);
                }
                sweep_check(&c, bits & 4);
            }
        }
    }
}

static void kv_len_at_every_page_edge(void **state) {
    (void)state;
    uint64_t seed = 1000;
    for (int32_t p = 0; p < COUNT(page_sizes); p++) {
        for (int32_t pages = 1; pages <= 4; pages++) {
            for (int32_t off = -1; off <= 1; off++) {
                attention_case c = drawn(seed++);
                c.page_size = page_sizes[p];
                c.kv_len[0] = pages * c.page_size + off;
                c.kv_len[1] = (pages + 1) * c.page_size + off;
                sweep_check(&c, false);
            }
        }
    }
}

/* Tiles are 64 keys and vectors 4 to 32: every length over two tiles, in one batch each. */
static void every_kv_len_over_two_tiles(void **state) {
    (void)state;
    for (int32_t first = 0; first < 140; first += 20) {
        attention_case c = drawn(2000 + (uint64_t)first);
        c.batch = 20;
        c.num_kv_heads = 1;
        for (int32_t b = 0; b < c.batch; b++) {
            c.kv_len[b] = first + b;
            c.qo_len[b] = 1;
        }
        sweep_check(&c, false);
    }
}

static void qo_len_by_group_by_head_dim(void **state) {
    (void)state;
    static const int32_t qo_lens[] = {1, 2, 8, 130}, groups[] = {1, 3, 8}, dims[] = {45, 64, 128};
    uint64_t seed = 3000;
    for (int32_t q = 0; q < COUNT(qo_lens); q++) {
        for (int32_t g = 0; g < COUNT(groups); g++) {
            for (int32_t d = 0; d < COUNT(dims); d++) {
                attention_case c = drawn(seed++);
                c.group_size = groups[g];
                c.head_dim = dims[d];
                c.v_head_dim = 0;
                c.num_kv_heads = qo_lens[q] > 100 ? 1 : 2;
                c.qo_len[0] = qo_lens[q];
                c.kv_len[0] = qo_lens[q] + (int32_t)(seed % 70);
                c.qo_len[1] = 1;
                c.kv_len[1] = 33;
                sweep_check(&c, false);
            }
        }
    }
}

static void unusual_head_dims_and_groups(void **state) {
    (void)state;
    static const struct {
        int32_t dim, v_dim, group;
    } shapes[] = {{1, 0, 1},   {1, 3, 71},     {2, 1, 5},    {3, 0, 8},     {17, 33, 4},
                  {31, 32, 2}, {80, 0, 5},     {96, 0, 6},   {192, 128, 4}, {256, 0, 2},
                  {575, 1, 1}, {576, 512, 16}, {64, 576, 3}, {45, 0, 71},   {64, 0, 130}};
    for (int32_t i = 0; i < COUNT(shapes); i++) {
        for (uint64_t round = 0; round < 3; round++) {
            attention_case c = drawn(4000 + (uint64_t)i * 3 + round);
            c.head_dim = shapes[i].dim;
            c.v_head_dim = shapes[i].v_dim;
            c.group_size = shapes[i].group;
            c.num_kv_heads = 1 + (int32_t)(round % 2);
            c.qo_len[0] = 1 + (int32_t)round;
            c.kv_len[0] = 70;
            if (round == 2) { /* bf16 math where the rung has it */
                c.q_dtype = KV8_BF16;
                c.k_dtype = KV8_E4M3;
                c.v_dtype = KV8_INT8;
            }
            sweep_check(&c, false);
        }
    }
}

static void masks_random_and_tree(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 60; i++) {
        attention_case c = drawn(5000 + i);
        c.mask = i % 2 ? MASK_TREE : MASK_RANDOM;
        c.causal = i % 2 ? 0 : (int32_t)(i / 2 % 2); /* a tree's siblings are no history */
        c.qo_len[0] = i % 5 == 0 ? 70 : 7;
        c.kv_len[0] = c.qo_len[0] + (int32_t)(i * 3);
        c.qo_len[1] = 2;
        c.kv_len[1] = 9;
        sweep_check(&c, false);
    }
}

/* A NaN that row r may see and row r-1 may not: it must be in the one and not in the other. */
static void nan_in_the_newest_key_stays_there(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 70; i++) {
        attention_case c = drawn(6000 + i);
        c.nan_newest = true;
        c.causal = 1;
        c.k_dtype = kv_dtypes[i % 7];
        c.v_dtype = kv_dtypes[i / 7 % 7];
        if (c.k_dtype == KV8_E4M3FNUZ) c.extremes = false;
        c.mask = i % 3 == 0 ? MASK_RANDOM : MASK_NONE;
        c.qo_len[0] = c.qo_len[1] = 2 + (int32_t)(i % 9);
        c.kv_len[0] = c.kv_len[1] = c.qo_len[0] + (int32_t)(i * 2);
        sweep_check(&c, false);
    }
}

/* Visible infinities reach the result where the definition says so, and nowhere else. */
static void infinities_in_visible_slots(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_F32, KV8_BF16, KV8_F16, KV8_E5M2};
    for (uint64_t i = 0; i < 64; i++) {
        attention_case c = drawn(6500 + i);
        c.infinities = true;
        c.extremes = false;
        c.head_dim = 16;
        c.q_dtype = i % 2 ? KV8_BF16 : KV8_F32;
        c.k_dtype = i % 4 < 2 ? KV8_E4M3 : dtypes[i / 4 % 4];
        c.v_dtype = dtypes[i / 16 % 4];
        c.mask = i % 3 == 0 ? MASK_RANDOM : MASK_NONE;
        c.kv_len[0] = 1 + (int32_t)i;
        c.kv_len[1] = 90;
        sweep_check(&c, false);
    }
}

static void infinite_sinks_and_empty_rows(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 40; i++) {
        attention_case c = drawn(7000 + i);
        c.sink = (sink_kind)(i % SINK_KINDS);
        c.num_kv_heads = 2;
        c.group_size = 3;
        c.causal = i % 4 != 0;
        c.batch = 4;
        c.qo_len[0] = 9, c.kv_len[0] = 5; /* rows before the first key */
        c.qo_len[1] = 0, c.kv_len[1] = 12;
        c.qo_len[2] = 3, c.kv_len[2] = 0;
        c.qo_len[3] = 0, c.kv_len[3] = 0;
        sweep_check(&c, false);
    }
}

static void one_long_among_many_short(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 8; i++) {
        attention_case c = drawn(8000 + i);
        c.batch = CASE_MAX_BATCH;
        c.num_kv_heads = 2;
        c.batch_invariant = i % 2;
        if (i % 4 < 2) c.window_left = -1;
        for (int32_t b = 0; b < c.batch; b++) {
            c.qo_len[b] = 1 + b % 2;
            c.kv_len[b] = 3 + b;
        }
        c.kv_len[17] = 3000;
        sweep_check(&c, true);
    }
}

/* All scores far from 0, where a maximum that starts at 0, or none, loses everything. */
static void scores_far_from_zero(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_F32, KV8_BF16, KV8_F16, KV8_E4M3, KV8_E5M2};
    for (uint64_t i = 0; i < 40; i++) {
        attention_case c = drawn(8500 + i);
        c.score_shift = i % 2 ? 200.0f : -200.0f;
        c.head_dim = 1;
        c.v_head_dim = 20;
        c.sm_scale = 1;
        c.soft_cap = 0;
        c.scale = SCALE_NONE;
        c.extremes = false;
        c.q_dtype = i % 4 < 2 ? KV8_F32 : KV8_BF16;
        c.k_dtype = dtypes[i / 2 % 5];
        if (i % 3 == 0) c.kv_len[0] = 900;
        sweep_check(&c, i % 3 == 0);
    }
}

/* Storage of o: rounded once, like the value itself. */
static void outputs_in_bf16_and_f16(void **state) {
    (void)state;
    for (uint64_t i = 0; i < 16; i++) {
        attention_case c = drawn(9000 + i);
        c.o_dtype = i % 2 ? KV8_BF16 : KV8_F16;
        sweep_check(&c, false);
    }
}

static void anything_with_anything(void **state) {
    (void)state;
    for (uint64_t i = 0; i < test_cases(400); i++) {
        attention_case c = drawn(10000 + i);
        c.mask = (mask_kind)(i % 7 == 0);
        sweep_check(&c, i % 8 == 0);
    }
}

#define SWEEPS                                                                                   \
    cmocka_unit_test(sink_window_dtypes_and_splits_together),                                    \
        cmocka_unit_test(kv_len_at_every_page_edge),                                             \
        cmocka_unit_test(every_kv_len_over_two_tiles),                                           \
        cmocka_unit_test(qo_len_by_group_by_head_dim),                                           \
        cmocka_unit_test(unusual_head_dims_and_groups), cmocka_unit_test(masks_random_and_tree), \
        cmocka_unit_test(nan_in_the_newest_key_stays_there),                                     \
        cmocka_unit_test(infinities_in_visible_slots),                                           \
        cmocka_unit_test(infinite_sinks_and_empty_rows),                                         \
        cmocka_unit_test(one_long_among_many_short), cmocka_unit_test(scores_far_from_zero),     \
        cmocka_unit_test(outputs_in_bf16_and_f16), cmocka_unit_test(anything_with_anything)

#endif
