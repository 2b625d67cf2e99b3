/* engine.c - the step loop: choose rows, run the model, look at the logits, draw, tell.
 *
 *   gather   which tokens of which requests the step takes
 *   judge    every row of logits must be finite: else its request ends here
 *   draw     one token for each request whose last token went in, in parallel
 *   tell     one event for each request of the step
 *
 * It never looks at a clock, and no token depends on which other requests ran but through the
 * model's own rounding.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "cache_impl.h"
#include "model_impl.h"
#include "request.h"
#include "sampler.h"

enum {
    DEFAULT_REQUESTS = 16,
    MAX_REQUESTS = 1 << 20,
    MAX_LOGIT_ROWS = 1 << 20,
    MAX_LOGPROBS = 32,
    MESSAGE_SIZE = 160
};

/* A request's part in one step. */
typedef struct share {
    kv8_running *running;
    int32_t num_tokens;          /* taken by the step */
    int32_t first_row, num_rows; /* its rows of logits */
    bool draws;                  /* the last of them gives a token */
    kv8_event event;
    kv8_logprob top[MAX_LOGPROBS];
    char message[MESSAGE_SIZE];
} share;

struct kv8_engine {
    const kv8_allocator *allocator;
    kv8_model *model;
    kv8_cache *cache;
    kv8_threads *threads;
    kv8_model_info info;
    int32_t step_tokens, step_seqs, max_seq_len;
    uint64_t last_id;

    kv8_running **requests; /* [num_requests] of max_requests, by id */
    int32_t num_requests, max_requests;

    /* The step, as kv8_step has it. */
    kv8_seq *seqs;       /* [step_seqs] */
    int32_t *indptr;     /* [step_seqs + 1] */
    int32_t *token_ids;  /* [step_tokens] */
    int32_t *logit_rows; /* [num_rows] of max_rows */
    int32_t num_rows, max_rows;
    float *logits, *own_logits; /* [max_rows, vocab_size]; own: NULL when the caller's */
    int32_t *bad_ids;           /* [max_rows] first id whose logit is not finite; -1 = none */
    share *shares;              /* [num_shares] of step_seqs */
    int32_t num_shares;

    kv8_sampler **samplers; /* one for each thread */
    int32_t num_samplers;
};

/* --- life --- */

static kv8_status take_array(const kv8_engine *engine, int64_t count, size_t size, void *out) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(engine->allocator, (size_t)count, size, "engine", &memory));
    memcpy(out, &memory, sizeof memory);
    return KV8_OK;
}

