/* attention_device.c - attention on a GPU: one kernel for a spec, the layout of its workspace, the
 * launch. Which keys a block walks is decided on the device, from the lengths it finds there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention_device.h>

#include <stdio.h>

#include "cuda/common/attention_args.h"
#include "device_impl.h"
#include "prefill_device.h"

/* One row of decode_kernels.inc. */
typedef struct decode_choice {
    const char *name;
    kv8_dtype dtype; /* of K and V */
    int32_t head_dim, num_warps;
    bool whole_granules; /* pages of a multiple of 16 tokens only */
    int32_t warp_heads;  /* KV heads of a warp */
    size_t fixed_bytes;  /* of shared memory */
} decode_choice;

static const decode_choice choices[] = {
#define ROW(name, dtype, dim, warps, whole, heads, fixed) \
    {#name, dtype, dim, warps, whole, heads, fixed},
#define KV8_DECODE_E4M3(name, dim, warps, stages, whole, heads, fixed) \
    ROW(name, KV8_E4M3, dim, warps, whole, heads, fixed)
#define KV8_DECODE_E5M2(name, dim, warps, stages, whole, heads, fixed) \
    ROW(name, KV8_E5M2, dim, warps, whole, heads, fixed)
#define KV8_DECODE_INT8(name, dim, warps, stages, whole, heads, fixed) \
    ROW(name, KV8_INT8, dim, warps, whole, heads, fixed)
#define KV8_DECODE_BF16(name, dim, warps, stages, whole, heads, fixed) \
    ROW(name, KV8_BF16, dim, warps, whole, heads, fixed)
#define KV8_DECODE_F16(name, dim, warps, stages, whole, heads, fixed) \
    ROW(name, KV8_F16, dim, warps, whole, heads, fixed)
#include "cuda/decode/decode_kernels.inc"
#undef ROW
};
/* Those that copy whole pages, of so many KV heads. */
static const struct {
    decode_choice choice;
    int32_t num_kv_heads;
} page_choices[] = {
#define KV8_DECODE_PAGES(format, name, dim, kv_heads, warps, stages, fixed) \
    {{#name, KV8_##format, dim, warps, true, 1, fixed}, kv_heads},
#include "cuda/decode/decode_kernels.inc"
};
/* Those for one request; all want whole granules. */
static const decode_choice singles[] = {
#define KV8_DECODE_SINGLE(format, name, dim, warps, stages, fixed) \
    {#name, KV8_##format, dim, warps, true, 1, fixed},
#include "cuda/decode/decode_kernels.inc"
};

enum { DEVICE_ALIGNMENT = 256, ANY_THREADS = 128, ANY_MAX_ROWS = 65535 };
static const char any_name[] = "kv8_attention_any_any_dany_generic__sm80";

/* A kernel of decode_kernels.inc but those for one request, and how it cuts the work. */
typedef struct decode_way {
    const decode_choice *choice; /* NULL: there is none */
    kv8_kernel kernel;
    int32_t num_blocks, num_threads; /* threads of a block */
    int32_t heads_per_block, num_slices, min_units, split_units;
    size_t dynamic_bytes;
} decode_way;

struct kv8_attention_device_plan {
    kv8_attention_spec spec; /* resolved: v_head_dim, o_dtype, window_right */
    kv8_device *device;
    const kv8_allocator *allocator;
    kv8_allocator allocator_copy;
    decode_way rows;  /* takes every run; without it the general kernel does */
    decode_way pages; /* beside it: runs over pages whose tokens lie one after another */
    bool prefills;    /* the prefill kernels take every run, and there is neither */
    kv8_prefill_plan prefill;
    size_t prefill_at;
    const decode_choice *single; /* for runs of one request; NULL: there is none */
    int32_t single_blocks;       /* of a cluster */
    kv8_kernel any, single_kernel;
    /* Byte offsets into the workspace. */
    size_t arrivals_at, sums_at, partials_at, workspace_size;
    size_t arrivals_bytes;
};

static int32_t row_bytes(const kv8_attention_spec *spec) {
    return spec->head_dim * (int32_t)kv8_dtype_size(spec->k_dtype);
}

/* KV heads that one block walks at once: four, so that rows of a token are 256 bytes or more in
 * NHD, which DRAM serves at once; fewer where a small batch would leave too few streams to join
 * their pieces in parallel, if a warp copies whole lines by itself. */
static int32_t heads_per_block(const kv8_attention_spec *spec, const decode_choice *choice) {
    enum { LINE = 128, LARGE_BATCH = 32, LONG = 32768 };
    int32_t most = 4;
    if (spec->max_batch <= LARGE_BATCH && row_bytes(spec) * choice->warp_heads % LINE == 0)
        most = 2;
    if (spec->max_batch <= 4 && spec->max_kv_len <= LONG) most = 2;
    if (spec->max_batch == 1 && spec->max_kv_len <= LONG / 2) most = 1;
    int32_t heads = 1;
    while (heads * 2 <= most && spec->num_kv_heads % (heads * 2) == 0 &&
           choice->num_warps * choice->warp_heads % (heads * 2) == 0)
        heads *= 2;
    return heads;
}

/* The row for this spec, NULL when there is none. Rows for whole granules come first, and before
 * them those with more heads for a warp. */
static const decode_choice *choose(const kv8_attention_spec *spec, const kv8_device *device) {
    const bool q_fits =
        spec->q_dtype == KV8_BF16 || (spec->q_dtype == KV8_F16 && spec->k_dtype != KV8_BF16);
    if (!q_fits || spec->k_dtype != spec->v_dtype || spec->head_dim != spec->v_head_dim ||
        spec->batch_invariant)
        return NULL;
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        const decode_choice *const c = &choices[i];
        if (c->dtype != spec->k_dtype || c->head_dim != spec->head_dim) continue;
        if (c->whole_granules && spec->page_size % KV8_DECODE_TOKENS != 0) continue;
        if (heads_per_block(spec, c) % c->warp_heads != 0) continue;
        if (kv8_kernel_exists(device, c->name)) return c;
    }
    return NULL;
}

/* What a block loses between two pieces, in granules that it would read meanwhile. */
enum { MOST_PIECE_UNITS = 24, MOST_BLOCKS = 1024 };
static int32_t split_units(const kv8_attention_spec *spec, int32_t heads) {
    enum { LOST_BYTES = 192 << 10 };
    const int64_t units = LOST_BYTES / (2 * (int64_t)KV8_DECODE_TOKENS * row_bytes(spec) * heads);
    return units > MOST_PIECE_UNITS ? MOST_PIECE_UNITS : (int32_t)units;
}

/* Row tiles that any run within the bounds has: a tile belongs to one request. */
static int64_t max_row_tiles(const kv8_attention_spec *spec) {
    const int64_t group = spec->num_qo_heads / spec->num_kv_heads;
    return spec->max_total_q * group / KV8_DECODE_ROWS + spec->max_batch + 1;
}

/* A tensor core kernel, if the bounds fit what it counts in 32 bits and its shared memory. `way`
 * has its choice, threads, heads and slices. */
static kv8_status prepare_way(kv8_attention_device_plan *plan, decode_way *way) {
    const kv8_attention_spec *const spec = &plan->spec;
    const kv8_device_info *const info = kv8_device_get_info(plan->device);
    const decode_choice *const c = way->choice;
    enum { STATIC_BYTES = 4096 }; /* at least what the kernels declare beside it */
    const size_t dynamic = c->fixed_bytes + ((size_t)spec->max_batch + 1) * KV8_DECODE_START_BYTES;
    const int64_t granules = spec->max_kv_len / KV8_DECODE_TOKENS + 2 + MOST_PIECE_UNITS;
    const int64_t streams = max_row_tiles(spec) * spec->num_kv_heads;
    way->choice = NULL;
    if (dynamic + STATIC_BYTES > info->shared_bytes_per_block) return KV8_OK;
    if (streams > (INT32_MAX >> 1) / granules || granules > INT32_MAX / MOST_BLOCKS) return KV8_OK;
    KV8_TRY(kv8_kernel_get(&way->kernel, plan->device, c->name, sizeof(kv8_kernel_args), dynamic));
    int32_t per_sm = 0;
    KV8_TRY(kv8_kernel_max_blocks(&way->kernel, (uint32_t)way->num_threads, dynamic, &per_sm));
    if (per_sm < 1)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s does not fit a multiprocessor of %s", c->name,
                        info->name);
    way->choice = c;
    way->dynamic_bytes = dynamic;
    way->num_blocks = per_sm * info->num_sms;
    if (way->num_blocks > MOST_BLOCKS) way->num_blocks = MOST_BLOCKS;
    way->num_slices = c->num_warps * c->warp_heads / way->heads_per_block;
    way->min_units = way->num_slices; /* a granule for every warp */
    way->split_units = split_units(spec, way->heads_per_block);
    return KV8_OK;
}

static kv8_status prepare_rows(kv8_attention_device_plan *plan) {
    const decode_choice *const c = choose(&plan->spec, plan->device);
    if (c == NULL) return KV8_OK;
    plan->rows = (decode_way){.choice = c,
                              .num_threads = c->num_warps * 32,
                              .heads_per_block = heads_per_block(&plan->spec, c)};
    return prepare_way(plan, &plan->rows);
}

/* Beside it, the kernel that copies whole pages. Its blocks have all KV heads, so that a request is
 * cut into more pieces: of few requests, joining them takes longer than it gains. */
enum { LEAST_BATCH_OF_PAGES = 16 };
static kv8_status prepare_pages(kv8_attention_device_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    enum { PRODUCERS = 1 };
    if (plan->rows.choice == NULL || !plan->rows.choice->whole_granules ||
        spec->max_batch < LEAST_BATCH_OF_PAGES)
        return KV8_OK;
    for (size_t i = 0; i < sizeof page_choices / sizeof page_choices[0]; i++) {
        const decode_choice *const c = &page_choices[i].choice;
        if (c->dtype != spec->k_dtype || c->head_dim != spec->head_dim ||
            page_choices[i].num_kv_heads != spec->num_kv_heads ||
            !kv8_kernel_exists(plan->device, c->name))
            continue;
        plan->pages = (decode_way){.choice = c,
                                   .num_threads = (c->num_warps + PRODUCERS) * 32,
                                   .heads_per_block = spec->num_kv_heads};
        return prepare_way(plan, &plan->pages);
    }
    return KV8_OK;
}

static kv8_launch single_launch(const kv8_attention_device_plan *plan) {
    return (kv8_launch){.grid = {(uint32_t)plan->single_blocks, (uint32_t)plan->spec.num_kv_heads},
                        .block = {(uint32_t)plan->single->num_warps * 32},
                        .cluster = {(uint32_t)plan->single_blocks},
                        .dynamic_bytes = plan->single->fixed_bytes,
                        .overlaps_previous = true};
}

/* Beside the tensor core kernel: the one for a single request, if the GPU has the clusters and the
 * keys of a head are not so many that reading them takes longer than joining. */
static kv8_status prepare_single(kv8_attention_device_plan *plan) {
    enum { MAX_HEAD_BYTES = 2 << 20 };
    const kv8_attention_spec *const spec = &plan->spec;
    const int64_t row = row_bytes(spec);
    if (plan->rows.choice == NULL || !plan->rows.choice->whole_granules || spec->has_mask ||
        spec->max_kv_len > MAX_HEAD_BYTES / row)
        return KV8_OK;
    const decode_choice *found = NULL;
    for (size_t i = 0; i < sizeof singles / sizeof singles[0] && found == NULL; i++)
        if (singles[i].dtype == spec->k_dtype && singles[i].head_dim == spec->head_dim &&
            kv8_kernel_exists(plan->device, singles[i].name))
            found = &singles[i];
    if (found == NULL) return KV8_OK;
    KV8_TRY(kv8_kernel_get(&plan->single_kernel, plan->device, found->name, sizeof(kv8_kernel_args),
                           found->fixed_bytes));
    plan->single = found;
    for (plan->single_blocks = 16; plan->single_blocks >= 8; plan->single_blocks /= 2) {
        const kv8_launch launch = single_launch(plan);
        int32_t clusters = 0;
        KV8_TRY(kv8_kernel_max_clusters(&plan->single_kernel, &launch, &clusters));
        if (clusters >= spec->num_kv_heads || (plan->single_blocks == 8 && clusters > 0))
            return KV8_OK;
    }
    plan->single = NULL;
    return KV8_OK;
}

/* Many rows of a request share each widened tile of keys in a prefill kernel; with a few, a decode
 * kernel reads the same bytes without computing for rows that are not there, where there is one. By
 * the bounds alone: a plan is one kernel. */
static bool has_many_rows(const kv8_attention_spec *spec) {
    enum { LEAST_ROWS = 64 }; /* packed, of a request on average: one warpgroup's */
    const int64_t packed = (int64_t)spec->max_total_q * (spec->num_qo_heads / spec->num_kv_heads);
    return packed >= (int64_t)LEAST_ROWS * spec->max_batch;
}
static kv8_status prepare_prefill(kv8_attention_device_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    if (!kv8_prefill_takes(plan->device, spec, KV8_PREFILL_BEST)) return KV8_OK;
    KV8_TRY(kv8_prefill_plan_make(&plan->prefill, plan->device, spec, KV8_PREFILL_BEST));
    plan->prefills = true;
    return KV8_OK;
}
static kv8_status prepare(kv8_attention_device_plan *plan) {
    if (has_many_rows(&plan->spec)) KV8_TRY(prepare_prefill(plan));
    if (!plan->prefills) KV8_TRY(prepare_rows(plan));
    if (!plan->prefills) KV8_TRY(prepare_pages(plan));
    if (!plan->prefills && plan->rows.choice == NULL) KV8_TRY(prepare_prefill(plan));
    return KV8_OK;
}

static void take_larger(size_t *most, size_t bytes) {
    if (bytes > *most) *most = bytes;
}
static void lay_out_workspace(kv8_attention_device_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    size_t end = 0;
    /* What either kernel needs; a launch leaves nothing there but counters of 0. */
    size_t sums = 0, partials = 0;
    const decode_way *const ways[] = {&plan->rows, &plan->pages};
    for (size_t i = 0; i < 2; i++) {
        const decode_way *const way = ways[i];
        if (way->choice == NULL) continue;
        const size_t slots = 2 * (size_t)way->num_blocks;
        const int64_t streams = max_row_tiles(spec) * (spec->num_kv_heads / way->heads_per_block);
        const size_t fragments = (size_t)way->heads_per_block * (size_t)spec->v_head_dim / 16;
        take_larger(&plan->arrivals_bytes,
                    (slots + (size_t)streams) * (size_t)way->choice->num_warps * sizeof(uint32_t));
        take_larger(&sums, slots * fragments * 16 * sizeof(float));
        take_larger(&partials, slots * fragments * 128 * sizeof(float));
    }
    plan->arrivals_at = end;
    end = kv8_round_up(end + plan->arrivals_bytes, DEVICE_ALIGNMENT);
    plan->sums_at = end;
    end = kv8_round_up(end + sums, DEVICE_ALIGNMENT);
    plan->partials_at = end;
    end += partials;
    if (plan->prefills) {
        plan->prefill_at = end;
        end += plan->prefill.workspace_size;
    }
    plan->workspace_size = kv8_round_up(end, DEVICE_ALIGNMENT);
}

kv8_status kv8_attention_device_plan_create(kv8_attention_device_plan **out, kv8_device *device,
                                            const kv8_attention_spec *spec,
                                            const kv8_allocator *allocator) {
    *out = NULL;
    if (device == NULL) return kv8_fail(KV8_ERR_INVALID, "device is NULL");
    KV8_TAKE_STRUCT(kv8_attention_spec, spec);
    KV8_TRY(kv8_attention_check_spec(spec));
    KV8_TRY(kv8_attention_check_extras(spec));
    if (spec->isa != KV8_ISA_BEST)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "isa is %s, which names a CPU's kernels; a GPU's plan takes the default",
                        kv8_isa_name(spec->isa));
    if (spec->math != KV8_MATH_AUTO)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "math is %d, which chooses among a CPU's kernels; a GPU's plan takes %d",
                        (int)spec->math, (int)KV8_MATH_AUTO);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, 1, sizeof(kv8_attention_device_plan), "attention plan", &memory));
    kv8_attention_device_plan *const plan = memory;
    if (allocator != NULL) {
        plan->allocator_copy = *allocator;
        plan->allocator = &plan->allocator_copy;
    }
    plan->device = device;
    plan->spec = kv8_attention_resolve_spec(spec);
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_kernel_get(&plan->any, device, any_name, sizeof(kv8_kernel_args), 0));
    KV8_TRY_GOTO(prepare(plan));
    KV8_TRY_GOTO(prepare_single(plan));
    lay_out_workspace(plan);
    *out = plan;
    return KV8_OK;
