/* device_plan.c - a plan of attention on a GPU: the kernels for a spec, their launches, the layout
 * of their workspace. Which keys a block computes is decided on the device, from the lengths it
 * finds there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_plan.h"

#include "prefill_args.h"
#include "prefill_schedule_args.h"

static const char schedule_name[] = "kv8_prefill_schedule__sm80";
static const char masks_name[] = "kv8_prefill_masks__sm80";

/* --- decode --- */

/* Granules whose time a block loses between two splits: it would read so many bytes meanwhile. */
static int32_t split_units(const kv8_attention_spec *spec, int32_t heads) {
    enum { LOST_BYTES = 192 << 10 };
    const int64_t token_bytes = kv8_head_bytes(spec->k_dtype, spec->head_dim) +
                                kv8_head_bytes(spec->v_dtype, spec->v_head_dim);
    const int64_t units = LOST_BYTES / (KV8_DECODE_TOKENS * token_bytes * heads);
    return (int32_t)kv8_min_i64(units, KV8_DECODE_MAX_SPLIT_UNITS);
}

static kv8_decode_tail decode_tail(const kv8_variant *v, const kv8_attention_spec *spec) {
    const int32_t heads = kv8_variant_heads_per_block(v, spec);
    const int32_t slices = kv8_variant_slices(v, spec);
    const int32_t head_blocks = spec->num_kv_heads / heads;
    return (kv8_decode_tail){
        .heads_per_block = heads,
        .num_slices = slices,
        .head_blocks = head_blocks,
        .min_units = slices, /* a granule for every warp */
        .split_units = split_units(spec, heads),
        .by_min_units = kv8_make_divisor(slices),
        .by_heads = kv8_make_divisor(heads / v->warp_heads),
        .by_head_blocks = kv8_make_divisor(head_blocks),
        .by_slices = kv8_make_divisor(slices),
        .piece_units = spec->batch_invariant ? kv8_variant_piece_units(v, spec) : 0,
    };
}

/* Blocks of a launch that fills the machine. */
static kv8_status fill_machine(const kv8_attention_device_plan *plan, kv8_device_choice *choice,
                               int32_t *blocks_out) {
    const kv8_device_info *const info = kv8_device_get_info(plan->device);
    int32_t per_sm = 0;
    KV8_TRY(kv8_kernel_max_blocks(&choice->kernel, choice->launch.block[0],
                                  choice->launch.dynamic_bytes, &per_sm));
    if (per_sm < 1)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "%s does not fit a multiprocessor of %s",
                        choice->variant->name, info->name);
    *blocks_out = per_sm * info->num_sms;
    return KV8_OK;
}

/* Under batch_invariant: a slot for every piece, if a block has a few. */
static int32_t max_slots(const kv8_attention_spec *spec, const kv8_device_choice *choice) {
    enum { SLOTS_PER_BLOCK = 16 };
    const int64_t streams = kv8_decode_max_row_tiles(spec) * choice->decode.head_blocks;
    const int64_t tokens = (int64_t)choice->decode.piece_units * KV8_DECODE_TOKENS;
    return (int32_t)kv8_min_i64(streams * kv8_ceil_div(spec->max_kv_len, tokens),
                                (int64_t)SLOTS_PER_BLOCK * choice->launch.grid[0]);
}

static kv8_status make_decode(const kv8_attention_device_plan *plan, kv8_device_choice *choice) {
    const kv8_variant *const v = choice->variant;
    const int32_t producers = kv8_way_is_bulk(v->way);
    int32_t blocks = 0;
    choice->decode = decode_tail(v, &plan->spec);
    choice->launch.block[0] = (uint32_t)(v->num_warps + producers) * 32;
    choice->launch.overlaps_previous = true;
    KV8_TRY(fill_machine(plan, choice, &blocks));
    choice->launch.grid[0] = (uint32_t)kv8_min_i64(blocks, KV8_DECODE_MAX_BLOCKS);
    if (plan->spec.batch_invariant) choice->decode.max_slots = max_slots(&plan->spec, choice);
    return KV8_OK;
}

