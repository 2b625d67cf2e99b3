/* engine.c - an engine's life, its requests and its figures. What a step does is step.c's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "engine_state.h"

enum {
    DEFAULT_REQUESTS = 16,
    MAX_REQUESTS = 1 << 20,
    MAX_LOGIT_ROWS = 1 << 20,
    DEFAULT_PATIENCE_NS = 1000000000,
    /* Ids with a bias or a penalty, of all rows that a GPU draws in a step; biases of a row. */
    MAX_CHANGES = 1 << 22,
    MAX_BIASES = 1 << 10
};

/* --- life --- */

static kv8_status take_array(const kv8_engine *engine, int64_t count, size_t size, void *out) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(engine->allocator, (size_t)count, size, "engine", &memory));
    memcpy(out, &memory, sizeof memory);
    return KV8_OK;
}

/* Every array of an engine: X(member, count). */
#define EACH_ARRAY(X)                                        \
    X(requests, e->max_alive)                                \
    X(seqs, e->max_running)                                  \
    X(indptr, e->max_running + 1)                            \
    X(token_ids, e->step_tokens)                             \
    X(logit_rows, e->max_rows)                               \
    X(shares, e->max_running)                                \
    X(messages, e->max_running)                              \
    X(share_of, e->max_rows)                                 \
    X(bad_ids, e->max_rows)                                  \
    X(bad_logits, e->max_rows)                               \
    X(draws, e->max_rows)                                    \
    X(drawn, e->max_rows)                                    \
    X(logprobs, e->max_rows)                                 \
    X(tops, (int64_t)e->max_rows *KV8_MAX_LOGPROBS)          \
    X(chosen, e->max_running)                                \
    X(events, (int64_t)e->max_running + e->max_alive)        \
    X(events_before, (int64_t)e->max_running + e->max_alive) \
    X(samplers, kv8_threads_count(e->threads))               \
    X(masks, (int64_t)kv8_threads_count(e->threads) * e->mask_words)

static size_t logits_row_bytes(const kv8_engine *e) {
    return (size_t)e->info.vocab_size * sizeof(float);
}

/* Page-locked where a GPU writes them. */
static kv8_status take_logits(kv8_engine *e) {
    kv8_device *const device = kv8_model_get_options(e->model)->device;
    if (device == NULL) return take_array(e, e->max_rows, logits_row_bytes(e), &e->own_logits);
    void *memory = NULL;
    KV8_TRY(kv8_device_alloc_host(device, (size_t)e->max_rows * logits_row_bytes(e), &memory));
    e->own_logits = memory;
    return KV8_OK;
}

static void release_logits(kv8_engine *e) {
    kv8_device *const device = kv8_model_get_options(e->model)->device;
    if (device == NULL)
        kv8_release(e->allocator, e->own_logits, (size_t)e->max_rows, logits_row_bytes(e));
    else
        kv8_device_free_host(device, e->own_logits);
}

static kv8_status take_arrays(kv8_engine *e) {
#define X(member, count) KV8_TRY(take_array(e, count, sizeof *e->member, &e->member));
    EACH_ARRAY(X)
#undef X
    if (e->logits == NULL) {
        KV8_TRY(take_logits(e));
        e->logits = e->own_logits;
    }
    for (; e->num_samplers < kv8_threads_count(e->threads); e->num_samplers++)
        KV8_TRY(
            kv8_sampler_create(&e->samplers[e->num_samplers], e->info.vocab_size, e->allocator));
    const kv8_model_options *const model = kv8_model_get_options(e->model);
    if (model->device == NULL) return KV8_OK;
    const int32_t rows = (int32_t)kv8_min_i64(e->max_rows, kv8_model_held_logits(e->model));
    const int64_t of_row = kv8_min_i64(e->info.vocab_size, e->max_seq_len + MAX_BIASES);
    return kv8_device_sampler_create(
        &e->device_sampler, model->device, model->stream, e->threads, e->info.vocab_size, rows,
        (int32_t)kv8_min_i64(rows * of_row, MAX_CHANGES), e->allocator);
}

