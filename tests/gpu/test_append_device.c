/* test_append_device.c - rows appended on the GPU leave the bytes and the counts that the CPU's
 * append leaves: every source and cache format, layouts, dims, page sizes and scales, values from
 * the whole range of f32, by tables and by slot mapping; a whole pool is compared, so that a stray
 * write shows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_case.h"
#include "gpu_testing.h"

enum { MAX_ON_GPU = 24 };
typedef struct gpu_memory {
    const gpu *g;
    void *ptr[MAX_ON_GPU];
    int count;
} gpu_memory;

static void *copy(void *cookie, const void *from, size_t bytes) {
    gpu_memory *const memory = cookie;
    assert_true(memory->count < MAX_ON_GPU);
    return memory->ptr[memory->count++] = gpu_upload(memory->g, from, bytes);
}

static uint8_t got_pool[15 * 64 * MAX_HEADS * (2 * MAX_DIM + 8) * 4];

static void check_case(const append_case *c, uint64_t seed, void *cookie) {
    const gpu *const g = cookie;
    const float *const cos_sin = open_append_case(c, seed);
    gpu_memory memory = {.g = g};
    const append_memory m = {copy, &memory};
    plan_side on;
    open_plan_side(&on, &m, c, cos_sin);
    append_on_cpu(c, cos_sin);
    const kv8_append_spec spec = spec_of(c);
    kv8_append_device_plan *plan = NULL;
    assert_ok(kv8_append_device_plan_create(&plan, g->device, &spec));
    assert_ok(kv8_append_device_run(plan, g->stream, &on.args));
    assert_true(cpu.pool_bytes <= sizeof got_pool);
    gpu_download(g, got_pool, on.pool, cpu.pool_bytes);
    compare_pools(got_pool, c);
    uint64_t counters[4 * MAX_HEADS];
    gpu_download(g, counters, on.counters, sizeof counters);
    compare_counters(counters, c);
    kv8_append_device_plan_destroy(plan);
    for (int i = 0; i < memory.count; i++) kv8_device_free(g->device, memory.ptr[i]);
    kv8_cache_destroy(cpu.cache);
}

/* --- the tests --- */

static void walk(void **state, bool rotates, bool wild) {
    gpu g = *gpu_get_with_kernels(state);
    const int count = walk_append_cases(rotates, wild, check_case, &g);
    printf("%d cases\n", count);
}
static void bytes_equal_the_cpus(void **state) {
    walk(state, false, false);
}
static void bytes_equal_the_cpus_over_all_of_f32(void **state) {
    walk(state, false, true);
}
static void rotated_bytes_equal_the_cpus(void **state) {
    walk(state, true, false);
}
static void rotated_bytes_equal_the_cpus_over_all_of_f32(void **state) {
    walk(state, true, true);
}

/* A recorded run takes lengths, tables and rows as they are at replay. */
static void a_graph_follows_the_lengths(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = 1;
    spec.k_head_dim = 16;
    spec.page_size = 2;
    spec.src_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    kv8_append_device_plan *plan = NULL;
    assert_ok(kv8_append_device_plan_create(&plan, g->device, &spec));
    enum { PAGES = 4, POOL = PAGES * 2 * 16 };
    struct {
        int32_t indptr[3], block_table[2 * 2], seq_lens[2];
    } table = {{0, 1, 3}, {2, KV8_NO_PAGE, 1, 3}, {2, 3}};
    float source[3 * 16];
    for (int i = 0; i < 3 * 16; i++) source[i] = (float)(1 + i / 16);
    uint8_t *const pool = gpu_alloc(g, 2 * POOL);
    int32_t *const on_gpu = gpu_upload(g, &table, sizeof table);
    float *const source_on_gpu = gpu_upload(g, source, sizeof source);
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = 2;
    args.max_rows = 3;
    args.indptr = on_gpu;
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.block_table = on_gpu + 3;
    pages.block_table_stride = 2;
    pages.seq_lens = on_gpu + 7;
    args.pages = &pages;
    args.k = args.v = source_on_gpu;
    args.k_stride_row = args.k_stride_head = args.v_stride_row = args.v_stride_head = 16;
    kv8_paged k_pages = KV8_PAGED_INIT, v_pages;
    k_pages.data = pool;
    k_pages.stride_page = 32;
    k_pages.stride_slot = k_pages.stride_head = 16;
    v_pages = k_pages;
    v_pages.data = pool + POOL;
    args.k_pages = &k_pages;
    args.v_pages = &v_pages;
    kv8_graph *graph = NULL;
    assert_ok(kv8_stream_capture_begin(g->stream));
    assert_ok(kv8_stream_fill(g->stream, pool, 0, 2 * POOL));
    assert_ok(kv8_append_device_run(plan, g->stream, &args));
    assert_ok(kv8_stream_capture_end(g->stream, &graph));
    const uint8_t code[4] = {0, 0x38, 0x40, 0x44}; /* 0, 1, 2, 3 in e4m3 */
    /* Row of (page, slot): request 0 has page 2, request 1 pages 1 and 3. */
    static const uint8_t wanted[3][PAGES * 2] = {
        {0, 0, 0, 2, 0, 1, 3, 0}, /* lengths 2, 3: rows 1 and 2 are positions 1 and 2 */
        {0, 0, 2, 0, 1, 0, 0, 0}, /* lengths 1, 1, one row each */
        {0, 0, 0, 0, 0, 0, 0, 2}, /* lengths 3, 4: position 2 of request 0 has no page */
    };
    for (int step = 0; step < 3; step++) {
        if (step >= 1) table.indptr[2] = 2;
        table.seq_lens[0] = step == 0 ? 2 : step == 1 ? 1 : 3;
        table.seq_lens[1] = step == 0 ? 3 : step == 1 ? 1 : 4;
        assert_ok(kv8_stream_copy(g->stream, on_gpu, &table, sizeof table));
        assert_ok(kv8_graph_launch(graph, g->stream));
        uint8_t got[2 * POOL];
        gpu_download(g, got, pool, sizeof got);
        for (int i = 0; i < 2 * POOL; i++) {
            if (got[i] != code[wanted[step][i % POOL / 16]])
                fail_msg("step %d: byte %d is 0x%02x", step, i, got[i]);
        }
    }
    kv8_graph_destroy(graph);
    kv8_device_free(g->device, pool);
    kv8_device_free(g->device, on_gpu);
    kv8_device_free(g->device, source_on_gpu);
    kv8_append_device_plan_destroy(plan);
}

