/* test_observe.c - observers count what a plain definition counts, whatever the order, the cuts,
 * the threads and the ranks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/calibrate.h>

#include "testing.h"

enum { LAYERS = 2, KV_HEADS = 4, QO_HEADS = 8, K_DIM = 24, V_DIM = 40, ROWS = 97 };

static kv8_observer *make(bool with_q, int32_t rank, int32_t num_ranks, kv8_threads *threads) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    options.num_layers = LAYERS;
    options.num_kv_heads = KV_HEADS;
    options.num_qo_heads = with_q ? QO_HEADS : 0;
    options.k_head_dim = K_DIM;
    options.v_head_dim = V_DIM;
    options.rank = rank;
    options.num_ranks = num_ranks;
    options.threads = threads;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    return observer;
}

/* K, V and Q of one layer: K and V differ everywhere, and every kind of value is there. */
typedef struct rows {
    float k[ROWS][KV_HEADS][K_DIM], v[ROWS][KV_HEADS][V_DIM], q[ROWS][QO_HEADS][K_DIM];
} rows;

static float any_value(test_rng *rng, float spread) {
    switch (rng_range(rng, 0, 60)) {
        case 0: return 0;
        case 1: return -0.0f;
        case 2: return (float)NAN;
        case 3: return -INFINITY;
        case 4: return 1e-42f; /* subnormal */
        case 5: return -3e38f;
        default: return rng_normal(rng) * exp2f((float)rng_range(rng, -40, 36)) * spread;
    }
}

static rows *make_rows(uint64_t seed) {
    rows *const r = malloc(sizeof *r);
    test_rng rng = {seed};
    float *const parts[] = {&r->k[0][0][0], &r->v[0][0][0], &r->q[0][0][0]};
    const size_t sizes[] = {sizeof r->k / 4, sizeof r->v / 4, sizeof r->q / 4};
    static const float spreads[] = {1, 0.37f, 5};
    for (int p = 0; p < 3; p++) {
        for (size_t i = 0; i < sizes[p]; i++) parts[p][i] = any_value(&rng, spreads[p]);
    }
    return r;
}

static void add(kv8_observer *observer, int32_t layer, const rows *r, int32_t begin, int32_t end,
                bool with_q) {
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = end - begin;
    args.src_dtype = KV8_F32;
    args.k = r->k[begin];
    args.k_stride_row = KV_HEADS * K_DIM;
    args.k_stride_head = K_DIM;
    args.v = r->v[begin];
    args.v_stride_row = KV_HEADS * V_DIM;
    args.v_stride_head = V_DIM;
    args.q = with_q ? r->q[begin] : NULL;
    args.q_stride_row = QO_HEADS * K_DIM;
    args.q_stride_head = K_DIM;
    assert_ok(kv8_observer_add(observer, layer, &args));
}

/* The definition, without the library's bit tricks: frexp and division into eighths. */
static int32_t bin_of(float value) {
    int exponent = 0;
    const double mantissa = frexp(fabs((double)value), &exponent); /* [0.5, 1) */
    const int32_t bin = (exponent - 1 + 32) * 8 + (int32_t)((mantissa - 0.5) * 16);
    return bin < 0 ? 0 : bin > 511 ? 511 : bin;
}

static void assert_same(const kv8_observer *a, const kv8_observer *b) {
    size_t num_a = 0, num_b = 0;
    const uint64_t *const sums_a = kv8_observer_sums((kv8_observer *)(uintptr_t)a, &num_a);
    const uint64_t *const sums_b = kv8_observer_sums((kv8_observer *)(uintptr_t)b, &num_b);
    assert_int_equal(num_a, num_b);
    assert_memory_equal(sums_a, sums_b, num_a * sizeof *sums_a);
    const float *const most_a = kv8_observer_maxima((kv8_observer *)(uintptr_t)a, &num_a);
    const float *const most_b = kv8_observer_maxima((kv8_observer *)(uintptr_t)b, &num_b);
    assert_int_equal(num_a, num_b);
    assert_memory_equal(most_a, most_b, num_a * sizeof *most_a);
}

