/* model_attention_device.c - plans, tables and calls of a step's attention on a GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_device.h"

/* --- does the set fit the cache? --- */

static kv8_status read_place(const kv8_cache *cache, int32_t layer, kv8_layer_place *out) {
    out->k = out->v = (kv8_paged)KV8_PAGED_INIT;
    KV8_TRY(kv8_cache_layer_kv(cache, layer, &out->k, &out->v));
    return kv8_cache_get_device_layer(cache, layer, &out->own);
}

static bool same_place(const kv8_layer_place *a, const kv8_layer_place *b) {
    return a->k.data == b->k.data && a->v.data == b->v.data &&
           a->k.stride_page == b->k.stride_page && a->k.stride_slot == b->k.stride_slot &&
           a->k.stride_head == b->k.stride_head && a->own.k_scale == b->own.k_scale &&
           a->own.counters == b->own.counters &&
           a->own.pages.page_indptr == b->own.pages.page_indptr;
}

static bool fits(const kv8_device_attention *set, const kv8_cache *cache,
                 const kv8_cache_shape *shape) {
    if (set->num_kinds == 0 || shape->page_size != set->shape.page_size ||
        shape->max_seq_len != set->shape.max_seq_len || shape->max_seqs != set->shape.max_seqs)
        return false;
    for (int32_t i = 0; i < set->num_layers; i++) {
        kv8_cache_layer layer;
        kv8_layer_place place;
        if (kv8_cache_get_layer(cache, i, &layer) != KV8_OK ||
            !kv8_same_layer(&set->kinds[set->layers[i].kind].stored, &layer) ||
            read_place(cache, i, &place) != KV8_OK || !same_place(&set->layers[i], &place))
            return false;
    }
    return true;
}

/* --- plans --- */

/* 1, 4 and 32 requests where a step has more, then as many as it has. */
static void set_classes(kv8_device_attention *set, int32_t max_seqs) {
    static const int32_t sizes[KV8_DECODE_CLASSES - 1] = {1, 4, 32};
    for (int c = 0; c < KV8_DECODE_CLASSES - 1; c++)
        set->class_seqs[c] = sizes[c] < max_seqs ? sizes[c] : 0;
    set->class_seqs[KV8_DECODE_CLASSES - 1] = set->class_seqs[KV8_CHUNK_CLASS] = max_seqs;
}

/* Rows that the bounds of the plan for chunks name: so many that a kernel for many rows is taken,
 * whose calls may have few. */
static int32_t chunk_rows(const kv8_model *model) {
    enum { LEAST_PACKED = 65 };
    const int32_t group = model->info.num_qo_heads / model->info.num_kv_heads;
    const int64_t least = kv8_ceil_div((int64_t)LEAST_PACKED * model->options.max_step_seqs, group);
    return (int32_t)kv8_max_i64(model->options.max_step_tokens, least);
}

/* Products with K and V are of f16, which has three bits more, but of bf16 where a format has its
 * range. */
static kv8_dtype q_dtype_of(const kv8_cache_layer *stored) {
    return stored->k_dtype == KV8_BF16 || stored->v_dtype == KV8_BF16 ? KV8_BF16 : KV8_F16;
}

/* Of one request with one row. */
static kv8_attention_spec layer_spec(const kv8_model *model, const kv8_cache_layer *stored,
                                     int32_t window_left, const kv8_cache_shape *shape) {
    const kv8_model_info *const c = &model->info;
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = c->num_qo_heads;
    spec.num_kv_heads = c->num_kv_heads;
    spec.head_dim = c->head_dim;
    spec.q_dtype = q_dtype_of(stored);
    spec.o_dtype = KV8_F16;
    spec.k_dtype = stored->k_dtype;
    spec.v_dtype = stored->v_dtype;
    spec.page_size = shape->page_size;
    spec.window_left = window_left;
    spec.causal = 1;
    spec.batch_invariant = model->options.batch_invariant == 1;
    spec.max_batch = spec.max_total_q = 1;
    spec.max_kv_len = (int32_t)kv8_min_i64(model->options.max_seq_len, shape->max_seq_len);
    return spec;
}

static kv8_attention_spec spec_of(const kv8_model *model, const kv8_layer_kind *kind,
                                  int class_idx) {
    const kv8_device_attention *const set = model->on_device->attention;
    kv8_attention_spec spec = layer_spec(model, &kind->stored, kind->window_left, &set->shape);
    spec.max_batch = set->class_seqs[class_idx];
    spec.max_total_q = class_idx == KV8_CHUNK_CLASS ? chunk_rows(model) : spec.max_batch;
    return spec;
}