fail:
    kv8_attention_device_plan_destroy(plan);
    return status;
}

void kv8_attention_device_plan_destroy(kv8_attention_device_plan *plan) {
    if (plan == NULL) return;
    const kv8_allocator allocator = plan->allocator_copy;
    const kv8_allocator *const from = plan->allocator == NULL ? NULL : &allocator;
    kv8_release(from, plan, 1, sizeof *plan);
}

size_t kv8_attention_device_workspace_size(const kv8_attention_device_plan *plan) {
    return plan->workspace_size;
}

static kv8_status check_workspace(const void *workspace) {
    if (workspace != NULL && (uintptr_t)workspace % DEVICE_ALIGNMENT == 0) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "workspace is %p, must be aligned to %d", workspace,
                    (int)DEVICE_ALIGNMENT);
}

kv8_status kv8_attention_device_workspace_init(const kv8_attention_device_plan *plan,
                                               kv8_stream *stream, void *workspace) {
    if (plan == NULL || stream == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s is NULL", plan == NULL ? "plan" : "stream");
    KV8_TRY(check_workspace(workspace));
    if (plan->arrivals_bytes > 0)
        KV8_TRY(kv8_stream_fill(stream, (uint8_t *)workspace + plan->arrivals_at, 0,
                                plan->arrivals_bytes));
    return kv8_stream_synchronize(stream);
}

/* --- run --- */

static kv8_status check_pointers(const kv8_attention_spec *spec, const kv8_attention_args *args) {
    const struct {
        const char *name;
        const void *pointer;
    } needed[] = {{"qo_indptr", args->qo_indptr}, {"q", args->q}, {"o", args->o}};
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        if (needed[i].pointer == NULL)
            return kv8_fail(KV8_ERR_INVALID, "%s is NULL", needed[i].name);
    }
    KV8_TRY(kv8_attention_check_form(spec, args->pages));
    if (args->pages->page_indptr != NULL && args->pages->page_indices == NULL)
        return kv8_fail(KV8_ERR_INVALID, "page_indptr is set and page_indices is NULL");
    return kv8_attention_check_data(spec, args);
}

