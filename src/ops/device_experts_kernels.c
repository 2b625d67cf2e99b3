/* device_experts_kernels.c - the form of every kernel of the experts on one GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_experts_kernels.h"

/* --- sizes --- */

int32_t kv8_experts_part_rows(const kv8_experts_shape *shape, int part) {
    return part == GATE_UP ? 2 * shape->intermediate : shape->hidden;
}
int32_t kv8_experts_part_cols(const kv8_experts_shape *shape, int part) {
    return part == GATE_UP ? shape->hidden : shape->intermediate;
}

kv8_expert_strips kv8_experts_strips_of(const kv8_experts_shape *shape, int part,
                                        const void *data) {
    const int32_t cols = kv8_experts_part_cols(shape, part);
    kv8_expert_strips w = {.data = data,
                           .num_strips = kv8_experts_part_rows(shape, part) / KV8_STRIP_ROWS,
                           .num_tiles = (int32_t)kv8_ceil_div(cols, KV8_TILE_COLS),
                           .cols = cols};
    w.strip_bytes =
        w.num_tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES) + KV8_STRIP_END_BYTES;
    w.expert_bytes = (int64_t)w.num_strips * w.strip_bytes;
    return w;
}

/* --- forms of the kernels --- */

static const int32_t tile_rows[NUM_TILES] = {48, 96, 192};

/* By lanes; where the GPU has them, those that the copy engine feeds: by quarters, or whole strips
 * a warp, and such of scaled weights. */
enum { BY_LANES, QUARTERS, WHOLE, SCALED, NUM_KINDS };
static const char *const stream_names[NUM_KINDS][NUM_PARTS][NUM_STREAMS] = {
    {{"kv8_experts_gate_up_x8__sm80", "kv8_experts_gate_up_x16__sm80"},
     {"kv8_experts_down_x8__sm80", "kv8_experts_down_x16__sm80"}},
    {{"kv8_experts_gate_up_x8__sm90", "kv8_experts_gate_up_x16__sm90"},
     {"kv8_experts_down_x8__sm90", "kv8_experts_down_x16__sm90"}},
    {{"kv8_experts_gate_up_x8_whole__sm90", "kv8_experts_gate_up_x16_whole__sm90"},
     {"kv8_experts_down_x8_whole__sm90", "kv8_experts_down_x16_whole__sm90"}},
    {{"kv8_experts_gate_up_x8_scaled__sm90", "kv8_experts_gate_up_x16_scaled__sm90"},
     {"kv8_experts_down_x8_scaled__sm90", "kv8_experts_down_x16_scaled__sm90"}}};

/* Rows in shared memory, padded so that eight of them lie in different banks. */
int32_t kv8_experts_x_row_bytes(const kv8_experts_shape *shape, int part) {
    return kv8_experts_strips_of(shape, part, NULL).num_tiles * KV8_TILE_COLS * 2 + 16;
}

/* Threads and shared memory of a streaming kernel: `bytes`, and two tiles of rows where there is
 * room, or of items of one tile one. x_tiles 0: they do not fit. */
static kv8_experts_form form_of_stream(kv8_device *device, const kv8_experts_shape *shape, int part,
                                       int which, uint32_t threads, size_t bytes) {
    const size_t room =
        kv8_device_get_info(device)->shared_bytes_per_block - KV8_EXPERTS_STATIC_BYTES;
    const size_t tile_bytes = 8 * (size_t)kv8_experts_x_row_bytes(shape, part);
    const int32_t least = which == X8 ? 1 : KV8_EXPERTS_ITEM_TILES;
    int32_t tiles = KV8_EXPERTS_ITEM_TILES;
    while (tiles >= least && bytes + (size_t)tiles * tile_bytes > room) tiles--;
    if (tiles < least) return (kv8_experts_form){.x_tiles = 0};
    return (kv8_experts_form){
        .x_tiles = tiles,
        .launch = {.block = {threads}, .dynamic_bytes = bytes + (size_t)tiles * tile_bytes}};
}

/* As many blocks as the GPU holds, if it has the kernel. */
static kv8_status get_stream_kernel(kv8_experts_form *form, kv8_device *device, const char *name) {
    int32_t blocks = 0;
    if (!kv8_kernel_exists(device, name)) form->x_tiles = 0;
    if (form->x_tiles == 0) return KV8_OK;
    KV8_TRY(kv8_kernel_get(&form->kernel, device, name, sizeof(kv8_experts_matmul_args),
                           form->launch.dynamic_bytes));
    KV8_TRY(kv8_kernel_max_blocks(&form->kernel, form->launch.block[0], form->launch.dynamic_bytes,
                                  &blocks));
    form->launch.grid[0] =
        (uint32_t)(kv8_max_i64(blocks, 1) * kv8_device_get_info(device)->num_sms);
    return KV8_OK;
}

