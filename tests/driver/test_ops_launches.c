/* test_ops_launches.c - the host's part of the kernels of ops on the stand-in driver: what is
 * launched for how many rows on which GPU, what is refused, and calls that fail.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_ops.h"
#include "device_plan_case.h"
#include "linear_args.h"
#include "rowwise_args.h"

enum { OUT_OF_MEMORY = 2, UNKNOWN = 999 };

typedef struct case_ops {
    stand s;
    kv8_device_ops *ops;
    kv8_device_linear qkv;
} case_ops;
static case_ops open_ops(int32_t sm_version) {
    case_ops c = {.s = stand_open(sm_version, H200_SMS)};
    assert_ok(kv8_device_ops_create(&c.ops, c.s.device));
    c.qkv = (kv8_device_linear){c.s.memory, c.s.memory + 1024, 5120, 2880};
    return c;
}
static void close_ops(case_ops *c) {
    kv8_device_ops_destroy(c->ops);
    stand_close(&c->s);
}
static kv8_status multiply(const case_ops *c, const kv8_device_linear *w, int32_t n, kv8_dtype to,
                           bool accumulate) {
    return kv8_device_linear_run(c->ops, c->s.stream, w, c->s.memory + 2048, n, c->s.memory + 4096,
                                 to, accumulate);
}
/* What has run since the last call. */
static const stand_in_launch *only_launch(const case_ops *c, int32_t before) {
    assert_ok(kv8_stream_synchronize(c->s.stream));
    assert_int_equal(stand_in_num_launches(), before + 1);
    return stand_in_get_launch(before);
}

/* The stand-in's maps: address, columns, rows, rows of a box. */
static void check_maps(const stand_in_launch *launch, const kv8_device_linear *w, int32_t n,
                       uint32_t rows) {
    const kv8_linear_mapped_args *const args = launch->args;
    const uint32_t splits = launch->cluster[0];
    assert_true(splits <= KV8_LINEAR_MAX_SPLITS);
    assert_true((int64_t)args->split_stages * splits * 64 >= w->cols);
    assert_int_equal(args->w_map[0], (uint64_t)(uintptr_t)w->w);
    assert_int_equal(args->w_map[1], w->cols);
    assert_int_equal(args->w_map[2], w->rows);
    assert_int_equal(args->w_map[3], rows);
    assert_int_equal(args->x_map[1], w->cols);
    assert_int_equal(args->x_map[2], n);
    assert_int_equal(args->x_map[3], n <= 128 ? (n + 7) / 8 * 8 : 32);
}

/* The same of a launch by pairs of blocks, of tiles of `rows` by 256: whole rounds of whole tiles,
 * then halves for one pair each, or all whole where that takes as long. */
static void check_pairs(const stand_in_launch *launch, const kv8_device_linear *w, int32_t n,
                        uint32_t rows, uint32_t num_tiles) {
    const kv8_linear_pairs_args *const args = launch->args;
    const int32_t num_pairs = H200_SMS / 2, rest = (int32_t)num_tiles % num_pairs;
    const int32_t num_cut = 2 * rest <= num_pairs ? rest : 0;
    assert_true(n > KV8_LINEAR_PAIRS_TOKENS);
    assert_int_equal(launch->dynamic_bytes, KV8_LINEAR_PAIRS_BYTES(rows));
    assert_int_equal(launch->cluster[0], 2);
    assert_int_equal(launch->grid[0], 2 * num_pairs);
    assert_int_equal(launch->grid[1] * launch->grid[2], 1);
    assert_int_equal(args->num_tiles, num_tiles);
    assert_int_equal(args->num_whole, (int32_t)num_tiles - num_cut);
    assert_int_equal(args->product.n, n);
    assert_int_equal(args->product.rows, w->rows);
    assert_true(args->product.is_f32 && args->product.accumulate);
    assert_int_equal(args->product.rotated_rows, 0);
    const uint64_t maps[3][5] = {
        {(uint64_t)(uintptr_t)w->w, (uint64_t)w->cols, (uint64_t)w->rows, rows / 2, 2},
        {(uint64_t)(uintptr_t)args->product.x, (uint64_t)w->cols, (uint64_t)n, 64, 2},
        {(uint64_t)(uintptr_t)args->product.y, (uint64_t)w->rows, (uint64_t)n, 64, 4}};
    assert_memory_equal(args->w_map, maps[0], sizeof maps[0]);
    assert_memory_equal(args->x_map, maps[1], sizeof maps[1]);
    assert_memory_equal(args->y_map, maps[2], sizeof maps[2]);
}

