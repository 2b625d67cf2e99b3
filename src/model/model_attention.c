/* model_attention.c - a step's attention: plans and page tables kept per shape of cache.
 *
 * Plans depend on the cache's dtypes, windows and page size, so a set of them is made when a cache
 * of a new shape first appears and kept while that shape is used. A step prepares each plan once,
 * for all layers that have it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "model.h"

/* --- does the cache belong to this model? --- */

static kv8_status check_shape(const kv8_model *model, const kv8_cache_shape *shape) {
    const kv8_model_info *const c = &model->info;
    const struct {
        const char *what;
        int32_t has, must;
    } checks[] = {{"layers", shape->num_layers, c->num_layers},
                  {"kv heads", shape->num_kv_heads, c->num_kv_heads},
                  {"k head_dim", shape->k_head_dim, c->head_dim},
                  {"v head_dim", shape->v_head_dim, c->head_dim}};
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; i++) {
        if (checks[i].has != checks[i].must)
            return kv8_fail(KV8_ERR_INVALID, "the cache has %s = %d, this model needs %d",
                            checks[i].what, checks[i].has, checks[i].must);
    }
    return KV8_OK;
}

/* The cache may keep more than a layer sees, never less. */
static kv8_status check_window(const kv8_model *model, int32_t layer, int32_t kept) {
    const int32_t window = model->window_left[layer];
    if (kept == -1 || (window != -1 && kept >= window)) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID,
                    "layer %d: the cache keeps a window of %d, this layer needs %d", layer, kept,
                    window);
}

bool kv8_same_layer(const kv8_cache_layer *stored, const kv8_cache_layer *layer) {
    return stored->k_dtype == layer->k_dtype && stored->v_dtype == layer->v_dtype &&
           stored->window_left == layer->window_left;
}

/* Pages and model lie together. */
static kv8_status check_place(const kv8_model *model, const kv8_cache_shape *shape) {
    const kv8_model_options *const o = &model->options;
    if (shape->device == o->device && (o->device == NULL || shape->stream == o->stream))
        return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "the cache's pages lie %s, this model computes %s",
                    shape->device == NULL        ? "in host memory"
                    : shape->device == o->device ? "on another stream"
                                                 : "on a GPU",
                    o->device == NULL ? "on the host" : "on a GPU");
}

kv8_status kv8_model_check_cache(const kv8_model *model, const kv8_cache *cache,
                                 kv8_cache_shape *shape_out) {
    kv8_cache_get_shape(cache, shape_out);
    KV8_TRY(check_place(model, shape_out));
    return check_shape(model, shape_out);
}

kv8_status kv8_model_read_layer(const kv8_model *model, const kv8_cache *cache, int32_t layer,
                                kv8_cache_layer *stored_out) {
    KV8_TRY(kv8_cache_get_layer(cache, layer, stored_out));
    stored_out->k_scale = stored_out->v_scale = NULL;
    return check_window(model, layer, stored_out->window_left);
}

static bool fits(const kv8_model *model, const kv8_cache *cache, const kv8_cache_shape *shape) {
    const kv8_model_attention *const set = &model->attention;
    if (!set->ready || shape->page_size != set->shape.page_size ||
        shape->max_seq_len != set->shape.max_seq_len)
        return false;
    for (int32_t i = 0; i < set->num_layers; i++) {
        kv8_cache_layer layer;
        if (kv8_cache_get_layer(cache, i, &layer) != KV8_OK ||
            !kv8_same_layer(&set->layers[i].stored, &layer))
            return false;
    }
    return true;
}

/* --- building --- */

/* Rounding Q to bf16 (2^-9) is as K's rounding, or disappears beside it, where K has no more bits,
 * and lets the plan take bf16 products; beside f16 and f32 it would be the larger error. Figures:
 * docs/design/evaluation.md. */
static kv8_dtype q_dtype_for(const kv8_cache_layer *stored) {
    const kv8_dtype both[] = {stored->k_dtype, stored->v_dtype};
    for (int i = 0; i < 2; i++) {
        if (both[i] == KV8_F32 || both[i] == KV8_F16) return KV8_F32;
    }
    return KV8_BF16;
}