static kv8_status check_run(const kv8_attention_device_plan *plan, const kv8_stream *stream,
                            const kv8_attention_args *args, const void *workspace) {
    if (plan == NULL || stream == NULL)
        return kv8_fail(KV8_ERR_INVALID, "%s is NULL", plan == NULL ? "plan" : "stream");
    const kv8_attention_spec *const spec = &plan->spec;
    KV8_TRY(kv8_attention_check_extra_args(args));
    KV8_TRY(kv8_attention_check_scalars(args));
    if (args->batch < 0 || args->batch > spec->max_batch)
        return kv8_fail(KV8_ERR_INVALID, "batch is %d, must be 0 to %d", args->batch,
                        spec->max_batch);
    KV8_TRY(check_workspace(workspace));
    if (args->batch == 0) return KV8_OK;
    const bool masked = args->mask_bits != NULL && args->mask_indptr != NULL;
    if (spec->has_mask && !masked)
        return kv8_fail(KV8_ERR_INVALID, "the plan has a mask and %s is NULL",
                        args->mask_bits == NULL ? "mask_bits" : "mask_indptr");
    if (!spec->has_mask && (args->mask_bits != NULL || args->mask_indptr != NULL))
        return kv8_fail(KV8_ERR_INVALID, "mask_bits are given and the plan's has_mask is 0");
    return check_pointers(spec, args);
}

