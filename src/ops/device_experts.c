/* device_experts.c - the experts on a GPU, the host's part: memory and the launches. What the
 * kernels do is in cuda/experts_*.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_experts.h"

#include "device_experts_kernels.h"
#include "rowwise_args.h"

struct kv8_device_experts {
    kv8_device *device;
    kv8_experts_shape shape;
    int32_t max_rows;
    bool has_fixed_order; /* kv8_device_experts_fix_order */
    kv8_experts_kernels kernels;
    void *memory; /* of all below, in device memory */
    kv8_experts_routing routing;
    /* f16 [max_rows * top_k, intermediate] in the order of routing.sorted, or packed. */
    uint16_t *gated;
    float
        *down; /* [max_rows * top_k, hidden] by place; until then the rows of gate and up, packed */
};

/* --- sizes --- */

size_t kv8_experts_part_bytes(const kv8_experts_shape *shape, kv8_experts_part part) {
    return (size_t)kv8_experts_strips_of(shape, (int)part, NULL).expert_bytes;
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
        kv8_max_i64(kv8_experts_part_rows(shape, GATE_UP), kv8_experts_part_rows(shape, DOWN)) /
        KV8_STRIP_ROWS;
    const int64_t cost = (KV8_EXPERTS_STRIP_COST + KV8_EXPERTS_TILE_COST) * strips;
    return (int32_t)kv8_min_i64(INT32_MAX / KV8_EXPERTS_MAX_TOP_K,
                                (int64_t)UINT32_MAX / (cost * shape->top_k));
}

/* Of `places` rows, packed or not. */
static size_t packed_bytes(const kv8_experts_shape *shape, int part, size_t places) {
    const size_t rows = KV8_EXPERTS_PACKED_ROWS(places, (size_t)shape->num_experts);
    return rows * (size_t)kv8_round_up(kv8_experts_part_cols(shape, part), KV8_TILE_COLS) *
           sizeof(uint16_t);
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
    KV8_TRY(kv8_experts_kernels_get(&made.kernels, device, shape));
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
    return e->kernels.router.launch.grid[0] != 0 && !e->has_fixed_order && n <= KV8_ROUTER_ROWS;
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
    const kv8_expert_strips w = kv8_experts_strips_of(&e->shape, (int)part, to);
    const kv8_experts_load_args args = {.blocks = from->blocks,
                                        .scales = from->scales,
                                        .bias = from->bias,
                                        .strips = to,
                                        .rows = kv8_experts_part_rows(&e->shape, (int)part),
                                        .cols = w.cols,
                                        .strip_bytes = w.strip_bytes,
                                        .num_tiles = w.num_tiles,
                                        .paired = part == KV8_EXPERTS_GATE_UP};
    if (from->count == 0) return KV8_OK;
    const kv8_launch launch = {.grid = {(uint32_t)w.num_strips, (uint32_t)from->count},
                               .block = {KV8_EXPERTS_LOAD_THREADS}};
    return kv8_kernel_launch(&e->kernels.load, stream, &launch, &args);
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
    return launch_early(&e->kernels.sort, stream, sort, a);
}

/* By columns, of two groups of rows a cluster where clusters of one would not all run at once; of
 * many rows, and under a fixed order, by rows. */
static const kv8_experts_form *choose_router(const kv8_device_experts *e, int32_t n) {
    const kv8_experts_form *const forms = e->kernels.router_columns;
    if (forms[R16].launch.grid[0] == 0 || e->has_fixed_order || n > KV8_ROUTER_COLUMNS_ROWS)
        return &e->kernels.router_rows;
    const int64_t clusters = kv8_ceil_div(n, forms[R16].rows);
    return &forms[clusters > e->kernels.router_clusters ? R32 : R16];
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
        return launch_early(&e->kernels.router.kernel, stream, e->kernels.router.launch, &a);
    const kv8_experts_form *const form = choose_router(e, args->n);
    kv8_launch launch = form->launch;
    launch.grid[0] *= (uint32_t)kv8_ceil_div(args->n, form->rows);
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
        return launch_early(&e->kernels.route_few, stream, few, &a);
    const uint32_t blocks = (uint32_t)kv8_ceil_div(args->n, KV8_EXPERTS_CHOOSE_THREADS / 32);
    const kv8_launch choose = {.grid = {blocks}, .block = {KV8_EXPERTS_CHOOSE_THREADS}};
    KV8_TRY(launch_early(&e->kernels.choose, stream, choose, &a));
    return sort_places(e, stream, &a);
}

/* Rows of many sequences choose as if by chance, about as many each expert. Those of a chunk of one
 * are alike: some experts have a quarter of all, others none. */
static bool are_alike(const kv8_experts_args *args) {
    enum { LEAST_ROWS = 16, MOST_SEQS = 8 }; /* of a sequence; of about as many rows */
    return args->seq_rows >= LEAST_ROWS && (int64_t)MOST_SEQS * args->seq_rows >= args->n;
}

