/* test_attention_long.c - what shows only at length: sums over 131072 keys stay exact or within the
 * contract's bounds on every rung, and a window reads no page that it cannot see, which here are
 * not even mapped readable.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_case.h"

/* For emulators: a length that still splits. */
static int32_t num_keys(void) {
    return test_is_short() ? 16384 : 131072;
}

/* --- equal scores --- */

typedef struct equal_case {
    kv8_dtype q_dtype, kv_dtype;
    int32_t group_size, head_dim, qo_len;
} equal_case;

/* Every K and V is 1, all in one page: o is exactly 1 and lse the logarithm of the count, at any
 * length, or an accumulator is too narrow. */
static void check_equal(const equal_case *c, kv8_threads *threads) {
    enum { PAGE = 64, MAX_DIM = 128, MAX_ROWS = 2 * 8 };
    const int32_t keys = num_keys(), rows = c->group_size * c->qo_len;
    uint8_t *const data = malloc((size_t)PAGE * MAX_DIM * sizeof(float));
    kv8_f16 row_scale[PAGE];
    for (int i = 0; i < PAGE * c->head_dim; i++) case_store(c->kv_dtype, data, i, 1.0f);
    if (c->kv_dtype == KV8_INT8) memset(data, 64, (size_t)PAGE * MAX_DIM);
    for (int i = 0; i < PAGE; i++) row_scale[i] = kv8_f16_from_f32(1.0f / 64);
    int32_t *const pages = calloc((size_t)(keys / PAGE), sizeof *pages);
    _Alignas(float) uint8_t q[MAX_ROWS * MAX_DIM * sizeof(float)];
    for (int i = 0; i < rows * c->head_dim; i++) case_store(c->q_dtype, q, i, 0.3f);
    float o[MAX_ROWS * MAX_DIM], lse[MAX_ROWS];
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = c->group_size;
    spec.num_kv_heads = 1;
    spec.head_dim = c->head_dim;
    spec.q_dtype = c->q_dtype;
    spec.o_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = c->kv_dtype;
    spec.page_size = PAGE;
    spec.window_left = -1;
    spec.max_batch = 1;
    spec.max_total_q = c->qo_len;
    spec.max_kv_len = keys;
    const int32_t qo_indptr[] = {0, c->qo_len};
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = 1;
    args.qo_indptr = qo_indptr;
    args.q = q;
    args.q_stride_head = args.o_stride_head = c->head_dim;
    args.q_stride_row = args.o_stride_row = c->group_size * c->head_dim;
    kv8_paged pool = KV8_PAGED_INIT;
    pool.data = data;
    pool.stride_slot = c->head_dim;
    pool.row_scale_stride_slot = 1;
    if (c->kv_dtype == KV8_INT8) pool.row_scale = row_scale;
    const kv8_page_table table = case_dense_table(pages, keys / PAGE, &keys);
    args.k = args.v = &pool;
    args.pages = &table;
    args.o = o;
    args.lse = lse;
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        spec.isa = isa;
        kv8_attention_plan *plan = NULL;
        assert_ok(kv8_attention_plan_create(&plan, &spec, threads, NULL));
        const guarded workspace = guarded_alloc(kv8_attention_workspace_size(plan));
        assert_ok(kv8_attention_prepare(plan, &args, workspace.data));
        assert_ok(kv8_attention_run(plan, &args, workspace.data));
        for (int i = 0; i < rows * c->head_dim; i++) {
            if (!(o[i] == 1))
                fail_msg("%s: q %s kv %s group %d: o[%d] is %.9g", kv8_isa_name(isa),
                         kv8_dtype_name(c->q_dtype), kv8_dtype_name(c->kv_dtype), c->group_size, i,
                         (double)o[i]);
        }
        guarded_free(workspace);
        kv8_attention_plan_destroy(plan);
    }
    free(pages);
    free(data);
}

