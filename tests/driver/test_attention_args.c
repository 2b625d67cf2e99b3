/* test_attention_args.c - which kernel of a plan of attention on a GPU a run takes by its args,
 * with what launch and argument: on the stand-in, so on every machine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_choice_case.h"
#include "device_plan.h"
#include "prefill_schedule_args.h"

/* Pages of `spec` in addresses that nobody reads. */
typedef struct inputs {
    kv8_attention_args args;
    kv8_paged k, v;
    kv8_page_table pages;
} inputs;
static void fill(inputs *in, const kv8_attention_spec *spec) {
    static uint8_t memory[256] __attribute__((aligned(256)));
    const int64_t dim = spec->head_dim, heads = spec->num_kv_heads;
    const kv8_paged paged = {.struct_size = sizeof paged,
                             .data = memory,
                             .stride_page = dim * heads * spec->page_size,
                             .stride_slot = dim * heads,
                             .stride_head = dim};
    *in = (inputs){.args = KV8_ATTENTION_ARGS_INIT, .k = paged, .v = paged};
    in->pages = (kv8_page_table){.struct_size = sizeof in->pages,
                                 .block_table = (const int32_t *)(const void *)memory,
                                 .block_table_stride = 512,
                                 .seq_lens = (const int32_t *)(const void *)memory};
    in->args.k = &in->k, in->args.v = &in->v, in->args.pages = &in->pages;
    in->args.qo_indptr = (const int32_t *)(const void *)memory;
    in->args.q = in->args.o = memory;
    in->args.batch = spec->max_batch;
}

/* Runs and gives what was launched last. */
static stand_in_launch launch_of(const stand *s, const kv8_attention_spec *spec,
                                 const kv8_attention_args *args, kv8_kernel_args *args_out) {
    kv8_attention_device_plan *plan = NULL;
    void *workspace = NULL;
    assert_ok(kv8_attention_device_plan_create(&plan, s->device, spec, NULL));
    assert_ok(kv8_device_alloc(s->device, kv8_attention_device_workspace_size(plan), &workspace));
    assert_ok(kv8_attention_device_workspace_init(plan, s->stream, workspace));
    assert_ok(kv8_attention_device_prepare(plan, s->stream, args, workspace));
    assert_ok(kv8_attention_device_run(plan, s->stream, args, workspace));
    assert_ok(kv8_stream_synchronize(s->stream));
    const stand_in_launch *const last = stand_in_get_launch(stand_in_num_launches() - 1);
    if (last->args_bytes == sizeof *args_out) memcpy(args_out, last->args, sizeof *args_out);
    const stand_in_launch launch = *last;
    kv8_device_free(s->device, workspace);
    kv8_attention_device_plan_destroy(plan);
    return launch;
}