/* `value`, or `fallback` for 0; from 1 to limit. */
static kv8_status resolve(const char *what, int32_t value, int32_t fallback, int32_t limit,
                          int32_t *out) {
    if (value < 0 || value > limit)
        return kv8_fail(KV8_ERR_INVALID, "%s is %d, must be 0 (%d) to %d", what, value, fallback,
                        limit);
    *out = value == 0 ? fallback : value;
    return KV8_OK;
}

static kv8_status resolve_requests(kv8_engine *e, const kv8_engine_options *options) {
    KV8_TRY(resolve("max_requests", options->max_requests, DEFAULT_REQUESTS, MAX_REQUESTS,
                    &e->max_requests));
    if (options->max_waiting < 0 || options->max_waiting > MAX_REQUESTS)
        return kv8_fail(KV8_ERR_INVALID, "max_waiting is %d, must be 0 to %d", options->max_waiting,
                        MAX_REQUESTS);
    if (options->patience_ns < 0)
        return kv8_fail(KV8_ERR_INVALID, "patience_ns is %lld, must not be < 0",
                        (long long)options->patience_ns);
    e->max_alive = e->max_requests + options->max_waiting;
    return KV8_OK;
}

static kv8_status open_scheduler(kv8_engine *e, const kv8_engine_options *options) {
    const kv8_scheduler_options scheduler_options = {
        .allocator = e->allocator,
        .pages = kv8_cache_pages(e->cache),
        .max_running = e->max_running,
        .max_waiting = e->max_alive,
        .max_step_tokens = e->step_tokens,
        .max_step_logits = e->max_rows,
        .share_prefixes = options->share_prefixes != 0,
        .patience_ns = options->patience_ns > 0 ? options->patience_ns : DEFAULT_PATIENCE_NS,
        .paced = options->paced != 0};
    return kv8_scheduler_create(&e->scheduler, &scheduler_options);
}

static kv8_status measure_tokens(kv8_engine *e) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    KV8_TRY(kv8_cache_get_stats(e->cache, &stats));
    e->kv_bytes = (double)stats.bytes_per_token_unwindowed;
    e->window_kv_bytes = (double)stats.bytes_per_token - e->kv_bytes;
    return KV8_OK;
}

static kv8_status open_engine(kv8_engine *e, const kv8_engine_options *options) {
    const kv8_model_options *const model = kv8_model_get_options(e->model);
    const int32_t step_seqs = model->max_step_seqs;
    kv8_cache_shape shape;
    kv8_cache_get_shape(e->cache, &shape);
    e->threads = model->threads;
    e->max_seq_len = (int32_t)kv8_min_i64(model->max_seq_len, shape.max_seq_len);
    e->mask_words = (e->info.vocab_size + 31) / 32;
    KV8_TRY(resolve_requests(e, options));
    KV8_TRY(resolve("step_tokens", options->step_tokens, model->max_step_tokens,
                    model->max_step_tokens, &e->step_tokens));
    const int64_t held = kv8_max_i64(step_seqs, kv8_model_held_logits(e->model));
    KV8_TRY(resolve("logit_rows", options->logit_rows, (int32_t)kv8_min_i64(held, MAX_LOGIT_ROWS),
                    MAX_LOGIT_ROWS, &e->max_rows));
    /* Each that runs has a token and a row of logits in every step. */
    const int64_t rows = kv8_min_i64(e->step_tokens, e->max_rows);
    e->max_running = (int32_t)kv8_min_i64(kv8_min_i64(e->max_requests, step_seqs), rows);
    e->logits = options->logits;
    KV8_TRY(take_arrays(e));
    KV8_TRY(measure_tokens(e));
    return open_scheduler(e, options);
}

