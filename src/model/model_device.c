/* model_device.c - a model's life on a GPU, and its steps: inputs over, kernels or their graph,
 * logits back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_device.h"

#include <string.h>

/* --- life --- */

/* Integers of a step's inputs for up to so many rows: ids, positions, logit rows, two indptr. */
static size_t input_ints(size_t rows) {
    return 5 * rows + 2;
}

static kv8_status refuse_options(const kv8_model_options *o) {
    if (o->stream == NULL) return kv8_fail(KV8_ERR_INVALID, "device is set and stream is NULL");
    if ((int)o->path < KV8_PATH_AUTO || (int)o->path > KV8_PATH_PERSISTENT)
        return kv8_fail(KV8_ERR_INVALID, "path is %d, must be %d to %d", (int)o->path,
                        (int)KV8_PATH_AUTO, (int)KV8_PATH_PERSISTENT);
    return KV8_OK;
}

static void lay_out(kv8_model *model) {
    kv8_model_device *const d = model->on_device;
    const size_t rows = (size_t)kv8_model_most_rows(model);
    const size_t vocab = (size_t)model->info.vocab_size;
    d->input_device = kv8_device_memory_take(&d->memory, KV8_PART_ACTIVATIONS,
                                             input_ints(rows) * sizeof(int32_t));
    d->logits = kv8_device_memory_take(&d->memory, KV8_PART_LOGITS,
                                       (size_t)d->logit_rows * vocab * sizeof(float));
    d->maxima =
        kv8_device_memory_take(&d->memory, KV8_PART_LOGITS,
                               (size_t)d->logit_rows * (vocab / KV8_MAXIMUM_IDS) * sizeof(float));
    model->architecture->device->lay_out(model, &d->memory);
}

static kv8_status load(kv8_model *model) {
    const kv8_model_options *const o = &model->options;
    kv8_device_loader loader;
    kv8_status status = kv8_device_loader_open(&loader, o->device, o, model->info.bytes);
    if (status == KV8_OK) status = model->architecture->device->load(model, &loader);
    if (status == KV8_OK) status = kv8_device_loader_finish(&loader);
    kv8_device_loader_close(&loader);
    return status;
}

/* Logits of a step of decode at once, and of as many rows of any other as take no more than this.
 */
static int32_t choose_logit_rows(const kv8_model *model) {
    enum { LEAST_ROWS = 16, BYTES = 256 << 20 };
    const kv8_model_options *const o = &model->options;
    const int64_t fitting = BYTES / (model->info.vocab_size * (int64_t)sizeof(float));
    const int64_t of_step = kv8_min_i64(o->max_step_tokens, fitting);
    return (int32_t)kv8_max_i64(kv8_max_i64(o->max_step_seqs, LEAST_ROWS), of_step);
}

/* Everything but memory and weights; counts those. */
static kv8_status create(kv8_model *model) {
    const kv8_model_options *const o = &model->options;
    void *memory = NULL;
    KV8_TRY(refuse_options(o));
    KV8_TRY(kv8_alloc(o->allocator, 1, sizeof(kv8_model_device), "model on a GPU", &memory));
    kv8_model_device *const d = model->on_device = memory;
    d->memory.device = o->device;
    for (int i = 0; i < KV8_MAX_CACHES; i++) d->attentions[i].allocator = o->allocator;
    d->logit_rows = choose_logit_rows(model);
    KV8_TRY(model->architecture->device->create(model));
    lay_out(model);
    return KV8_OK;
}

kv8_status kv8_model_device_open(kv8_model *model) {
    const kv8_model_options *const o = &model->options;
    void *memory = NULL;
    KV8_TRY(create(model));
    kv8_model_device *const d = model->on_device;
    KV8_TRY(kv8_device_memory_allocate(&d->memory));
    lay_out(model);
    const size_t rows = (size_t)kv8_model_most_rows(model);
    KV8_TRY(kv8_device_alloc_host(o->device, input_ints(rows) * sizeof(int32_t), &memory));
    d->input_host = memory;
    return load(model);
}

kv8_status kv8_model_device_count(kv8_model *model, kv8_model_memory *out) {
    KV8_TRY(create(model));
    const kv8_device_memory *const m = &model->on_device->memory;
    *out = (kv8_model_memory){.dense = m->parts[KV8_PART_DENSE],
                              .experts = m->parts[KV8_PART_EXPERTS],
                              .activations = m->parts[KV8_PART_ACTIVATIONS],
                              .logits = m->parts[KV8_PART_LOGITS],
                              .workspaces = m->parts[KV8_PART_WORKSPACES],
                              .total = m->used + m->parts[KV8_PART_WORKSPACES],
                              .loading = m->passing};
    return kv8_device_available(m->device, &out->available);
}