/* The args of a run decide among the kernels of its plan. */
static void each_run_has_its_kernel(void **state) {
    (void)state;
    stand s;
    kv8_kernel_args a;
    s = open_gpu(90);
#define LAUNCHES(change, launched)                                              \
    do {                                                                        \
        kv8_attention_spec spec = stand_spec();                                 \
        inputs in;                                                              \
        fill(&in, &spec);                                                       \
        change;                                                                 \
        assert_string_equal(launch_of(&s, &spec, &in.args, &a).name, launched); \
        assert_string_equal(name_of(&s, &spec, &in.args), launched);            \
    } while (0)
    LAUNCHES((void)0, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    LAUNCHES(in.args.batch = 15, "kv8_decode_f16_e4m3_d64_rows__sm90");
    LAUNCHES(spec.max_batch = spec.max_total_q = 256;
             in.args.batch = 129, "kv8_decode_f16_e4m3_d64_bulk8_many__sm90");
    LAUNCHES(spec.max_batch = spec.max_total_q = 256;
             in.args.batch = 128, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    LAUNCHES(in.args.batch = 1, "kv8_decode_f16_e4m3_d64_cluster__sm90");
    LAUNCHES(in.args.batch = 1; in.args.logits_soft_cap = 30, "kv8_decode_f16_e4m3_d64_rows__sm90");
    LAUNCHES(in.k.stride_page += 16, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    LAUNCHES(in.v.stride_slot += 16, "kv8_decode_f16_e4m3_d64_rows__sm90");
    LAUNCHES(in.v.stride_slot += 8, "kv8_attention_any_any_dany_generic__sm80");
    LAUNCHES(in.k.num_pages = 1000; in.args.lse_base2 = 1;
             in.args.qo_lens = in.args.qo_indptr, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    LAUNCHES(spec.window_left = 127, "kv8_decode_f16_e4m3_d64_window__sm90");
    LAUNCHES(spec.window_left = 127;
             in.args.logits_soft_cap = 30, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    LAUNCHES(spec.max_kv_len = 1024, "kv8_decode_f16_e4m3_d64_window__sm90");
    LAUNCHES(spec.max_kv_len = 1024; in.args.batch = 2, "kv8_decode_f16_e4m3_d64_window__sm90");
    /* Kernels of several rows, and what takes the rest. */
    LAUNCHES(spec.max_total_q = 512, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    LAUNCHES(spec.max_total_q = 1024; spec.window_left = 127;
             in.k.num_pages = 1000, "kv8_prefill_f16_e4m3_d64_options__sm90");
    LAUNCHES(spec.max_total_q = 512;
             in.args.logits_soft_cap = 30, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    LAUNCHES(spec.max_total_q = 512;
             in.k.num_pages = 1000, "kv8_prefill_f16_e4m3_d64_rows64_options__sm90");
    LAUNCHES(spec.max_total_q = 1024; spec.max_batch = in.args.batch = 1;
             in.v.num_pages = 1000, "kv8_prefill_f16_e4m3_d64_options__sm90");
    LAUNCHES(spec.max_total_q = 8;
             spec.max_batch = in.args.batch = 1, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    LAUNCHES(spec.max_total_q = 8; spec.max_batch = in.args.batch = 1;
             in.k.num_pages = 1000, "kv8_prefill_f16_e4m3_d64_rows64_options__sm90");
    LAUNCHES(spec.max_total_q = 8; spec.max_batch = in.args.batch = 1; spec.max_kv_len = 1024;
             in.k.num_pages = 1000, "kv8_decode_f16_e4m3_d64_cluster_rows16__sm90");
    LAUNCHES(spec.max_total_q = spec.max_batch = 8;
             in.args.batch = 1, "kv8_decode_f16_e4m3_d64_cluster__sm90");
    /* As many clusters as find room at once, and more. */
    LAUNCHES(spec.num_qo_heads = spec.num_kv_heads = 33; spec.max_total_q = 32;
             spec.max_batch = in.args.batch = 1, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    LAUNCHES(spec.num_qo_heads = spec.num_kv_heads = 34; spec.max_total_q = 32;
             spec.max_batch = in.args.batch = 1, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    LAUNCHES(spec.num_qo_heads = spec.num_kv_heads = 34; spec.max_total_q = 32;
             spec.max_kv_len = 1024;
             spec.max_batch = in.args.batch = 1, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    LAUNCHES(spec.max_total_q = 8; spec.max_batch = in.args.batch = 1;
             in.args.logits_soft_cap = 30, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
#undef LAUNCHES
    stand_close(&s);
}

/* In a plan for chunks among rows of decode two kernels share a run: the schedule leaves decode its
 * requests. */
static void decode_goes_beside_prefill(void **state) {
    (void)state;
    stand s;
    kv8_kernel_args a;
    inputs in;
    kv8_attention_spec spec = stand_spec();
    spec.max_total_q = 2048 + 63;
    fill(&in, &spec);
    s = open_gpu(90);
    for (int mixed = 0; mixed < 2; mixed++) {
        const int32_t before = stand_in_num_launches();
        spec.max_batch = in.args.batch = mixed ? 64 : 15; /* of so few prefill takes all */
        assert_string_equal(launch_of(&s, &spec, &in.args, &a).name,
                            "kv8_prefill_f16_e4m3_d64__sm90");
        assert_int_equal(stand_in_num_launches() - before, 2 + mixed);
        const stand_in_launch *const cut = stand_in_get_launch(before);
        const kv8_prefill_schedule_args *const schedule = cut->args;
        assert_int_equal(cut->args_bytes, sizeof *schedule);
        assert_int_equal(schedule->decode_lens != NULL, mixed);
        assert_int_equal(a.is_beside, mixed);
        assert_true(stand_in_get_launch(before + 1 + mixed)->overlaps_previous);
        if (!mixed) continue;
        const stand_in_launch *const decode = stand_in_get_launch(before + 1);
        const kv8_kernel_args *const of_decode = decode->args;
        assert_string_equal(decode->name, "kv8_decode_f16_e4m3_d64_bulk8_rows16__sm90");
        assert_ptr_equal(of_decode->qo_lens, schedule->decode_lens);
        assert_int_equal(schedule->decode_rows, 2);
        /* Both run at once. */
        assert_false(decode->overlaps_previous);
        assert_ptr_not_equal(of_decode->decode.partials, a.prefill.partials);
        assert_ptr_not_equal(of_decode->decode.arrivals, a.prefill.arrivals);
        assert_null(a.qo_lens);
    }
    spec.num_qo_heads = 71, spec.num_kv_heads = 1; /* a row of decode is several tiles of it */
    fill(&in, &spec);
    in.args.batch = 64;
    const int32_t before = stand_in_num_launches();
    assert_string_equal(launch_of(&s, &spec, &in.args, &a).name, "kv8_prefill_f16_e4m3_d64__sm90");
    assert_int_equal(stand_in_num_launches() - before, 2);
    stand_close(&s);
}

/* Kernels that look pages up before they may trust an index know how many entries there are: what
 * is left of the allocation that the table lies in. */
static void tables_end_with_their_memory(void **state) {
    (void)state;
    enum { BYTES = 4096, BEGIN = 256 };
    static const struct {
        const char *kernel;
        int32_t batch, window_left;
        bool looks_early;
    } cases[] = {{"kv8_decode_f16_e4m3_d64_cluster__sm90", 1, -1, true},
                 {"kv8_decode_f16_e4m3_d64_window__sm90", 64, 127, true},
                 {"kv8_decode_f16_e4m3_d64_bulk8__sm90", 64, -1, true},
                 {"kv8_decode_f16_e4m3_d64_rows__sm90", 15, -1, false}};
    stand s = open_gpu(90);
    void *table = NULL;
    assert_ok(kv8_device_alloc(s.device, BYTES, &table));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_attention_spec spec = stand_spec();
        inputs in;
        kv8_kernel_args a;
        spec.window_left = cases[i].window_left;
        fill(&in, &spec);
        in.args.batch = cases[i].batch;
        in.pages.block_table = (const int32_t *)table + BEGIN / 4;
        assert_string_equal(launch_of(&s, &spec, &in.args, &a).name, cases[i].kernel);
        assert_int_equal(a.table_entries, cases[i].looks_early ? (BYTES - BEGIN) / 4 : 0);
    }
    kv8_device_free(s.device, table);
    stand_close(&s);
}

/* Rows of decode among chunks keep the kernel of windows for few requests alone. */
static void windows_beside_prefill_are_few(void **state) {
    (void)state;
    kv8_kernel_args a;
    inputs in;
    stand s = open_gpu(90);
    for (int32_t batch = 132; batch <= 133; batch++) {
        kv8_attention_spec spec = stand_spec();
        spec.q_dtype = spec.k_dtype = spec.v_dtype = KV8_BF16;
        spec.window_left = 127;
        spec.max_batch = batch, spec.max_total_q = 2048 + batch;
        fill(&in, &spec);
        in.args.batch = batch;
        const int32_t before = stand_in_num_launches();
        (void)launch_of(&s, &spec, &in.args, &a);
        const char *const decode = stand_in_get_launch(before + 1)->name;
        assert_int_equal(strstr(decode, "_window__") != NULL, batch == 132);
    }
    stand_close(&s);
}

/* The fewer keys there are in all, the fewer heads a block of warpgroups has; of many requests
 * four. */
static void warpgroups_share_heads_of_few_keys(void **state) {
    (void)state;
    static const struct {
        int32_t batch, keys, kv_heads, dim, heads;
    } cases[] = {{1, 65536, 4, 64, 1},   {3, 16384, 2, 64, 1},   {1, 65537, 8, 64, 2},
                 {33, 8192, 8, 64, 2},   {16, 32768, 8, 64, 2},  {17, 32768, 8, 64, 4},
                 {34, 8192, 8, 64, 4},   {1, 131072, 8, 128, 1}, {16, 32768, 8, 128, 1},
                 {16, 32769, 8, 128, 2}, {17, 8192, 8, 128, 2},  {33, 8192, 8, 128, 2},
                 {34, 8192, 8, 128, 4}};
    kv8_kernel_args a;
    inputs in;
    stand s = open_gpu(90);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_attention_spec spec = stand_spec();
        spec.max_batch = cases[i].batch, spec.max_total_q = 4 * cases[i].batch;
        spec.max_kv_len = cases[i].keys;
        spec.num_kv_heads = cases[i].kv_heads, spec.num_qo_heads = 8 * cases[i].kv_heads;
        spec.head_dim = cases[i].dim;
        fill(&in, &spec);
        in.args.batch = cases[i].batch;
        const stand_in_launch launch = launch_of(&s, &spec, &in.args, &a);
        assert_string_equal(launch.name, cases[i].dim == 64
                                             ? "kv8_decode_f16_e4m3_d64_rows32__sm90"
                                             : "kv8_decode_f16_e4m3_d128_rows32__sm90");
        assert_int_equal(launch.block[0], 512);
        assert_int_equal(a.decode.heads_per_block, cases[i].heads);
        assert_int_equal(a.decode.num_slices * a.decode.heads_per_block, 16);
    }
    stand_close(&s);
}

/* Over short windows a block has a request's whole streams, of as few heads as fill the GPU. */
static void short_windows_are_not_split(void **state) {
    (void)state;
    static const struct {
        int32_t batch, heads, blocks;
    } cases[] = {{2, 1, 16},   {16, 1, 128},  {17, 2, 68},   {64, 2, 256},
                 {65, 4, 130}, {128, 4, 256}, {129, 8, 129}, {512, 8, 512}};
    kv8_kernel_args a;
    inputs in;
    stand s = open_gpu(90);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_attention_spec spec = stand_spec();
        spec.window_left = 127;
        spec.max_batch = spec.max_total_q = 512;
        fill(&in, &spec);
        in.args.batch = cases[i].batch; /* blocks are for the run, not for the bounds */
        const stand_in_launch launch = launch_of(&s, &spec, &in.args, &a);
        assert_string_equal(launch.name, "kv8_decode_f16_e4m3_d64_window__sm90");
        assert_int_equal(launch.grid[0], cases[i].blocks);
        assert_int_equal(a.decode.heads_per_block, cases[i].heads);
        assert_int_equal(a.decode.num_slices * a.decode.heads_per_block, 8);
        char heads[32];
        snprintf(heads, sizeof heads, " %d KV heads", cases[i].heads);
        assert_non_null(strstr(text_of(&s, &spec, &in.args), heads));
        assert_true(launch.overlaps_previous);
    }
    stand_close(&s);
}

static void a_run_says_what_it_was_given(void **state) {
    (void)state;
    stand s;
    kv8_kernel_args a;
    inputs in;
    float sinks[64], lse[1], scale = 2;
    uint32_t bad_pages = 0;
    kv8_attention_spec spec = stand_spec();
    spec.o_dtype = KV8_E4M3;
    fill(&in, &spec);
    in.k.num_pages = 900, in.v.num_pages = 800;
    in.args.sink_logit = sinks, in.args.o_scale = &scale, in.args.bad_pages = &bad_pages;
    in.args.lse = lse, in.args.lse_stride_row = 1, in.args.lse_stride_head = 64;
    in.args.lse_base2 = 1;
    in.args.sm_scale = 0.25f, in.args.logits_soft_cap = 10;
    s = open_gpu(90);
    const stand_in_launch launch = launch_of(&s, &spec, &in.args, &a);
    assert_int_equal(launch.grid[0], 132);
    assert_int_equal(launch.block[0], 17 * 32);
    assert_true(launch.overlaps_previous);
    assert_int_equal(a.num_pages, 800);
    assert_ptr_equal(a.sink_logit, sinks);
    assert_ptr_equal(a.o_scale, &scale);
    assert_ptr_equal(a.bad_pages, &bad_pages);
    assert_int_equal(a.lse_stride_row, 1);
    assert_int_equal(a.lse_stride_head, 64);
    assert_true(a.lse_scale == 1);
    assert_true(a.score_scale == 0.25f * 1.4426950408889634f);
    assert_true(a.soft_cap == 10 * 1.4426950408889634f);
    assert_int_equal(a.window_right, 0);
    assert_int_equal(a.by_page.factor, 1u << 31);
    assert_int_equal(a.decode.heads_per_block, 8);
    stand_close(&s);
}

/* Ragged rows are one page a request, from any slot on. */
static void ragged_rows_are_pages(void **state) {
    (void)state;
    stand s;
    kv8_kernel_args a;
    inputs in;
    kv8_attention_spec spec = stand_spec();
    spec.page_size = 0;
    fill(&in, &spec);
    in.pages.kv_indptr = in.pages.block_table;
    in.pages.block_table = NULL, in.pages.seq_lens = NULL;
    s = open_gpu(90);
    assert_string_equal(launch_of(&s, &spec, &in.args, &a).name,
                        "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    assert_ptr_equal(a.table, in.pages.kv_indptr);
    assert_ptr_equal(a.kv_indptr, in.pages.kv_indptr);
    assert_null(a.seq_lens);
    assert_int_equal(a.table_stride, 1);
    assert_int_equal(a.k.stride_page, a.k.stride_slot);
    assert_int_equal(a.page_size, KV8_RAGGED_PAGE);
    stand_close(&s);
}

static void wrong_args_are_refused(void **state) {
    (void)state;
    stand s;
    kv8_attention_spec spec = stand_spec();
    kv8_attention_device_plan *plan = NULL;
    void *workspace = NULL;
    s = open_gpu(90);
    assert_refused(
        kv8_attention_device_plan_create_of(&plan, s.device, &spec, "kv8_append_*", NULL),
        KV8_ERR_UNSUPPORTED, "no kernel like kv8_append_*");
    assert_ok(kv8_attention_device_plan_create(&plan, s.device, &spec, NULL));
    assert_ok(kv8_device_alloc(s.device, kv8_attention_device_workspace_size(plan), &workspace));
#define REFUSED(change, part)                                                         \
    do {                                                                              \
        inputs in;                                                                    \
        fill(&in, &spec);                                                             \
        change;                                                                       \
        assert_refused(kv8_attention_device_run(plan, s.stream, &in.args, workspace), \
                       KV8_ERR_INVALID, part);                                        \
    } while (0)
    float scale = 1;
    REFUSED(in.args.batch = 65, "batch is 65, must be 0 to 64");
    REFUSED(in.args.qo_indptr = NULL, "qo_indptr is NULL");
    REFUSED(in.args.k = NULL, "k is NULL");
    REFUSED(in.args.pages = NULL, "pages is NULL");
    REFUSED(in.pages.seq_lens = NULL, "seq_lens is NULL");
    REFUSED(in.args.key_begin = in.args.qo_indptr,
            "key_begin is given and the plan's has_key_range");
    REFUSED(in.args.mask_indptr = (const int64_t *)1, "mask_indptr is given");
    REFUSED(in.args.o_scale = &scale, "o_scale is set and o_dtype bf16");
    REFUSED(in.args.lse_base2 = 2, "lse_base2 is 2");
#undef REFUSED
    assert_int_equal(stand_in_num_launches(), 0);
    kv8_device_free(s.device, workspace);
    kv8_attention_device_plan_destroy(plan);
    stand_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_run_has_its_kernel),
                                       cmocka_unit_test(decode_goes_beside_prefill),
                                       cmocka_unit_test(tables_end_with_their_memory),
                                       cmocka_unit_test(windows_beside_prefill_are_few),
                                       cmocka_unit_test(warpgroups_share_heads_of_few_keys),
                                       cmocka_unit_test(short_windows_are_not_split),
                                       cmocka_unit_test(a_run_says_what_it_was_given),
                                       cmocka_unit_test(ragged_rows_are_pages),
                                       cmocka_unit_test(wrong_args_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