static void products_cover_every_row_and_token(void **state) {
    (void)state;
    static const struct {
        const char *part; /* of the kernel's name */
        uint32_t rows, tokens;
    } tiles[] = {{"_wgmma_n32__", 64, 32},
                 {"_wgmma_n64__", 64, 64},
                 {"_wgmma_n128__", 64, 128},
                 {"_wgmma_t128__", 128, 128},
                 {"_pairs_r256__", 256, 256},
                 {"_pairs_r192__", 192, 256},
                 {"_n8__", 16, 8},
                 {"_n16__", 16, 16},
                 {"_n32__", 32, 32},
                 {"_n64__", 32, 64},
                 {"_t64__", 64, 64},
                 {"_t128__", 128, 128}};
    static const int32_t sm_versions[] = {80, 89, 90, 120}, rows[] = {1, 127, 128, 5120};
    for (int v = 0; v < 4; v++) {
        case_ops c = open_ops(sm_versions[v]);
        for (int r = 0; r < 4; r++) {
            for (int32_t n = 1; n <= 16384; n = n < 70 ? n + 1 : n * 3 / 2) {
                const kv8_device_linear w = {c.s.memory, NULL, rows[r], 2880};
                const int32_t before = stand_in_num_launches();
                assert_ok(multiply(&c, &w, n, KV8_F32, true));
                const stand_in_launch *const launch = only_launch(&c, before);
                size_t i = 0;
                while (strstr(launch->name, tiles[i].part) == NULL) i++;
                const uint32_t tokens = ((uint32_t)n + tiles[i].tokens - 1) / tiles[i].tokens;
                const uint32_t tall = ((uint32_t)rows[r] + tiles[i].rows - 1) / tiles[i].rows;
                if (strstr(launch->name, "_pairs_") != NULL) {
                    assert_int_equal(sm_versions[v], 90);
                    check_pairs(launch, &w, n, tiles[i].rows, tall * tokens);
                    continue;
                }
                const bool mapped = strstr(launch->name, "wgmma") != NULL;
                assert_int_equal(mapped, n > 16 && sm_versions[v] == 90);
                const uint32_t splits = mapped ? launch->cluster[0] : 1;
                assert_int_equal(launch->grid[0], tall * tokens * splits);
                assert_int_equal(launch->grid[1] * launch->grid[2], 1);
                assert_true(n <= 16 || launch->dynamic_bytes > 0);
                if (mapped) check_maps(launch, &w, n, tiles[i].rows);
                const kv8_linear_args *const args =
                    mapped ? &((const kv8_linear_mapped_args *)launch->args)->product
                           : launch->args;
                assert_int_equal(args->n, n);
                assert_int_equal(args->rows, rows[r]);
                assert_true(args->is_f32 && args->accumulate && args->bias == NULL);
            }
        }
        close_ops(&c);
    }
}

/* As measured on a H200: how many blocks share a tile's columns. */
static void few_tiles_are_split(void **state) {
    (void)state;
    static const struct {
        int32_t rows, cols, n;
        uint32_t splits;
    } known[] = {{5120, 2880, 32, 2},
                 {2880, 4096, 64, 4},
                 {128, 2880, 64, 8},
                 {5124, 2880, 512, 1},
                 {2880, 4096, 256, 4}};
    case_ops c = open_ops(90);
    for (int i = 0; i < 5; i++) {
        const kv8_device_linear w = {c.s.memory, NULL, known[i].rows, known[i].cols};
        assert_ok(multiply(&c, &w, known[i].n, KV8_F32, false));
        assert_int_equal(only_launch(&c, i)->cluster[0], known[i].splits);
    }
    close_ops(&c);
}