/* Streams that sum as tiles do, for a fixed order. */
static bool has_scaled(const kv8_device_experts *e) {
    return e->kernels.scaled[GATE_UP][X8].launch.grid[0] > 0 &&
           e->kernels.scaled[DOWN][X8].launch.grid[0] > 0;
}

/* Has every warp several pairs of strips, whole? Those sum in another order. */
static bool takes_whole(const kv8_device_experts *e, int part, int which, int64_t places) {
    enum { ROWS_IN_HALVES = 3, PAIRS = 5 }; /* of an expert; of a warp, of all experts' */
    const int64_t blocks = e->kernels.whole[part][which].launch.grid[0],
                  experts = e->shape.num_experts;
    const int64_t pairs = experts * kv8_experts_part_rows(&e->shape, part) / (2 * KV8_STRIP_ROWS);
    return blocks > 0 && !e->has_fixed_order && 2 * places >= ROWS_IN_HALVES * experts &&
           pairs >= PAIRS * KV8_EXPERTS_WHOLE_WARPS * blocks;
}

/* Which kernels on wgmma, by rows an expert on average; -1: none, where there are few or the GPU
 * has them not. They sum in another order than the streaming ones, but for those of scaled
 * weights. */
static int choose_tiles(const kv8_device_experts *e, const kv8_experts_args *args) {
    enum { FROM_WHOLE = 12 }; /* where streams take whole strips */
    static const int32_t from[2][NUM_TILES] = {{9, 40, 104}, {4, 20, 20}}; /* [alike] */
    const int64_t places = (int64_t)args->n * e->shape.top_k, experts = e->shape.num_experts;
    const bool alike = are_alike(args);
    int which = -1;
    while (which + 1 < NUM_TILES && places >= from[alike][which + 1] * experts) which++;
    if ((e->has_fixed_order && !has_scaled(e)) || which < 0) return -1;
    if (!alike && places < FROM_WHOLE * experts && takes_whole(e, DOWN, X16, places)) return -1;
    const bool exist = e->kernels.packs[which].launch.grid[0] != 0 &&
                       e->kernels.tiles[GATE_UP][which].launch.grid[0] != 0 &&
                       e->kernels.tiles[DOWN][which].launch.grid[0] != 0;
    return exist ? which : -1;
}

/* By rows an expert on average: some experts have twice as many. */
static const kv8_experts_form *choose_stream(const kv8_device_experts *e, int part, int32_t n) {
    enum { X16_FROM = 22, X16_FROM_WHOLE = 21 }; /* in quarters of a row */
    const int64_t places = (int64_t)n * e->shape.top_k, experts = e->shape.num_experts;
    if (takes_whole(e, part, X16, places) && 4 * places >= X16_FROM_WHOLE * experts)
        return &e->kernels.whole[part][X16];
    if (takes_whole(e, part, X8, places)) return &e->kernels.whole[part][X8];
    const bool many = n > 8 && 4 * places > X16_FROM * experts;
    const kv8_experts_form *const forms =
        e->has_fixed_order && has_scaled(e) ? e->kernels.scaled[part] : e->kernels.streams[part];
    return &forms[many && forms[X16].x_tiles > 0 ? X16 : X8];
}

static kv8_status launch_mapped(const kv8_device_experts *e, kv8_stream *stream,
                                const kv8_experts_form *form, const kv8_experts_matmul_args *a) {
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
    return launch_early(&e->kernels.packs[tiles].kernel, stream, e->kernels.packs[tiles].launch,
                        &a);
}

static kv8_status multiply(const kv8_device_experts *e, kv8_stream *stream, int part,
                           const kv8_experts_form *form, const void *weights, const void *x,
                           void *y) {
    const kv8_experts_matmul_args a = {.routing = e->routing,
                                       .w = kv8_experts_strips_of(&e->shape, part, weights),
                                       .x = x,
                                       .y = y,
                                       .num_experts = e->shape.num_experts,
                                       .top_k = e->shape.top_k,
                                       .x_row_bytes = kv8_experts_x_row_bytes(&e->shape, part),
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
    if (args->normed != NULL) return launch_early(&e->kernels.combine_norm, stream, rows, &a);
    const int64_t threads = (int64_t)args->n * (e->shape.hidden / 4);
    const kv8_launch launch = {
        .grid = {(uint32_t)kv8_ceil_div(threads, KV8_EXPERTS_COMBINE_THREADS)},
        .block = {KV8_EXPERTS_COMBINE_THREADS}};
    return launch_early(&e->kernels.combine, stream, launch, &a);
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
    const kv8_experts_form *forms[NUM_PARTS];
    for (int part = 0; part < NUM_PARTS; part++)
        forms[part] = tiles < 0 ? choose_stream(e, part, args->n) : &e->kernels.tiles[part][tiles];
    KV8_TRY(pack(e, stream, tiles, x, &x));
    KV8_TRY(multiply(e, stream, GATE_UP, forms[GATE_UP], args->gate_up, x, e->gated));
    KV8_TRY(multiply(e, stream, DOWN, forms[DOWN], args->down, e->gated, e->down));
    return combine(e, stream, args);
}
