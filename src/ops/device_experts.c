/* device_experts.c - the experts on a GPU, the host's part: memory, the form of every kernel, and
 * the launches. What the kernels do is in cuda/experts_*.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_experts.h"

#include "experts_args.h"
#include "rowwise_args.h"

enum { GATE_UP = KV8_EXPERTS_GATE_UP, DOWN = KV8_EXPERTS_DOWN, NUM_PARTS };
/* Streaming kernels by the most rows of an item: 8, or 16. */
enum { X8, X16, NUM_STREAMS };
/* Kernels on wgmma by the rows of a work. */
enum { X48, X96, X192, NUM_TILES };
static const int32_t tile_rows[NUM_TILES] = {48, 96, 192};

/* A kernel of one part and how it is launched. */
typedef struct kernel_form {
    kv8_kernel kernel;
    kv8_launch launch; /* grid 0: this GPU has it not */
    int32_t x_tiles;   /* of a streaming kernel */
    int32_t rows;      /* of a kernel on wgmma, which takes kv8_experts_tiles_args */
} kernel_form;

struct kv8_device_experts {
    kv8_device *device;
    kv8_experts_shape shape;
    int32_t max_rows;
    bool has_fixed_order; /* kv8_device_experts_fix_order */
    kv8_kernel load, choose, sort, route_few, combine, combine_norm;
    kernel_form router; /* from the residual stream to the routing of few rows */
    kernel_form router_columns, router_rows; /* the same of more, but for the sort */
    kernel_form streams[NUM_PARTS][NUM_STREAMS], tiles[NUM_PARTS][NUM_TILES], packs[NUM_TILES];
    kernel_form whole[NUM_PARTS][NUM_STREAMS]; /* streams in which a warp has whole strips */
    void *memory;                              /* of all below, in device memory */
    kv8_experts_routing routing;
    /* f16 [max_rows * top_k, intermediate] in the order of routing.sorted, or packed. */
    uint16_t *gated;
    float
        *down; /* [max_rows * top_k, hidden] by place; until then the rows of gate and up, packed */
};

/* --- sizes --- */

static int32_t part_rows(const kv8_experts_shape *shape, int part) {
    return part == GATE_UP ? 2 * shape->intermediate : shape->hidden;
}
static int32_t part_cols(const kv8_experts_shape *shape, int part) {
    return part == GATE_UP ? shape->hidden : shape->intermediate;
}

static kv8_expert_strips strips_of(const kv8_experts_shape *shape, int part, const void *data) {
    const int32_t cols = part_cols(shape, part);
    kv8_expert_strips w = {.data = data,
                           .num_strips = part_rows(shape, part) / KV8_STRIP_ROWS,
                           .num_tiles = (int32_t)kv8_ceil_div(cols, KV8_TILE_COLS),
                           .cols = cols};
    w.strip_bytes =
        w.num_tiles * (KV8_TILE_CODE_BYTES + KV8_TILE_SCALE_BYTES) + KV8_STRIP_END_BYTES;
    w.expert_bytes = (int64_t)w.num_strips * w.strip_bytes;
    return w;
}

size_t kv8_experts_part_bytes(const kv8_experts_shape *shape, kv8_experts_part part) {
    return (size_t)strips_of(shape, (int)part, NULL).expert_bytes;
}

static kv8_status check_shape(const kv8_experts_shape *s) {
    const struct {
        const char *name;
        int32_t value, least, most, multiple;
    } sizes[] = {{"num_experts", s->num_experts, 1, KV8_EXPERTS_MAX, 1},
                 {"top_k", s->top_k, 1, KV8_EXPERTS_MAX_TOP_K, 1},
                 {"hidden", s->hidden, 32, 1 << 16, 32},
                 {"intermediate", s->intermediate, 32, 1 << 16, 32}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int32_t value = sizes[i].value;
        if (value < sizes[i].least || value > sizes[i].most || value % sizes[i].multiple != 0)
            return kv8_fail(KV8_ERR_INVALID,
                            "experts: %s is %d, must be %d to %d, a multiple of %d", sizes[i].name,
                            value, sizes[i].least, sizes[i].most, sizes[i].multiple);
    }
    if (s->top_k > s->num_experts)
        return kv8_fail(KV8_ERR_INVALID, "experts: top_k is %d, there are %d experts", s->top_k,
                        s->num_experts);
    return KV8_OK;
}