/* Which products pairs of blocks take, by which shape, and how many of their tiles whole. */
static void many_tokens_go_to_pairs_of_blocks(void **state) {
    (void)state;
    static const struct {
        int32_t rows, cols, n;
        kv8_dtype to;
        const char *part; /* of the kernel's name */
        int32_t num_tiles, num_whole;
    } known[] = {{5120, 2880, 128, KV8_BF16, "_n128__", 0, 0},
                 {5120, 2880, 256, KV8_BF16, "_r256__", 20, 0},
                 {5120, 2880, 384, KV8_BF16, "_t128__", 0, 0},
                 {5120, 2880, 512, KV8_BF16, "_r192__", 54, 54},
                 {5120, 2880, 1024, KV8_F32, "_r256__", 80, 66},
                 {5120, 2880, 2048, KV8_F32, "_r256__", 160, 132},
                 {5120, 2880, 8192, KV8_F32, "_r256__", 640, 640},
                 {2880, 4096, 256, KV8_F32, "_t128__", 0, 0},
                 {2880, 4096, 512, KV8_F32, "_r192__", 30, 0},
                 {2880, 4096, 512, KV8_BF16, "_r256__", 24, 0},
                 {2880, 4096, 1024, KV8_F32, "_r192__", 60, 60},
                 {2880, 4096, 2048, KV8_F32, "_r256__", 96, 66},
                 {2880, 4096, 8192, KV8_F32, "_r192__", 480, 462},
                 {201088, 2880, 64, KV8_F32, "_n64__", 0, 0},
                 {201088, 2880, 65, KV8_F32, "_tall__", 393, 0},
                 {201088, 2880, 128, KV8_F32, "_tall__", 393, 0},
                 {201088, 2880, 129, KV8_F32, "_r256__", 786, 786},
                 {201084, 2880, 128, KV8_F32, "_t128__", 0, 0},
                 {29184, 2880, 128, KV8_F32, "_n128__", 0, 0},
                 {29192, 2880, 128, KV8_F32, "_tall__", 58, 0},
                 {201088, 2880, 512, KV8_F32, "_r256__", 1572, 1572},
                 {5124, 2880, 8192, KV8_F32, "_t128__", 0, 0}};
    enum { NUM = sizeof known / sizeof *known };
    case_ops c = open_ops(90);
    for (int i = 0; i < NUM; i++) {
        const kv8_device_linear w = {c.s.memory, NULL, known[i].rows, known[i].cols};
        assert_ok(multiply(&c, &w, known[i].n, known[i].to, false));
        const stand_in_launch *const launch = only_launch(&c, i);
        if (strstr(launch->name, known[i].part) == NULL)
            fail_msg("%d x %d, %d tokens: %s", w.rows, w.cols, known[i].n, launch->name);
        if (known[i].num_tiles == 0) continue;
        const kv8_linear_pairs_args *const args = launch->args;
        assert_int_equal(args->num_tiles, known[i].num_tiles);
        assert_int_equal(args->num_whole, known[i].num_whole);
        assert_int_equal(launch->grid[0], H200_SMS);
    }
    kv8_device_ops_fix_order(c.ops);
    assert_ok(multiply(&c, &c.qkv, 2048, KV8_F32, false));
    assert_null(strstr(only_launch(&c, NUM)->name, "_pairs_"));
    close_ops(&c);
}