/* Streams are whole: blocks for every request of a run, whose lengths they alone look at. */
static void make_window(kv8_device_choice *choice) {
    choice->launch.block[0] = (uint32_t)choice->variant->num_warps * 32;
    choice->launch.overlaps_previous = true;
}
kv8_device_choice kv8_device_choice_of_run(const kv8_attention_device_plan *plan,
                                           const kv8_device_choice *choice, int32_t batch) {
    kv8_device_choice of_run = *choice;
    if (choice->variant->way == KV8_WAY_WINDOW) {
        kv8_attention_spec spec = plan->spec;
        spec.max_batch = batch;
        of_run.decode = decode_tail(choice->variant, &spec);
        of_run.launch.grid[0] = (uint32_t)(batch * of_run.decode.head_blocks);
    }
    return of_run;
}

/* Clusters as wide as all KV heads' tiles find room in at once, of narrow tiles else of 8 blocks.
 * *fits_out: it has them. */
static kv8_status make_cluster(const kv8_attention_device_plan *plan, kv8_device_choice *choice,
                               bool *fits_out) {
    const kv8_variant *const v = choice->variant;
    const int32_t heads = plan->spec.num_kv_heads;
    const int32_t tiles = kv8_variant_row_tiles(v, &plan->spec);
    choice->decode = decode_tail(v, &plan->spec);
    choice->launch.block[0] = (uint32_t)v->num_warps * 32;
    choice->launch.grid[1] = (uint32_t)heads;
    choice->launch.grid[2] = (uint32_t)tiles;
    choice->launch.overlaps_previous = true;
    for (uint32_t blocks = 16; blocks >= 8; blocks /= 2) {
        int32_t clusters = 0;
        choice->launch.grid[0] = choice->launch.cluster[0] = blocks;
        KV8_TRY(kv8_kernel_max_clusters(&choice->kernel, &choice->launch, &clusters));
        *fits_out =
            clusters >= heads * tiles || (v->way == KV8_WAY_CLUSTER && blocks == 8 && clusters > 0);
        if (*fits_out) return KV8_OK;
    }
    return KV8_OK;
}

/* --- prefill --- */

static kv8_status make_prefill(kv8_attention_device_plan *plan, kv8_device_choice *choice) {
    /* Splits of rows that may be under way: a few for every block. */
    enum { SLOTS_PER_BLOCK = 4 };
    const kv8_attention_spec *const spec = &plan->spec;
    const kv8_variant *const v = choice->variant;
    int32_t blocks = 0;
    KV8_TRY(kv8_kernel_get(&plan->schedule, plan->device, schedule_name,
                           sizeof(kv8_prefill_schedule_args), 0));
    if (spec->has_mask)
        KV8_TRY(kv8_kernel_get(&plan->masks, plan->device, masks_name,
                               sizeof(kv8_prefill_schedule_args), 0));
    choice->launch.block[0] = (uint32_t)v->num_warps * 32;
    KV8_TRY(fill_machine(plan, choice, &blocks));
    choice->launch.grid[0] = (uint32_t)blocks;
    choice->prefill = (kv8_prefill_tail){
        .block_rows = v->block_rows,
        .num_blocks = blocks,
        .max_tiles = (int32_t)kv8_ceil_div(spec->max_kv_len, KV8_PREFILL_TILE_KEYS),
        .max_slots = spec->batch_invariant || v->window_keys > 0 ? 0 : SLOTS_PER_BLOCK * blocks,
    };
    return KV8_OK;
}

/* --- the workspace --- */