static void drop_graphs(kv8_device_graphs *graphs) {
    for (int i = 0; i < KV8_MAX_GRAPHS; i++) {
        kv8_graph_destroy(graphs->recorded[i]);
        graphs->recorded[i] = NULL;
    }
}
static void drop_all_graphs(kv8_model_device *d) {
    for (int i = 0; i < KV8_MAX_CACHES; i++) drop_graphs(&d->graphs[i]);
}

/* Graphs with an observer count into it, those without do not. */
static kv8_status take_observer(kv8_model *model) {
    kv8_model_device *const d = model->on_device;
    if (d->observer == NULL) return KV8_OK;
    drop_all_graphs(d);
    const kv8_status status =
        kv8_device_observer_read(d->observer, model->options.stream, model->observer);
    kv8_device_observer_destroy(d->observer);
    d->observer = NULL;
    d->observes = false;
    return status;
}

kv8_status kv8_model_device_observe(kv8_model *model, const kv8_observer *observer) {
    kv8_model_device *const d = model->on_device;
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    KV8_TRY(take_observer(model));
    if (observer == NULL) return KV8_OK;
    KV8_TRY(kv8_observer_get_options(observer, &options));
    KV8_TRY(kv8_device_observer_create(&d->observer, model->options.stream, &options));
    d->observes_q = options.num_qo_heads > 0;
    drop_all_graphs(d);
    return KV8_OK;
}

/* The observer is on or off as that of the host is when the step begins. */
static kv8_status follow_observer(kv8_model *model) {
    kv8_model_device *const d = model->on_device;
    if (d->observer == NULL || d->observes == (kv8_observer_is_on(model->observer) != 0))
        return KV8_OK;
    KV8_TRY(d->observes ? kv8_device_observer_stop(d->observer, model->options.stream)
                        : kv8_device_observer_start(d->observer, model->options.stream));
    d->observes = !d->observes;
    return KV8_OK;
}

void kv8_model_device_close(kv8_model *model) {
    kv8_model_device *const d = model->on_device;
    if (d == NULL) return;
    (void)take_observer(model);
    kv8_model_profile_destroy(d->profile, model->options.stream);
    drop_all_graphs(d);
    kv8_device_attention_release(model);
    kv8_device_free_host(d->memory.device, d->input_host);
    kv8_device_memory_release(&d->memory);
    kv8_release(model->options.allocator, d, 1, sizeof *d);
    model->on_device = NULL;
}

/* --- inputs --- */

/* The inputs of a step, in host or device memory, of `capacity` rows each. */
typedef struct inputs {
    int32_t *ids, *positions, *logit_rows, *indptr, *logit_indptr;
} inputs;

static inputs inputs_at(int32_t *base, int32_t capacity) {
    int32_t *const indptr = base + 3 * (size_t)capacity;
    return (inputs){base, base + capacity, base + 2 * (size_t)capacity, indptr,
                    indptr + capacity + 1};
}

static int32_t most_rows_of_seq(const kv8_step *step) {
    int64_t most = 0;
    for (int32_t i = 0; i < step->num_seqs; i++)
        most = kv8_max_i64(most, step->indptr[i + 1] - step->indptr[i]);
    return (int32_t)most;
}

/* Are the rows whose logits are wanted the last ones of their sequences, and not all? */
static bool find_last_rows(const kv8_step *step, int32_t *indptr_out) {
    int32_t count = indptr_out[0] = 0;
    for (int32_t i = 0; i < step->num_seqs; i++) {
        const int32_t first = count, end = step->indptr[i + 1];
        while (count < step->num_logit_rows && step->logit_rows[count] < end) count++;
        if (count > first && step->logit_rows[first] != end - (count - first)) return false;
        indptr_out[i + 1] = count;
    }
    return count < step->indptr[step->num_seqs];
}