/* The streaming kernels count the cost of all strips in 32 bits. */
static int32_t find_most_rows(const kv8_experts_shape *shape) {
    const int64_t strips =
        kv8_max_i64(part_rows(shape, GATE_UP), part_rows(shape, DOWN)) / KV8_STRIP_ROWS;
    const int64_t cost = (KV8_EXPERTS_STRIP_COST + KV8_EXPERTS_TILE_COST) * strips;
    return (int32_t)kv8_min_i64(INT32_MAX / KV8_EXPERTS_MAX_TOP_K,
                                (int64_t)UINT32_MAX / (cost * shape->top_k));
}

/* Of `places` rows, packed or not. */
static size_t packed_bytes(const kv8_experts_shape *shape, int part, size_t places) {
    const size_t rows = KV8_EXPERTS_PACKED_ROWS(places, (size_t)shape->num_experts);
    return rows * (size_t)kv8_round_up(part_cols(shape, part), KV8_TILE_COLS) * sizeof(uint16_t);
}

/* The arrays of the workspace, one after another; returns their bytes. memory NULL: counts. */
static size_t lay_out(kv8_device_experts *e, uint8_t *memory) {
    const size_t places = (size_t)e->max_rows * (size_t)e->shape.top_k;
    const size_t gated = packed_bytes(&e->shape, DOWN, places);
    const size_t packed = packed_bytes(&e->shape, GATE_UP, places);
    const size_t down = places * (size_t)e->shape.hidden * sizeof *e->down;
    const struct {
        void **array;
        size_t bytes;
    } arrays[] = {
        {(void **)&e->routing.ids, places},
        {(void **)&e->routing.weights, places * sizeof *e->routing.weights},
        {(void **)&e->routing.offsets,
         ((size_t)e->shape.num_experts + 1) * sizeof *e->routing.offsets},
        {(void **)&e->routing.sorted, places * sizeof *e->routing.sorted},
        {(void **)&e->gated, gated},
        {(void **)&e->down, packed > down ? packed : down},
    };
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        if (memory != NULL) *arrays[i].array = memory + bytes;
        bytes += kv8_round_up(arrays[i].bytes, 256);
    }
    return bytes;
}

size_t kv8_device_experts_workspace_bytes(const kv8_experts_shape *shape, int32_t max_rows) {
    kv8_device_experts e = {.shape = *shape, .max_rows = max_rows};
    return lay_out(&e, NULL);
}

/* --- forms of the kernels --- */

/* Where the GPU has them, those that the copy engine feeds. */
enum { BY_LANES, BULK, NUM_RINGS };
static const char *const stream_names[NUM_RINGS][NUM_PARTS][NUM_STREAMS] = {
    {{"kv8_experts_gate_up_x8__sm80", "kv8_experts_gate_up_x16__sm80"},
     {"kv8_experts_down_x8__sm80", "kv8_experts_down_x16__sm80"}},
    {{"kv8_experts_gate_up_x8__sm90", "kv8_experts_gate_up_x16__sm90"},
     {"kv8_experts_down_x8__sm90", "kv8_experts_down_x16__sm90"}}};

/* Rows in shared memory, padded so that eight of them lie in different banks. */
static int32_t x_row_bytes(const kv8_experts_shape *shape, int part) {
    return strips_of(shape, part, NULL).num_tiles * KV8_TILE_COLS * 2 + 16;
}

/* Threads and shared memory of a streaming kernel: `bytes`, and two tiles of rows where there is
 * room, or of items of one tile one. x_tiles 0: they do not fit. */
