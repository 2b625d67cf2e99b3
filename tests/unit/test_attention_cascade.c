/* test_attention_cascade.c - requests that share leading pages: the results stay within the
 * contract's bounds of the oracle, the keys they share are walked once, and where sharing does not
 * pay or is not allowed every request walks its own.
 *
 * What was walked is read from the work that the run left in its workspace, and compared with the
 * distinct pages of the tables.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "attention_case.h"
#include "plan.h"

static kv8_threads *pools[2]; /* one thread, two */

static int start_threads(void **state) {
    (void)state;
    return kv8_threads_create(&pools[1], 2) == KV8_OK ? 0 : -1;
}
static int stop_threads(void **state) {
    (void)state;
    kv8_threads_destroy(pools[1]);
    return 0;
}

/* --- what a run walked --- */

typedef struct walked {
    int64_t keys; /* of one kv head, over all items */
    int32_t num_prefixes, num_members;
} walked;

/* Runs and looks into the workspace. The plan had room for all of it, and rows met as many keys as
 * they see. */
static walked walk(const kv8_attention_plan *plan, const kv8_attention_args *args) {
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    assert_ok(kv8_attention_prepare(plan, args, workspace.data));
    assert_ok(kv8_attention_run(plan, args, workspace.data));
    const uint8_t *const bytes = workspace.data;
    const kv8_attention_item *const items =
        (const kv8_attention_item *)(const void *)(bytes + plan->items_at);
    void *const memory = aligned_alloc(64, plan->cascade_size + 64);
    const kv8_attention_cascade cascade = kv8_attention_cascade_find(plan, args, memory);
    const kv8_attention_schedule cut = kv8_attention_cut(plan, args, &cascade, NULL, NULL);
    assert_true(cut.num_items <= plan->max_items && cut.num_joins <= plan->max_joins);
    assert_true(cut.partial_floats <= plan->max_partial_floats);
    assert_true(cut.num_parts <= plan->max_parts && cascade.num_prefixes <= plan->max_prefixes);
    assert_true(cascade.num_rows <= plan->max_shared_rows);
    walked w = {.num_prefixes = cascade.num_prefixes};
    for (int32_t b = 0; cascade.num_prefixes > 0 && b < args->batch; b++)
        w.num_members += cascade.members[b].num_keys > 0;
    int64_t met = 0, visible = 0;
    bool single_blocks = true; /* a block walks what any of its rows sees */
    for (int64_t i = 0; i < cut.num_items; i++) {
        const int64_t keys = items[i].key_end - items[i].key_begin;
        w.keys += keys * items[i].num_heads;
        met += keys * items[i].num_heads * items[i].num_rows;
    }
    assert_int_equal(w.keys % plan->spec.num_kv_heads, 0);
    w.keys /= plan->spec.num_kv_heads;
    for (int32_t b = 0; b < args->batch; b++) {
        const int64_t qo_len = args->qo_indptr[b + 1] - args->qo_indptr[b];
        single_blocks &= qo_len * plan->group_size <= plan->block_rows;
        visible += qo_len * plan->spec.num_qo_heads *
                   kv8_request_kv_len(args->pages, plan->spec.page_size, b);
    }
    if (single_blocks && plan->spec.window_left < 0) assert_int_equal(met, visible);
    free(memory);
    guarded_free(workspace);
    return w;
}

static walked walk_case(const attention_case *c, kv8_threads *threads) {
    static attention_inputs in;
    case_make(&in, c);
    kv8_attention_plan *plan = NULL;
    assert_ok(kv8_attention_plan_create(&plan, &in.spec, threads, NULL));
    const size_t row = (size_t)(in.num_qo_heads * in.v_head_dim);
    in.args.o_stride_head = in.v_head_dim;
    in.args.o_stride_row = (int64_t)row;
    in.args.o = calloc((size_t)in.total_q * row + 1, sizeof(float));
    const walked w = walk(plan, &in.args);
    free(in.args.o);
    kv8_attention_plan_destroy(plan);
    case_free(&in);
    return w;
}