static kv8_status create_plan(kv8_model *model, int32_t layer) {
    const kv8_model_info *const c = &model->info;
    kv8_model_attention *const set = &model->attention;
    kv8_layer_attention *const entry = &set->layers[layer];
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = c->num_qo_heads;
    spec.num_kv_heads = c->num_kv_heads;
    spec.head_dim = c->head_dim;
    spec.q_dtype = entry->q_dtype;
    spec.k_dtype = entry->stored.k_dtype;
    spec.v_dtype = entry->stored.v_dtype;
    spec.o_dtype = KV8_F32;
    spec.page_size = set->shape.page_size;
    spec.window_left = model->window_left[layer];
    spec.causal = 1;
    spec.batch_invariant = model->options.batch_invariant == 1;
    spec.isa = model->options.isa;
    spec.max_batch = model->options.max_step_seqs;
    spec.max_total_q = model->options.max_step_tokens;
    spec.max_kv_len = model->options.max_seq_len;
    const kv8_status status = kv8_attention_plan_create(&entry->plan, &spec, model->options.threads,
                                                        model->options.allocator);
    if (status != KV8_OK) return kv8_fail_within(status, "layer %d", layer);
    return kv8_buffers_take(&set->buffers, (int64_t)kv8_attention_workspace_size(entry->plan), 1,
                            "attention workspace", &entry->workspace);
}

/* The first layer, this one at the latest, whose plan and pages are this one's. */
static int32_t find_owner(const kv8_model *model, const kv8_cache *cache, int32_t layer) {
    const kv8_layer_attention *const layers = model->attention.layers;
    for (int32_t i = 0; i < layer; i++) {
        if (kv8_same_layer(&layers[i].stored, &layers[layer].stored) &&
            model->window_left[i] == model->window_left[layer] &&
            kv8_cache_same_group(cache, i, layer))
            return i;
    }
    return layer;
}

/* Assigns every layer to the table of the first layer it shares pages with. */
static void group_layers(kv8_model_attention *set, const kv8_cache *cache) {
    for (int32_t i = 0; i < set->num_layers; i++) {
        int32_t group = 0;
        while (group < set->num_groups && !kv8_cache_same_group(cache, set->tables[group].layer, i))
            group++;
        if (group == set->num_groups) set->tables[set->num_groups++].layer = i;
        set->layers[i].group = group;
    }
}

static kv8_status create_tables(kv8_model *model, const kv8_cache *cache) {
    kv8_model_attention *const set = &model->attention;
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(&set->buffers, set->num_layers, sizeof *set->tables, "table list",
                             &memory));
    set->tables = memory;
    group_layers(set, cache);
    const int64_t seqs = model->options.max_step_seqs;
    const int32_t longest =
        (int32_t)kv8_min_i64(model->options.max_seq_len, set->shape.max_seq_len);
    set->capacity = seqs * kv8_ceil_div(longest, set->shape.page_size);
    /* One buffer for all groups: indptr, last_page_len, indices of each. */
    const int64_t per_group = (seqs + 1) + seqs + set->capacity;
    KV8_TRY(kv8_buffers_take(&set->buffers, set->num_groups * per_group, sizeof(int32_t),
                             "page tables", &memory));
    int32_t *at = memory;
    for (int32_t g = 0; g < set->num_groups; g++, at += per_group) {
        set->tables[g].indptr = at;
        set->tables[g].last_page_len = at + seqs + 1;
        set->tables[g].indices = at + 2 * seqs + 1;
    }
    return KV8_OK;
}