static kernel_form form_of_stream(kv8_device *device, const kv8_experts_shape *shape, int part,
                                  int which, uint32_t threads, size_t bytes) {
    const size_t room =
        kv8_device_get_info(device)->shared_bytes_per_block - KV8_EXPERTS_STATIC_BYTES;
    const size_t tile_bytes = 8 * (size_t)x_row_bytes(shape, part);
    const int32_t least = which == X8 ? 1 : KV8_EXPERTS_ITEM_TILES;
    int32_t tiles = KV8_EXPERTS_ITEM_TILES;
    while (tiles >= least && bytes + (size_t)tiles * tile_bytes > room) tiles--;
    if (tiles < least) return (kernel_form){.x_tiles = 0};
    return (kernel_form){
        .x_tiles = tiles,
        .launch = {.block = {threads}, .dynamic_bytes = bytes + (size_t)tiles * tile_bytes}};
}

/* As many blocks as the GPU holds, if it has the kernel. */
static kv8_status get_stream_kernel(kernel_form *form, kv8_device *device, const char *name) {
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
static kv8_status get_stream(kernel_form *form, kv8_device *device, const kv8_experts_shape *shape,
                             int part, int which) {
    const int ring = kv8_kernel_exists(device, stream_names[BULK][part][which]) ? BULK : BY_LANES;
    const int32_t num_tiles = strips_of(shape, part, NULL).num_tiles;
    const int32_t ring_bytes = ring == BULK
                                   ? KV8_EXPERTS_TEAM_WARPS * KV8_EXPERTS_BULK_RING_BYTES(num_tiles)
                                   : KV8_EXPERTS_TEAM_BYTES;
    const size_t team_bytes = (size_t)(ring_bytes + KV8_EXPERTS_SUM_BYTES);
    *form = (kernel_form){.x_tiles = 0};
    for (uint32_t teams = KV8_EXPERTS_MAX_TEAMS; teams > 0 && form->x_tiles == 0; teams /= 2)
        *form = form_of_stream(device, shape, part, which, teams * KV8_EXPERTS_TEAM_THREADS,
                               teams * team_bytes);
    return get_stream_kernel(form, device, stream_names[ring][part][which]);
}

/* The same where a warp has whole strips. */
static kv8_status get_whole(kernel_form *form, kv8_device *device, const kv8_experts_shape *shape,
                            int part, int which) {
    static const char *const names[NUM_PARTS][NUM_STREAMS] = {
        {"kv8_experts_gate_up_x8_whole__sm90", "kv8_experts_gate_up_x16_whole__sm90"},
        {"kv8_experts_down_x8_whole__sm90", "kv8_experts_down_x16_whole__sm90"}};
    *form = form_of_stream(device, shape, part, which, 32 * KV8_EXPERTS_WHOLE_WARPS,
                           KV8_EXPERTS_WHOLE_BYTES);
    return get_stream_kernel(form, device, names[part][which]);
}

/* On wgmma, where the GPU has it. */
static kv8_status get_tiles(kernel_form *form, kv8_device *device, int part, int which) {
    static const char *const names[NUM_PARTS][NUM_TILES] = {
        {"kv8_experts_gate_up_x48__sm90a", "kv8_experts_gate_up_x96__sm90a",
         "kv8_experts_gate_up_x192__sm90a"},
        {"kv8_experts_down_x48__sm90a", "kv8_experts_down_x96__sm90a",
         "kv8_experts_down_x192__sm90a"}};
    const int32_t rows = tile_rows[which];
    *form = (kernel_form){.rows = rows};
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
static kv8_status get_pack(kernel_form *form, kv8_device *device, int which) {
    static const char *const names[NUM_TILES] = {"kv8_experts_pack_x48__sm90a",
                                                 "kv8_experts_pack_x96__sm90a",
                                                 "kv8_experts_pack_x192__sm90a"};
    enum { BLOCKS_EACH = 4 };
    *form = (kernel_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, names[which])) return KV8_OK;
    form->launch =
        (kv8_launch){.grid = {BLOCKS_EACH * (uint32_t)kv8_device_get_info(device)->num_sms},
                     .block = {KV8_EXPERTS_PACK_THREADS}};
    return kv8_kernel_get(&form->kernel, device, names[which], sizeof(kv8_experts_pack_args), 0);
}

static kv8_status get_router(kernel_form *form, kv8_device *device,
                             const kv8_experts_shape *shape) {
    static const char name[] = "kv8_experts_router__sm90";
    const size_t bytes = KV8_ROUTER_BYTES((size_t)shape->hidden);
    const size_t room = kv8_device_get_info(device)->shared_bytes_per_block;
    *form = (kernel_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, name) || shape->num_experts > KV8_ROUTER_EXPERTS ||
        shape->hidden > KV8_ROUTER_MAX_HIDDEN || bytes + KV8_ROUTER_STATIC_BYTES > room)
        return KV8_OK;
    form->launch = (kv8_launch){.grid = {KV8_ROUTER_BLOCKS},
                                .block = {KV8_EXPERTS_SORT_THREADS},
                                .cluster = {KV8_ROUTER_BLOCKS},
                                .dynamic_bytes = bytes};
    return kv8_kernel_get(&form->kernel, device, name, sizeof(kv8_experts_router_args), bytes);
}