/* Keys that a run walks which reads every distinct page once: each request's behind its parent's
 * pages. */
static int64_t distinct_keys(const attention_case *c) {
    int64_t keys = 0;
    for (int32_t b = 0; b < c->batch; b++)
        keys += c->qo_len[b] == 0 ? 0 : c->kv_len[b] - c->shared_pages[b] * c->page_size;
    return keys;
}
static int64_t all_keys(const attention_case *c) {
    int64_t keys = 0;
    for (int32_t b = 0; b < c->batch; b++) keys += c->qo_len[b] == 0 ? 0 : c->kv_len[b];
    return keys;
}

static attention_case decode_case(int32_t batch) {
    attention_case c = {.seed = 900 + (uint64_t)batch,
                        .group_size = 4,
                        .num_kv_heads = 2,
                        .head_dim = 32,
                        .q_dtype = KV8_BF16,
                        .k_dtype = KV8_E4M3,
                        .v_dtype = KV8_E4M3,
                        .page_size = 16,
                        .window_left = -1,
                        .causal = 1,
                        .sink = SINK_FINITE,
                        .scale = SCALE_REQUEST_HEAD,
                        .batch = batch};
    for (int32_t b = 0; b < batch; b++) c.qo_len[b] = 1, c.kv_len[b] = 200 + b;
    return c;
}

/* Request b forks request `parent`, `pages` pages deep, and goes on for `own` keys. */
static void fork_case(attention_case *c, int32_t b, int32_t parent, int32_t pages, int32_t own) {
    c->parent[b] = parent;
    c->shared_pages[b] = pages;
    c->kv_len[b] = pages * c->page_size + own;
}

static void check_walk(const attention_case *c, int32_t num_prefixes, int32_t num_members,
                       int64_t keys) {
    for (int i = 0; i < 2; i++) {
        case_check(c, pools[i]);
        const walked w = walk_case(c, pools[i]);
        assert_int_equal(w.num_prefixes, num_prefixes);
        assert_int_equal(w.num_members, num_members);
        assert_int_equal(w.keys, keys);
    }
}

/* --- taken --- */

static void a_prefix_of_many_is_walked_once(void **state) {
    (void)state;
    attention_case c = decode_case(8);
    c.kv_len[0] = 40 * 16 + 5;
    for (int32_t b = 1; b < 8; b++) fork_case(&c, b, 0, 40, 1 + 9 * b);
    check_walk(&c, 1, 8, distinct_keys(&c));
}

/* Groups interleaved, one request alone, one without a query, one whose prefix is all it has, two
 * whose tables are equal. */
static void groups_lie_anywhere_in_the_batch(void **state) {
    (void)state;
    attention_case c = decode_case(14);
    c.kv_len[0] = c.kv_len[1] = 20 * 16 + 3;
    for (int32_t b = 2; b < 14; b++) fork_case(&c, b, b % 2, 20, 1 + b * 7);
    c.shared_pages[5] = 0;
    c.qo_len[6] = 0;
    fork_case(&c, 8, 0, 20, 0);
    fork_case(&c, 9, 1, 20, 0);
    fork_case(&c, 13, 1, 20, 3);
    check_walk(&c, 2, 12, distinct_keys(&c));
}

/* Where forks branch again, whichever saves more is shared: the long branches... */
static void branches_or_their_stem(void **state) {
    (void)state;
    attention_case c = decode_case(8);
    c.kv_len[0] = 60 * 16 + 1;
    for (int32_t b = 1; b < 4; b++) fork_case(&c, b, 0, 60, b);
    fork_case(&c, 4, 0, 4, 60 * 16);
    for (int32_t b = 5; b < 8; b++) fork_case(&c, b, 4, 60, b);
    check_walk(&c, 2, 8, distinct_keys(&c) + 4 * 16);
    /* ... or the long stem; then the branches' shared keys are walked by each. */
    for (int32_t b = 1; b < 8; b++) fork_case(&c, b, 0, 50, b);
    c.shared_pages[2] = c.shared_pages[3] = 51;
    c.kv_len[2] = c.kv_len[3] = 55 * 16;
    check_walk(&c, 1, 8, distinct_keys(&c) + 2 * 16);
}