static kv8_kernel_pages device_pages(const kv8_paged *paged, kv8_dtype dtype) {
    const int64_t size = (int64_t)kv8_dtype_size(dtype);
    return (kv8_kernel_pages){
        .data = paged->data,
        .stride_page = paged->stride_page * size,
        .stride_slot = paged->stride_slot * size,
        .stride_head = paged->stride_head * size,
        .row_scale = (const uint16_t *)paged->row_scale,
        .scale_stride_page = paged->row_scale_stride_page,
        .scale_stride_slot = paged->row_scale_stride_slot,
        .scale_stride_head = paged->row_scale_stride_head,
    };
}

/* What copies of 16 bytes and strides of 32 bits ask; and that all pages begin in the same half of
 * a word of scales. */
static bool fits_copies(const kv8_kernel_pages *p) {
    const int64_t strides = p->stride_page | p->stride_slot | p->stride_head;
    const int64_t scales = p->scale_stride_page | p->scale_stride_slot | p->scale_stride_head;
    enum { MAX_SLOT = 1 << 27, MAX_HEAD = 1 << 30 };
    return (((uintptr_t)p->data | (uintptr_t)strides) & 15) == 0 && strides >= 0 && scales >= 0 &&
           p->stride_page <= UINT32_MAX && p->scale_stride_page <= UINT32_MAX &&
           p->scale_stride_page % 2 == 0 && p->stride_slot < MAX_SLOT &&
           p->scale_stride_slot < MAX_SLOT && p->stride_head < MAX_HEAD;
}

