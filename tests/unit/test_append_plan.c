/* test_append_plan.c - append plans on the host: the bytes and counts of kv8_cache_append for every
 * format, layout, table and slot mapping, with threads and without; rows that are left out; and
 * what is refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_case.h"

enum { MAX_COPIES = 24 };
typedef struct host_memory {
    void *ptr[MAX_COPIES];
    int count;
} host_memory;

static void *copy(void *cookie, const void *from, size_t bytes) {
    host_memory *const memory = cookie;
    assert_true(memory->count < MAX_COPIES);
    void *const to = malloc(bytes);
    assert_non_null(to);
    memcpy(to, from, bytes);
    return memory->ptr[memory->count++] = to;
}

static void check_case(const append_case *c, uint64_t seed, void *cookie) {
    kv8_threads *const threads = seed % 2 == 0 ? cookie : NULL;
    const float *const cos_sin = open_append_case(c, seed);
    host_memory memory = {.count = 0};
    const append_memory m = {copy, &memory};
    plan_side on;
    open_plan_side(&on, &m, c, cos_sin);
    append_on_cpu(c, cos_sin);
    kv8_append_spec spec = spec_of(c);
    spec.isa = seed % 3 == 0 ? KV8_ISA_SCALAR : KV8_ISA_BEST;
    kv8_append_plan *plan = NULL;
    assert_ok(kv8_append_plan_create(&plan, &spec, threads, NULL));
    assert_ok(kv8_append_run(plan, &on.args));
    compare_pools(on.pool, c);
    compare_counters(on.counters, c);
    kv8_append_plan_destroy(plan);
    for (int i = 0; i < memory.count; i++) free(memory.ptr[i]);
    kv8_cache_destroy(cpu.cache);
}

static void bytes_equal_the_caches(void **state) {
    (void)state;
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 2));
    for (int rotates = 0; rotates < 2; rotates++) {
        assert_true(walk_append_cases(rotates, false, check_case, threads) > 100);
        assert_true(walk_append_cases(rotates, true, check_case, threads) > 100);
    }
    kv8_threads_destroy(threads);
}

/* --- small pools of e4m3, page_size 2, one head of 16, row r of the source is r + 1 --- */

enum { ROWS = 6, PAGES = 3, DIM = 16, POOL = PAGES * 2 * DIM };
typedef struct small_pool {
    uint8_t bytes[2 * POOL];
    float source[ROWS * DIM];
    kv8_paged k_pages, v_pages;
    kv8_page_table pages;
    kv8_append_plan *plan;
    kv8_append_args args;
} small_pool;

static kv8_append_spec small_spec(void) {
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = 1;
    spec.k_head_dim = DIM;
    spec.page_size = 2;
    spec.src_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    return spec;
}

static void open_small(small_pool *p) {
    *p = (small_pool){
        .k_pages = KV8_PAGED_INIT, .pages = KV8_PAGE_TABLE_INIT, .args = KV8_APPEND_ARGS_INIT};
    for (int i = 0; i < ROWS * DIM; i++) p->source[i] = (float)(1 + i / DIM);
    p->k_pages.data = p->bytes;
    p->k_pages.stride_page = 2 * DIM;
    p->k_pages.stride_slot = p->k_pages.stride_head = DIM;
    p->k_pages.num_pages = PAGES;
    p->v_pages = p->k_pages;
    p->v_pages.data = p->bytes + POOL;
    const kv8_append_spec spec = small_spec();
    assert_ok(kv8_append_plan_create(&p->plan, &spec, NULL, NULL));
    kv8_append_args *const a = &p->args;
    a->k = a->v = p->source;
    a->k_stride_row = a->k_stride_head = a->v_stride_row = a->v_stride_head = DIM;
    a->k_pages = &p->k_pages;
    a->v_pages = &p->v_pages;
    a->max_rows = ROWS;
}

/* Which row, counted from 1, every slot holds; 0 = none. */
static void assert_slots(const small_pool *p, const uint8_t wanted[PAGES * 2]) {
    static const uint8_t code[7] = {0, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c};
    for (int i = 0; i < 2 * POOL; i++) assert_int_equal(p->bytes[i], code[wanted[i % POOL / DIM]]);
}