/* As many teams of warps as fit beside an item's rows. */
static kv8_status get_stream(kv8_experts_form *form, kv8_device *device,
                             const kv8_experts_shape *shape, int part, int which) {
    const int kind =
        kv8_kernel_exists(device, stream_names[QUARTERS][part][which]) ? QUARTERS : BY_LANES;
    const int32_t num_tiles = kv8_experts_strips_of(shape, part, NULL).num_tiles;
    const int32_t ring_bytes = kind == QUARTERS
                                   ? KV8_EXPERTS_TEAM_WARPS * KV8_EXPERTS_BULK_RING_BYTES(num_tiles)
                                   : KV8_EXPERTS_TEAM_BYTES;
    const size_t team_bytes = (size_t)(ring_bytes + KV8_EXPERTS_SUM_BYTES);
    *form = (kv8_experts_form){.x_tiles = 0};
    for (uint32_t teams = KV8_EXPERTS_MAX_TEAMS; teams > 0 && form->x_tiles == 0; teams /= 2)
        *form = form_of_stream(device, shape, part, which, teams * KV8_EXPERTS_TEAM_THREADS,
                               teams * team_bytes);
    return get_stream_kernel(form, device, stream_names[kind][part][which]);
}

/* The same where a warp has whole strips. */
static kv8_status get_whole(kv8_experts_form *form, kv8_device *device,
                            const kv8_experts_shape *shape, int part, int which, int kind) {
    *form = form_of_stream(device, shape, part, which, 32 * KV8_EXPERTS_WHOLE_WARPS,
                           KV8_EXPERTS_WHOLE_BYTES);
    return get_stream_kernel(form, device, stream_names[kind][part][which]);
}

/* On wgmma, where the GPU has it. */
static kv8_status get_tiles(kv8_experts_form *form, kv8_device *device, int part, int which) {
    static const char *const names[NUM_PARTS][NUM_TILES] = {
        {"kv8_experts_gate_up_x48__sm90a", "kv8_experts_gate_up_x96__sm90a",
         "kv8_experts_gate_up_x192__sm90a"},
        {"kv8_experts_down_x48__sm90a", "kv8_experts_down_x96__sm90a",
         "kv8_experts_down_x192__sm90a"}};
    const int32_t rows = tile_rows[which];
    *form = (kv8_experts_form){.rows = rows};
    if (!kv8_kernel_exists(device, names[part][which])) return KV8_OK;
    kv8_launch launch = {.grid = {KV8_EXPERTS_TILES_BLOCKS},
                         .block = {(uint32_t)KV8_EXPERTS_TILES_THREADS(rows)},
                         .cluster = {KV8_EXPERTS_TILES_BLOCKS},
                         .dynamic_bytes = (size_t)KV8_EXPERTS_TILES_BYTES(rows)};
    int32_t clusters = 0;
    KV8_TRY(kv8_kernel_get(&form->kernel, device, names[part][which],
                           sizeof(kv8_experts_tiles_args), launch.dynamic_bytes));
    KV8_TRY(kv8_kernel_max_clusters(&form->kernel, &launch, &clusters));
    launch.grid[0] *= (uint32_t)clusters;
    form->launch = launch;
    return KV8_OK;
}

/* Packs the rows of gate and up for them. */
static kv8_status get_pack(kv8_experts_form *form, kv8_device *device, int which) {
    static const char *const names[NUM_TILES] = {"kv8_experts_pack_x48__sm90a",
                                                 "kv8_experts_pack_x96__sm90a",
                                                 "kv8_experts_pack_x192__sm90a"};
    enum { BLOCKS_EACH = 4 };
    *form = (kv8_experts_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, names[which])) return KV8_OK;
    form->launch =
        (kv8_launch){.grid = {BLOCKS_EACH * (uint32_t)kv8_device_get_info(device)->num_sms},
                     .block = {KV8_EXPERTS_PACK_THREADS}};
    return kv8_kernel_get(&form->kernel, device, names[which], sizeof(kv8_experts_pack_args), 0);
}

static kv8_status get_router(kv8_experts_form *form, kv8_device *device,
                             const kv8_experts_shape *shape) {
    static const char name[] = "kv8_experts_router__sm90";
    const size_t bytes = KV8_ROUTER_BYTES((size_t)shape->hidden);
    const size_t room = kv8_device_get_info(device)->shared_bytes_per_block;
    *form = (kv8_experts_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, name) || shape->num_experts > KV8_ROUTER_EXPERTS ||
        shape->hidden > KV8_ROUTER_MAX_HIDDEN || bytes + KV8_ROUTER_STATIC_BYTES > room)
        return KV8_OK;
    form->launch = (kv8_launch){.grid = {KV8_ROUTER_BLOCKS},
                                .block = {KV8_EXPERTS_SORT_THREADS},
                                .cluster = {KV8_ROUTER_BLOCKS},
                                .dynamic_bytes = bytes};
    return kv8_kernel_get(&form->kernel, device, name, sizeof(kv8_experts_router_args), bytes);
}