static void check_head(const kv8_observer *observer, kv8_observed_tensor tensor, int32_t head,
                       const float *at, int64_t stride_row, int32_t head_dim) {
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(observer, tensor, 1, head, &seen));
    uint64_t histogram[KV8_OBSERVE_BINS] = {0}, nonfinite[V_DIM] = {0};
    uint64_t zeros = 0, nans = 0, infs = 0;
    float absmax = 0, channel[V_DIM] = {0};
    for (int64_t row = 0; row < ROWS; row++) {
        for (int32_t d = 0; d < head_dim; d++) {
            const float x = fabsf(at[row * stride_row + d]);
            nans += isnan(x);
            infs += isinf(x);
            nonfinite[d] += !isfinite(x);
            if (!isfinite(x)) continue;
            if (x == 0)
                zeros++;
            else
                histogram[bin_of(x)]++;
            if (x > channel[d]) channel[d] = x;
            if (x > absmax) absmax = x;
        }
    }
    assert_int_equal(seen.num_rows, ROWS);
    assert_int_equal(seen.num_values, ROWS * head_dim);
    assert_int_equal(seen.zeros, zeros);
    assert_int_equal(seen.nans, nans);
    assert_int_equal(seen.infs, infs);
    assert_int_equal(seen.head_dim, head_dim);
    assert_true(seen.absmax == absmax && absmax > 0 && nans > 0 && infs > 0 && zeros > 0);
    assert_memory_equal(seen.histogram, histogram, sizeof histogram);
    for (int32_t d = 0; d < head_dim; d++) {
        assert_true(seen.channel_absmax[d] == channel[d]);
        assert_int_equal(seen.channel_nonfinite[d], nonfinite[d]);
    }
}

static void counts_as_defined(void **state) {
    (void)state;
    rows *const r = make_rows(1);
    kv8_observer *const observer = make(true, 0, 0, NULL);
    add(observer, 1, r, 0, ROWS, true); /* stopped: left out */
    kv8_observer_start(observer);
    assert_true(kv8_observer_is_on(observer));
    add(observer, 1, r, 0, ROWS, true);
    kv8_observer_stop(observer);
    add(observer, 1, r, 0, ROWS, true);
    for (int32_t head = 0; head < KV_HEADS; head++) {
        check_head(observer, KV8_OBSERVED_K, head, r->k[0][head], KV_HEADS * K_DIM, K_DIM);
        check_head(observer, KV8_OBSERVED_V, head, r->v[0][head], KV_HEADS * V_DIM, V_DIM);
    }
    for (int32_t head = 0; head < QO_HEADS; head++)
        check_head(observer, KV8_OBSERVED_Q, head, r->q[0][head], QO_HEADS * K_DIM, K_DIM);
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(observer, KV8_OBSERVED_K, 0, 0, &seen)); /* the other layer */
    assert_int_equal(seen.num_rows, 0);
    kv8_observer_destroy(observer);
    free(r);
}

static void bin_edges_are_exact(void **state) {
    (void)state;
    for (int32_t bin = 1; bin < KV8_OBSERVE_BINS; bin++) {
        const float edge = kv8_observe_bin_edge(bin);
        assert_true((double)edge == ldexp(1 + (bin % 8) / 8.0, bin / 8 - 32));
        assert_int_equal(bin_of(edge), bin);
        assert_int_equal(bin_of(nextafterf(edge, 0)), bin - 1);
    }
    assert_true(kv8_observe_bin_edge(KV8_OBSERVE_BINS) == 0x1p32f);
}