static kv8_status get_router_rows(kernel_form *form, kv8_device *device,
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
    *form = (kernel_form){.x_tiles = 0};
    form->launch =
        (kv8_launch){.grid = {1}, .block = {KV8_ROUTER_ROWS_THREADS}, .dynamic_bytes = bytes};
    return kv8_kernel_get(&form->kernel, device, kernels[which].name,
                          sizeof(kv8_experts_router_args), bytes);
}

static kv8_status get_router_columns(kernel_form *form, kv8_device *device,
                                     const kv8_experts_shape *shape) {
    const bool few = shape->num_experts <= 32;
    const char *const name =
        few ? "kv8_experts_router_columns_x32__sm90" : "kv8_experts_router_columns_x128__sm90";
    const size_t bytes = (size_t)KV8_ROUTER_COLUMNS_BYTES(few ? 32 : 128);
    const size_t room = kv8_device_get_info(device)->shared_bytes_per_block;
    *form = (kernel_form){.x_tiles = 0};
    if (!kv8_kernel_exists(device, name) || shape->num_experts > KV8_ROUTER_EXPERTS ||
        shape->hidden > KV8_ROUTER_COLUMNS_MAX_HIDDEN || bytes + KV8_ROUTER_STATIC_BYTES > room)
        return KV8_OK;
    form->launch = (kv8_launch){.grid = {KV8_ROUTER_BLOCKS},
                                .block = {32 * KV8_ROUTER_COLUMNS_WARPS},
                                .cluster = {KV8_ROUTER_BLOCKS},
                                .dynamic_bytes = bytes};
    return kv8_kernel_get(&form->kernel, device, name, sizeof(kv8_experts_router_args), bytes);
}