/* The step's rows, then rows of nobody up to the batch's. */
static kv8_status send_inputs(kv8_model *model, const kv8_step *step, kv8_device_batch *batch) {
    kv8_model_device *const d = model->on_device;
    const kv8_model_options *const o = &model->options;
    const int32_t num_rows = step->indptr[step->num_seqs];
    const int32_t capacity = batch->is_decode ? o->max_step_seqs : kv8_model_most_rows(model);
    const inputs host = inputs_at(d->input_host, capacity);
    const inputs device = inputs_at(d->input_device, capacity);
    memcpy(host.ids, step->token_ids, (size_t)num_rows * sizeof(int32_t));
    memcpy(host.positions, model->positions, (size_t)num_rows * sizeof(int32_t));
    for (int32_t i = num_rows; i < batch->num_rows; i++) host.ids[i] = host.positions[i] = 0;
    for (int32_t i = 0; i < batch->num_rows; i++)
        host.logit_rows[i] = i < step->num_logit_rows ? step->logit_rows[i] : 0;
    for (int32_t i = 0; i <= batch->num_seqs; i++)
        host.indptr[i] = step->indptr[i < step->num_seqs ? i : step->num_seqs];
    const bool are_last = find_last_rows(step, host.logit_indptr);
    *batch = (kv8_device_batch){.num_rows = batch->num_rows,
                                .num_seqs = batch->num_seqs,
                                .seq_rows = most_rows_of_seq(step),
                                .is_decode = batch->is_decode,
                                .token_ids = device.ids,
                                .positions = device.positions,
                                .logit_rows = device.logit_rows,
                                .indptr = device.indptr,
                                .logit_indptr = are_last ? device.logit_indptr : NULL,
                                .num_logit_rows = step->num_logit_rows};
    const int32_t *const last = are_last ? host.logit_indptr : host.indptr;
    const size_t used = (size_t)(last - d->input_host) + (size_t)batch->num_seqs + 1;
    return kv8_stream_copy(o->stream, d->input_device, d->input_host, used * sizeof(int32_t));
}

/* --- graphs --- */

/* Which graph takes so many rows, and how many it is recorded for; -1: none. */
static int graph_of(int32_t num_rows, int32_t *recorded_out) {
    const int32_t step = num_rows <= 16 ? 1 : num_rows <= 64 ? 8 : 32;
    const int32_t rounded = (int32_t)kv8_ceil_div(num_rows, step) * step;
    *recorded_out = rounded;
    if (rounded > KV8_MAX_GRAPH_ROWS) return -1;
    if (rounded <= 16) return rounded - 1;
    return rounded <= 64 ? 16 + (rounded - 24) / 8 : 22 + (rounded - 96) / 32;
}

static kv8_status enqueue_logits(kv8_model *model, const kv8_device_batch *batch, int32_t first,
                                 int32_t num) {
    KV8_RANGE("head");
    kv8_stream_set_scope(model->options.stream, KV8_HEAD_SCOPE);
    const kv8_status status = model->architecture->device->logits(model, batch, first, num);
    kv8_stream_set_scope(model->options.stream, NULL);
    return status;
}

/* All of a step but its inputs and what the host reads, where logits of every row are wanted. */
static kv8_status enqueue_decode(kv8_model *model, const kv8_device_batch *batch) {
    const kv8_device_architecture *const a = model->architecture->device;
    KV8_TRY(a->layers(model, batch));
    return enqueue_logits(model, batch, 0, batch->num_rows);
}

static kv8_status record(kv8_model *model, const kv8_device_batch *batch, kv8_graph **out) {
    KV8_RANGE("capture of %d rows", batch->num_rows);
    KV8_TRY(kv8_stream_capture_begin(model->options.stream));
    const kv8_status status = enqueue_decode(model, batch);
    const kv8_status ended = kv8_stream_capture_end(model->options.stream, out);
    if (status == KV8_OK) return ended;
    kv8_graph_destroy(*out);
    *out = NULL;
    return status;
}

static kv8_status run_graph(kv8_model *model, const kv8_device_batch *batch,
                            kv8_device_graphs *graphs, int idx) {
    kv8_model_device *const d = model->on_device;
    kv8_graph **const graph = &graphs->recorded[idx];
    if (*graph == NULL) {
        KV8_TRY(record(model, batch, graph));
        graphs->have_maxima[idx] = d->has_maxima;
    }
    d->has_maxima = graphs->have_maxima[idx];
    KV8_RANGE("graph of %d rows", batch->num_rows);
    return kv8_graph_launch(*graph, model->options.stream);
}

/* --- the step --- */