/* Cut anywhere, on threads, merged in any order: the same bits. */
static void parts_merge_to_the_whole(void **state) {
    (void)state;
    rows *const r = make_rows(2);
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 3));
    kv8_observer *const whole = make(true, 0, 0, NULL);
    kv8_observer_start(whole);
    for (int32_t layer = 0; layer < LAYERS; layer++) add(whole, layer, r, 0, ROWS, true);
    static const int32_t cuts[] = {0, 1, 48, ROWS};
    kv8_observer *parts[3];
    for (int p = 0; p < 3; p++) {
        parts[p] = make(true, 0, 0, p == 1 ? threads : NULL);
        kv8_observer_start(parts[p]);
        for (int32_t layer = 0; layer < LAYERS; layer++)
            add(parts[p], layer, r, cuts[p], cuts[p + 1], true);
    }
    kv8_observer *const merged = make(true, 0, 0, NULL);
    for (int p = 2; p >= 0; p--) assert_ok(kv8_observer_merge(merged, parts[p]));
    assert_same(whole, merged);
    for (int p = 0; p < 3; p++) kv8_observer_destroy(parts[p]);
    kv8_observer_destroy(merged);
    kv8_observer_destroy(whole);
    kv8_threads_destroy(threads);
    free(r);
}

/* Ranks count their own heads, copies of a head once. */
static void ranks_merge_to_the_whole(void **state) {
    (void)state;
    rows *const r = make_rows(3);
    kv8_observer *const whole = make(true, 0, 0, NULL);
    kv8_observer_start(whole);
    add(whole, 1, r, 0, ROWS, true);
    static const int32_t ranks[] = {1, 2, 4, 8};
    for (int i = 0; i < 4; i++) {
        kv8_observer *const merged = make(true, 0, 0, NULL);
        for (int32_t rank = 0; rank < ranks[i]; rank++) {
            kv8_observer *const part = make(true, rank, ranks[i], NULL);
            kv8_observer_start(part);
            add(part, 1, r, 0, ROWS, true);
            assert_ok(kv8_observer_merge(merged, part));
            kv8_observer_destroy(part);
        }
        assert_same(whole, merged);
        kv8_observer_destroy(merged);
    }
    kv8_observer_destroy(whole);
    free(r);
}

static void ranks_hold_their_heads(void **state) {
    (void)state;
    kv8_rank_heads heads;
    assert_ok(kv8_rank_heads_get(8, 4, 3, &heads));
    assert_true(heads.first == 6 && heads.num == 2 && heads.owns);
    assert_ok(kv8_rank_heads_get(2, 8, 3, &heads));
    assert_true(heads.first == 0 && heads.num == 1 && !heads.owns);
    assert_ok(kv8_rank_heads_get(2, 8, 4, &heads));
    assert_true(heads.first == 1 && heads.num == 1 && heads.owns);
    assert_refused(kv8_rank_heads_get(8, 3, 0, &heads), KV8_ERR_INVALID, "8 heads over 3 ranks");
    assert_refused(kv8_rank_heads_get(8, 4, 4, &heads), KV8_ERR_INVALID, "rank 4");
    assert_refused(kv8_rank_heads_get(0, 1, 0, &heads), KV8_ERR_INVALID, "0 heads");
}

/* bf16 rows count as the f32 values they are. */
static void widens_short_floats(void **state) {
    (void)state;
    rows *const r = make_rows(4);
    static kv8_bf16 codes[ROWS][KV_HEADS][K_DIM];
    assert_ok(
        kv8_narrow(KV8_ISA_SCALAR, KV8_BF16, &r->k[0][0][0], sizeof r->k / 4, 1, codes, NULL));
    assert_ok(kv8_widen(KV8_ISA_SCALAR, KV8_BF16, codes, sizeof r->k / 4, &r->k[0][0][0]));
    kv8_observer *const a = make(false, 0, 0, NULL), *const b = make(false, 0, 0, NULL);
    kv8_observer_start(a);
    kv8_observer_start(b);
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = ROWS;
    args.k = r->k;
    args.k_stride_row = KV_HEADS * K_DIM;
    args.k_stride_head = K_DIM;
    args.src_dtype = KV8_F32;
    assert_ok(kv8_observer_add(a, 0, &args));
    args.src_dtype = KV8_BF16;
    args.k = codes;
    assert_ok(kv8_observer_add(b, 0, &args));
    assert_same(a, b);
    kv8_observer_destroy(a);
    kv8_observer_destroy(b);
    free(r);
}