kv8_status kv8_device_attention_check(const kv8_model *model, kv8_device *device,
                                      const kv8_cache *cache, const kv8_cache_shape *shape) {
    kv8_cache_layer stored, before = KV8_CACHE_LAYER_INIT;
    for (int32_t i = 0; i < model->info.num_layers; i++, before = stored) {
        KV8_TRY(kv8_model_read_layer(model, cache, i, &stored));
        if (i > 0 && stored.k_dtype == before.k_dtype && stored.v_dtype == before.v_dtype) continue;
        const kv8_attention_spec spec = layer_spec(model, &stored, model->window_left[i], shape);
        kv8_attention_device_plan *plan = NULL;
        KV8_TRY(kv8_attention_device_plan_create(&plan, device, &spec, model->options.allocator));
        kv8_attention_device_plan_destroy(plan);
    }
    return KV8_OK;
}

static kv8_status create_class(const kv8_model *model, kv8_layer_kind *kind, int class_idx) {
    const kv8_model_options *const o = &model->options;
    const kv8_attention_spec spec = spec_of(model, kind, class_idx);
    kv8_device_plan *const out = &kind->classes[class_idx];
    KV8_TRY(kv8_attention_device_plan_create(&out->plan, o->device, &spec, o->allocator));
    KV8_TRY(kv8_device_alloc(o->device, kv8_attention_device_workspace_size(out->plan),
                             &out->workspace));
    return kv8_attention_device_workspace_init(out->plan, o->stream, out->workspace);
}

static kv8_status create_kind(const kv8_model *model, kv8_layer_kind *kind) {
    const kv8_device_attention *const set = model->on_device->attention;
    kv8_append_spec append = KV8_APPEND_SPEC_INIT;
    append.num_kv_heads = model->info.num_kv_heads;
    append.k_head_dim = model->info.head_dim;
    append.page_size = set->shape.page_size;
    append.src_dtype = KV8_F32;
    append.k_dtype = kind->stored.k_dtype;
    append.v_dtype = kind->stored.v_dtype;
    KV8_TRY(kv8_append_device_plan_create(&kind->append, model->options.device, &append));
    for (int c = 0; c < KV8_NUM_CLASSES; c++) {
        if (set->class_seqs[c] > 0) KV8_TRY(create_class(model, kind, c));
    }
    return KV8_OK;
}

static void release_kind(const kv8_model *model, kv8_layer_kind *kind) {
    kv8_append_device_plan_destroy(kind->append);
    for (int c = 0; c < KV8_NUM_CLASSES; c++) {
        kv8_attention_device_plan_destroy(kind->classes[c].plan);
        kv8_device_free(model->options.device, kind->classes[c].workspace);
    }
}

/* --- building --- */

const char *kv8_why_not_tokens(const kv8_model *model, kv8_device *device, const kv8_cache *cache) {
    const kv8_device_architecture *const a = model->architecture->device;
    return a->why_not_tokens == NULL ? "of this architecture"
                                     : a->why_not_tokens(model, device, cache);
}

/* The kind of a layer: one that there is, or a new one. */
static kv8_status find_kind(kv8_model *model, const kv8_cache *cache, int32_t layer) {
    kv8_device_attention *const set = model->on_device->attention;
    kv8_cache_layer stored;
    KV8_TRY(kv8_model_read_layer(model, cache, layer, &stored));
    int32_t k = 0;
    while (k < set->num_kinds && !(kv8_same_layer(&set->kinds[k].stored, &stored) &&
                                   set->kinds[k].window_left == model->window_left[layer] &&
                                   kv8_cache_same_group(cache, set->kinds[k].layer, layer)))
        k++;
    set->layers[layer].kind = k;
    if (k < set->num_kinds) return KV8_OK;
    kv8_layer_kind *const kind = &set->kinds[set->num_kinds++];
    kind->stored = stored;
    kind->q_dtype = q_dtype_of(&stored);
    kind->window_left = model->window_left[layer];
    kind->layer = layer;
    const kv8_status status = create_kind(model, kind);
    return status == KV8_OK ? status : kv8_fail_within(status, "layer %d", layer);
}

/* Every array of a set: X(member, count). */
#define EACH_ARRAY(X)     \
    X(kinds, num_layers)  \
    X(layers, num_layers) \
    X(scales, 2 * (size_t)num_layers)

static kv8_status create_set(kv8_model *model, const kv8_cache *cache) {
    kv8_device_attention *const set = model->on_device->attention;
    const int32_t num_layers = set->num_layers = model->info.num_layers;
    void *memory = NULL;
#define X(member, count)                                                                       \
    KV8_TRY(kv8_alloc(set->allocator, (size_t)(count), sizeof *set->member, "attention plans", \
                      &memory));                                                               \
    set->member = memory;
    EACH_ARRAY(X)
#undef X
    set_classes(set, model->options.max_step_seqs);
    for (int32_t i = 0; i < num_layers; i++) {
        KV8_TRY(read_place(cache, i, &set->layers[i]));
        KV8_TRY(find_kind(model, cache, i));
    }
    set->why_not_tokens = kv8_why_not_tokens(model, model->options.device, cache);
    return KV8_OK;
}