static kv8_status get_kernels(kv8_device_experts *e) {
    const struct {
        kv8_kernel *kernel;
        const char *name;
        size_t args_bytes;
    } kernels[] = {
        {&e->load, "kv8_experts_load__sm80", sizeof(kv8_experts_load_args)},
        {&e->choose, "kv8_experts_choose__sm80", sizeof(kv8_experts_route_args)},
        {&e->sort, "kv8_experts_sort__sm80", sizeof(kv8_experts_route_args)},
        {&e->route_few, "kv8_experts_route_few__sm80", sizeof(kv8_experts_route_args)},
        {&e->combine, "kv8_experts_combine__sm80", sizeof(kv8_experts_combine_args)},
        {&e->combine_norm, "kv8_experts_combine_norm__sm80", sizeof(kv8_experts_combine_args)},
    };
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        KV8_TRY(kv8_kernel_get(kernels[i].kernel, e->device, kernels[i].name, kernels[i].args_bytes,
                               0));
    KV8_TRY(get_router(&e->router, e->device, &e->shape));
    KV8_TRY(get_router_columns(&e->router_columns, e->device, &e->shape));
    KV8_TRY(get_router_rows(&e->router_rows, e->device, &e->shape));
    for (int which = 0; which < NUM_TILES; which++)
        KV8_TRY(get_pack(&e->packs[which], e->device, which));
    for (int part = 0; part < NUM_PARTS; part++) {
        for (int which = 0; which < NUM_STREAMS; which++) {
            KV8_TRY(get_stream(&e->streams[part][which], e->device, &e->shape, part, which));
            KV8_TRY(get_whole(&e->whole[part][which], e->device, &e->shape, part, which));
        }
        for (int which = 0; which < NUM_TILES; which++)
            KV8_TRY(get_tiles(&e->tiles[part][which], e->device, part, which));
        if (e->streams[part][X8].x_tiles == 0)
            return kv8_fail(
                KV8_ERR_UNSUPPORTED,
                "experts: %s is %d, whose rows do not fit in the %llu bytes of shared "
                "memory of %s",
                part == GATE_UP ? "hidden" : "intermediate", part_cols(&e->shape, part),
                (unsigned long long)kv8_device_get_info(e->device)->shared_bytes_per_block,
                kv8_device_get_info(e->device)->name);
    }
    return KV8_OK;
}

/* --- life --- */

kv8_status kv8_device_experts_create(kv8_device_experts **out, kv8_device *device,
                                     const kv8_experts_shape *shape, int32_t max_rows) {
    KV8_REQUIRE(out, device, shape);
    *out = NULL;
    KV8_TRY(check_shape(shape));
    const int32_t most_rows = find_most_rows(shape);
    if (max_rows < 1 || max_rows > most_rows)
        return kv8_fail(KV8_ERR_INVALID, "experts: max_rows is %d, must be 1 to %d", max_rows,
                        most_rows);
    kv8_device_experts made = {.device = device, .shape = *shape, .max_rows = max_rows};
    KV8_TRY(get_kernels(&made));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof made, "experts", &memory));
    kv8_device_experts *const e = memory;
    *e = made;
    const kv8_status status = kv8_device_alloc(device, lay_out(e, NULL), &e->memory);
    if (status != KV8_OK) {
        kv8_device_experts_destroy(e);
        return status;
    }
    lay_out(e, e->memory);
    *out = e;
    return KV8_OK;
}

void kv8_device_experts_destroy(kv8_device_experts *experts) {
    if (experts == NULL) return;
    kv8_device_free(experts->device, experts->memory);
    kv8_release(NULL, experts, 1, sizeof *experts);
}

void kv8_device_experts_fix_order(kv8_device_experts *experts) {
    experts->has_fixed_order = true;
}

const kv8_experts_routing *kv8_device_experts_get_routing(const kv8_device_experts *experts) {
    return &experts->routing;
}

const int32_t *kv8_device_experts_get_offsets(const kv8_device_experts *experts) {
    return experts->routing.offsets;
}

/* Has the GPU the kernel that sorts too, of few rows? */
static bool has_router(const kv8_device_experts *e, int32_t n) {
    return e->router.launch.grid[0] != 0 && !e->has_fixed_order && n <= KV8_ROUTER_ROWS;
}

/* --- launches --- */