static size_t place(size_t *end, int64_t count, size_t size) {
    const size_t at = *end;
    *end = kv8_round_up(at + (size_t)count * size, KV8_DEVICE_ALIGNMENT);
    return at;
}
static void take_larger(size_t *most, size_t bytes) {
    if (bytes > *most) *most = bytes;
}

static bool is_decode(const kv8_device_choice *c) {
    const kv8_way way = c->variant->way;
    return way == KV8_WAY_WINDOW || way == KV8_WAY_ROWS || kv8_way_is_bulk(way);
}

/* Of counters and partial results: the most that a kernel of several has. */
typedef struct shared_bytes {
    size_t arrivals, sums, partials;
} shared_bytes;

static void count_decode(const kv8_attention_spec *spec, const kv8_device_choice *c,
                         shared_bytes *most) {
    if (c->variant->way == KV8_WAY_WINDOW) return; /* splits nothing */
    const size_t pieces = (size_t)c->decode.max_slots, own = 2 * (size_t)c->launch.grid[0];
    const size_t slots = pieces + own;
    const size_t streams = (size_t)(kv8_decode_max_row_tiles(spec) * c->decode.head_blocks);
    const size_t counters = pieces > 0 ? 2 * pieces : slots + streams;
    const size_t tiles = (size_t)(c->variant->block_rows / KV8_DECODE_ROWS);
    const size_t fragments =
        (size_t)c->decode.heads_per_block * (size_t)spec->v_head_dim / 16 * tiles;
    take_larger(&most->arrivals, counters * (size_t)c->variant->num_warps * sizeof(uint32_t));
    take_larger(&most->sums, slots * fragments * 16 * sizeof(float));
    take_larger(&most->partials, slots * fragments * 128 * sizeof(float));
}

/* The work list is prefill's alone: of num_items items at most, from num_blocks blocks of rows. */
static kv8_status count_prefill(const kv8_attention_spec *spec, const kv8_device_choice *c,
                                shared_bytes *most, int64_t *num_items, int64_t *num_blocks) {
    const kv8_prefill_tail *const t = &c->prefill;
    const int64_t warpgroups = t->block_rows / 64, slots = t->max_slots;
    const int64_t packed = (int64_t)spec->max_total_q * (spec->num_qo_heads / spec->num_kv_heads);
    *num_blocks = packed / t->block_rows + kv8_min_i64(spec->max_batch, spec->max_total_q);
    *num_items = *num_blocks * spec->num_kv_heads + slots;
    if (*num_items > INT32_MAX)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "max_total_q is %d, which makes %lld items, up to %d",
                        spec->max_total_q, (long long)*num_items, INT32_MAX);
    take_larger(&most->arrivals, (size_t)(slots * warpgroups) * sizeof(uint32_t));
    take_larger(&most->sums, (size_t)(slots * warpgroups * 512) * sizeof(float));
    take_larger(&most->partials,
                (size_t)(slots * t->block_rows * c->variant->head_dim) * sizeof(float));
    return KV8_OK;
}

/* A launch leaves nothing there but counters of 0. Of the partial results, one place for all
 * kernels, and another for prefill's where decode runs beside them. */