/* Slots below 0 are left out, those past the pool too, and counted. */
static void rows_past_the_pool_are_counted(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    enum { ROWS = 6, SLOTS = 4, DIM = 16 };
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = 1;
    spec.k_head_dim = DIM;
    spec.page_size = 2;
    spec.src_dtype = KV8_F32;
    spec.k_dtype = spec.v_dtype = KV8_E4M3;
    kv8_append_device_plan *plan = NULL;
    assert_ok(kv8_append_device_plan_create(&plan, g->device, &spec));
    const int64_t slots[ROWS] = {3, -1, 4, 0, INT64_MAX, 5};
    float source[ROWS * DIM];
    for (int i = 0; i < ROWS * DIM; i++) source[i] = (float)(1 + i / DIM);
    const uint32_t zero = 0;
    uint8_t *const pool = gpu_alloc(g, 2 * SLOTS * DIM);
    int64_t *const slots_on_gpu = gpu_upload(g, slots, sizeof slots);
    float *const source_on_gpu = gpu_upload(g, source, sizeof source);
    uint32_t *const bad_pages = gpu_upload(g, &zero, sizeof zero);
    assert_ok(kv8_stream_fill(g->stream, pool, 0, 2 * SLOTS * DIM));
    kv8_paged k_pages = KV8_PAGED_INIT, v_pages;
    k_pages.data = pool;
    k_pages.stride_page = 2 * DIM;
    k_pages.stride_slot = k_pages.stride_head = DIM;
    k_pages.num_pages = 3;
    v_pages = k_pages;
    v_pages.data = pool + SLOTS * DIM;
    v_pages.num_pages = 2; /* the smaller counts */
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.max_rows = ROWS;
    args.slot_mapping = slots_on_gpu;
    args.k = args.v = source_on_gpu;
    args.k_stride_row = args.k_stride_head = args.v_stride_row = args.v_stride_head = DIM;
    args.k_pages = &k_pages;
    args.v_pages = &v_pages;
    args.bad_pages = bad_pages;
    assert_ok(kv8_append_device_run(plan, g->stream, &args));
    uint8_t got[2 * SLOTS * DIM];
    uint32_t count = 0;
    gpu_download(g, got, pool, sizeof got);
    gpu_download(g, &count, bad_pages, sizeof count);
    assert_int_equal(count, 3);
    static const uint8_t wanted[SLOTS] = {0x48, 0, 0, 0x38}; /* 4 and 1 in e4m3 */
    for (int i = 0; i < 2 * SLOTS * DIM; i++) assert_int_equal(got[i], wanted[i / DIM % SLOTS]);
    kv8_append_device_plan_destroy(plan);
    void *const all[] = {pool, slots_on_gpu, source_on_gpu, bad_pages};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) kv8_device_free(g->device, all[i]);
}

/* What host and GPU plans refuse alike is test_append_plan.c's. */
static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    kv8_append_spec good = KV8_APPEND_SPEC_INIT, spec;
    good.num_kv_heads = 2;
    good.k_head_dim = 63;
    good.page_size = 16;
    good.src_dtype = KV8_BF16;
    good.k_dtype = KV8_E4M3;
    good.v_dtype = KV8_INT8;
    kv8_append_device_plan *plan = (kv8_append_device_plan *)1;
    assert_refused(kv8_append_device_plan_create(&plan, NULL, &good), KV8_ERR_INVALID,
                   "device is NULL");
    assert_null(plan);
    spec = good;
    spec.isa = KV8_ISA_SCALAR;
    assert_refused(kv8_append_device_plan_create(&plan, g->device, &spec), KV8_ERR_INVALID, "isa");
    spec = good;
    spec.src_dtype = KV8_E4M3;
    assert_refused(kv8_append_device_plan_create(&plan, g->device, &spec), KV8_ERR_UNSUPPORTED,
                   "src_dtype is e4m3");
    assert_ok(kv8_append_device_plan_create(&plan, g->device, &good));
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    assert_refused(kv8_append_device_run(NULL, g->stream, &args), KV8_ERR_INVALID, "plan is NULL");
    assert_refused(kv8_append_device_run(plan, NULL, &args), KV8_ERR_INVALID, "stream is NULL");
    assert_refused(kv8_append_device_run(plan, g->stream, &args), KV8_ERR_INVALID, "both NULL");
    args.slot_mapping = (const void *)1; /* never read */
    assert_ok(kv8_append_device_run(plan, g->stream, &args));
    kv8_append_device_plan_destroy(plan);
    kv8_append_device_plan_destroy(NULL);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_equal_the_cpus),
        cmocka_unit_test(bytes_equal_the_cpus_over_all_of_f32),
        cmocka_unit_test(rotated_bytes_equal_the_cpus),
        cmocka_unit_test(rotated_bytes_equal_the_cpus_over_all_of_f32),
        cmocka_unit_test(a_graph_follows_the_lengths),
        cmocka_unit_test(rows_past_the_pool_are_counted),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("append_device", tests, gpu_open, gpu_close);
}
