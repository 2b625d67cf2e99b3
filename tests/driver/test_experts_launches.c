/* test_experts_launches.c - the host's part of the experts on the stand-in driver: which kernels
 * run for how many rows on GPUs of several kinds, their argument blocks, graphs, and calls that
 * fail.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_experts.h"
#include "experts_args.h"
#include "stand_in.h"
#include "testing.h"

enum { UNKNOWN = 999, OUT_OF_MEMORY = 2, MAX_ROWS = 4096 };

static const kv8_experts_shape large = {128, 4, 2880, 2880, 1.702f, 7.0f};

typedef struct stand {
    kv8_device *device;
    kv8_stream *stream;
    kv8_device_experts *experts;
} stand;

static stand open_stand(int32_t sm_version, int32_t num_sms) {
    stand s = {NULL};
    stand_in_reset();
    const stand_in_gpu gpu = {sm_version, num_sms, (size_t)64 << 30};
    stand_in_set_gpus(&gpu, 1);
    assert_ok(kv8_device_open(&s.device, 0));
    assert_ok(kv8_stream_create(&s.stream, s.device));
    return s;
}
static void close_stand(stand *s) {
    kv8_device_experts_destroy(s->experts);
    kv8_stream_destroy(s->stream);
    kv8_device_close(s->device);
    const stand_in_live live = stand_in_get_live();
    static const stand_in_live none;
    assert_memory_equal(&live, &none, sizeof live);
}
static void open_experts(stand *s) {
    assert_ok(kv8_device_experts_create(&s->experts, s->device, &large, MAX_ROWS));
}

static const kv8_experts_args some_args = {.gate_up = (void *)0x1000,
                                           .down = (void *)0x2000,
                                           .logits = (float *)0x3000,
                                           .x = (void *)0x4000,
                                           .residual = (float *)0x5000,
                                           .n = 1};
static kv8_status run_rows(const stand *s, int32_t n) {
    kv8_experts_args args = some_args;
    args.n = n;
    KV8_TRY(kv8_device_experts_run(s->experts, s->stream, &args));
    return kv8_stream_synchronize(s->stream);
}

/* --- launches --- */

static void check_matmul(const stand_in_launch *launch, const void *weights, int32_t cols,
                         int32_t rows) {
    const bool is_mapped = strstr(launch->name, "sm90a") != NULL;
    kv8_experts_tiles_args mapped;
    kv8_experts_matmul_args a;
    assert_int_equal(launch->args_bytes, is_mapped ? sizeof mapped : sizeof a);
    memcpy(is_mapped ? (void *)&mapped : (void *)&a, launch->args, launch->args_bytes);
    if (is_mapped) a = mapped.product;
    assert_ptr_equal(a.w.data, weights);
    assert_int_equal(a.w.cols, cols);
    assert_int_equal(a.w.num_tiles, (cols + 63) / 64);
    assert_int_equal(a.w.num_strips, rows / 16);
    assert_int_equal(a.w.strip_bytes, 24576);
    assert_int_equal(a.num_experts, 128);
    if (is_mapped) { /* strips of all experts: address, words of 8 bytes, strips, of a box */
        const uint64_t box = strstr(launch->name, "x192") != NULL ? 4 : 8;
        const uint64_t tiles = (uint64_t)a.w.num_tiles, strips = 128 * (uint64_t)a.w.num_strips;
        const uint64_t address = (uint64_t)(uintptr_t)weights;
        const uint64_t codes[] = {address, tiles * 64, strips, box};
        const uint64_t scales[] = {address + tiles * 512, tiles * 4, strips, box};
        assert_memory_equal(mapped.codes_map, codes, sizeof codes);
        assert_memory_equal(mapped.scales_map, scales, sizeof scales);
        assert_int_equal(launch->cluster[0], 2); /* blocks that share rows */
        assert_int_equal(launch->grid[0] % 2, 0);
        return;
    }
    assert_true(a.x_tiles >= 1 && a.x_tiles <= KV8_EXPERTS_ITEM_TILES);
    assert_true(a.x_row_bytes >= cols * 2 && a.x_row_bytes % 32 == 16); /* banks */
    assert_int_equal(launch->block[0] % KV8_EXPERTS_TEAM_THREADS, 0);
}