static kv8_status lay_out(kv8_attention_device_plan *plan) {
    kv8_device_layout *const l = &plan->layout;
    const bool is_apart = plan->decode_rows > 0;
    shared_bytes most[2] = {{0}};
    kv8_partials_layout at[2];
    int64_t items = 0, blocks = 0;
    size_t owners = 0; /* blocks of threads */
    for (int i = 0; i < plan->num_choices; i++) {
        const kv8_device_choice *const c = &plan->choices[i];
        if (is_decode(c)) count_decode(&plan->spec, c, &most[0]);
        if (c->variant->way != KV8_WAY_PREFILL) continue;
        KV8_TRY(count_prefill(&plan->spec, c, &most[is_apart], &items, &blocks));
        take_larger(&owners, (size_t)c->prefill.num_blocks);
    }
    /* A block reads the item of its number, if there is one or not. */
    if (items > 0 && items < (int64_t)owners) items = (int64_t)owners;
    *l = (kv8_device_layout){0};
    if (items > 0)
        l->queue_at =
            place(&l->size, 1, sizeof(kv8_prefill_queue) + (owners + 1) * sizeof(int32_t));
    for (int i = 0; i < 2; i++) at[i].arrivals_at = place(&l->size, 1, most[i].arrivals);
    l->zeroed_bytes = l->size;
    if (items > 0) {
        l->items_at = place(&l->size, items, sizeof(kv8_prefill_item));
        l->blocks_at = place(&l->size, blocks, sizeof(kv8_prefill_block));
        l->indptr_at = place(&l->size, (int64_t)plan->spec.max_batch + 1, sizeof(int32_t));
        l->broken_at = place(&l->size, items, sizeof(kv8_prefill_broken));
        l->decode_lens_at = place(&l->size, plan->spec.max_batch, sizeof(int32_t));
        l->unmasked_at =
            place(&l->size, plan->spec.has_mask ? plan->spec.max_total_q : 0, sizeof(int32_t));
    }
    for (int i = 0; i < 2; i++) {
        at[i].sums_at = place(&l->size, 1, most[i].sums);
        at[i].partials_at = place(&l->size, 1, most[i].partials);
    }
    l->decode = at[0];
    l->prefill = at[is_apart];
    if (l->size == 0) l->size = KV8_DEVICE_ALIGNMENT; /* an address at least */
    return KV8_OK;
}

/* --- the plan --- */

static kv8_status check(const kv8_attention_spec *spec) {
    KV8_TRY(kv8_attention_check_spec(spec));
    if (spec->isa != KV8_ISA_BEST)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "isa is %s, which names a CPU's kernels; a GPU's plan takes the default",
                        kv8_isa_name(spec->isa));
    if (spec->math != KV8_MATH_AUTO)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "math is %d, which chooses among a CPU's kernels; a GPU's plan takes %d",
                        (int)spec->math, (int)KV8_MATH_AUTO);
    return KV8_OK;
}

static kv8_status make_choice(kv8_attention_device_plan *plan, const kv8_variant *variant) {
    enum { GENERIC_MAX_ROWS = 65535 };
    const kv8_attention_spec *const spec = &plan->spec;
    kv8_device_choice *const choice = &plan->choices[plan->num_choices];
    const size_t dynamic = kv8_variant_shared_bytes(variant, spec);
    bool fits = true;
    *choice = (kv8_device_choice){.variant = variant, .launch = {.dynamic_bytes = dynamic}};
    KV8_TRY(kv8_kernel_get(&choice->kernel, plan->device, variant->name, sizeof(kv8_kernel_args),
                           dynamic));
    switch (variant->way) {
        case KV8_WAY_WIDE:
        case KV8_WAY_CLUSTER: KV8_TRY(make_cluster(plan, choice, &fits)); break;
        case KV8_WAY_WINDOW: make_window(choice); break;
        case KV8_WAY_BULK_MANY:
        case KV8_WAY_BULK:
        case KV8_WAY_ROWS: KV8_TRY(make_decode(plan, choice)); break;
        case KV8_WAY_PREFILL: KV8_TRY(make_prefill(plan, choice)); break;
        default:
            choice->launch.grid[0] = (uint32_t)spec->num_qo_heads;
            choice->launch.grid[1] = (uint32_t)kv8_min_i64(spec->max_total_q, GENERIC_MAX_ROWS);
            choice->launch.block[0] = (uint32_t)variant->num_warps * 32;
    }
    plan->num_choices += fits;
    return KV8_OK;
}

/* Query rows of a request that a tile of decode holds, where the plan has a prefill kernel to take
 * the other requests and enough of them may be small. */