static kv8_status create_layers(kv8_model *model, const kv8_cache *cache) {
    kv8_model_attention *const set = &model->attention;
    void *memory = NULL;
    KV8_TRY(kv8_buffers_take(&set->buffers, model->info.num_layers, sizeof *set->layers,
                             "attention plans", &memory));
    set->layers = memory;
    set->num_layers = model->info.num_layers;
    for (int32_t i = 0; i < set->num_layers; i++) {
        kv8_layer_attention *const entry = &set->layers[i];
        KV8_TRY(kv8_model_read_layer(model, cache, i, &entry->stored));
        entry->q_dtype = q_dtype_for(&entry->stored);
        entry->owner = find_owner(model, cache, i);
        if (entry->owner == i) KV8_TRY(create_plan(model, i));
        entry->plan = set->layers[entry->owner].plan;
        entry->workspace = set->layers[entry->owner].workspace;
    }
    const int64_t scales = (int64_t)model->options.max_step_seqs * model->info.num_kv_heads;
    KV8_TRY(kv8_buffers_take(&set->buffers, scales, sizeof(float), "scales", &memory));
    set->k_scale = memory;
    KV8_TRY(kv8_buffers_take(&set->buffers, scales, sizeof(float), "scales", &memory));
    set->v_scale = memory;
    const int64_t q_values =
        (int64_t)model->options.max_step_tokens * model->info.num_qo_heads * model->info.head_dim;
    KV8_TRY(
        kv8_buffers_take(&set->buffers, q_values, sizeof *set->q_rounded, "rounded q", &memory));
    set->q_rounded = memory;
    return KV8_OK;
}

void kv8_model_attention_release(kv8_model *model) {
    kv8_model_attention *const set = &model->attention;
    for (int32_t i = 0; i < set->num_layers; i++) {
        if (set->layers[i].owner == i) kv8_attention_plan_destroy(set->layers[i].plan);
    }
    kv8_buffers_release(&set->buffers);
    *set = (kv8_model_attention){0};
}

kv8_status kv8_model_attention_fit(kv8_model *model, const kv8_cache *cache) {
    kv8_model_attention *const set = &model->attention;
    kv8_cache_shape shape;
    KV8_TRY(kv8_model_check_cache(model, cache, &shape));
    if (fits(model, cache, &shape)) return KV8_OK;
    kv8_model_attention_release(model);
    set->buffers.allocator = model->options.allocator;
    set->shape = shape;
    kv8_status status = create_layers(model, cache);
    if (status == KV8_OK) status = create_tables(model, cache);
    if (status != KV8_OK) {
        kv8_model_attention_release(model);
        return status;
    }
    set->ready = true;
    return KV8_OK;
}

/* --- running --- */

static kv8_page_table page_table_of(const kv8_group_table *table) {
    kv8_page_table pages = KV8_PAGE_TABLE_INIT;
    pages.page_indptr = table->indptr;
    pages.page_indices = table->indices;
    pages.last_page_len = table->last_page_len;
    return pages;
}

/* What all layers of a group have in common. */
static kv8_attention_args batch_args(const kv8_step *step, const kv8_page_table *pages) {
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = step->num_seqs;
    args.qo_indptr = step->indptr;
    args.pages = pages;
    return args;
}

kv8_status kv8_model_attention_load(kv8_model *model, const kv8_cache *cache,
                                    const kv8_step *step) {
    const kv8_model_attention *const set = &model->attention;
    for (int32_t g = 0; g < set->num_groups; g++) {
        const kv8_group_table *const table = &set->tables[g];
        KV8_TRY(kv8_cache_page_table(cache, table->layer, step->seqs, step->num_seqs, table->indptr,
                                     table->indices, set->capacity, table->last_page_len));
    }
    for (int32_t i = 0; i < set->num_layers; i++) {
        const kv8_layer_attention *const entry = &set->layers[i];
        if (entry->owner != i) continue;
        const kv8_page_table pages = page_table_of(&set->tables[entry->group]);
        const kv8_attention_args args = batch_args(step, &pages);
        KV8_TRY(kv8_attention_prepare(entry->plan, &args, entry->workspace));
    }
    return KV8_OK;
}