static void release_set(const kv8_model *model, kv8_device_attention *set) {
    const int32_t num_layers = set->num_layers;
    for (int32_t k = 0; k < set->num_kinds; k++) release_kind(model, &set->kinds[k]);
#define X(member, count) \
    kv8_release(set->allocator, set->member, (size_t)(count), sizeof *set->member);
    EACH_ARRAY(X)
#undef X
    *set = (kv8_device_attention){.allocator = set->allocator, .version = set->version + 1};
}

void kv8_device_attention_release(kv8_model *model) {
    for (int i = 0; i < KV8_MAX_CACHES; i++) release_set(model, &model->on_device->attentions[i]);
}

/* The set that fits the cache, NULL: none. */
static kv8_device_attention *find_set(kv8_model_device *d, const kv8_cache *cache,
                                      const kv8_cache_shape *shape) {
    for (int i = 0; i < KV8_MAX_CACHES; i++) {
        if (fits(&d->attentions[i], cache, shape)) return &d->attentions[i];
    }
    return NULL;
}

/* One that is empty, or that was used before all others. */
static kv8_device_attention *oldest_set(kv8_model_device *d) {
    kv8_device_attention *oldest = &d->attentions[0];
    for (int i = 1; i < KV8_MAX_CACHES; i++) {
        if (d->attentions[i].last_use < oldest->last_use) oldest = &d->attentions[i];
    }
    return oldest;
}

/* The set of another cache, the oldest; false where no other is left. */
static bool release_other(kv8_model *model) {
    kv8_model_device *const d = model->on_device;
    kv8_device_attention *oldest = NULL;
    for (int i = 0; i < KV8_MAX_CACHES; i++) {
        kv8_device_attention *const set = &d->attentions[i];
        if (set != d->attention && set->last_use > 0 &&
            (oldest == NULL || set->last_use < oldest->last_use))
            oldest = set;
    }
    if (oldest != NULL) release_set(model, oldest);
    return oldest != NULL;
}

kv8_status kv8_device_attention_fit(kv8_model *model, const kv8_cache *cache) {
    kv8_model_device *const d = model->on_device;
    kv8_cache_shape shape;
    KV8_TRY(kv8_model_check_cache(model, cache, &shape));
    d->attention = find_set(d, cache, &shape);
    if (d->attention == NULL) {
        kv8_device_attention *const set = d->attention = oldest_set(d);
        kv8_status status = KV8_OK;
        do {
            release_set(model, set);
            set->shape = shape;
            status = create_set(model, cache);
        } while (status == KV8_ERR_NO_MEMORY && release_other(model));
        if (status != KV8_OK) {
            release_set(model, set);
            return status;
        }
    }
    d->attention->last_use = ++d->num_uses;
    return KV8_OK;
}

/* --- a step --- */

kv8_status kv8_device_attention_load(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                     bool lists_alone) {
    kv8_device_attention *const set = model->on_device->attention;
    KV8_TRY(kv8_cache_load_tables(cache, step->seqs, step->num_seqs, lists_alone));
    for (int32_t i = 0; set->own_scales && i < set->num_layers; i++)
        KV8_TRY(kv8_cache_scales_device(cache, i, step->seqs, step->num_seqs, &set->scales[2 * i],
                                        &set->scales[2 * i + 1]));
    return KV8_OK;
}

/* A layer's scales: one for all sequences, or one for each. */
typedef struct layer_scales {
    const float *k, *v;
    int64_t stride_request;
} layer_scales;

static layer_scales scales_of(const kv8_model *model, int32_t layer) {
    const kv8_device_attention *const set = model->on_device->attention;
    const kv8_cache_device_layer *const own = &set->layers[layer].own;
    if (!set->own_scales) return (layer_scales){own->k_scale, own->v_scale, 0};
    return (layer_scales){set->scales[2 * layer], set->scales[2 * layer + 1],
                          model->info.num_kv_heads};
}

static kv8_status append(const kv8_model *model, int32_t layer, const kv8_device_batch *batch,
                         const kv8_device_layer_rows *rows) {
    const kv8_device_attention *const set = model->on_device->attention;
    const kv8_layer_place *const place = &set->layers[layer];
    const layer_scales scales = scales_of(model, layer);
    kv8_append_args args = KV8_APPEND_ARGS_INIT;
    args.batch = batch->num_seqs;
    args.max_rows = batch->num_rows;
    args.indptr = batch->indptr;
    args.pages = &place->own.pages;
    args.k = rows->k;
    args.v = rows->v;
    args.k_stride_row = args.v_stride_row = rows->kv_stride_row;
    args.k_stride_head = args.v_stride_head = model->info.head_dim;
    args.k_pages = &place->k;
    args.v_pages = &place->v;
    args.k_scale = scales.k;
    args.v_scale = scales.v;
    args.scale_stride_request = scales.stride_request;
    args.scale_stride_head = 1;
    args.cos_sin = rows->cos_sin;
    args.counters = place->own.counters;
    return kv8_append_device_run(set->kinds[place->kind].append, model->options.stream, &args);
}