static int32_t rows_beside_prefill(const kv8_attention_device_plan *plan) {
    const kv8_attention_spec *const spec = &plan->spec;
    bool has_prefill = false;
    int32_t rows = 0;
    for (int i = 0; i < plan->num_choices; i++) {
        const kv8_variant *const v = plan->choices[i].variant;
        has_prefill |= v->way == KV8_WAY_PREFILL;
        if (is_decode(&plan->choices[i]) && rows == 0) rows = v->block_rows;
    }
    if (!has_prefill || rows == 0 || !kv8_may_mix(spec)) return 0;
    const int32_t group = spec->num_qo_heads / spec->num_kv_heads;
    return rows > group ? rows / group : 1;
}

static kv8_status make_choices(kv8_attention_device_plan *plan, const char *pattern) {
    const kv8_variant *found[KV8_MAX_CHOICES];
    const int count = kv8_choose_variants(&plan->spec, plan->device, pattern, found);
    for (int i = 0; i < count; i++) KV8_TRY(make_choice(plan, found[i]));
    plan->decode_rows = rows_beside_prefill(plan);
    if (plan->num_choices > 0) return lay_out(plan);
    const kv8_device_info *const info = kv8_device_get_info(plan->device);
    return kv8_fail(
        KV8_ERR_UNSUPPORTED,
        "no kernel like %s takes the spec on %s (sm_%d); this build's CUDA kernels are %s",
        pattern == NULL ? "*" : pattern, info->name, info->sm_version, kv8_device_images_note());
}

kv8_status kv8_attention_device_plan_create_of(kv8_attention_device_plan **out, kv8_device *device,
                                               const kv8_attention_spec *spec, const char *pattern,
                                               const kv8_allocator *allocator) {
    *out = NULL;
    if (device == NULL) return kv8_fail(KV8_ERR_INVALID, "device is NULL");
    KV8_TAKE_STRUCT(kv8_attention_spec, spec);
    KV8_TRY(check(spec));
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
    KV8_TRY_GOTO(make_choices(plan, pattern));
    *out = plan;
    return KV8_OK;
fail:
    kv8_attention_device_plan_destroy(plan);
    return status;
}

kv8_status kv8_attention_device_plan_create(kv8_attention_device_plan **out, kv8_device *device,
                                            const kv8_attention_spec *spec,
                                            const kv8_allocator *allocator) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(device, spec);
    return kv8_attention_device_plan_create_of(out, device, spec, NULL, allocator);
}

void kv8_attention_device_plan_destroy(kv8_attention_device_plan *plan) {
    if (plan == NULL) return;
    const kv8_allocator allocator = plan->allocator_copy;
    const kv8_allocator *const from = plan->allocator == NULL ? NULL : &allocator;
    kv8_release(from, plan, 1, sizeof *plan);
}

size_t kv8_attention_device_workspace_size(const kv8_attention_device_plan *plan) {
    return plan->layout.size;
}

const kv8_device_choice *kv8_device_choose_beside(const kv8_attention_device_plan *plan,
                                                  uint32_t needs, int32_t batch,
                                                  const kv8_kernel_pages *k,
                                                  const kv8_kernel_pages *v) {
    if (plan->decode_rows == 0) return NULL;
    for (int i = 0; i < plan->num_choices; i++) {
        const kv8_device_choice *const c = &plan->choices[i];
        if (is_decode(c) && kv8_variant_takes_run(c->variant, &plan->spec, needs, batch, k, v))
            return c;
    }
    return NULL;
}

const kv8_device_choice *kv8_device_choose(const kv8_attention_device_plan *plan, uint32_t needs,
                                           int32_t batch, const kv8_kernel_pages *k,
                                           const kv8_kernel_pages *v) {
    for (int i = 0; i < plan->num_choices; i++) {
        const kv8_device_choice *const c = &plan->choices[i];
        if (kv8_variant_takes_run(c->variant, &plan->spec, needs, batch, k, v)) return c;
    }
    return NULL;
}