kv8_status kv8_engine_create(kv8_engine **out, kv8_model *model, kv8_cache *cache,
                             const kv8_engine_options *options) {
    if (out == NULL || model == NULL || cache == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_engine_create: out, model or cache is NULL");
    *out = NULL;
    KV8_TAKE_STRUCT(kv8_engine_options, options);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_engine), "engine", &memory));
    kv8_engine *const engine = memory;
    engine->allocator = options->allocator;
    engine->model = model;
    engine->cache = cache;
    engine->info = *kv8_model_facts(model);
    const kv8_status status = open_engine(engine, options);
    if (status != KV8_OK) {
        kv8_engine_destroy(engine);
        return status;
    }
    *out = engine;
    return KV8_OK;
}

void kv8_engine_destroy(kv8_engine *e) {
    if (e == NULL) return;
    const kv8_allocator *const a = e->allocator;
    kv8_scheduler_destroy(e->scheduler);
    for (int32_t i = 0; i < e->num_requests; i++) kv8_running_destroy(e->requests[i], a);
    for (int32_t i = 0; i < e->num_samplers; i++) kv8_sampler_destroy(e->samplers[i]);
    kv8_device_sampler_destroy(e->device_sampler);
#define X(member, count) kv8_release(a, e->member, (size_t)(count), sizeof *e->member);
    EACH_ARRAY(X)
#undef X
    release_logits(e);
    kv8_release(a, e, 1, sizeof *e);
}

/* --- requests --- */