/* Rows are packed for the kernel of gate and up behind it, whose output has their place. */
static void check_pack(const stand_in_launch *launch, const stand_in_launch *gate_up,
                       const stand_in_launch *down) {
    kv8_experts_pack_args a;
    kv8_experts_tiles_args first, second;
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    memcpy(&first, gate_up->args, sizeof first);
    memcpy(&second, down->args, sizeof second);
    assert_ptr_equal(a.x, some_args.x);
    assert_int_equal(a.num_experts, 128);
    assert_int_equal(a.top_k, 4);
    assert_int_equal(a.cols, large.hidden);
    assert_int_equal(a.gated_cols, large.intermediate);
    assert_ptr_equal(first.product.x, a.packed);
    assert_ptr_equal(first.product.y, a.gated);
    assert_ptr_equal(second.product.x, a.gated);
    assert_ptr_equal(second.product.y, a.packed);
}

/* Kernels of one run, in order; "%" stands for what ends a matmul's name: "_x8__sm80".
 */
static const char *const few[] = {"kv8_experts_route_few__sm80", "kv8_experts_gate_up%",
                                  "kv8_experts_down%", "kv8_experts_combine__sm80", NULL};
static const char *const many[] = {"kv8_experts_choose__sm80",  "kv8_experts_sort__sm80",
                                   "kv8_experts_gate_up%",      "kv8_experts_down%",
                                   "kv8_experts_combine__sm80", NULL};
static const char *const packed[] = {"kv8_experts_choose__sm80",
                                     "kv8_experts_sort__sm80",
                                     "kv8_experts_pack%",
                                     "kv8_experts_gate_up%",
                                     "kv8_experts_down%",
                                     "kv8_experts_combine__sm80",
                                     NULL};

static void check_run(const stand *s, int32_t n, const char *const *names, const char *end) {
    int32_t at = stand_in_num_launches();
    assert_ok(run_rows(s, n));
    for (; *names != NULL; names++, at++) {
        const stand_in_launch *const launch = stand_in_get_launch(at);
        const size_t prefix = strcspn(*names, "%");
        assert_memory_equal(launch->name, *names, prefix);
        assert_string_equal(launch->name + prefix, (*names)[prefix] == '%' ? end : "");
        assert_int_equal(launch->overlaps_previous,
                         kv8_device_get_info(s->device)->sm_version >= 90);
        if (strstr(launch->name, "pack") != NULL)
            check_pack(launch, stand_in_get_launch(at + 1), stand_in_get_launch(at + 2));
        if (strstr(launch->name, "gate_up") != NULL)
            check_matmul(launch, some_args.gate_up, large.hidden, 2 * large.intermediate);
        if (strstr(launch->name, "down") != NULL)
            check_matmul(launch, some_args.down, large.intermediate, large.hidden);
    }
    assert_int_equal(stand_in_num_launches(), at);
}