/* More rows than a block has: blocks of nearly equal size, each walks the prefix once. */
static void many_rows_take_several_blocks(void **state) {
    (void)state;
    attention_case c = decode_case(36);
    c.group_size = 16;
    c.num_kv_heads = 1;
    c.k_dtype = KV8_INT8;
    c.kv_len[0] = 24 * 16 + 5;
    for (int32_t b = 1; b < 36; b++) fork_case(&c, b, 0, 24, b % 5);
    c.qo_len[7] = 2, c.kv_len[7] += 2;
    check_walk(&c, 1, 36, distinct_keys(&c) + 24 * 16);
}

/* Several query rows: the pages that all of them see in full. Row 0 of request 1 sees 12 pages less
 * a key, so all share 11. */
static void rows_in_the_prefix_shorten_it(void **state) {
    (void)state;
    attention_case c = decode_case(6);
    c.kv_len[0] = 12 * 16 + 1;
    for (int32_t b = 1; b < 6; b++) fork_case(&c, b, 0, 12, 3), c.qo_len[b] = 4;
    c.group_size = 1;
    check_walk(&c, 1, 6, distinct_keys(&c));
    c.qo_len[1] = 5;
    check_walk(&c, 1, 6, distinct_keys(&c) + 5 * 16);
    c.causal = 0; /* then all rows see all keys */
    check_walk(&c, 1, 6, distinct_keys(&c));
}

/* Everything drawn. Most of these pay; all must be right. */
static void drawn_forks_stay_within_the_bounds(void **state) {
    (void)state;
    static const kv8_dtype kv[] = {KV8_E4M3, KV8_INT8, KV8_BF16, KV8_E5M2, KV8_F16, KV8_F32};
    static const int32_t groups[] = {1, 2, 3, 8}, dims[] = {64, 45, 64, 128, 16};
    static const int32_t page_sizes[] = {1, 2, 7, 16, 64};
    const uint64_t total = test_is_short() ? 20 : 120;
    uint64_t taken = 0;
    for (uint64_t n = 0; n < total; n++) {
        test_rng rng = {4242 + n};
        attention_case c = decode_case(rng_range(&rng, 2, 12));
        c.seed = 20000 + n;
        c.group_size = groups[n % 4];
        c.num_kv_heads = rng_range(&rng, 1, 3);
        c.head_dim = dims[rng_range(&rng, 0, 4)];
        c.v_head_dim = n % 7 == 0 ? dims[rng_range(&rng, 0, 4)] : 0;
        c.page_size = page_sizes[n % 5];
        c.k_dtype = kv[rng_range(&rng, 0, 5)];
        c.v_dtype = kv[rng_range(&rng, 0, 5)];
        c.q_dtype = n % 3 == 0 ? KV8_F32 : n % 11 == 0 ? KV8_E4M3 : KV8_BF16;
        c.causal = n % 5 != 0;
        c.soft_cap = n % 4 == 1 ? 7.0f : 0;
        c.sink = (sink_kind)rng_range(&rng, 0, SINK_KINDS - 1);
        c.scale = (scale_kind)rng_range(&rng, 0, SCALE_KINDS - 1);
        c.layout = (layout_kind)rng_range(&rng, 0, LAYOUTS - 1);
        c.dense_table = rng_range(&rng, 0, 1);
        c.extremes = n % 9 == 0;
        c.nan_newest = n % 13 == 0;
        c.window_left = n % 6 == 0 ? rng_range(&rng, 50, 900) : -1;
        const int32_t num_stems = rng_range(&rng, 1, 2);
        for (int32_t b = 0; b < c.batch; b++) {
            c.qo_len[b] = rng_range(&rng, 0, 9) == 0 ? rng_range(&rng, 0, 9) : 1;
            c.kv_len[b] = rng_range(&rng, 0, 300);
            if (b < num_stems) c.kv_len[b] = 400 + rng_range(&rng, 0, 300);
            if (b < num_stems || rng_range(&rng, 0, 5) == 0) continue;
            const int32_t parent = rng_range(&rng, 0, num_stems - 1);
            const int32_t pages = c.kv_len[parent] / c.page_size - rng_range(&rng, 0, 1);
            fork_case(&c, b, parent, pages, rng_range(&rng, 0, 2) * rng_range(&rng, 0, 90));
        }
        kv8_threads *const threads = pools[n % 3 == 1];
        case_check(&c, threads);
        taken += walk_case(&c, threads).num_prefixes > 0;
    }
    assert_in_range(taken, total * 5 / 8, total - 1); /* most, not all */
}