/* n / d = high half of n * factor, shifted, for n below 2^31: with 2^(s-1) < d <= 2^s and factor =
 * ceil(2^(31+s) / d), factor * d exceeds 2^(31+s) by less than 2^s, and n times that by less than
 * 2^(31+s). */
static kv8_divisor divisor(int32_t d) {
    if (d == 1) return (kv8_divisor){0};
    uint32_t s = 1;
    while ((int64_t)1 << s < d) s++;
    const uint64_t whole = (uint64_t)1 << (31 + s);
    return (kv8_divisor){.factor = (uint32_t)((whole + (uint64_t)d - 1) / (uint64_t)d),
                         .shift = s - 1};
}

static kv8_kernel_args device_args(const kv8_attention_device_plan *plan,
                                   const kv8_attention_args *args, void *workspace) {
    const kv8_attention_spec *const spec = &plan->spec;
    const kv8_page_table *const table = args->pages;
    uint8_t *const bytes = workspace;
    static const float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
    return (kv8_kernel_args){
        .q = args->q,
        .q_stride_row = args->q_stride_row,
        .q_stride_head = args->q_stride_head,
        .o = args->o,
        .o_stride_row = args->o_stride_row,
        .o_stride_head = args->o_stride_head,
        .lse = args->lse,
        .lse_stride_row = spec->num_qo_heads,
        .lse_stride_head = 1,
        .lse_scale = ln_2,
        .qo_indptr = args->qo_indptr,
        .k = device_pages(args->k, spec->k_dtype),
        .v = device_pages(args->v, spec->v_dtype),
        .table = table->page_indptr != NULL ? table->page_indices : table->block_table,
        .table_stride = table->block_table_stride,
        .num_pages = KV8_ANY_PAGES,
        .page_indptr = table->page_indptr,
        .last_page_len = table->last_page_len,
        .seq_lens = table->seq_lens,
        .k_scale = args->k_scale,
        .v_scale = args->v_scale,
        .k_scale_stride_batch = args->k_scale_stride_batch,
        .k_scale_stride_head = args->k_scale_stride_head,
        .v_scale_stride_batch = args->v_scale_stride_batch,
        .v_scale_stride_head = args->v_scale_stride_head,
        .sink_logit = args->sink_logit,
        .mask_bits = args->mask_bits,
        .mask_indptr = args->mask_indptr,
        .q_scale = args->q_scale,
        .q_scale_stride_batch = args->q_scale_stride_batch,
        .q_scale_stride_row = args->q_scale_stride_row,
        .q_scale_stride_kv_head = args->q_scale_stride_kv_head,
        .q_scale_stride_group = args->q_scale_stride_group,
        .decode.partials = (float *)(void *)(bytes + plan->partials_at),
        .decode.partial_sums = (float *)(void *)(bytes + plan->sums_at),
        .decode.arrivals = (uint32_t *)(void *)(bytes + plan->arrivals_at),
        .batch = args->batch,
        .num_qo_heads = spec->num_qo_heads,
        .num_kv_heads = spec->num_kv_heads,
        .group_size = spec->num_qo_heads / spec->num_kv_heads,
        .head_dim = spec->head_dim,
        .v_head_dim = spec->v_head_dim,
        .page_size = spec->page_size,
        .q_dtype = (int32_t)spec->q_dtype,
        .k_dtype = (int32_t)spec->k_dtype,
        .v_dtype = (int32_t)spec->v_dtype,
        .o_dtype = (int32_t)spec->o_dtype,
        .window_left = spec->window_left,
        .window_right = spec->causal ? 0 : -1,
        .by_group = divisor(spec->num_qo_heads / spec->num_kv_heads),
        .by_page = divisor(spec->page_size),
        .score_scale = (float)kv8_args_sm_scale(spec, args) * log2_e,
        .soft_cap = args->logits_soft_cap * log2_e,
    };
}