static void kernels_follow_the_rows_and_the_gpu(void **state) {
    (void)state;
    static const struct {
        int32_t sm_version;
        const char *few, *some, *many, *more, *most;
    } gpus[] = {{80, "_x8__sm80", "_x8__sm80", "_x16__sm80", "_x16__sm80", "_x16__sm80"},
                {90, "_x8__sm90", "_x8_whole__sm90", "_x48__sm90a", "_x96__sm90a", "_x192__sm90a"},
                {100, "_x8__sm90", "_x8_whole__sm90", "_x16_whole__sm90", "_x16_whole__sm90",
                 "_x16_whole__sm90"},
                /* 16 do not fit, nor whole strips */
                {120, "_x8__sm90", "_x8__sm90", "_x8__sm90", "_x8__sm90", "_x8__sm90"}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        stand s = open_stand(gpus[i].sm_version, 132);
        open_experts(&s);
        check_run(&s, 1, few, gpus[i].few);
        check_run(&s, 47, few, gpus[i].few);
        check_run(&s, 48, few, gpus[i].some);
        const char *const *const names = gpus[i].sm_version == 90 ? packed : many;
        check_run(&s, 512, names, gpus[i].many);
        check_run(&s, 2048, names, gpus[i].more);
        check_run(&s, MAX_ROWS, names, gpus[i].most);
        close_stand(&s);
    }
}

/* Rows of one sequence, of which some experts have many and others none, are cut by the expert. */
static void rows_of_one_sequence_choose_alike(void **state) {
    (void)state;
    static const struct {
        int32_t n, seq_rows;
        const char *end;
    } runs[] = {
        {127, 127, "_x8_whole__sm90"}, {128, 128, "_x48__sm90a"},    {639, 639, "_x48__sm90a"},
        {640, 640, "_x192__sm90a"},    {640, 80, "_x192__sm90a"},    {640, 79, "_x48__sm90a"},
        {128, 16, "_x48__sm90a"},      {2048, 0, "_x96__sm90a"},     {2048, 1, "_x96__sm90a"},
        {2048, 256, "_x192__sm90a"},   {2048, 255, "_x96__sm90a"},   {167, 1, "_x8_whole__sm90"},
        {168, 1, "_x16_whole__sm90"},  {383, 1, "_x16_whole__sm90"}, {384, 1, "_x48__sm90a"},
        {1279, 1, "_x48__sm90a"},      {1280, 1, "_x96__sm90a"},     {3327, 1, "_x96__sm90a"},
        {3328, 1, "_x192__sm90a"}};
    stand s = open_stand(90, 132);
    open_experts(&s);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        kv8_experts_args args = some_args;
        args.n = runs[i].n;
        args.seq_rows = runs[i].seq_rows;
        assert_ok(kv8_device_experts_run(s.experts, s.stream, &args));
        assert_ok(kv8_stream_synchronize(s.stream));
        const int32_t last = stand_in_num_launches() - 1; /* combine, and before it down */
        for (int part = 1; part <= 2; part++) {
            const char *const name = stand_in_get_launch(last - part)->name;
            assert_string_equal(name + strlen(name) - strlen(runs[i].end), runs[i].end);
        }
    }
    close_stand(&s);
}

/* Items of up to 16 rows where there are more than 5.5 an expert, or 5.25 where warps have whole
 * strips; where their rows do not fit, never. As many warps as fit beside them. */
static void items_grow_with_the_rows(void **state) {
    (void)state;
    static const struct {
        int32_t sm_version;
        bool has_fixed_order; /* streams that sum as tiles do */
        int32_t most_of_few, few_tiles, many_tiles;
        uint32_t few_threads, many_threads;
        const char *few, *many;
    } gpus[] = {{80, false, 176, 1, 2, 512, 256, "_x8__", "_x16__"},
                {90, false, 167, 2, 2, 384, 384, "_x8_whole__", "_x16_whole__"},
                {90, true, 176, 2, 2, 384, 384, "_x8_scaled__", "_x16_scaled__"},
                {120, false, 176, 1, 1, 128, 128, "_x8__", "_x8__"}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        for (int is_many = 0; is_many < 2; is_many++) {
            stand s = open_stand(gpus[i].sm_version, 132);
            open_experts(&s);
            if (gpus[i].has_fixed_order) kv8_device_experts_fix_order(s.experts);
            assert_ok(run_rows(&s, gpus[i].most_of_few + is_many));
            const int32_t at = stand_in_num_launches() - 3;
            for (int part = 0; part < 2; part++) {
                const stand_in_launch *const launch = stand_in_get_launch(at + part);
                const kv8_experts_matmul_args *const a = launch->args;
                assert_non_null(strstr(launch->name, is_many ? gpus[i].many : gpus[i].few));
                assert_int_equal(a->x_tiles, is_many ? gpus[i].many_tiles : gpus[i].few_tiles);
                assert_int_equal(launch->block[0],
                                 is_many ? gpus[i].many_threads : gpus[i].few_threads);
            }
            close_stand(&s);
        }
    }
}