static kv8_status take_arrays(kv8_engine *e) {
    const int64_t seqs = e->step_seqs;
    KV8_TRY(take_array(e, e->max_requests, sizeof *e->requests, &e->requests));
    KV8_TRY(take_array(e, seqs, sizeof *e->seqs, &e->seqs));
    KV8_TRY(take_array(e, seqs + 1, sizeof *e->indptr, &e->indptr));
    KV8_TRY(take_array(e, e->step_tokens, sizeof *e->token_ids, &e->token_ids));
    KV8_TRY(take_array(e, e->max_rows, sizeof *e->logit_rows, &e->logit_rows));
    KV8_TRY(take_array(e, e->max_rows, sizeof *e->bad_ids, &e->bad_ids));
    KV8_TRY(take_array(e, seqs, sizeof *e->shares, &e->shares));
    if (e->logits == NULL) {
        const int64_t row_bytes = (int64_t)e->info.vocab_size * (int64_t)sizeof(float);
        KV8_TRY(take_array(e, e->max_rows, (size_t)row_bytes, &e->own_logits));
        e->logits = e->own_logits;
    }
    const int32_t num_samplers = kv8_threads_count(e->threads);
    KV8_TRY(take_array(e, num_samplers, sizeof *e->samplers, &e->samplers));
    for (e->num_samplers = 0; e->num_samplers < num_samplers; e->num_samplers++)
        KV8_TRY(
            kv8_sampler_create(&e->samplers[e->num_samplers], e->info.vocab_size, e->allocator));
    return KV8_OK;
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

static kv8_status open_engine(kv8_engine *e, const kv8_engine_options *options) {
    const kv8_model_options *const model = kv8_model_get_options(e->model);
    kv8_cache_shape shape;
    kv8_cache_get_shape(e->cache, &shape);
    e->threads = model->threads;
    e->step_seqs = model->max_step_seqs;
    e->max_seq_len = (int32_t)kv8_min_i64(model->max_seq_len, shape.max_seq_len);
    KV8_TRY(resolve("max_requests", options->max_requests, DEFAULT_REQUESTS, MAX_REQUESTS,
                    &e->max_requests));
    KV8_TRY(resolve("step_tokens", options->step_tokens, model->max_step_tokens,
                    model->max_step_tokens, &e->step_tokens));
    KV8_TRY(resolve("logit_rows", options->logit_rows, e->step_seqs, MAX_LOGIT_ROWS, &e->max_rows));
    e->logits = options->logits;
    return take_arrays(e);
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

/* Takes a request out of the list and gives back what it holds. */
static kv8_status remove_request(kv8_engine *e, kv8_running *running) {
    int32_t i = 0;
    while (e->requests[i] != running) i++;
    e->num_requests--;
    memmove(&e->requests[i], &e->requests[i + 1],
            (size_t)(e->num_requests - i) * sizeof *e->requests);
    const kv8_status status = kv8_cache_seq_destroy(e->cache, running->seq);
    kv8_running_destroy(running, e->allocator);
    return status;
}

void kv8_engine_destroy(kv8_engine *e) {
    if (e == NULL) return;
    while (e->num_requests > 0) {
        if (remove_request(e, e->requests[e->num_requests - 1]) != KV8_OK) continue;
    }
    for (int32_t i = 0; i < e->num_samplers; i++) kv8_sampler_destroy(e->samplers[i]);
    const kv8_allocator *const a = e->allocator;
    const size_t seqs = (size_t)e->step_seqs, rows = (size_t)e->max_rows;
    kv8_release(a, e->requests, (size_t)e->max_requests, sizeof *e->requests);
    kv8_release(a, e->seqs, seqs, sizeof *e->seqs);
    kv8_release(a, e->indptr, seqs + 1, sizeof *e->indptr);
    kv8_release(a, e->token_ids, (size_t)e->step_tokens, sizeof *e->token_ids);
    kv8_release(a, e->logit_rows, rows, sizeof *e->logit_rows);
    kv8_release(a, e->bad_ids, rows, sizeof *e->bad_ids);
    kv8_release(a, e->shares, seqs, sizeof *e->shares);
    kv8_release(a, e->own_logits, rows, (size_t)e->info.vocab_size * sizeof(float));
    kv8_release(a, e->samplers, (size_t)kv8_threads_count(e->threads), sizeof *e->samplers);
    kv8_release(a, e, 1, sizeof *e);
}

/* --- requests --- */

static kv8_running *find_request(const kv8_engine *e, uint64_t id) {
    for (int32_t i = 0; i < e->num_requests; i++) {
        if (e->requests[i]->id == id) return e->requests[i];
    }
    return NULL;
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

static kv8_status check_request(const kv8_engine *e, const kv8_request *r,
                                const kv8_running *parent) {
    KV8_TRY(check_ids(e, "token", r->token_ids, r->num_tokens));
    KV8_TRY(check_ids(e, "stop id", r->stop_ids, r->num_stop_ids));
    if (r->num_tokens < 1) return kv8_fail(KV8_ERR_INVALID, "a request without a token");
    if (r->max_tokens < 0 || r->max_chunk < 0)
        return kv8_fail(KV8_ERR_INVALID, "max_tokens is %d and max_chunk %d: neither < 0",
                        r->max_tokens, r->max_chunk);
    if (r->num_logprobs < 0 || r->num_logprobs > kv8_min_i64(MAX_LOGPROBS, e->info.vocab_size))
        return kv8_fail(KV8_ERR_INVALID, "num_logprobs is %d, must be 0 to %d", r->num_logprobs,
                        (int)kv8_min_i64(MAX_LOGPROBS, e->info.vocab_size));
    /* The last token that is generated is never read back. */
    const int64_t prompt = (int64_t)r->num_tokens + (parent == NULL ? 0 : parent->num_tokens);
    const int64_t stored = prompt + kv8_max_i64(r->max_tokens - 1, 0);
    if (stored > e->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "%lld tokens and %d to generate, the limit of max_seq_len is %d",
                        (long long)prompt, r->max_tokens, e->max_seq_len);
    return r->sampling == NULL ? KV8_OK : kv8_sampling_check(r->sampling, e->info.vocab_size);
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
    KV8_TRY(check_request(engine, request, parent));
    if (engine->num_requests == engine->max_requests)
        return kv8_fail(KV8_ERR_FULL, "%d requests are alive, the limit of max_requests",
                        engine->max_requests);
    kv8_running *running = NULL;
    KV8_TRY(kv8_running_create(&running, request, parent, engine->allocator));
    const kv8_status status = parent == NULL
                                  ? kv8_cache_seq_create(engine->cache, &running->seq)
                                  : kv8_cache_seq_fork(engine->cache, parent->seq, &running->seq);
    if (status != KV8_OK) {
        kv8_running_destroy(running, engine->allocator);
        return status;
    }
    *id_out = running->id = ++engine->last_id;
    engine->requests[engine->num_requests++] = running;
    return KV8_OK;
}

kv8_status kv8_engine_cancel(kv8_engine *engine, uint64_t id) {
    KV8_REQUIRE(engine);
    kv8_running *const running = find_request(engine, id);
    if (running == NULL)
        return kv8_fail(KV8_ERR_NOT_FOUND, "no request %llu", (unsigned long long)id);
    return remove_request(engine, running);
}

/* --- gather --- */

/* Gives the request what the step has left for it: nothing, where a row of logits is missing. */
static void gather_request(kv8_engine *e, kv8_running *r) {
    const int32_t pending = r->num_tokens - r->num_computed, begin = e->indptr[e->num_shares];
    const int32_t rows_left = e->max_rows - e->num_rows;
    int64_t num = kv8_min_i64(pending, e->step_tokens - begin);
    if (r->spec.max_chunk > 0) num = kv8_min_i64(num, r->spec.max_chunk);
    if (r->spec.visit != NULL) num = kv8_min_i64(num, rows_left);
    const bool draws = num == pending && r->spec.max_tokens > 0;
    const int32_t num_rows = r->spec.visit != NULL ? (int32_t)num : draws;
    if (num == 0 || num_rows > rows_left || e->num_shares == e->step_seqs) return;
    share *const s = &e->shares[e->num_shares];
    s->running = r;
    s->num_tokens = (int32_t)num;
    s->first_row = e->num_rows;
    s->num_rows = num_rows;
    s->draws = draws;
    e->seqs[e->num_shares] = r->seq;
    memcpy(e->token_ids + begin, r->token_ids + r->num_computed, (size_t)num * sizeof(int32_t));
    e->indptr[++e->num_shares] = begin + (int32_t)num;
    for (int32_t i = 0; i < num_rows; i++)
        e->logit_rows[e->num_rows++] = begin + (int32_t)num - num_rows + i;
}

/* Requests with one token left first, so that no prompt makes them wait. */
static void gather(kv8_engine *e) {
    e->num_shares = e->num_rows = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < e->num_requests; i++) {
            kv8_running *const r = e->requests[i];
            const int32_t pending = r->num_tokens - r->num_computed;
            if (!r->rests && (pending == 1) == (pass == 0)) gather_request(e, r);
        }
    }
}

/* --- judge --- */

static bool is_finite_code(uint32_t bits) {
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static void judge_row(void *cookie, size_t row, int32_t thread_idx) {
    (void)thread_idx;
    kv8_engine *const e = cookie;
    const float *const logits = e->logits + row * (size_t)e->info.vocab_size;
    uint32_t any = 0;
    for (int32_t i = 0; i < e->info.vocab_size; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof bits);
        any |= !is_finite_code(bits);
    }
    int32_t id = any ? 0 : -1;
    while (any && isfinite(logits[id])) id++;
    e->bad_ids[row] = id;
}

/* Fails the share when one of its rows is no numbers. */
static void judge_share(const kv8_engine *e, share *s) {
    for (int32_t i = 0; i < s->num_rows; i++) {
        const int32_t row = s->first_row + i, id = e->bad_ids[row];
        if (id < 0) continue;
        const float logit = e->logits[(size_t)row * (size_t)e->info.vocab_size + (size_t)id];
        const int32_t position = s->running->num_computed + s->num_tokens - s->num_rows + i;
        snprintf(s->message, sizeof s->message,
                 "the logits after token %d (row %d of a step of %d) are not finite: %s at id %d",
                 position, e->logit_rows[row], e->indptr[e->num_shares],
                 isnan(logit) ? "NaN"
                 : logit > 0  ? "inf"
                              : "-inf",
                 id);
        s->event.finish = KV8_FINISH_FAILED;
        s->event.message = s->message;
        return;
    }
}

/* --- draw --- */

static void draw_token(void *cookie, size_t share_idx, int32_t thread_idx) {
    kv8_engine *const e = cookie;
    share *const s = &e->shares[share_idx];
    kv8_running *const r = s->running;
    if (!s->draws || s->event.finish == KV8_FINISH_FAILED) return;
    const size_t row = (size_t)(s->first_row + s->num_rows - 1);
    const float *const logits = e->logits + row * (size_t)e->info.vocab_size;
    const kv8_history history = {r->token_ids, r->num_prompt, r->num_tokens};
    kv8_sampler *const sampler = e->samplers[thread_idx];
    s->event.token = kv8_sampler_draw(sampler, &r->sampling, &history, logits);
    if (r->spec.num_logprobs == 0) return;
    s->event.top = s->top;
    s->event.logprob =
        kv8_sampler_logprobs(sampler, logits, s->event.token, r->spec.num_logprobs, s->top);
}

/* --- tell --- */

static kv8_status tell(kv8_engine *e, share *s) {
    kv8_running *const r = s->running;
    kv8_event *const event = &s->event;
    const int32_t first = r->num_computed + s->num_tokens - s->num_rows;
    event->num_computed = r->num_computed += s->num_tokens;
    if (event->finish != KV8_FINISH_FAILED) {
        if (r->spec.visit != NULL)
            r->spec.visit(r->spec.visit_cookie, first, s->num_rows,
                          e->logits + (size_t)s->first_row * (size_t)e->info.vocab_size);
        if (s->draws)
            event->finish = kv8_running_take(r, event->token, &e->info);
        else if (r->num_computed == r->num_tokens)
            event->finish = KV8_FINISH_LENGTH;
    }
    if (event->finish == KV8_FINISH_NONE) return KV8_OK;
    r->rests = r->spec.hold && event->finish != KV8_FINISH_FAILED;
    return r->rests ? KV8_OK : remove_request(e, r);
}

kv8_status kv8_engine_step(kv8_engine *engine, int32_t *num_events_out) {
    KV8_REQUIRE(engine, num_events_out);
    kv8_engine *const e = engine;
    gather(e);
    *num_events_out = 0;
    if (e->num_shares == 0) return KV8_OK;
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = e->num_shares,
                           .seqs = e->seqs,
                           .indptr = e->indptr,
                           .token_ids = e->token_ids,
                           .num_logit_rows = e->num_rows,
                           .logit_rows = e->logit_rows,
                           .logits_out = e->logits};
    KV8_TRY(kv8_model_step(e->model, e->cache, &step));
    kv8_threads_run(e->threads, (size_t)e->num_rows, judge_row, e);
    for (int32_t i = 0; i < e->num_shares; i++) {
        share *const s = &e->shares[i];
        s->event = (kv8_event){.request = s->running->id, .num_taken = s->num_tokens, .token = -1};
        judge_share(e, s);
    }
    kv8_threads_run(e->threads, (size_t)e->num_shares, draw_token, e);
    for (int32_t i = 0; i < e->num_shares; i++) KV8_TRY(tell(e, &e->shares[i]));
    *num_events_out = e->num_shares;
    return KV8_OK;
}

const kv8_event *kv8_engine_event(const kv8_engine *engine, int32_t event_idx) {
    return &engine->shares[event_idx].event;
}
