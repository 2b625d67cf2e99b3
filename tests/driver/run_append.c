/* run_append.c - what the append kernels compute, for the GPU's own tests of append and of caches
 * on the stand-in: the argument block is read back into the args of a host plan, so that these
 * tests tell what the host half hands to the GPU. How a kernel computes it is left to GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/append.h>

#include "append_args.h"
#include "run_page_lists.h"
#include "testing.h"

/* kv8_append_[rope_|rope_pairs_]SOURCE_x8__sm80 */
static kv8_dtype source_of(const char *name) {
    char text[64];
    const char *const end = strstr(name, "_x");
    assert_non_null(end);
    const char *begin = end;
    while (begin[-1] != '_') begin--;
    snprintf(text, sizeof text, "%.*s", (int)(end - begin), begin);
    kv8_dtype dtype;
    assert_ok(kv8_dtype_from_name(text, &dtype));
    return dtype;
}

static kv8_paged pool_of(const kv8_append_plane *plane) {
    kv8_paged pool = KV8_PAGED_INIT;
    pool.data = plane->codes;
    pool.stride_page = plane->stride_page;
    pool.stride_slot = plane->stride_slot;
    pool.stride_head = plane->stride_head;
    pool.row_scale = plane->row_scale;
    pool.row_scale_stride_page = plane->row_scale_stride_page;
    pool.row_scale_stride_slot = plane->row_scale_stride_slot;
    pool.row_scale_stride_head = plane->row_scale_stride_head;
    return pool;
}

/* Rows past the pool are left out and counted; a host plan would refuse them. */
static int64_t *known_slots(const kv8_append_kernel_args *a) {
    int64_t *const slots = malloc((size_t)a->max_rows * sizeof *slots);
    for (int32_t i = 0; i < a->max_rows; i++) {
        slots[i] = a->slot_mapping[i];
        if (slots[i] < 0 || slots[i] / a->page_size < a->num_pages) continue;
        slots[i] = -1;
        if (a->bad_pages != NULL) ++*a->bad_pages;
    }
    return slots;
}

static void run(const stand_in_launch *launch) {
    kv8_append_kernel_args a;
    if (run_page_lists(launch)) return;
    assert_true(strncmp(launch->name, "kv8_append_", 11) == 0);
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    assert_true((int64_t)launch->grid[0] * a.rows_per_block >= a.max_rows);
    assert_int_equal(launch->grid[1], 2);
    kv8_append_spec spec = KV8_APPEND_SPEC_INIT;
    spec.num_kv_heads = a.num_kv_heads;
    spec.k_head_dim = a.plane[0].head_dim;
    spec.v_head_dim = a.plane[1].head_dim;
    spec.page_size = a.page_size;
    spec.src_dtype = source_of(launch->name);
    spec.k_dtype = (kv8_dtype)a.plane[0].dtype;
    spec.v_dtype = (kv8_dtype)a.plane[1].dtype;
    spec.isa = KV8_ISA_SCALAR;
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.page_indptr = a.page_indptr;
    pages.page_indices = a.page_indices;
    pages.last_page_len = a.last_page_len;
    pages.block_table = a.block_table;
    pages.block_table_stride = a.block_table_stride;
    pages.seq_lens = a.seq_lens;
    const kv8_paged k_pages = pool_of(&a.plane[0]), v_pages = pool_of(&a.plane[1]);
    int64_t *const slots = a.slot_mapping == NULL ? NULL : known_slots(&a);
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = a.batch;
    args.max_rows = a.max_rows;
    args.interleaved = strstr(launch->name, "_rope_pairs_") != NULL;
    args.indptr = a.indptr;
    args.pages = slots == NULL ? &pages : NULL;
    args.slot_mapping = slots;
    args.k = a.plane[0].source;
    args.k_stride_row = a.plane[0].source_stride_row;
    args.k_stride_head = a.plane[0].source_stride_head;
    args.v = a.plane[1].source;
    args.v_stride_row = a.plane[1].source_stride_row;
    args.v_stride_head = a.plane[1].source_stride_head;
    args.k_pages = &k_pages;
    args.v_pages = &v_pages;
    args.k_scale = a.plane[0].scale;
    args.v_scale = a.plane[1].scale;
    args.scale_stride_request = a.plane[0].scale_stride_request;
    args.scale_stride_head = a.plane[0].scale_stride_head;
    assert_int_equal(strstr(launch->name, "_rope_") != NULL, a.cos_sin != NULL);
    args.cos_sin = a.cos_sin;
    args.counters = a.plane[0].counters;
    kv8_append_plan *plan = NULL;
    assert_ok(kv8_append_plan_create(&plan, &spec, NULL, NULL));
    assert_ok(kv8_append_run(plan, &args));
    kv8_append_plan_destroy(plan);
    free(slots);
}

__attribute__((constructor)) static void begin(void) {
    stand_in_on_launch(run);
}