/* The index of the first request whose id is not below `id`. */
static int32_t lower_bound(const kv8_engine *e, uint64_t id) {
    int32_t low = 0, high = e->num_requests;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (e->requests[middle]->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static kv8_running *find_request(const kv8_engine *e, uint64_t id) {
    const int32_t i = lower_bound(e, id);
    return i < e->num_requests && e->requests[i]->id == id ? e->requests[i] : NULL;
}

static kv8_status check_ids(const kv8_engine *e, const char *what, const int32_t *ids,
                            int32_t num) {
    if (num < 0 || (num > 0 && ids == NULL))
        return kv8_fail(KV8_ERR_INVALID, "%s: %d ids, or NULL", what, num);
    for (int32_t i = 0; i < num; i++) {
        if (ids[i] < 0 || ids[i] >= e->info.vocab_size)
            return kv8_fail(KV8_ERR_INVALID, "%s %d is id %d, the vocabulary has ids 0 to %d", what,
                            i, ids[i], e->info.vocab_size - 1);
    }
    return KV8_OK;
}

static kv8_status check_logprobs(const kv8_engine *e, const char *what, int32_t num) {
    const int32_t limit = (int32_t)kv8_min_i64(KV8_MAX_LOGPROBS, e->info.vocab_size);
    if (num >= 0 && num <= limit) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s is %d, must be 0 to %d", what, num, limit);
}

static kv8_status check_request(const kv8_engine *e, const kv8_request *r,
                                const kv8_running *parent) {
    KV8_TRY(check_ids(e, "token", r->token_ids, r->num_tokens));
    KV8_TRY(check_ids(e, "stop id", r->stop_ids, r->num_stop_ids));
    if (r->num_tokens < 1) return kv8_fail(KV8_ERR_INVALID, "a request without a token");
    if (r->max_tokens < 0 || r->max_chunk < 0)
        return kv8_fail(KV8_ERR_INVALID, "max_tokens is %d and max_chunk %d: neither < 0",
                        r->max_tokens, r->max_chunk);
    if (r->min_tokens < 0 || r->min_tokens > r->max_tokens)
        return kv8_fail(KV8_ERR_INVALID, "min_tokens is %d, must be 0 to max_tokens, %d",
                        r->min_tokens, r->max_tokens);
    KV8_TRY(check_logprobs(e, "num_logprobs", r->num_logprobs));
    KV8_TRY(check_logprobs(e, "prompt_logprobs", r->prompt_logprobs));
    /* The last token that is generated is never read back. */
    const int64_t prompt = (int64_t)r->num_tokens + (parent == NULL ? 0 : parent->num_tokens);
    const int64_t stored = prompt + kv8_max_i64(r->max_tokens - 1, 0);
    if (stored > e->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "%lld tokens and %d to generate, the limit of max_seq_len is %d",
                        (long long)prompt, r->max_tokens, e->max_seq_len);
    return r->sampling == NULL ? KV8_OK : kv8_sampling_check(r->sampling, e->info.vocab_size);
}

static kv8_arrival arrival_of(const kv8_running *r) {
    return (kv8_arrival){.tokens = r->token_ids,
                         .prompt_len = r->num_prompt,
                         .max_new_tokens = r->spec.max_tokens,
                         .max_chunk = r->spec.max_chunk,
                         .priority = r->spec.priority,
                         .all_logits = r->spec.visit != NULL || r->spec.prompt_logprobs > 0,
                         .salt = r->spec.cache_salt,
                         .parent = r->parent};
}

kv8_status kv8_engine_prepare(const kv8_engine *engine, const kv8_request *request,
                              const kv8_running *parent, kv8_running **out) {
    KV8_TRY(check_request(engine, request, parent));
    kv8_running *running = NULL;
    KV8_TRY(kv8_running_create(&running, request, parent, engine->allocator));
    running->arrived_ns = kv8_time_ns();
    const kv8_arrival arrival = arrival_of(running);
    const kv8_status status = kv8_scheduler_check(engine->scheduler, &arrival);
    if (status == KV8_OK)
        *out = running;
    else
        kv8_running_destroy(running, engine->allocator);
    return status;
}

void kv8_engine_admit(kv8_engine *engine, kv8_running *running) {
    const uint64_t arrived = running->arrived_ns, wait = running->spec.deadline_ns;
    kv8_arrival arrival = arrival_of(running);
    arrival.owner = running;
    arrival.deadline_ns = wait > 0 && arrived + wait > arrived ? arrived + wait : 0;
    KV8_MUST(kv8_scheduler_submit(engine->scheduler, &arrival, arrived, &running->handle));
    engine->last_id = running->id;
    engine->requests[engine->num_requests++] = running;
}

kv8_status kv8_engine_submit(kv8_engine *engine, const kv8_request *request, uint64_t *id_out) {
    if (engine == NULL || id_out == NULL)
        return kv8_fail(KV8_ERR_INVALID, "kv8_engine_submit: engine or id_out is NULL");
    KV8_TAKE_STRUCT(kv8_request, request);
    const kv8_running *const parent =
        request->parent == 0 ? NULL : find_request(engine, request->parent);
    if (request->parent != 0 && (parent == NULL || !parent->rests))
        return kv8_fail(KV8_ERR_NOT_FOUND, "no request %llu at rest",
                        (unsigned long long)request->parent);
    kv8_running *running = NULL;
    KV8_TRY(kv8_engine_prepare(engine, request, parent, &running));
    if (engine->num_requests == engine->max_alive) {
        kv8_running_destroy(running, engine->allocator);
        return kv8_fail(KV8_ERR_FULL,
                        "%d requests are alive, the limit of max_requests, %d, and "
                        "max_waiting, %d",
                        engine->max_alive, engine->max_requests,
                        engine->max_alive - engine->max_requests);
    }
    *id_out = running->id = engine->last_id + 1;
    kv8_engine_admit(engine, running);
    return KV8_OK;
}

void kv8_engine_forget(kv8_engine *e, kv8_running *running) {
    const int32_t i = lower_bound(e, running->id);
    e->num_requests--;
    memmove(&e->requests[i], &e->requests[i + 1],
            (size_t)(e->num_requests - i) * sizeof *e->requests);
    kv8_running_destroy(running, e->allocator);
}

kv8_status kv8_engine_cancel(kv8_engine *engine, uint64_t id) {
    KV8_REQUIRE(engine);
    kv8_running *const running = find_request(engine, id);
    if (running == NULL)
        return kv8_fail(KV8_ERR_NOT_FOUND, "no request %llu", (unsigned long long)id);
    KV8_MUST(kv8_scheduler_end(engine->scheduler, running->handle));
    kv8_engine_forget(engine, running);
    return KV8_OK;
}

/* --- figures --- */

static kv8_status add_counters(const kv8_engine *e, kv8_engine_stats *stats) {
    kv8_cache_counters sums;
    KV8_TRY(kv8_cache_sum_counters(e->cache, &sums));
    stats->kv_clips += sums.k_clips + sums.v_clips;
    stats->kv_nans += sums.k_nans + sums.v_nans;
    return KV8_OK;
}

void kv8_engine_count(const kv8_engine *engine, kv8_engine_stats *stats_out) {
    kv8_engine_stats stats = engine->stats;
    kv8_scheduler_stats scheduler;
    kv8_scheduler_get_stats(engine->scheduler, &scheduler);
    stats.num_running = scheduler.num_running;
    stats.num_waiting = scheduler.num_waiting;
    stats.num_resting = scheduler.num_resting;
    stats.num_preemptions = scheduler.num_preemptions;
    stats.prefix_queries = scheduler.prefix_queries;
    stats.prefix_hits = scheduler.prefix_hits;
    const kv8_pages *const pages = kv8_cache_pages(engine->cache);
    for (int32_t g = 0; g < kv8_pages_num_groups(pages); g++) {
        stats.pages_total += kv8_pages_num_pages(pages, g);
        stats.pages_used += kv8_pages_num_pages(pages, g) - kv8_pages_num_free(pages, g);
        stats.pages_shared += kv8_pages_num_shared(pages, g);
    }
    *stats_out = stats;
}

kv8_status kv8_engine_get_stats(const kv8_engine *engine, kv8_engine_stats *stats_out) {
    KV8_REQUIRE(engine, stats_out);
    kv8_engine_stats stats;
    kv8_engine_count(engine, &stats);
    KV8_TRY(add_counters(engine, &stats));
    KV8_WRITE_STRUCT(kv8_engine_stats, stats_out, &stats);
    return KV8_OK;
}

/* Adds pages [first, end) of all groups together to a cell. */
static void add_to_cell(const kv8_pages *pages, int64_t first, int64_t end, kv8_page_map *map,
                        int32_t cell) {
    for (int32_t g = 0; g < kv8_pages_num_groups(pages) && end > 0; g++) {
        const int64_t num = kv8_pages_num_pages(pages, g);
        const int64_t from = kv8_max_i64(first, 0), to = kv8_min_i64(end, num);
        int32_t used = 0, shared = 0;
        if (from < to)
            kv8_pages_count(pages, g, (int32_t)from, (int32_t)(to - from), &used, &shared);
        map->used[cell] += used;
        map->shared[cell] += shared;
        first -= num;
        end -= num;
    }
}

kv8_status kv8_engine_get_page_map(const kv8_engine *engine, kv8_page_map *map_out) {
    KV8_REQUIRE(engine, map_out);
    kv8_page_map map = KV8_PAGE_MAP_INIT;
    const kv8_pages *const pages = kv8_cache_pages(engine->cache);
    int64_t total = 0;
    for (int32_t g = 0; g < kv8_pages_num_groups(pages); g++)
        total += kv8_pages_num_pages(pages, g);
    map.num_cells = (int32_t)kv8_min_i64(total, KV8_PAGE_CELLS);
    for (int32_t i = 0; i < map.num_cells; i++) {
        const int64_t first = total * i / map.num_cells, end = total * (i + 1) / map.num_cells;
        map.pages[i] = (int32_t)(end - first);
        add_to_cell(pages, first, end, &map, i);
    }
    KV8_WRITE_STRUCT(kv8_page_map, map_out, &map);
    return KV8_OK;
}