/* What arithmetic makes of x where subnormals count as 0. */
static float as_counted(float x) {
#if defined(__x86_64__)
    return fabsf(x) < 0x1p-126f ? 0 : x;
#else
    return x;
#endif
}
static float turned(float a, float cosine, float b, float sine) {
    return as_counted(as_counted(as_counted(a) * cosine) + as_counted(as_counted(b) * sine));
}

/* K that is rotated on the way counts as K that comes rotated, by the definition of rope.h; rows
 * beyond those in use are left out. */
static void rotates_k_and_leaves_padding_out(void **state) {
    (void)state;
    enum { HALF = K_DIM / 2, IN_USE = 90 };
    rows *const r = make_rows(5);
    static float cos_sin[ROWS * K_DIM];
    test_rng rng = {6};
    for (int32_t i = 0; i < ROWS * K_DIM; i++) cos_sin[i] = 2 * rng_unit(&rng) - 1;
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        kv8_observer *const want = make(false, 0, 0, NULL), *const got = make(false, 0, 0, NULL);
        kv8_observer_start(want);
        kv8_observer_start(got);
        const int32_t in_use = IN_USE;
        kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
        args.num_rows = ROWS;
        args.src_dtype = KV8_F32;
        args.k = r->k;
        args.k_stride_row = KV_HEADS * K_DIM;
        args.k_stride_head = K_DIM;
        args.cos_sin = cos_sin;
        args.interleaved = interleaved;
        args.rows_in_use = &in_use;
        assert_ok(kv8_observer_add(got, 0, &args));
        static float rotated[IN_USE][KV_HEADS][K_DIM];
        for (int32_t i = 0; i < IN_USE * KV_HEADS * HALF; i++) {
            const int32_t row = i / (KV_HEADS * HALF), head = i / HALF % KV_HEADS, pair = i % HALF;
            const int32_t first = interleaved ? 2 * pair : pair;
            const int32_t second = interleaved ? 2 * pair + 1 : pair + HALF;
            const float a = r->k[row][head][first], b = r->k[row][head][second];
            const float *const cosine = cos_sin + row * K_DIM + pair, *const sine = cosine + HALF;
            rotated[row][head][first] = turned(a, *cosine, b, -*sine);
            rotated[row][head][second] = turned(b, *cosine, a, *sine);
        }
        args.num_rows = IN_USE;
        args.k = rotated;
        args.cos_sin = NULL;
        args.rows_in_use = NULL;
        assert_ok(kv8_observer_add(want, 0, &args));
        assert_same(got, want);
        kv8_observer_destroy(want);
        kv8_observer_destroy(got);
    }
    free(r);
}

/* What kv8_observer_get tells of every head makes the observer anew, added twice it counts twice.
 */
static void heads_are_added_as_they_were_told(void **state) {
    (void)state;
    rows *const r = make_rows(7);
    kv8_observer *const from = make(true, 0, 0, NULL), *const to = make(true, 0, 0, NULL);
    kv8_observer_start(from);
    add(from, 0, r, 0, ROWS, true);
    add(from, 1, r, 3, 50, true);
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    for (int i = 0; i < LAYERS * (2 * KV_HEADS + QO_HEADS); i++) {
        const int32_t layer = i % LAYERS, idx = i / LAYERS;
        const kv8_observed_tensor tensor =
            (kv8_observed_tensor)(idx < 2 * KV_HEADS ? idx / KV_HEADS : KV8_OBSERVED_Q);
        const int32_t head = idx < 2 * KV_HEADS ? idx % KV_HEADS : idx - 2 * KV_HEADS;
        assert_ok(kv8_observer_get(from, tensor, layer, head, &seen));
        assert_ok(kv8_observer_add_head(to, tensor, layer, head, &seen));
    }
    assert_same(from, to);
    assert_ok(kv8_observer_add_head(to, KV8_OBSERVED_Q, 1, QO_HEADS - 1, &seen));
    kv8_observed_head twice = KV8_OBSERVED_HEAD_INIT;
    assert_ok(kv8_observer_get(to, KV8_OBSERVED_Q, 1, QO_HEADS - 1, &twice));
    assert_true(twice.num_rows == 2 * seen.num_rows && twice.zeros == 2 * seen.zeros);
    seen.zeros++;
    assert_refused(kv8_observer_add_head(to, KV8_OBSERVED_K, 0, 0, &seen), KV8_ERR_INVALID,
                   "counts of 1129 values, 47 rows of head_dim 24 have 1128");
    seen.zeros--;
    seen.absmax = INFINITY;
    assert_refused(kv8_observer_add_head(to, KV8_OBSERVED_K, 0, 0, &seen), KV8_ERR_INVALID,
                   "absmax of inf");
    seen.absmax = 9;
    seen.channel_absmax = NULL;
    seen.channel_nonfinite = NULL;
    kv8_observer *const bare = make(false, 0, 0, NULL);
    assert_ok(kv8_observer_add_head(bare, KV8_OBSERVED_K, 0, 0, &seen));
    assert_ok(kv8_observer_get(bare, KV8_OBSERVED_K, 0, 0, &twice));
    assert_true(twice.absmax == 9 && twice.channel_absmax[K_DIM - 1] == 9);
    kv8_observer_destroy(bare);
    kv8_observer_destroy(from);
    kv8_observer_destroy(to);
    free(r);
}