int32_t kv8_model_held_logits(const kv8_model *model) {
    return model->on_device == NULL ? 0 : model->on_device->logit_rows;
}
float *kv8_model_device_logits(const kv8_model *model) {
    return model->on_device->logits;
}
_Static_assert((int)KV8_MAXIMUM_IDS == (int)KV8_DEVICE_MAXIMA_ROWS, "as the head leaves them");
const float *kv8_model_device_maxima(const kv8_model *model) {
    return model->on_device->has_maxima ? model->on_device->maxima : NULL;
}

/* --- the path --- */

/* What a step's path depends on beside the model and the moment. */
typedef struct step_shape {
    int32_t num_seqs, num_rows, num_logit_rows;
    bool own_scales;            /* a sequence has */
    int32_t max_tokens;         /* the architecture's, of one kernel, */
    const char *why_not_tokens; /* and why it is none */
} step_shape;

/* On the GPU; a model on the host would have been opened there with default options. */
static kv8_step_path asked_path(const kv8_model *model) {
    return model->on_device == NULL ? KV8_PATH_AUTO : model->options.path;
}
static bool is_profiled(const kv8_model *model) {
    return model->on_device != NULL && kv8_stream_times_graphs(model->options.stream);
}

static const char *why_not_persistent(const kv8_model *model, const step_shape *s) {
    const kv8_model_device *const d = model->on_device;
    if (s->num_rows > s->num_seqs) return "a sequence has more than one row";
    if (s->num_rows > s->max_tokens) return "the step has more rows than a kernel takes";
    if (s->num_logit_rows < s->num_rows) return "not all logits are wanted";
    if (model->options.num_input_layers > 0) return "layers' inputs are kept";
    if (d == NULL) return s->why_not_tokens;
    if (asked_path(model) == KV8_PATH_EAGER) return "path is eager";
    if (asked_path(model) == KV8_PATH_GRAPH) return "path is graph";
    if (model->options.batch_invariant == 1) return "batch_invariant is asked for";
    if (d->observer != NULL) return "an observer counts";
    if (s->own_scales) return "a sequence has scales of its own";
    if (is_profiled(model)) return "a profile tells kernels apart";
    return s->why_not_tokens;
}

static bool replays(const kv8_model *model, const step_shape *s) {
    return s->num_rows == s->num_seqs && s->num_rows <= KV8_MAX_GRAPH_ROWS &&
           asked_path(model) != KV8_PATH_EAGER && s->num_logit_rows == s->num_rows &&
           !s->own_scales;
}

/* A profile by kernel looks into what is asked for, the graph in the one kernel's place. */
static kv8_status plan(const kv8_model *model, const step_shape *s, kv8_step_plan *out) {
    const char *const why = why_not_persistent(model, s);
    const bool is_token = s->num_rows == 1 && s->num_logit_rows == 1;
    if (why != NULL && asked_path(model) == KV8_PATH_PERSISTENT && is_token && !is_profiled(model))
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "path is persistent, and no kernel computes a token: %s", why);
    *out = (kv8_step_plan){.struct_size = sizeof *out, .why_not_persistent = why};
    out->path = why == NULL         ? KV8_PATH_PERSISTENT
                : replays(model, s) ? KV8_PATH_GRAPH
                                    : KV8_PATH_EAGER;
    return KV8_OK;
}

kv8_status kv8_model_device_plan(const kv8_model *model, const kv8_cache *cache, kv8_device *device,
                                 int32_t num_seqs, int32_t num_rows, kv8_step_plan *out) {
    kv8_cache_shape shape;
    KV8_TRY(kv8_model_check_cache(model, cache, &shape));
    KV8_TRY(kv8_device_attention_check(model, device, cache, &shape));
    const step_shape step = {.num_seqs = num_seqs,
                             .num_rows = num_rows,
                             .num_logit_rows = num_seqs,
                             .max_tokens = model->architecture->device->max_tokens,
                             .why_not_tokens = kv8_why_not_tokens(model, device, cache)};
    return plan(model, &step, out);
}

/* out NULL: they stay. */
static kv8_status read_logits(const kv8_model *model, int32_t first, int32_t num, float *out) {
    if (out == NULL) return KV8_OK;
    const size_t vocab = (size_t)model->info.vocab_size;
    return kv8_stream_copy(model->options.stream, out + (size_t)first * vocab,
                           model->on_device->logits, (size_t)num * vocab * sizeof(float));
}