static void what_no_kernel_takes_is_refused_by_name(void **state) {
    (void)state;
    case_ops c = open_ops(90);
    kv8_device_linear w = c.qkv;
    w.cols = 2884;
    assert_refused(multiply(&c, &w, 1, KV8_F32, false), KV8_ERR_UNSUPPORTED, "cols is 2884");
    w = c.qkv;
    w.rows = 0;
    assert_refused(multiply(&c, &w, 1, KV8_F32, false), KV8_ERR_INVALID, "rows is 0");
    w = c.qkv;
    w.w = c.s.memory + 8;
    assert_refused(multiply(&c, &w, 1, KV8_F32, false), KV8_ERR_INVALID, "w is not aligned");
    assert_refused(multiply(&c, &c.qkv, -1, KV8_F32, false), KV8_ERR_INVALID, "-1 rows");
    assert_refused(multiply(&c, &c.qkv, 1, KV8_BF16, true), KV8_ERR_UNSUPPORTED,
                   "bf16 accumulates");
    assert_refused(multiply(&c, &c.qkv, 1, KV8_F16, false), KV8_ERR_UNSUPPORTED, "f16 comes out");
    float *const f32 = (void *)c.s.memory;
    const int32_t *const ids = (const void *)c.s.memory;
    assert_refused(kv8_device_embed(c.ops, c.s.stream, f32, ids, 1, 12, f32), KV8_ERR_UNSUPPORTED,
                   "hidden is 12");
    assert_refused(kv8_device_rmsnorm(c.ops, c.s.stream, f32, f32, 1e-5f, KV8_DEVICE_MAX_ROWS + 1,
                                      64, NULL, f32),
                   KV8_ERR_INVALID, "1048577 rows");
    assert_refused(kv8_device_rope_angles(c.ops, c.s.stream, ids, 1, f32, 1, 63, f32),
                   KV8_ERR_UNSUPPORTED, "head_dim is 63");
    assert_refused(
        kv8_device_rope(c.ops, c.s.stream, f32, 1, 64, 64, f32, KV8_F16, 4096, f32, KV8_BF16, 4096),
        KV8_ERR_UNSUPPORTED, "heads of f16");
    assert_refused(
        kv8_device_rope(c.ops, c.s.stream, f32, 1, 64, 64, f32, KV8_F32, 4096, f32, KV8_E4M3, 4096),
        KV8_ERR_UNSUPPORTED, "rotated heads of e4m3");
    assert_refused(kv8_device_to_f16(c.ops, c.s.stream, f32, 12, 0, (uint64_t *)(void *)f32),
                   KV8_ERR_UNSUPPORTED, "12 weights");
    assert_ok(multiply(&c, &c.qkv, 0, KV8_BF16, false));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 0);
    close_ops(&c);
}

static kv8_device_norm_linear normed_qkv(const case_ops *c) {
    return (kv8_device_norm_linear){.w = c->qkv,
                                    .x = (void *)(c->s.memory + 2048),
                                    .gain = c->s.memory + 3072,
                                    .eps = 1e-5f,
                                    .normed = c->s.memory + 4096,
                                    .num_rotated = 64,
                                    .head_dim = 64,
                                    .cos_sin = (void *)(c->s.memory + 5120),
                                    .rotated = c->s.memory + 7168,
                                    .rotated_dtype = KV8_F16,
                                    .y = c->s.memory + 6144,
                                    .y_dtype = KV8_BF16};
}

/* A recorded step's kernels are made ready ahead of their turn while it has few rows, pairs always.
 */
static void kernels_of_a_graph_overlap(void **state) {
    (void)state;
    static const int32_t rows[] = {1, 128, 512, 513};
    for (int32_t sm = 80; sm <= 90; sm += 10) {
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            case_ops c = open_ops(sm);
            const kv8_device_norm_linear p = normed_qkv(&c);
            kv8_graph *graph = NULL;
            const int32_t before = stand_in_num_launches();
            assert_ok(kv8_stream_capture_begin(c.s.stream));
            assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, rows[i]));
            assert_ok(kv8_stream_capture_end(c.s.stream, &graph));
            assert_ok(kv8_graph_launch(graph, c.s.stream));
            assert_ok(kv8_stream_synchronize(c.s.stream));
            assert_true(stand_in_num_launches() > before);
            for (int32_t k = before; k < stand_in_num_launches(); k++) {
                const stand_in_launch *const launch = stand_in_get_launch(k);
                const bool are_pairs = strstr(launch->name, "_pairs_") != NULL;
                assert_int_equal(launch->overlaps_previous,
                                 are_pairs || (sm >= 90 && rows[i] <= 512));
            }
            kv8_graph_destroy(graph);
            close_ops(&c);
        }
    }
}

static void check_turned(const kv8_linear_args *product, const kv8_device_norm_linear *p) {
    assert_ptr_equal(product->x, p->normed);
    assert_int_equal(product->half_dim, 32);
    assert_int_equal(product->rotated_rows, 4096);
    assert_true(product->rotated_is_f16);
    assert_ptr_equal(product->rotated, p->rotated);
    assert_ptr_equal(product->cos_sin, p->cos_sin);
}

/* The norm is a kernel of its own, but of rows that come normed; the product's kernel rotates heads
 * of 64, of others one behind it. */