kv8_status kv8_device_experts_load(const kv8_device_experts *e, kv8_stream *stream,
                                   kv8_experts_part part, const kv8_experts_source *from,
                                   void *to) {
    KV8_REQUIRE(e, stream, from, to);
    if ((uintptr_t)from->blocks % 16 != 0 || (uintptr_t)to % 32 != 0)
        return kv8_fail(KV8_ERR_INVALID, "experts: %s at %p, must be aligned to %d bytes",
                        (uintptr_t)to % 32 != 0 ? "weights" : "blocks",
                        (uintptr_t)to % 32 != 0 ? to : (void *)(uintptr_t)from->blocks,
                        (uintptr_t)to % 32 != 0 ? 32 : 16);
    const kv8_expert_strips w = strips_of(&e->shape, (int)part, to);
    const kv8_experts_load_args args = {.blocks = from->blocks,
                                        .scales = from->scales,
                                        .bias = from->bias,
                                        .strips = to,
                                        .rows = part_rows(&e->shape, (int)part),
                                        .cols = w.cols,
                                        .strip_bytes = w.strip_bytes,
                                        .num_tiles = w.num_tiles,
                                        .paired = part == KV8_EXPERTS_GATE_UP};
    if (from->count == 0) return KV8_OK;
    const kv8_launch launch = {.grid = {(uint32_t)w.num_strips, (uint32_t)from->count},
                               .block = {KV8_EXPERTS_LOAD_THREADS}};
    return kv8_kernel_launch(&e->load, stream, &launch, &args);
}

/* Ahead of its turn: the kernels wait themselves. */
static kv8_status launch_early(const kv8_kernel *kernel, kv8_stream *stream, kv8_launch launch,
                               const void *args) {
    launch.overlaps_previous = true;
    return kv8_kernel_launch(kernel, stream, &launch, args);
}

static kv8_status sort_places(const kv8_device_experts *e, kv8_stream *stream,
                              const kv8_experts_route_args *a) {
    const kv8_launch sort = {.grid = {(uint32_t)e->shape.num_experts},
                             .block = {KV8_EXPERTS_SORT_THREADS}};
    return launch_early(&e->sort, stream, sort, a);
}

static kv8_status run_router(const kv8_device_experts *e, kv8_stream *stream,
                             const kv8_experts_args *args, const kv8_experts_route_args *route) {
    const kv8_experts_router *const r = args->router;
    const kv8_experts_router_args a = {.route = *route,
                                       .x = args->residual,
                                       .w = r->w,
                                       .bias = r->bias,
                                       .gain = r->gain,
                                       .normed = r->normed,
                                       .hidden = e->shape.hidden,
                                       .eps = r->eps};
    if (has_router(e, args->n))
        return launch_early(&e->router.kernel, stream, e->router.launch, &a);
    const bool by_columns = e->router_columns.launch.grid[0] != 0 && !e->has_fixed_order &&
                            args->n <= KV8_ROUTER_COLUMNS_ROWS;
    const kernel_form *const form = by_columns ? &e->router_columns : &e->router_rows;
    kv8_launch launch = form->launch;
    launch.grid[0] *= (uint32_t)kv8_ceil_div(args->n, KV8_ROUTER_ROWS_EACH);
    KV8_TRY(launch_early(&form->kernel, stream, launch, &a));
    return sort_places(e, stream, route);
}

static kv8_status route(const kv8_device_experts *e, kv8_stream *stream,
                        const kv8_experts_args *args) {
    KV8_RANGE("routing and gather");
    const kv8_experts_route_args a = {.routing = e->routing,
                                      .logits = args->logits,
                                      .live_rows = args->live_rows,
                                      .n = args->n,
                                      .num_experts = e->shape.num_experts,
                                      .top_k = e->shape.top_k};
    if (args->router != NULL) return run_router(e, stream, args, &a);
    const kv8_launch few = {.grid = {1}, .block = {KV8_EXPERTS_SORT_THREADS}};
    if (args->n * e->shape.top_k <= KV8_EXPERTS_FEW_PLACES)
        return launch_early(&e->route_few, stream, few, &a);
    const uint32_t blocks = (uint32_t)kv8_ceil_div(args->n, KV8_EXPERTS_CHOOSE_THREADS / 32);
    const kv8_launch choose = {.grid = {blocks}, .block = {KV8_EXPERTS_CHOOSE_THREADS}};
    KV8_TRY(launch_early(&e->choose, stream, choose, &a));
    return sort_places(e, stream, &a);
}

/* Rows of many sequences choose as if by chance, about as many each expert. Those of a chunk of one
 * are alike: some experts have a quarter of all, others none. */