/* --- not taken --- */

static void where_it_is_not_allowed_everyone_walks_alone(void **state) {
    (void)state;
    attention_case c = decode_case(6);
    c.kv_len[0] = 16 * 16 + 5;
    for (int32_t b = 1; b < 6; b++) fork_case(&c, b, 0, 16, b);
    check_walk(&c, 1, 6, distinct_keys(&c));
    c.mask = MASK_RANDOM;
    check_walk(&c, 0, 0, all_keys(&c));
    c.mask = MASK_NONE;
    c.batch_invariant = true;
    check_walk(&c, 0, 0, all_keys(&c));
    c.batch_invariant = false;
    c.window_left = 16 * 16 + 2; /* 259 keys: hides some from requests 0, 4 and 5 */
    attention_case few = c;
    few.batch = 4;
    few.kv_len[0] = 16 * 16 + 3;
    check_walk(&few, 1, 4, distinct_keys(&few));
    check_walk(&c, 1, 3, 256 + 1 + 2 + 3 + 3 * 259);
    c.window_left = 100;
    check_walk(&c, 0, 0, 6 * 101);
}

static void where_it_does_not_pay_everyone_walks_alone(void **state) {
    (void)state;
    attention_case c = decode_case(2); /* 16 rows of widening 128 keys, 8 rows' parts of 256 each */
    c.kv_len[0] = 16 * 16 + 5;
    fork_case(&c, 1, 0, 8, 3);
    check_walk(&c, 0, 0, all_keys(&c));
    fork_case(&c, 1, 0, 9, 3);
    check_walk(&c, 1, 2, distinct_keys(&c));
    attention_case short_of_a_tile = decode_case(8);
    short_of_a_tile.group_size = 1;
    for (int32_t b = 1; b < 8; b++) fork_case(&short_of_a_tile, b, 0, 3, 30);
    check_walk(&short_of_a_tile, 0, 0, all_keys(&short_of_a_tile));
    for (int32_t b = 1; b < 8; b++) fork_case(&short_of_a_tile, b, 0, 4, 30);
    check_walk(&short_of_a_tile, 1, 8, distinct_keys(&short_of_a_tile));
    c.qo_len[0] = c.qo_len[1] = 100; /* rows enough by themselves */
    fork_case(&c, 1, 0, 16, 100);
    c.kv_len[0] = 400;
    case_check(&c, NULL);
    assert_int_equal(walk_case(&c, NULL).num_prefixes, 0);
}

static void describe_says_when_it_is_taken(void **state) {
    (void)state;
    static attention_inputs in;
    attention_case c = decode_case(8);
    c.kv_len[0] = c.kv_len[1] = 20 * 16 + 1;
    for (int32_t b = 2; b < 8; b++) fork_case(&c, b, b % 2, 20, 1);
    c.num_kv_heads = 1;
    case_make(&in, &c);
    char text[512];
    kv8_attention_plan *plan = NULL;
    assert_ok(kv8_attention_plan_create(&plan, &in.spec, NULL, NULL));
    const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
    assert_ok(kv8_attention_prepare(plan, &in.args, workspace.data));
    assert_ok(kv8_attention_describe(plan, &in.args, workspace.data, text, sizeof text));
    const char *const said = ", cascade: 8 requests in 2 groups read 640 shared keys once, ";
    if (strstr(text, said) == NULL) fail_msg("\"%s\" has no \"%s\"", text, said);
    /* (640 + 8) keys x 64 bytes, 8 rows x 4 heads x 32 x (2 + 4) bytes */
    if (strstr(text, "0.048 MB to move") == NULL) fail_msg("%s", text);
    in.args.batch = 1;
    assert_ok(kv8_attention_prepare(plan, &in.args, workspace.data));
    assert_ok(kv8_attention_describe(plan, &in.args, workspace.data, text, sizeof text));
    assert_null(strstr(text, "cascade"));
    guarded_free(workspace);
    kv8_attention_plan_destroy(plan);
    case_free(&in);
}