/* Quantises and stores the step's K and V rows; rotates K on the way when it is not yet. */
static kv8_status store(const kv8_model *model, kv8_cache *cache, int32_t layer,
                        const kv8_step *step, const kv8_layer_rows *rows, bool rotated) {
    const kv8_model_info *const c = &model->info;
    const int64_t width = (int64_t)c->num_kv_heads * c->head_dim;
    const kv8_append append = {.struct_size = sizeof(kv8_append),
                               .num_seqs = step->num_seqs,
                               .seqs = step->seqs,
                               .indptr = step->indptr,
                               .src_dtype = KV8_F32,
                               .k = rows->k,
                               .k_stride_row = width,
                               .k_stride_head = c->head_dim,
                               .v = rows->v,
                               .v_stride_row = width,
                               .v_stride_head = c->head_dim,
                               .cos_sin = rotated ? NULL : rows->cos_sin};
    return kv8_cache_append(cache, layer, &append);
}

/* The step's rotated K and Q, and V. */
static kv8_status observe(const kv8_model *model, int32_t layer, int32_t num_rows,
                          const kv8_layer_rows *rows) {
    const kv8_model_info *const c = &model->info;
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    KV8_TRY(kv8_observer_get_options(model->observer, &options));
    kv8_observe_args args = KV8_OBSERVE_ARGS_INIT;
    args.num_rows = num_rows;
    args.src_dtype = KV8_F32;
    args.k = rows->k;
    args.v = rows->v;
    args.k_stride_row = args.v_stride_row = (int64_t)c->num_kv_heads * c->head_dim;
    args.q = options.num_qo_heads > 0 ? rows->q : NULL;
    args.q_stride_row = (int64_t)c->num_qo_heads * c->head_dim;
    args.k_stride_head = args.v_stride_head = args.q_stride_head = c->head_dim;
    return kv8_observer_add(model->observer, layer, &args);
}

kv8_status kv8_model_attention_run(kv8_model *model, kv8_cache *cache, int32_t layer,
                                   const kv8_step *step, const kv8_layer_rows *rows) {
    const kv8_model_info *const c = &model->info;
    const kv8_model_attention *const set = &model->attention;
    const kv8_layer_attention *const entry = &set->layers[layer];
    const int64_t width = (int64_t)c->num_qo_heads * c->head_dim;
    const size_t num_rows = (size_t)step->indptr[step->num_seqs];
    const bool observes = model->observer != NULL && kv8_observer_is_on(model->observer);
    /* The fused append keeps no rotated K to look at; its bytes are those of the two steps. */
    if (observes)
        kv8_rope_apply(rows->rope, rows->cos_sin, num_rows, rows->k, c->num_kv_heads,
                       (int64_t)c->num_kv_heads * c->head_dim, c->head_dim);
    KV8_TRY(store(model, cache, layer, step, rows, observes));
    KV8_TRY(kv8_cache_scales(cache, layer, step->seqs, step->num_seqs, set->k_scale, set->v_scale));
    kv8_rope_apply(rows->rope, rows->cos_sin, num_rows, rows->q, c->num_qo_heads, width,
                   c->head_dim);
    if (observes) KV8_TRY(observe(model, layer, (int32_t)num_rows, rows));
    if (entry->q_dtype == KV8_BF16)
        KV8_TRY(kv8_narrow(model->options.isa, KV8_BF16, rows->q, num_rows * (size_t)width, 1,
                           set->q_rounded, NULL));
    const kv8_page_table pages = page_table_of(&set->tables[entry->group]);
    kv8_attention_args args = batch_args(step, &pages);
    args.q = entry->q_dtype == KV8_BF16 ? (const void *)set->q_rounded : rows->q;
    args.q_stride_row = width;
    args.q_stride_head = c->head_dim;
    kv8_paged k = KV8_PAGED_INIT, v = KV8_PAGED_INIT;
    KV8_TRY(kv8_cache_layer_kv(cache, layer, &k, &v));
    args.k = &k;
    args.v = &v;
    args.sink_logit = model->options.without_sinks ? NULL : rows->sink_logit;
    args.k_scale = set->k_scale;
    args.v_scale = set->v_scale;
    args.k_scale_stride_batch = args.v_scale_stride_batch = c->num_kv_heads;
    args.k_scale_stride_head = args.v_scale_stride_head = 1;
    args.o = rows->attended;
    args.o_stride_row = width;
    args.o_stride_head = c->head_dim;
    return kv8_attention_run(entry->plan, &args, entry->workspace);
}