static bool are_alike(const kv8_experts_args *args) {
    enum { LEAST_ROWS = 16, MOST_SEQS = 8 }; /* of a sequence; of about as many rows */
    return args->seq_rows >= LEAST_ROWS && (int64_t)MOST_SEQS * args->seq_rows >= args->n;
}

/* Has every warp several pairs of strips, whole? Those sum in another order. */
static bool takes_whole(const kv8_device_experts *e, int part, int which, int64_t places) {
    enum { ROWS_IN_HALVES = 3, PAIRS = 5 }; /* of an expert; of a warp, of all experts' */
    const int64_t blocks = e->whole[part][which].launch.grid[0], experts = e->shape.num_experts;
    const int64_t pairs = experts * part_rows(&e->shape, part) / (2 * KV8_STRIP_ROWS);
    return blocks > 0 && !e->has_fixed_order && 2 * places >= ROWS_IN_HALVES * experts &&
           pairs >= PAIRS * KV8_EXPERTS_WHOLE_WARPS * blocks;
}

/* Which kernels on wgmma, by rows an expert on average; -1: none, where there are few or the GPU
 * has them not. They sum in another order than the streaming ones. */
static int choose_tiles(const kv8_device_experts *e, const kv8_experts_args *args) {
    enum { FROM_WHOLE = 12 }; /* where streams take whole strips */
    static const int32_t from[2][NUM_TILES] = {{9, 40, 104}, {4, 20, 20}}; /* [alike] */
    const int64_t places = (int64_t)args->n * e->shape.top_k, experts = e->shape.num_experts;
    const bool alike = are_alike(args);
    int which = -1;
    while (which + 1 < NUM_TILES && places >= from[alike][which + 1] * experts) which++;
    if (e->has_fixed_order || which < 0) return -1;
    if (!alike && places < FROM_WHOLE * experts && takes_whole(e, DOWN, X16, places)) return -1;
    const bool exist = e->packs[which].launch.grid[0] != 0 &&
                       e->tiles[GATE_UP][which].launch.grid[0] != 0 &&
                       e->tiles[DOWN][which].launch.grid[0] != 0;
    return exist ? which : -1;
}

/* By rows an expert on average: some experts have twice as many. */
static const kernel_form *choose_stream(const kv8_device_experts *e, int part, int32_t n) {
    enum { X16_FROM = 22, X16_FROM_WHOLE = 21 }; /* in quarters of a row */
    const int64_t places = (int64_t)n * e->shape.top_k, experts = e->shape.num_experts;
    if (takes_whole(e, part, X16, places) && 4 * places >= X16_FROM_WHOLE * experts)
        return &e->whole[part][X16];
    if (takes_whole(e, part, X8, places)) return &e->whole[part][X8];
    const bool many = n > 8 && 4 * places > X16_FROM * experts;
    return &e->streams[part][many && e->streams[part][X16].x_tiles > 0 ? X16 : X8];
}

static kv8_status launch_mapped(const kv8_device_experts *e, kv8_stream *stream,
                                const kernel_form *form, const kv8_experts_matmul_args *a) {
    kv8_experts_tiles_args mapped = {.product = *a};
    const kv8_expert_strips *const w = &a->w;
    const int64_t strips = (int64_t)w->num_strips * e->shape.num_experts;
    const int64_t code_bytes = (int64_t)w->num_tiles * KV8_TILE_CODE_BYTES;
    const int64_t scale_bytes = (int64_t)w->num_tiles * KV8_TILE_SCALE_BYTES;
    KV8_TRY(kv8_words_map_make(mapped.codes_map, e->device, w->data, strips, code_bytes / 8,
                               w->strip_bytes, KV8_EXPERTS_GROUP_STRIPS(form->rows),
                               KV8_EXPERTS_W_CODE_BYTES / 8));
    KV8_TRY(kv8_words_map_make(
        mapped.scales_map, e->device, w->data + code_bytes, strips, scale_bytes / 8, w->strip_bytes,
        KV8_EXPERTS_GROUP_STRIPS(form->rows), KV8_EXPERTS_W_SCALE_BYTES / 8));
    return launch_early(&form->kernel, stream, form->launch, &mapped);
}