/* --- through the cache --- */

enum { FORKS = 9, HEADS = 2, GROUP = 3, DIM = 24, ROW = HEADS * DIM, PREFIX = 300, LONGEST = 340 };

static void append_random(kv8_cache *cache, kv8_seq seq, int32_t n, test_rng *rng) {
    float values[2][LONGEST * ROW];
    for (int i = 0; i < 2 * n * ROW; i++) values[i / (n * ROW)][i % (n * ROW)] = rng_normal(rng);
    const int32_t indptr[] = {0, n};
    const kv8_append append = {.struct_size = sizeof(kv8_append),
                               .num_seqs = 1,
                               .seqs = &seq,
                               .indptr = indptr,
                               .src_dtype = KV8_F32,
                               .k = values[0],
                               .k_stride_row = ROW,
                               .k_stride_head = DIM,
                               .v = values[1],
                               .v_stride_row = ROW,
                               .v_stride_head = DIM};
    assert_ok(kv8_cache_extend(cache, seq, n, NULL));
    assert_ok(kv8_cache_append(cache, 0, &append));
}

static kv8_cache *open_fork_cache(kv8_dtype dtype, kv8_seq seqs[FORKS], test_rng *rng) {
    const float k_scale[HEADS] = {0.05f, 0.08f}, v_scale[HEADS] = {0.06f, 0.04f};
    const kv8_cache_layer layer = {.struct_size = sizeof layer,
                                   .k_dtype = dtype,
                                   .v_dtype = KV8_E4M3,
                                   .window_left = -1,
                                   .k_scale = k_scale,
                                   .v_scale = v_scale};
    kv8_cache_options options = KV8_CACHE_OPTIONS_INIT;
    options.num_layers = 1;
    options.num_kv_heads = HEADS;
    options.k_head_dim = DIM;
    options.page_size = 16;
    options.num_pages = 100;
    options.max_seqs = FORKS;
    options.max_seq_len = LONGEST;
    options.layers = &layer;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    assert_ok(kv8_cache_seq_create(cache, &seqs[0]));
    append_random(cache, seqs[0], PREFIX, rng);
    for (int i = 1; i < FORKS; i++) assert_ok(kv8_cache_seq_fork(cache, seqs[0], &seqs[i]));
    for (int i = 1; i < FORKS; i++) append_random(cache, seqs[i], 4 * i, rng);
    return cache;
}

/* A sequence forked eight times, tails of their own; everybody attends in one batch. 300 tokens are
 * 18 full pages, which are walked once; the nineteenth is copied by every fork that writes. */