static void rows_without_a_place_are_left_out(void **state) {
    (void)state;
    small_pool p;
    open_small(&p);
    p.args.slot_mapping = (const int64_t[ROWS]){4, -1, 0, INT64_MIN, 3, 1};
    p.args.max_rows = 5;
    assert_ok(kv8_append_run(p.plan, &p.args));
    assert_slots(&p, (const uint8_t[]){3, 0, 0, 5, 1, 0});
    kv8_append_plan_destroy(p.plan);
    open_small(&p);
    p.args.batch = 2;
    p.args.indptr = (const int32_t[]){0, 2, 5};
    p.pages.block_table = (const int32_t[]){2, KV8_NO_PAGE, 0, 1};
    p.pages.block_table_stride = 2;
    p.pages.seq_lens = (const int32_t[]){3, 2}; /* one row more than request 1 has room for */
    p.args.pages = &p.pages;
    assert_ok(kv8_append_run(p.plan, &p.args));
    assert_slots(&p, (const uint8_t[]){4, 5, 0, 0, 0, 1});
    p.args.batch = 0;
    assert_ok(kv8_append_run(p.plan, &p.args));
    kv8_append_plan_destroy(p.plan);
}

/* Scales by the request that indptr gives a mapped row. */
static void mapped_rows_have_their_requests_scales(void **state) {
    (void)state;
    small_pool p;
    open_small(&p);
    p.args.slot_mapping = (const int64_t[ROWS]){0, 1, 2, 3, 4, 5};
    p.args.batch = 3;
    p.args.indptr = (const int32_t[]){0, 1, 1, 4};
    p.args.k_scale = p.args.v_scale = (const float[]){0.5f, 1, 2};
    p.args.scale_stride_request = 1;
    assert_ok(kv8_append_run(p.plan, &p.args));
    const float wanted[PAGES * 2] = {2, 1, 1.5f, 2, 0, 0};
    for (int i = 0; i < 2 * POOL; i++) {
        const kv8_e4m3 code = {p.bytes[i]};
        assert_true(kv8_e4m3_to_f32(code) == wanted[i % POOL / DIM]);
    }
    kv8_append_plan_destroy(p.plan);
}