static kv8_status run_way(const decode_way *way, kv8_stream *stream, kv8_kernel_args a) {
    a.decode.heads_per_block = way->heads_per_block;
    a.decode.num_slices = way->num_slices;
    a.decode.head_blocks = a.num_kv_heads / way->heads_per_block;
    a.decode.min_units = way->min_units;
    a.decode.split_units = way->split_units;
    a.decode.by_min_units = divisor(way->min_units);
    a.decode.by_heads = divisor(way->heads_per_block / way->choice->warp_heads);
    a.decode.by_head_blocks = divisor(a.decode.head_blocks);
    a.decode.by_slices = divisor(way->num_slices);
    const kv8_launch launch = {.grid = {(uint32_t)way->num_blocks},
                               .block = {(uint32_t)way->num_threads},
                               .dynamic_bytes = way->dynamic_bytes,
                               .overlaps_previous = true};
    return kv8_kernel_launch(&way->kernel, stream, &launch, &a);
}

/* The tokens of a page one after another, each with its KV heads one after another. */
static bool has_whole_pages(const kv8_attention_spec *spec, const kv8_kernel_pages *p) {
    return fits_copies(p) && p->stride_head == row_bytes(spec) &&
           p->stride_slot == (int64_t)row_bytes(spec) * spec->num_kv_heads;
}