static kv8_status get_router_rows(kv8_experts_form *form, kv8_device *device,
                                  const kv8_experts_shape *shape) {
    static const struct {
        int32_t most;
        const char *name;
    } kernels[] = {{32, "kv8_experts_router_rows_x32__sm80"},
                   {128, "kv8_experts_router_rows_x128__sm80"},
                   {256, "kv8_experts_router_rows_x256__sm80"}};
    int which = 0;
    while (shape->num_experts > kernels[which].most) which++;
    const size_t bytes = (size_t)KV8_ROUTER_ROWS_BYTES(kernels[which].most);
    *form = (kv8_experts_form){.x_tiles = 0};
    form->launch =
        (kv8_launch){.grid = {1}, .block = {KV8_ROUTER_ROWS_THREADS}, .dynamic_bytes = bytes};
    form->rows = KV8_ROUTER_ROWS_EACH;
    return kv8_kernel_get(&form->kernel, device, kernels[which].name,
                          sizeof(kv8_experts_router_args), bytes);
}

static kv8_status get_router_columns(kv8_experts_kernels *k, kv8_device *device,
                                     const kv8_experts_shape *shape) {
    static const char *const names[2][NUM_COLUMNS] = {
        {"kv8_experts_router_columns_x32_r16__sm90", "kv8_experts_router_columns_x32_r32__sm90"},
        {"kv8_experts_router_columns_x128_r16__sm90", "kv8_experts_router_columns_x128_r32__sm90"}};
    const bool few = shape->num_experts <= 32;
    const size_t bytes = (size_t)KV8_ROUTER_COLUMNS_BYTES(few ? 32 : 128);
    const size_t room = kv8_device_get_info(device)->shared_bytes_per_block;
    for (int i = 0; i < NUM_COLUMNS; i++) k->router_columns[i] = (kv8_experts_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, names[0][R16]) || shape->num_experts > KV8_ROUTER_EXPERTS ||
        shape->hidden > KV8_ROUTER_COLUMNS_MAX_HIDDEN ||
        bytes + KV8_ROUTER_COLUMNS_STATIC_BYTES > room)
        return KV8_OK;
    for (int i = 0; i < NUM_COLUMNS; i++) {
        kv8_experts_form *const form = &k->router_columns[i];
        form->rows = (i + 1) * KV8_ROUTER_ROWS_EACH;
        form->launch = (kv8_launch){.grid = {KV8_ROUTER_BLOCKS},
                                    .block = {32 * KV8_ROUTER_COLUMNS_WARPS},
                                    .cluster = {KV8_ROUTER_BLOCKS},
                                    .dynamic_bytes = bytes};
        KV8_TRY(kv8_kernel_get(&form->kernel, device, names[!few][i],
                               sizeof(kv8_experts_router_args), bytes));
    }
    kv8_experts_form *const one = &k->router_columns[R16];
    KV8_TRY(kv8_kernel_max_clusters(&one->kernel, &one->launch, &k->router_clusters));
    if (k->router_clusters == 0) one->launch.grid[0] = 0;
    return KV8_OK;
}

kv8_status kv8_experts_kernels_get(kv8_experts_kernels *k, kv8_device *device,
                                   const kv8_experts_shape *shape) {
    const struct {
        kv8_kernel *kernel;
        const char *name;
        size_t args_bytes;
    } kernels[] = {
        {&k->load, "kv8_experts_load__sm80", sizeof(kv8_experts_load_args)},
        {&k->choose, "kv8_experts_choose__sm80", sizeof(kv8_experts_route_args)},
        {&k->sort, "kv8_experts_sort__sm80", sizeof(kv8_experts_route_args)},
        {&k->route_few, "kv8_experts_route_few__sm80", sizeof(kv8_experts_route_args)},
        {&k->combine, "kv8_experts_combine__sm80", sizeof(kv8_experts_combine_args)},
        {&k->combine_norm, "kv8_experts_combine_norm__sm80", sizeof(kv8_experts_combine_args)},
    };
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        KV8_TRY(
            kv8_kernel_get(kernels[i].kernel, device, kernels[i].name, kernels[i].args_bytes, 0));
    KV8_TRY(get_router(&k->router, device, shape));
    KV8_TRY(get_router_columns(k, device, shape));
    KV8_TRY(get_router_rows(&k->router_rows, device, shape));
    for (int which = 0; which < NUM_TILES; which++)
        KV8_TRY(get_pack(&k->packs[which], device, which));
    for (int part = 0; part < NUM_PARTS; part++) {
        for (int which = 0; which < NUM_STREAMS; which++) {
            KV8_TRY(get_stream(&k->streams[part][which], device, shape, part, which));
            KV8_TRY(get_whole(&k->whole[part][which], device, shape, part, which, WHOLE));
            KV8_TRY(get_whole(&k->scaled[part][which], device, shape, part, which, SCALED));
        }
        for (int which = 0; which < NUM_TILES; which++)
            KV8_TRY(get_tiles(&k->tiles[part][which], device, part, which));
        if (k->streams[part][X8].x_tiles == 0)
            return kv8_fail(KV8_ERR_UNSUPPORTED,
                            "experts: %s is %d, whose rows do not fit in the %llu bytes of shared "
                            "memory of %s",
                            part == GATE_UP ? "hidden" : "intermediate",
                            kv8_experts_part_cols(shape, part),
                            (unsigned long long)kv8_device_get_info(device)->shared_bytes_per_block,
                            kv8_device_get_info(device)->name);
    }
    return KV8_OK;
}