/* Kernel by kernel; logits as many rows at a time as there is room for. */
static kv8_status run_eager(kv8_model *model, const kv8_step *step, const kv8_device_batch *batch) {
    const kv8_device_architecture *const a = model->architecture->device;
    const int32_t room = model->on_device->logit_rows;
    KV8_TRY(a->layers(model, batch));
    for (int32_t at = 0; at < step->num_logit_rows; at += room) {
        const int32_t num = (int32_t)kv8_min_i64(room, step->num_logit_rows - at);
        KV8_TRY(enqueue_logits(model, batch, at, num));
        KV8_TRY(read_logits(model, at, num, step->logits_out));
    }
    return KV8_OK;
}

static kv8_status wait_for(const kv8_model *model) {
    KV8_RANGE("wait");
    return kv8_stream_synchronize(model->options.stream);
}

kv8_status kv8_model_device_step(kv8_model *model, kv8_cache *cache, const kv8_step *step,
                                 const kv8_step_draw *draw, bool *draws_out) {
    kv8_model_device *const d = model->on_device;
    int32_t recorded = 0;
    KV8_TRY(follow_observer(model));
    d->attention->own_scales = kv8_cache_has_own_scales(cache, step->seqs, step->num_seqs);
    const step_shape shape = {.num_seqs = step->num_seqs,
                              .num_rows = step->indptr[step->num_seqs],
                              .num_logit_rows = step->num_logit_rows,
                              .own_scales = d->attention->own_scales,
                              .max_tokens = model->architecture->device->max_tokens,
                              .why_not_tokens = d->attention->why_not_tokens};
    kv8_step_plan planned;
    KV8_TRY(plan(model, &shape, &planned));
    const bool is_persistent = planned.path == KV8_PATH_PERSISTENT;
    *draws_out = is_persistent && draw != NULL;
    d->has_maxima = false;
    KV8_TRY(kv8_device_attention_load(model, cache, step, is_persistent));
    kv8_device_graphs *const graphs = &d->graphs[d->attention - d->attentions];
    if (graphs->version != d->attention->version || kv8_stream_times_graphs(model->options.stream))
        drop_graphs(graphs);
    graphs->version = d->attention->version;
    kv8_device_batch batch = {.num_rows = shape.num_rows, .num_seqs = shape.num_seqs};
    batch.is_decode = shape.num_rows == shape.num_seqs;
    const int idx = graph_of(shape.num_rows, &recorded);
    /* A graph's tables, of the model and of the cache, hold so many requests. */
    const int32_t most =
        (int32_t)kv8_min_i64(model->options.max_step_seqs, d->attention->shape.max_seqs);
    if (planned.path == KV8_PATH_GRAPH)
        batch.num_rows = batch.num_seqs = (int32_t)kv8_min_i64(recorded, most);
    if (!is_persistent) KV8_TRY(send_inputs(model, step, &batch));
    if (is_persistent) {
        KV8_TRY(model->architecture->device->tokens(model, step, draw));
        KV8_TRY(read_logits(model, 0, shape.num_rows, step->logits_out));
    } else if (planned.path == KV8_PATH_GRAPH) {
        KV8_TRY(run_graph(model, &batch, graphs, idx));
        KV8_TRY(read_logits(model, 0, shape.num_rows, step->logits_out));
    } else {
        KV8_TRY(kv8_stream_begin_piece(model->options.stream, "step"));
        const kv8_status ran = run_eager(model, step, &batch);
        const kv8_status ended = kv8_stream_end_piece(model->options.stream);
        if (ran != KV8_OK) return ran;
        KV8_TRY(ended);
    }
    /* Logits that stay are waited for by whoever reads them. */
    if (step->logits_out != NULL || step->num_logit_rows == 0) KV8_TRY(wait_for(model));
    return kv8_model_profile_add_step(d->profile, model->options.stream);
}

/* --- profiles --- */

kv8_status kv8_model_device_begin_profile(kv8_model *model, bool by_kernel) {
    kv8_model_device *const d = model->on_device;
    kv8_model_profile_destroy(d->profile, model->options.stream);
    d->profile = NULL;
    const kv8_status status =
        kv8_model_profile_create(&d->profile, model->options.device, model->options.stream,
                                 model->info.num_layers, model->info.num_experts, by_kernel);
    if (by_kernel) drop_all_graphs(d);
    return status;
}

kv8_status kv8_model_device_end_profile(kv8_model *model, kv8_profile *out) {
    kv8_model_device *const d = model->on_device;
    if (kv8_stream_times_graphs(model->options.stream)) drop_all_graphs(d);
    return kv8_model_profile_end(d->profile, model->options.stream, out);
}