/* Under a fixed order many rows take tiles where few take streams that sum alike, and no others. */
static void a_fixed_order_is_that_of_tiles(void **state) {
    (void)state;
    static const struct {
        int32_t sm_version;
        const char *few, *many, *most;
    } gpus[] = {{80, "_x8__sm80", "_x16__sm80", "_x16__sm80"},
                {90, "_x8_scaled__sm90", "_x48__sm90a", "_x192__sm90a"},
                {100, "_x8_scaled__sm90", "_x16_scaled__sm90", "_x16_scaled__sm90"},
                {120, "_x8__sm90", "_x8__sm90", "_x8__sm90"}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        stand s = open_stand(gpus[i].sm_version, 132);
        open_experts(&s);
        kv8_device_experts_fix_order(s.experts);
        const char *const *const names = gpus[i].sm_version == 90 ? packed : many;
        check_run(&s, 1, few, gpus[i].few);
        check_run(&s, 47, few, gpus[i].few);
        check_run(&s, 512, names, gpus[i].many);
        check_run(&s, MAX_ROWS, names, gpus[i].most);
        close_stand(&s);
    }
}

/* Where shared memory has no room for whole strips beside rows, all rows take streams by quarters
 * under a fixed order: tiles sum in another. */
static void a_fixed_order_without_whole_strips_is_that_of_quarters(void **state) {
    (void)state;
    const kv8_experts_shape wide = {128, 4, 6144, 2880, 1.702f, 7.0f};
    for (int is_fixed = 0; is_fixed < 2; is_fixed++) {
        stand s = open_stand(90, 132);
        assert_ok(kv8_device_experts_create(&s.experts, s.device, &wide, MAX_ROWS));
        if (is_fixed) kv8_device_experts_fix_order(s.experts);
        static const int32_t rows[] = {1, 512, MAX_ROWS};
        for (int i = 0; i < 3; i++) {
            assert_ok(run_rows(&s, rows[i]));
            const int32_t last = stand_in_num_launches() - 1; /* combine */
            for (int part = 1; part <= 2; part++) {
                const char *const name = stand_in_get_launch(last - part)->name;
                const bool is_tiles = strstr(name, "__sm90a") != NULL;
                assert_int_equal(is_tiles, !is_fixed && rows[i] > 1);
                assert_null(strstr(name, "scaled"));
            }
        }
        close_stand(&s);
    }
}

/* A GPU that has room for no pair of blocks of one of the two products takes neither. */
static void without_clusters_rows_stream(void **state) {
    (void)state;
    for (int64_t nth = 2; nth <= 7; nth++) { /* 48, 96 and 192 rows of gate and up, then of down */
        stand s = open_stand(90, 132);
        stand_in_fail("cuOccupancyMaxActiveClusters", nth, UNKNOWN);
        open_experts(&s);
        stand_in_fail(NULL, 0, 0);
        static const struct {
            int32_t rows;
            const char *tiles;
        } sizes[] = {{512, "_x48__sm90a"}, {2048, "_x96__sm90a"}, {MAX_ROWS, "_x192__sm90a"}};
        for (int64_t i = 0; i < 3; i++) {
            const bool streams = (nth - 2) % 3 == i;
            check_run(&s, sizes[i].rows, streams ? many : packed,
                      streams ? "_x16_whole__sm90" : sizes[i].tiles);
        }
        close_stand(&s);
    }
}