/* The kernel of a run. */
typedef enum run_kind { BY_PREFILL, BY_SINGLE, BY_PAGES, BY_ROWS, BY_ANY } run_kind;

static run_kind choose_run(const kv8_attention_device_plan *plan, int32_t batch, bool capped,
                           const kv8_kernel_pages *k, const kv8_kernel_pages *v) {
    if (!fits_copies(k) || !fits_copies(v)) return BY_ANY;
    if (plan->prefills) return BY_PREFILL;
    if (plan->single != NULL && batch == 1 && !capped) return BY_SINGLE;
    if (plan->pages.choice != NULL && batch >= LEAST_BATCH_OF_PAGES &&
        has_whole_pages(&plan->spec, k) && has_whole_pages(&plan->spec, v))
        return BY_PAGES;
    return plan->rows.choice != NULL ? BY_ROWS : BY_ANY;
}

/* Pages as the cache lays them out. */
static kv8_kernel_pages usual_pages(const kv8_attention_spec *spec, kv8_dtype dtype, int64_t dim) {
    const kv8_paged paged = {.stride_head = dim,
                             .stride_slot = dim * spec->num_kv_heads,
                             .stride_page = dim * spec->num_kv_heads * spec->page_size};
    return device_pages(&paged, dtype);
}

kv8_status kv8_attention_device_describe(const kv8_attention_device_plan *plan,
                                         const kv8_attention_args *given, char *text, size_t size) {
    if (plan == NULL || (text == NULL && size > 0))
        return kv8_fail(KV8_ERR_INVALID, "%s is NULL", plan == NULL ? "plan" : "text");
    const kv8_attention_spec *const spec = &plan->spec;
    const char *const gpu = kv8_device_get_info(plan->device)->name;
    kv8_kernel_pages k = usual_pages(spec, spec->k_dtype, spec->head_dim);
    kv8_kernel_pages v = usual_pages(spec, spec->v_dtype, spec->v_head_dim);
    int32_t batch = spec->max_batch;
    bool capped = false;
    kv8_attention_inputs inputs;
    if (given != NULL) {
        KV8_TRY(kv8_attention_read_args(&inputs, given));
        const kv8_attention_args *const args = &inputs.args;
        if (args->k == NULL || args->v == NULL)
            return kv8_fail(KV8_ERR_INVALID, "%s is NULL", args->k == NULL ? "k" : "v");
        k = device_pages(args->k, spec->k_dtype), v = device_pages(args->v, spec->v_dtype);
        batch = args->batch;
        capped = args->logits_soft_cap > 0;
    }
    const run_kind kind = choose_run(plan, batch, capped, &k, &v);
    const decode_way *const way = kind == BY_PAGES ? &plan->pages : &plan->rows;
    switch (kind) {
        case BY_PREFILL:
            snprintf(text, size,
                     "%s on %s: %d blocks, items of %d packed rows, longest first, split over keys "
                     "where one would outlast the rest, workspace %zu bytes",
                     plan->prefill.main.name, gpu, plan->prefill.args.num_blocks,
                     plan->prefill.args.block_rows, plan->workspace_size);
            break;
        case BY_SINGLE:
            snprintf(text, size,
                     "%s on %s: clusters of %d blocks of %d warps, one for each KV head, workspace "
                     "%zu bytes",
                     plan->single->name, gpu, plan->single_blocks, plan->single->num_warps,
                     plan->workspace_size);
            break;
        case BY_PAGES:
        case BY_ROWS:
            snprintf(text, size,
                     "%s on %s: up to %d blocks of %d warps, %d KV heads each, equal shares of all "
                     "keys in steps of %d, workspace %zu bytes",
                     way->choice->name, gpu, way->num_blocks, way->num_threads / 32,
                     way->heads_per_block, (int)KV8_DECODE_TOKENS, plan->workspace_size);
            break;
        case BY_ANY:
            snprintf(text, size, "%s on %s: a block per query row and head, workspace %zu bytes",
                     any_name, gpu, plan->workspace_size);
            break;
    }
    return KV8_OK;
}