kv8_dtype kv8_device_attention_q_dtype(const kv8_model *model, int32_t layer) {
    const kv8_device_attention *const set = model->on_device->attention;
    return set->kinds[set->layers[layer].kind].q_dtype;
}

/* K, rotated on the way, V and the rotated Q, of the rows that are somebody's. */
static kv8_status observe(const kv8_model *model, int32_t layer, const kv8_device_batch *batch,
                          const kv8_device_layer_rows *rows) {
    const kv8_model_device *const d = model->on_device;
    kv8_stream *const stream = model->options.stream;
    kv8_observe_args keys = KV8_OBSERVE_ARGS_INIT;
    keys.num_rows = batch->num_rows;
    keys.rows_in_use = batch->indptr + batch->num_seqs;
    kv8_observe_args queries = keys;
    keys.src_dtype = KV8_F32;
    keys.k = rows->k;
    keys.v = rows->v;
    keys.k_stride_row = keys.v_stride_row = rows->kv_stride_row;
    keys.k_stride_head = keys.v_stride_head = model->info.head_dim;
    keys.cos_sin = rows->cos_sin;
    KV8_TRY(kv8_device_observer_add(d->observer, stream, layer, &keys));
    if (!d->observes_q) return KV8_OK;
    queries.src_dtype = kv8_device_attention_q_dtype(model, layer);
    queries.q = rows->q;
    queries.q_stride_row = (int64_t)model->info.num_qo_heads * model->info.head_dim;
    queries.q_stride_head = model->info.head_dim;
    return kv8_device_observer_add(d->observer, stream, layer, &queries);
}

static kv8_attention_args attention_args(const kv8_model *model, int32_t layer,
                                         const kv8_device_batch *batch,
                                         const kv8_device_layer_rows *rows) {
    const kv8_model_info *const c = &model->info;
    const kv8_device_attention *const set = model->on_device->attention;
    const kv8_layer_place *const place = &set->layers[layer];
    const layer_scales scales = scales_of(model, layer);
    kv8_attention_args args = KV8_ATTENTION_ARGS_INIT;
    args.batch = batch->num_seqs;
    args.qo_indptr = batch->indptr;
    args.pages = &place->own.pages;
    args.q = rows->q;
    args.k = &place->k;
    args.v = &place->v;
    args.sink_logit = model->options.without_sinks ? NULL : rows->sink_logit;
    args.k_scale = scales.k;
    args.v_scale = scales.v;
    args.k_scale_stride_batch = args.v_scale_stride_batch = scales.stride_request;
    args.k_scale_stride_head = args.v_scale_stride_head = 1;
    args.o = rows->attended;
    args.q_stride_row = args.o_stride_row = (int64_t)c->num_qo_heads * c->head_dim;
    args.q_stride_head = args.o_stride_head = c->head_dim;
    return args;
}

static const kv8_device_plan *plan_of(const kv8_device_attention *set, const kv8_layer_kind *kind,
                                      const kv8_device_batch *batch) {
    int c = batch->is_decode ? 0 : KV8_CHUNK_CLASS;
    while (batch->num_seqs > set->class_seqs[c]) c++;
    return &kind->classes[c];
}

kv8_status kv8_device_attention_append(kv8_model *model, int32_t layer,
                                       const kv8_device_batch *batch,
                                       const kv8_device_layer_rows *rows) {
    KV8_TRY(append(model, layer, batch, rows));
    return model->on_device->observer == NULL ? KV8_OK : observe(model, layer, batch, rows);
}

kv8_status kv8_device_attention_run(kv8_model *model, int32_t layer, const kv8_device_batch *batch,
                                    const kv8_device_layer_rows *rows) {
    const kv8_device_attention *const set = model->on_device->attention;
    const kv8_layer_kind *const kind = &set->kinds[set->layers[layer].kind];
    const kv8_device_plan *const p = plan_of(set, kind, batch);
    kv8_stream *const stream = model->options.stream;
    KV8_RANGE("attention");
    const kv8_attention_args args = attention_args(model, layer, batch, rows);
    if (layer == kind->layer || batch->indptr == batch->logit_indptr)
        KV8_TRY(kv8_attention_device_prepare(p->plan, stream, &args, p->workspace));
    return kv8_attention_device_run(p->plan, stream, &args, p->workspace);
}