static void equal_scores_over_ones_give_one_in_every_shape(void **state) {
    (void)state;
    static const equal_case cases[] = {
        {KV8_BF16, KV8_E4M3, 8, 64, 1},  {KV8_F32, KV8_E4M3, 8, 64, 1},
        {KV8_BF16, KV8_INT8, 8, 64, 1},  {KV8_F32, KV8_INT8, 8, 64, 1},
        {KV8_BF16, KV8_BF16, 8, 64, 1},  {KV8_BF16, KV8_E4M3, 4, 128, 1},
        {KV8_BF16, KV8_E4M3, 1, 64, 1},  {KV8_BF16, KV8_E4M3, 2, 64, 2},
        {KV8_BF16, KV8_E5M2, 1, 128, 1}, {KV8_F16, KV8_F16, 3, 64, 1},
        {KV8_BF16, KV8_INT8, 4, 128, 1}, {KV8_BF16, KV8_INT8, 1, 64, 1},
        {KV8_BF16, KV8_INT8, 2, 64, 1},  {KV8_BF16, KV8_INT8, 8, 64, 2},
    };
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_equal(&cases[i], i % 2 == 0 ? threads : NULL);
    kv8_threads_destroy(threads);
}

/* --- random data --- */

static void random_data_stay_within_the_bounds(void **state) {
    (void)state;
    static const kv8_dtype dtypes[][3] = {{KV8_BF16, KV8_E4M3, KV8_E4M3},
                                          {KV8_F32, KV8_E4M3, KV8_E4M3},
                                          {KV8_BF16, KV8_INT8, KV8_INT8},
                                          {KV8_BF16, KV8_BF16, KV8_E5M2}};
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        const attention_case c = {.seed = 500 + i,
                                  .group_size = i == 3 ? 1 : 4,
                                  .num_kv_heads = 1,
                                  .head_dim = 64,
                                  .q_dtype = dtypes[i][0],
                                  .k_dtype = dtypes[i][1],
                                  .v_dtype = dtypes[i][2],
                                  .page_size = 16,
                                  .window_left = -1,
                                  .causal = 1,
                                  .sink = SINK_FINITE,
                                  .scale = SCALE_HEAD,
                                  .batch_invariant = i == 2,
                                  .batch = 1,
                                  .qo_len = {1},
                                  .kv_len = {num_keys() - 5}};
        case_check(&c, threads);
    }
    kv8_threads_destroy(threads);
}

/* --- windows --- */

/* A plane of the cache with every page in memory of its own, unreadable where no query looks. */
typedef struct walled_plane {
    uint8_t *base;
    size_t size, page; /* bytes */
} walled_plane;

static bool is_seen(int32_t page) {
    return page != KV8_NO_PAGE && page != INT32_MAX; /* as case_make_cache marks them */
}