/* --- run --- */

static kv8_status run_pages(const kv8_attention_device_plan *plan, kv8_stream *stream,
                            kv8_kernel_args a) {
    a.table_entries = (int64_t)(kv8_device_bytes_from(plan->device, a.table) / sizeof *a.table);
    return run_way(&plan->pages, stream, a);
}

kv8_status kv8_attention_device_run(const kv8_attention_device_plan *plan, kv8_stream *stream,
                                    const kv8_attention_args *given, void *workspace) {
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    KV8_TRY(check_run(plan, stream, args, workspace));
    if (args->batch == 0) return KV8_OK;
    const kv8_kernel_args a = device_args(plan, args, workspace);
    switch (choose_run(plan, args->batch, a.soft_cap > 0, &a.k, &a.v)) {
        case BY_PREFILL:
            return kv8_prefill_run(&plan->prefill, stream, args,
                                   (uint8_t *)workspace + plan->prefill_at);
        case BY_SINGLE: {
            const kv8_launch launch = single_launch(plan);
            return kv8_kernel_launch(&plan->single_kernel, stream, &launch, &a);
        }
        case BY_PAGES: return run_pages(plan, stream, a);
        case BY_ROWS: return run_way(&plan->rows, stream, a);
        case BY_ANY: break;
    }
    const int32_t rows =
        plan->spec.max_total_q < ANY_MAX_ROWS ? plan->spec.max_total_q : ANY_MAX_ROWS;
    const kv8_launch launch = {.grid = {(uint32_t)plan->spec.num_qo_heads, (uint32_t)rows},
                               .block = {ANY_THREADS}};
    return kv8_kernel_launch(&plan->any, stream, &launch, &a);
}