/* Up to 8 rows come normed, routed and sorted from the residual stream by one kernel, up to 512
 * normed and routed by clusters, which the GPU must have, of 32 rows each where those of 16 would
 * not all run at once; more, and those whose order is fixed, by single blocks. */
static void check_router(int32_t sm, int32_t num_sms, int32_t n, bool has_fixed_order,
                         const char *name, uint32_t blocks) {
    static const char w, bias, gain, normed;
    const kv8_experts_router router = {&w, &bias, &gain, 0.5f, (void *)(uintptr_t)&normed};
    const bool sorts = strcmp(name, "kv8_experts_router__sm90") == 0;
    stand s = open_stand(sm, num_sms);
    open_experts(&s);
    if (has_fixed_order) kv8_device_experts_fix_order(s.experts);
    kv8_experts_args args = some_args;
    args.router = &router;
    args.n = n;
    assert_ok(kv8_device_experts_run(s.experts, s.stream, &args));
    assert_ok(kv8_stream_synchronize(s.stream));
    const int next = sorts ? 1 : 2; /* behind the sort */
    const bool packs = strstr(stand_in_get_launch(next)->name, "pack") != NULL;
    assert_int_equal(stand_in_num_launches(), next + 3 + packs);
    const stand_in_launch *const launch = stand_in_get_launch(0);
    assert_string_equal(launch->name, name);
    assert_int_equal(launch->cluster[0], strstr(name, "rows") == NULL ? KV8_ROUTER_BLOCKS : 0);
    assert_int_equal(launch->grid[0], blocks);
    const kv8_experts_router_args *const a = launch->args;
    assert_ptr_equal(a->x, args.residual);
    assert_true(a->w == &w && a->bias == &bias && a->gain == &gain && a->normed == &normed);
    assert_true(a->hidden == large.hidden && a->eps == 0.5f && a->route.n == n);
    if (!sorts) assert_string_equal(stand_in_get_launch(1)->name, "kv8_experts_sort__sm80");
    const kv8_experts_pack_args *const pack = stand_in_get_launch(next)->args;
    const kv8_experts_matmul_args *const gate_up = stand_in_get_launch(next)->args;
    assert_ptr_equal(packs ? pack->x : gate_up->x, &normed);
    close_stand(&s);
}

static const char by_rows[] = "kv8_experts_router_rows_x128__sm80",
                  by_columns[] = "kv8_experts_router_columns_x128_r16__sm90",
                  by_twos[] = "kv8_experts_router_columns_x128_r32__sm90";

static void rows_are_routed_from_the_residual_stream(void **state) {
    (void)state;
    check_router(90, 132, 8, false, "kv8_experts_router__sm90", KV8_ROUTER_BLOCKS);
    check_router(90, 132, 9, false, by_columns, 8);
    check_router(90, 132, 17, false, by_columns, 16);
    check_router(90, 132, 512, false, by_columns, 256);
    check_router(90, 66, 256, false, by_columns, 128); /* 16 clusters at once */
    check_router(90, 66, 257, false, by_twos, 72);
    check_router(90, 66, 512, false, by_twos, 128);
    check_router(90, 132, 513, false, by_rows, 33);
    check_router(90, 132, 49, true, by_rows, 4);
    check_router(90, 132, 1, true, by_rows, 1);
    check_router(80, 132, 1, false, by_rows, 1);
    check_router(80, 132, 48, false, by_rows, 3);
}

/* A GPU that seats no cluster of theirs routes by single blocks. */
static void without_clusters_rows_are_routed_by_blocks(void **state) {
    (void)state;
    static const char w, bias, gain, normed;
    const kv8_experts_router router = {&w, &bias, &gain, 0.5f, (void *)(uintptr_t)&normed};
    stand s = open_stand(90, 132);
    stand_in_fail("cuOccupancyMaxActiveClusters", 1, UNKNOWN);
    open_experts(&s);
    stand_in_fail(NULL, 0, 0);
    kv8_experts_args args = some_args;
    args.router = &router;
    args.n = 64;
    assert_ok(kv8_device_experts_run(s.experts, s.stream, &args));
    assert_ok(kv8_stream_synchronize(s.stream));
    assert_string_equal(stand_in_get_launch(0)->name, by_rows);
    close_stand(&s);
}