static void forks_of_a_cache_attend_in_one_batch(void **state) {
    (void)state;
    static const kv8_dtype dtypes[] = {KV8_E4M3, KV8_INT8, KV8_BF16};
    for (size_t n = 0; n < 6; n++) {
        test_rng rng = {77 + n};
        kv8_seq seqs[FORKS];
        kv8_cache *const cache = open_fork_cache(dtypes[n % 3], seqs, &rng);
        float q[FORKS * GROUP * ROW], o[FORKS * GROUP * ROW], lse[FORKS * GROUP * HEADS];
        double ref_o[FORKS * GROUP * ROW], ref_lse[FORKS * GROUP * HEADS];
        float k_scale[FORKS * HEADS], v_scale[FORKS * HEADS], sinks[GROUP * HEADS];
        int32_t indptr[FORKS + 1], pages[FORKS * 22], last[FORKS], qo_indptr[FORKS + 1];
        for (int i = 0; i < FORKS * GROUP * ROW; i++) q[i] = rng_normal(&rng);
        for (int i = 0; i < GROUP * HEADS; i++) sinks[i] = rng_normal(&rng);
        for (int i = 0; i <= FORKS; i++) qo_indptr[i] = i;
        kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
        spec.num_qo_heads = GROUP * HEADS;
        spec.num_kv_heads = HEADS;
        spec.head_dim = DIM;
        spec.q_dtype = KV8_F32;
        spec.k_dtype = dtypes[n % 3];
        spec.v_dtype = KV8_E4M3;
        spec.page_size = 16;
        spec.window_left = -1;
        spec.causal = 1;
        spec.max_batch = spec.max_total_q = FORKS;
        spec.max_kv_len = LONGEST;
        kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
        args.batch = FORKS;
        args.qo_indptr = qo_indptr;
        args.q = q;
        args.o = o;
        args.q_stride_row = args.o_stride_row = GROUP * ROW;
        args.q_stride_head = args.o_stride_head = DIM;
        args.k_scale = k_scale;
        args.v_scale = v_scale;
        args.k_scale_stride_batch = args.v_scale_stride_batch = HEADS;
        args.k_scale_stride_head = args.v_scale_stride_head = 1;
        args.lse = lse;
        args.sink_logit = sinks;
        kv8_paged k_view = KV8_PAGED_INIT, v_view = KV8_PAGED_INIT;
        assert_ok(kv8_cache_layer_kv(cache, 0, &k_view, &v_view));
        args.k = &k_view;
        args.v = &v_view;
        assert_ok(kv8_cache_scales(cache, 0, seqs, FORKS, k_scale, v_scale));
        assert_ok(kv8_cache_page_table(cache, 0, seqs, FORKS, indptr, pages, FORKS * 22, last));
        const kv8_page_table table = case_csr_table(indptr, pages, last);
        args.pages = &table;
        kv8_attention_plan *plan = NULL;
        assert_ok(kv8_attention_plan_create(&plan, &spec, pools[n / 3], NULL));
        const walked w = walk(plan, &args);
        assert_int_equal(w.num_prefixes, 1);
        assert_int_equal(w.num_members, FORKS);
        assert_int_equal(w.keys, 288 + FORKS * (PREFIX - 288) + 4 * (FORKS - 1) * FORKS / 2);
        assert_ok(kv8_attention_reference(&spec, &args, ref_o, ref_lse));
        for (int b = 0; b < FORKS; b++) {
            const double error =
                relative_error(o + b * GROUP * ROW, ref_o + b * GROUP * ROW, GROUP * ROW);
            if (!(error <= 1e-5)) fail_msg("fork %d: o is off by %g", b, error);
        }
        for (int i = 0; i < FORKS * GROUP * HEADS; i++)
            assert_true(fabs((double)lse[i] - ref_lse[i]) <= 1e-5);
        kv8_attention_plan_destroy(plan);
        kv8_cache_destroy(cache);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prefix_of_many_is_walked_once),
        cmocka_unit_test(groups_lie_anywhere_in_the_batch),
        cmocka_unit_test(branches_or_their_stem),
        cmocka_unit_test(many_rows_take_several_blocks),
        cmocka_unit_test(rows_in_the_prefix_shorten_it),
        cmocka_unit_test(drawn_forks_stay_within_the_bounds),
        cmocka_unit_test(where_it_is_not_allowed_everyone_walks_alone),
        cmocka_unit_test(where_it_does_not_pay_everyone_walks_alone),
        cmocka_unit_test(describe_says_when_it_is_taken),
        cmocka_unit_test(forks_of_a_cache_attend_in_one_batch),
    };
    return cmocka_run_group_tests(tests, start_threads, stop_threads);
}