static void wrong_specs_are_refused(void **state) {
    (void)state;
    const kv8_append_spec good = small_spec();
    kv8_append_spec spec;
    kv8_append_plan *plan = (kv8_append_plan *)1;
#define SPEC_REFUSED(change, status, part)                                                    \
    spec = good;                                                                              \
    change;                                                                                   \
    assert_refused(kv8_append_plan_create(&plan, &spec, NULL, NULL), KV8_ERR_##status, part); \
    assert_null(plan)
    SPEC_REFUSED(spec.struct_size = 8, INVALID, "struct_size is 8");
    SPEC_REFUSED(spec.src_dtype = KV8_E4M3, UNSUPPORTED, "src_dtype is e4m3");
    SPEC_REFUSED(spec.k_dtype = KV8_DTYPE_NONE, INVALID, "k_dtype is 0");
    SPEC_REFUSED(spec.num_kv_heads = 0, INVALID, "num_kv_heads is 0");
    SPEC_REFUSED(spec.page_size = 0, INVALID, "page_size 0");
    SPEC_REFUSED(spec.k_head_dim = 577, INVALID, "k_head_dim is 577");
    SPEC_REFUSED(spec.v_head_dim = -1, INVALID, "v_head_dim -1");
#undef SPEC_REFUSED
    assert_refused(kv8_append_plan_create(NULL, &good, NULL, NULL), KV8_ERR_INVALID, "out is NULL");
    assert_refused(kv8_append_plan_create(&plan, NULL, NULL, NULL), KV8_ERR_INVALID, "is NULL");
    kv8_append_plan_destroy(NULL);
}

static void wrong_args_are_refused(void **state) {
    (void)state;
    small_pool p;
    open_small(&p);
    const int32_t ones[3] = {1, 1, 1}, none[2] = {0, 0}, two[2] = {0, 2}, back[3] = {0, 2, 1};
    const float scales[2] = {1, NAN};
    p.args.batch = 1;
    p.args.indptr = two;
    p.args.pages = &p.pages;
    p.pages.page_indptr = two;
    p.pages.page_indices = none;
    p.pages.last_page_len = ones;
    const small_pool fine = p;
    assert_refused(kv8_append_run(NULL, &p.args), KV8_ERR_INVALID, "plan is NULL");
    assert_refused(kv8_append_run(p.plan, NULL), KV8_ERR_INVALID, "is NULL");
#define REFUSED(change, status, part)                                        \
    p = fine;                                                                \
    p.args.k_pages = &p.k_pages, p.args.v_pages = &p.v_pages;                \
    p.args.pages = &p.pages, p.args.k = p.args.v = p.source;                 \
    change;                                                                  \
    assert_refused(kv8_append_run(p.plan, &p.args), KV8_ERR_##status, part); \
    assert_memory_equal(p.bytes, fine.bytes, sizeof p.bytes)
    REFUSED(p.args.struct_size = 8, INVALID, "struct_size is 8");
    REFUSED(p.args.batch = -1, INVALID, "batch is -1");
    REFUSED(p.args.max_rows = -1, INVALID, "max_rows -1");
    REFUSED(p.args.slot_mapping = (const int64_t[]){0}, INVALID, "both set");
    REFUSED(p.args.pages = NULL, INVALID, "both NULL");
    REFUSED(p.args.indptr = NULL, INVALID, "indptr is NULL");
    REFUSED(p.args.indptr = ones, INVALID, "indptr[0] is 1");
    REFUSED((p.args.indptr = back, p.args.batch = 2, p.pages.page_indptr = NULL,
             p.pages.block_table = none, p.pages.seq_lens = ones),
            INVALID, "indptr[2] is 1");
    REFUSED(p.pages.page_indptr = NULL, INVALID, "both NULL");
    REFUSED(p.pages.block_table = ones, INVALID, "both set");
    REFUSED(p.pages.kv_indptr = two, UNSUPPORTED, "kv_indptr");
    REFUSED(p.pages.last_page_len = NULL, INVALID, "last_page_len is NULL");
    REFUSED(p.pages.last_page_len = (const int32_t[]){3}, INVALID, "last_page_len 3 of 2");
    REFUSED((p.pages.page_indptr = NULL, p.pages.block_table = none, p.pages.block_table_stride = 1,
             p.pages.seq_lens = (const int32_t[]){3}),
            INVALID, "seq_lens[0] is 3, its block table reaches 2");
    REFUSED(p.args.k = NULL, INVALID, "k is NULL");
    REFUSED(p.args.v_pages = NULL, INVALID, "is NULL");
    REFUSED(p.v_pages.data = NULL, INVALID, "v_pages.data is NULL");
    REFUSED(p.k_pages.num_pages = -1, INVALID, "num_pages is -1");
    REFUSED((p.pages.page_indices = (const int32_t[]){0, 3}), INVALID, "row 1 goes to page 3");
    REFUSED((p.args.pages = NULL, p.args.slot_mapping = (const int64_t[]){0, 6}), INVALID,
            "row 1 goes to page 3, k_pages has 3");
    REFUSED((p.args.v_scale = scales + 1), INVALID, "v_scale of request 0, head 0 is nan");
    REFUSED(p.args.interleaved = 2, INVALID, "interleaved is 2");
#undef REFUSED
    kv8_append_plan_destroy(fine.plan);
    kv8_append_spec spec = small_spec();
    spec.k_head_dim = 15;
    kv8_append_plan *odd = NULL;
    assert_ok(kv8_append_plan_create(&odd, &spec, NULL, NULL));
    p = fine;
    p.args.cos_sin = p.source;
    assert_refused(kv8_append_run(odd, &p.args), KV8_ERR_INVALID, "k_head_dim is 15, must be even");
    kv8_append_plan_destroy(odd);
    spec.v_dtype = KV8_INT8;
    assert_ok(kv8_append_plan_create(&odd, &spec, NULL, NULL));
    p.args.cos_sin = NULL;
    assert_refused(kv8_append_run(odd, &p.args), KV8_ERR_INVALID, "v_pages.row_scale is NULL");
    kv8_append_plan_destroy(odd);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_equal_the_caches),
        cmocka_unit_test(rows_without_a_place_are_left_out),
        cmocka_unit_test(mapped_rows_have_their_requests_scales),
        cmocka_unit_test(wrong_specs_are_refused),
        cmocka_unit_test(wrong_args_are_refused),
    };
    return cmocka_run_group_tests_name("append_plan", tests, NULL, NULL);
}