/* Where the norm of the sum is wanted, the kernel that adds up the experts makes it. */
static void the_sum_is_normed(void **state) {
    (void)state;
    static const char gain, normed;
    stand s = open_stand(90, 132);
    open_experts(&s);
    kv8_experts_args args = some_args;
    args.next_gain = &gain;
    args.normed = (void *)(uintptr_t)&normed;
    args.eps = 0.5f;
    assert_ok(kv8_device_experts_run(s.experts, s.stream, &args));
    assert_ok(kv8_stream_synchronize(s.stream));
    const stand_in_launch *const last = stand_in_get_launch(stand_in_num_launches() - 1);
    const kv8_experts_combine_args *const a = last->args;
    assert_string_equal(last->name, "kv8_experts_combine_norm__sm80");
    assert_int_equal(last->grid[0], args.n);
    assert_ptr_equal(a->gain, &gain);
    assert_ptr_equal(a->normed, &normed);
    assert_true(a->eps == 0.5f);
    close_stand(&s);
}

static void a_graph_runs_the_same(void **state) {
    (void)state;
    stand s = open_stand(90, 132);
    kv8_graph *graph = NULL;
    open_experts(&s);
    kv8_experts_args args = some_args;
    assert_ok(kv8_stream_capture_begin(s.stream));
    assert_ok(kv8_device_experts_run(s.experts, s.stream, &args));
    assert_ok(kv8_stream_capture_end(s.stream, &graph));
    const int32_t first = stand_in_num_launches();
    for (int i = 0; i < 2; i++) assert_ok(kv8_graph_launch(graph, s.stream));
    assert_ok(kv8_stream_synchronize(s.stream));
    assert_int_equal(stand_in_num_launches() - first, 8);
    kv8_graph_destroy(graph);
    close_stand(&s);
}

/* --- weights and memory --- */

static void loading_covers_the_experts(void **state) {
    (void)state;
    stand s = open_stand(90, 132);
    open_experts(&s);
    assert_int_equal(kv8_experts_part_bytes(&large, KV8_EXPERTS_GATE_UP), 360 * 24576);
    assert_int_equal(kv8_experts_part_bytes(&large, KV8_EXPERTS_DOWN), 180 * 24576);
    const kv8_experts_source from = {(void *)0x1000, (void *)0x2000, (void *)0x3000, 7};
    assert_ok(
        kv8_device_experts_load(s.experts, s.stream, KV8_EXPERTS_GATE_UP, &from, (void *)0x4000));
    assert_ok(kv8_stream_synchronize(s.stream));
    const stand_in_launch *const launch = stand_in_get_launch(stand_in_num_launches() - 1);
    kv8_experts_load_args a;
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    assert_int_equal(launch->grid[0], 360);
    assert_int_equal(launch->grid[1], 7);
    assert_int_equal(a.rows, 5760);
    assert_int_equal(a.paired, 1);
    const kv8_experts_source none = {.count = 0};
    const int32_t launches = stand_in_num_launches();
    assert_ok(
        kv8_device_experts_load(s.experts, s.stream, KV8_EXPERTS_DOWN, &none, (void *)0x4000));
    assert_ok(kv8_stream_synchronize(s.stream));
    assert_int_equal(stand_in_num_launches(), launches);
    close_stand(&s);
}