static walled_plane wall_off(const void *from, size_t page_bytes, const int32_t *pages,
                             int32_t num_pages) {
    const size_t unit = (size_t)sysconf(_SC_PAGESIZE);
    walled_plane plane = {.page = (page_bytes + unit - 1) / unit * unit};
    plane.size = plane.page * (size_t)num_pages;
    plane.base = mmap(NULL, plane.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(plane.base != MAP_FAILED);
    for (int32_t i = 0; i < num_pages; i++) {
        uint8_t *const to = plane.base + plane.page * (size_t)(num_pages - 1 - i);
        if (is_seen(pages[i])) {
            memcpy(to, (const uint8_t *)from + (size_t)pages[i] * page_bytes, page_bytes);
        } else {
            assert_int_equal(mprotect(to, plane.page, PROT_NONE), 0);
        }
    }
    return plane;
}

static void wall_off_tensor(kv8_paged *paged, kv8_dtype dtype, const int32_t *pages,
                            int32_t num_pages, walled_plane planes[2]) {
    const size_t size = kv8_dtype_size(dtype);
    planes[0] = wall_off(paged->data, (size_t)paged->stride_page * size, pages, num_pages);
    paged->data = planes[0].base;
    paged->stride_page = (int64_t)(planes[0].page / size);
    planes[1] = (walled_plane){0};
    if (paged->row_scale == NULL) return;
    planes[1] = wall_off(paged->row_scale, (size_t)paged->row_scale_stride_page * sizeof(kv8_f16),
                         pages, num_pages);
    paged->row_scale = (const kv8_f16 *)(const void *)planes[1].base;
    paged->row_scale_stride_page = (int64_t)(planes[1].page / sizeof(kv8_f16));
}

static void check_walled(const attention_case *c, kv8_threads *threads) {
    static attention_inputs in;
    case_make(&in, c);
    const int32_t num_pages = in.pages.page_indptr[c->batch];
    const int32_t *const pages = in.pages.page_indices;
    walled_plane planes[4];
    wall_off_tensor(&in.k, c->k_dtype, pages, num_pages, planes);
    wall_off_tensor(&in.v, c->v_dtype, pages, num_pages, planes + 2);
    /* Valid ids throughout: nothing but the walls tells which pages are out of sight. */
    int32_t *const ids = malloc((size_t)num_pages * sizeof *ids);
    int32_t hidden = 0;
    for (int32_t i = 0; i < num_pages; i++) {
        ids[i] = num_pages - 1 - i;
        hidden += !is_seen(pages[i]);
    }
    assert_true(hidden > num_pages / 2);
    in.pages.page_indices = ids;
    assert_ok(kv8_attention_reference(&in.spec, &in.args, in.ref_o, in.ref_lse));
    const size_t rows = (size_t)(in.total_q * in.num_qo_heads);
    float *const o = calloc(rows * (size_t)(in.v_head_dim + 1), sizeof *o);
    float *const lse = o + rows * (size_t)in.v_head_dim;
    for (kv8_isa isa = KV8_ISA_BEST; case_next_isa(&isa);) {
        case_run(&in, isa, threads, o, lse);
        case_compare(&in, isa, o, lse);
    }
    free(o);
    free(ids);
    for (int i = 0; i < 4; i++) {
        if (planes[i].base != NULL) munmap(planes[i].base, planes[i].size);
    }
    case_free(&in);
}

static void a_window_reads_only_pages_it_sees(void **state) {
    (void)state;
    static const kv8_dtype dtypes[][3] = {{KV8_BF16, KV8_E4M3, KV8_E4M3},
                                          {KV8_F32, KV8_E4M3, KV8_INT8},
                                          {KV8_BF16, KV8_INT8, KV8_INT8},
                                          {KV8_BF16, KV8_BF16, KV8_BF16}};
    static const int32_t groups[] = {8, 1, 3}, qo_lens[] = {1, 3, 40};
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (uint64_t n = 0; n < 4 * 3 * 3; n++) {
        const kv8_dtype *const types = dtypes[n % 4];
        const int32_t qo_len = qo_lens[n / 4 % 3];
        const attention_case c = {.seed = 600 + n,
                                  .group_size = groups[n / 12],
                                  .num_kv_heads = 2,
                                  .head_dim = 64,
                                  .q_dtype = types[0],
                                  .k_dtype = types[1],
                                  .v_dtype = types[2],
                                  .page_size = n % 5 == 0 ? 7 : 16,
                                  .window_left = 127, /* gpt-oss */
                                  .causal = 1,
                                  .sink = SINK_FINITE,
                                  .layout = n % 2 == 0 ? LAYOUT_NHD : LAYOUT_HND,
                                  .batch_invariant = n % 3 == 0,
                                  .batch = 4,
                                  .qo_len = {qo_len, 1, qo_len, 1},
                                  .kv_len = {3000, 2000 + (int32_t)n, 129 + qo_len, 145}};
        check_walled(&c, n % 2 == 0 ? threads : NULL);
    }
    kv8_threads_destroy(threads);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_scores_over_ones_give_one_in_every_shape),
        cmocka_unit_test(random_data_stay_within_the_bounds),
        cmocka_unit_test(a_window_reads_only_pages_it_sees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