/* *x_out: the rows as the kernels of gate and up take them. */
static kv8_status pack(const kv8_device_experts *e, kv8_stream *stream, int tiles, const void *x,
                       const void **x_out) {
    *x_out = x;
    if (tiles < 0) return KV8_OK;
    KV8_RANGE("routing and gather");
    const kv8_experts_pack_args a = {.routing = e->routing,
                                     .x = x,
                                     .packed = (uint16_t *)e->down,
                                     .gated = e->gated,
                                     .num_experts = e->shape.num_experts,
                                     .top_k = e->shape.top_k,
                                     .cols = e->shape.hidden,
                                     .gated_cols = e->shape.intermediate};
    *x_out = a.packed;
    return launch_early(&e->packs[tiles].kernel, stream, e->packs[tiles].launch, &a);
}

static kv8_status multiply(const kv8_device_experts *e, kv8_stream *stream, int part,
                           const kernel_form *form, const void *weights, const void *x, void *y) {
    const kv8_experts_matmul_args a = {.routing = e->routing,
                                       .w = strips_of(&e->shape, part, weights),
                                       .x = x,
                                       .y = y,
                                       .num_experts = e->shape.num_experts,
                                       .top_k = e->shape.top_k,
                                       .x_row_bytes = x_row_bytes(&e->shape, part),
                                       .x_tiles = form->x_tiles,
                                       .alpha = e->shape.alpha,
                                       .limit = e->shape.limit};
    return form->rows > 0 ? launch_mapped(e, stream, form, &a)
                          : launch_early(&form->kernel, stream, form->launch, &a);
}

static kv8_status combine(const kv8_device_experts *e, kv8_stream *stream,
                          const kv8_experts_args *args) {
    const kv8_experts_combine_args a = {.weights = e->routing.weights,
                                        .y = e->down,
                                        .residual = args->residual,
                                        .live_rows = args->live_rows,
                                        .n = args->n,
                                        .top_k = e->shape.top_k,
                                        .hidden = e->shape.hidden,
                                        .eps = args->eps,
                                        .gain = args->next_gain,
                                        .normed = args->normed};
    const kv8_launch rows = {.grid = {(uint32_t)args->n}, .block = {KV8_ROWWISE_THREADS}};
    if (args->normed != NULL) return launch_early(&e->combine_norm, stream, rows, &a);
    const int64_t threads = (int64_t)args->n * (e->shape.hidden / 4);
    const kv8_launch launch = {
        .grid = {(uint32_t)kv8_ceil_div(threads, KV8_EXPERTS_COMBINE_THREADS)},
        .block = {KV8_EXPERTS_COMBINE_THREADS}};
    return launch_early(&e->combine, stream, launch, &a);
}

kv8_status kv8_device_experts_run(kv8_device_experts *e, kv8_stream *stream,
                                  const kv8_experts_args *args) {
    KV8_REQUIRE(e, stream, args);
    if (args->n < 0 || args->n > e->max_rows)
        return kv8_fail(KV8_ERR_INVALID, "experts: %d rows, must be 0 to %d", args->n, e->max_rows);
    if (args->n == 0) return KV8_OK;
    KV8_RANGE("experts");
    KV8_TRY(route(e, stream, args));
    const void *x = args->router != NULL ? args->router->normed : args->x;
    const int tiles = choose_tiles(e, args);
    const kernel_form *forms[NUM_PARTS];
    for (int part = 0; part < NUM_PARTS; part++)
        forms[part] = tiles < 0 ? choose_stream(e, part, args->n) : &e->tiles[part][tiles];
    KV8_TRY(pack(e, stream, tiles, x, &x));
    KV8_TRY(multiply(e, stream, GATE_UP, forms[GATE_UP], args->gate_up, x, e->gated));
    KV8_TRY(multiply(e, stream, DOWN, forms[DOWN], args->down, e->gated, e->down));
    return combine(e, stream, args);
}