static void the_workspace_is_what_was_said(void **state) {
    (void)state;
    const size_t bytes = kv8_device_experts_workspace_bytes(&large, MAX_ROWS);
    const size_t places = (size_t)MAX_ROWS * 4, row = 2880 * (sizeof(float) + sizeof(uint16_t));
    const size_t filling = (size_t)(128 + 1) * 16 * 2880 * sizeof(uint16_t); /* of gated rows */
    assert_true(bytes >= places * (row + 9) && bytes <= places * (row + 9) + filling + 4096);
    stand s = open_stand(90, 132);
    open_experts(&s);
    const kv8_experts_routing *const r = kv8_device_experts_get_routing(s.experts);
    memset(r->ids, 0, places); /* host memory here, with nothing readable behind it */
    memset(r->offsets, 0, 129 * sizeof *r->offsets);
    assert_true((uintptr_t)r->weights % 256 == 0 && (uintptr_t)r->sorted % 256 == 0);
    close_stand(&s);
}

/* --- failures --- */

/* Questions whose refusal is an answer: no second argument; no context to return to. */
static bool is_an_answer(const char *call) {
    return strcmp(call, "cuFuncGetParamInfo") == 0 || strcmp(call, "cuFuncSetAttribute") == 0 ||
           strcmp(call, "cuOccupancyMaxActiveClusters") == 0 || strstr(call, "Pop") != NULL;
}

/* Create fails at every call of the driver in turn, and leaves nothing behind. */
static void create_fails_whole(void **state) {
    (void)state;
    int64_t told = 0;
    bool went_through = false;
    for (int64_t nth = 1; !went_through; nth++) {
        stand s = open_stand(90, 132);
        stand_in_fail(NULL, nth, nth % 2 == 0 ? UNKNOWN : OUT_OF_MEMORY);
        const kv8_status status = kv8_device_experts_create(&s.experts, s.device, &large, 1);
        const char *const call = stand_in_failed_call();
        stand_in_fail(NULL, 0, 0);
        went_through = call == NULL;
        assert_true((status == KV8_OK) == (s.experts != NULL));
        if (status != KV8_OK) {
            assert_int_equal(status, nth % 2 == 0 ? KV8_ERR_DEVICE : KV8_ERR_NO_MEMORY);
            told++;
        } else if (!went_through && !is_an_answer(call)) {
            fail_msg("%s failed unseen", call);
        }
        close_stand(&s);
    }
    assert_true(told > 20);
}

/* A run says so when any of its launches fails, and the next one runs. */
static void run_fails_by_name(void **state) {
    (void)state;
    stand s = open_stand(90, 132);
    open_experts(&s);
    for (int64_t nth = 1; nth <= 6; nth++) {
        stand_in_fail("cuLaunchKernelEx", nth, UNKNOWN);
        assert_refused(run_rows(&s, MAX_ROWS), KV8_ERR_DEVICE, "launch of kv8_experts_");
        assert_ok(kv8_stream_synchronize(s.stream));
        check_run(&s, MAX_ROWS, packed, "_x192__sm90a");
    }
    close_stand(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_follow_the_rows_and_the_gpu),
        cmocka_unit_test(rows_of_one_sequence_choose_alike),
        cmocka_unit_test(items_grow_with_the_rows),
        cmocka_unit_test(a_fixed_order_is_that_of_tiles),
        cmocka_unit_test(a_fixed_order_without_whole_strips_is_that_of_quarters),
        cmocka_unit_test(without_clusters_rows_stream),
        cmocka_unit_test(rows_are_routed_from_the_residual_stream),
        cmocka_unit_test(without_clusters_rows_are_routed_by_blocks),
        cmocka_unit_test(the_sum_is_normed),
        cmocka_unit_test(a_graph_runs_the_same),
        cmocka_unit_test(loading_covers_the_experts),
        cmocka_unit_test(the_workspace_is_what_was_said),
        cmocka_unit_test(create_fails_whole),
        cmocka_unit_test(run_fails_by_name),
    };
    return cmocka_run_group_tests_name("experts_launches", tests, NULL, NULL);
}