static void a_norm_and_a_rotation_come_with_the_product(void **state) {
    (void)state;
    case_ops c = open_ops(90);
    kv8_device_norm_linear p = normed_qkv(&c);
    p.is_normed = true;
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 4));
    check_turned(only_launch(&c, 0)->args, &p);
    assert_false(stand_in_get_launch(0)->overlaps_previous);
    p.is_normed = false;
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 3);
    check_turned(stand_in_get_launch(2)->args, &p);
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 17));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 5);
    check_turned(&((const kv8_linear_mapped_args *)stand_in_get_launch(4)->args)->product, &p);
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 2048));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 7);
    const kv8_linear_pairs_args *const pairs = stand_in_get_launch(6)->args;
    check_turned(&pairs->product, &p);
    const uint64_t rotated_map[] = {(uint64_t)(uintptr_t)p.rotated, 4096, 2048, 64, 2};
    assert_memory_equal(pairs->rotated_map, rotated_map, sizeof rotated_map);
    p.num_rotated = 32;
    p.head_dim = 128;
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 2048));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 10);
    assert_string_equal(stand_in_get_launch(9)->name, "kv8_rope_bf16__sm80");
    const kv8_rope_args *const turn = stand_in_get_launch(9)->args;
    assert_true(turn->x == p.y && turn->y == p.rotated && turn->y_is_f16);
    assert_int_equal(turn->x_stride_row, 5120);
    assert_int_equal(turn->y_stride_row, 4096);
    p.num_rotated = 0;
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 5));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 12);
    p.w.rows = 201088;
    assert_ok(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1));
    assert_ok(kv8_stream_synchronize(c.s.stream));
    assert_int_equal(stand_in_num_launches(), 14);
    p = normed_qkv(&c);
    p.head_dim = 24;
    assert_refused(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1), KV8_ERR_UNSUPPORTED,
                   "heads of 24");
    p = normed_qkv(&c);
    p.num_rotated = 81;
    assert_refused(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1), KV8_ERR_INVALID,
                   "81 heads of 64 to rotate in 5120 rows");
    p = normed_qkv(&c);
    p.rotated_dtype = KV8_E5M2;
    assert_refused(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1), KV8_ERR_UNSUPPORTED,
                   "rotated heads of e5m2");
    p = normed_qkv(&c);
    p.rotated = NULL;
    assert_refused(kv8_device_norm_linear_run(c.ops, c.s.stream, &p, 1), KV8_ERR_INVALID,
                   "args->rotated is NULL");
    close_ops(&c);
}

static void create_leaves_nothing_behind(void **state) {
    (void)state;
    stand s = stand_open(90, H200_SMS);
    const stand_in_live before = stand_in_get_live();
    int64_t nth = 1;
    for (;; nth++) {
        kv8_device_ops *ops = NULL;
        stand_in_fail(NULL, nth, OUT_OF_MEMORY);
        const kv8_status status = kv8_device_ops_create(&ops, s.device);
        const char *const failed = stand_in_failed_call();
        stand_in_fail(NULL, 0, 0);
        if (status == KV8_OK) {
            kv8_device_ops_destroy(ops);
        } else {
            assert_int_equal(status, KV8_ERR_NO_MEMORY);
            assert_null(ops);
        }
        const stand_in_live live = stand_in_get_live();
        assert_int_equal(live.memory, before.memory);
        assert_int_equal(live.streams, before.streams);
        if (failed == NULL) break;
    }
    assert_true(nth > 20);
    stand_close(&s);
}

static void a_launch_that_fails_says_so(void **state) {
    (void)state;
    case_ops c = open_ops(90);
    static const int32_t counts[] = {1, 20, 100, 2048};
    for (int i = 0; i < 4; i++) {
        stand_in_fail("cuLaunchKernelEx", 1, UNKNOWN);
        assert_refused(multiply(&c, &c.qkv, counts[i], KV8_BF16, false), KV8_ERR_DEVICE,
                       "kv8_linear_f16_");
        assert_ok(multiply(&c, &c.qkv, counts[i], KV8_BF16, false));
    }
    close_ops(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(products_cover_every_row_and_token, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(few_tiles_are_split, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(many_tokens_go_to_pairs_of_blocks, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(what_no_kernel_takes_is_refused_by_name, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(a_norm_and_a_rotation_come_with_the_product, reset,
                                        check_nothing_lives),
        cmocka_unit_test_setup_teardown(kernels_of_a_graph_overlap, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(create_leaves_nothing_behind, reset, check_nothing_lives),
        cmocka_unit_test_setup_teardown(a_launch_that_fails_says_so, reset, check_nothing_lives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