static void refuses_by_name(void **state) {
    (void)state;
    kv8_observer *const observer = make(false, 0, 0, NULL), *const with_q = make(true, 0, 0, NULL);
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.src_dtype = KV8_INT8;
    assert_refused(kv8_observer_add(observer, 0, &args), KV8_ERR_UNSUPPORTED, "int8");
    args.src_dtype = KV8_F32;
    assert_refused(kv8_observer_add(observer, LAYERS, &args), KV8_ERR_INVALID, "layer 2");
    args.q = &args;
    assert_refused(kv8_observer_add(observer, 0, &args), KV8_ERR_INVALID, "num_qo_heads is 0");
    args.num_rows = -1;
    assert_refused(kv8_observer_add(observer, 0, &args), KV8_ERR_INVALID, "num_rows is -1");
    assert_refused(kv8_observer_merge(observer, with_q), KV8_ERR_INVALID, "num_qo_heads 0 and 8");
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    assert_refused(kv8_observer_get(observer, KV8_OBSERVED_Q, 0, 0, &seen), KV8_ERR_INVALID,
                   "has 2 of 0");
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_observer *none = NULL;
    assert_refused(kv8_observer_create(&none, &options), KV8_ERR_INVALID, "num_layers is 0");
    options.num_layers = 1;
    options.num_kv_heads = 6;
    options.k_head_dim = 577;
    assert_refused(kv8_observer_create(&none, &options), KV8_ERR_INVALID, "k_head_dim is 577");
    options.k_head_dim = 576;
    options.num_ranks = 4;
    assert_refused(kv8_observer_create(&none, &options), KV8_ERR_INVALID, "6 heads over 4 ranks");
    assert_null(none);
    kv8_observer_destroy(observer);
    kv8_observer_destroy(with_q);
    kv8_observer_destroy(NULL);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    for (int64_t at = 0; at < 3; at++) {
        failing_heap heap = {.fail_at = at};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
        options.allocator = &allocator;
        options.num_layers = options.num_kv_heads = options.k_head_dim = 1;
        kv8_observer *observer = NULL;
        assert_int_equal(kv8_observer_create(&observer, &options), KV8_ERR_NO_MEMORY);
        assert_null(observer);
        assert_int_equal(heap.live, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_as_defined),
        cmocka_unit_test(bin_edges_are_exact),
        cmocka_unit_test(parts_merge_to_the_whole),
        cmocka_unit_test(ranks_merge_to_the_whole),
        cmocka_unit_test(ranks_hold_their_heads),
        cmocka_unit_test(widens_short_floats),
        cmocka_unit_test(heads_are_added_as_they_were_told),
        cmocka_unit_test(rotates_k_and_leaves_padding_out),
        cmocka_unit_test(refuses_by_name),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
