/* step.c - one step: the scheduler's rows through the model, the logits looked at, tokens drawn.
 *
 *   gather   the rows that were planned become a step of the model
 *   judge    every row of logits must be finite: else its request ends here
 *   draw     one token for each request whose last token went in, in parallel
 *   tell     one event for each request of the step, and for each that expired
 *
 * The time orders requests and ends their waiting. No token depends on it, nor on which other
 * requests ran but through the model's own rounding.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "device_impl.h"
#include "engine_state.h"

static const float *logits_of(const kv8_engine *e, int32_t row) {
    return e->logits + (size_t)row * (size_t)e->info.vocab_size;
}
static int32_t end_of(const kv8_share *s) {
    return s->row->first + s->row->num_tokens;
}
/* The position of the first token whose logits the share has. */
static int32_t seen_from(const kv8_share *s) {
    return end_of(s) - s->row->num_logits;
}

/* --- gather --- */

static void gather_row(kv8_engine *e, const kv8_scheduled_row *row) {
    const int32_t idx = e->num_shares++, begin = e->indptr[idx], end = begin + row->num_tokens;
    e->shares[idx] = (kv8_share){.running = row->owner, .row = row, .first_logits = e->num_rows};
    e->seqs[idx] = row->seq;
    e->indptr[idx + 1] = end;
    memcpy(e->token_ids + begin, row->token_ids, (size_t)row->num_tokens * sizeof(int32_t));
    for (int32_t i = end - row->num_logits; i < end; i++) {
        e->share_of[e->num_rows] = idx;
        e->logit_rows[e->num_rows++] = i;
    }
}

/* The GPU that computes draws too, where nobody else wants to see the logits. */
static bool can_draw_on_device(const kv8_engine *e) {
    int64_t num_changes = 0;
    if (e->device_sampler == NULL || e->num_rows == 0 ||
        e->num_rows > kv8_model_held_logits(e->model))
        return false;
    for (int32_t i = 0; i < e->num_shares; i++) {
        const kv8_running *const r = e->shares[i].running;
        if (r->is_plain) continue;
        if (r->spec.visit != NULL) return false;
        if (e->shares[i].row->samples)
            num_changes +=
                kv8_device_sampler_changes(e->device_sampler, &r->sampling, r->num_tokens);
    }
    return kv8_device_sampler_takes(e->device_sampler, e->num_rows, num_changes);
}

static void gather(kv8_engine *e, const kv8_schedule *schedule) {
    e->num_shares = e->num_rows = 0;
    for (int32_t i = 0; i < schedule->num_rows; i++) gather_row(e, &schedule->rows[i]);
    e->draws_on_device = can_draw_on_device(e);
}

static bool is_too_short(const kv8_running *r) {
    return r->num_tokens - r->num_prompt < r->spec.min_tokens;
}
static bool has_mask(const kv8_running *r) {
    return !r->is_plain && (r->spec.mask != NULL || is_too_short(r));
}

/* The share's row of logits that a token is chosen from; -1: it chooses none. */
static int32_t sampled_row(const kv8_share *s) {
    return s->row->samples ? s->first_logits + s->row->num_logits - 1 : -1;
}

/* How many of the share's rows of logits give the logprob of a prompt's token. */
static int32_t num_prompt_rows(const kv8_share *s) {
    if (s->running->is_plain || s->running->spec.prompt_logprobs == 0) return 0;
    const int32_t last = s->running->num_prompt - 1;
    return (int32_t)kv8_max_i64(0, kv8_min_i64(end_of(s), last) - seen_from(s));
}

/* One for each row of logits: a prompt's token is given, and what is neither that nor chosen from
 * is looked at alone. */
static void list_draws(kv8_engine *e) {
    static const kv8_sampling greedy = KV8_SAMPLING_INIT;
    for (int32_t row = 0; row < e->num_rows; row++) {
        const kv8_share *const s = &e->shares[e->share_of[row]];
        const kv8_running *const r = s->running;
        const int32_t i = row - s->first_logits;
        kv8_draw *const draw = &e->draws[row];
        *draw = (kv8_draw){.sampling = &greedy, .mask = -1, .token = -1};
        if (i < num_prompt_rows(s)) {
            draw->token = r->token_ids[seen_from(s) + i + 1];
            draw->num_logprobs = r->spec.prompt_logprobs;
        } else if (row == sampled_row(s)) {
            draw->sampling = &r->sampling;
            draw->history = (kv8_history){r->token_ids, r->num_prompt, r->num_tokens};
            draw->num_logprobs = r->spec.num_logprobs;
        }
    }
}

/* A draw that the step may do by itself: of the one row that there is. */
static bool simplify_draw(kv8_engine *e, kv8_step_draw *out) {
    if (!e->draws_on_device || e->num_rows != 1 || has_mask(e->shares[0].running)) return false;
    list_draws(e);
    return kv8_device_sampler_simplify(e->device_sampler, &e->draws[0], out);
}

static kv8_status compute(kv8_engine *e) {
    kv8_step_draw draw;
    const bool is_simple = simplify_draw(e, &draw);
    const kv8_step step = {.struct_size = sizeof(kv8_step),
                           .num_seqs = e->num_shares,
                           .seqs = e->seqs,
                           .indptr = e->indptr,
                           .token_ids = e->token_ids,
                           .num_logit_rows = e->num_rows,
                           .logit_rows = e->logit_rows,
                           .logits_out = e->draws_on_device ? NULL : e->logits};
    return kv8_model_step_extended(e->model, e->cache, &step, is_simple ? &draw : NULL,
                                   &e->step_draws);
}

/* --- judge --- */

static void fail_share(kv8_engine *e, int32_t idx) {
    e->events[idx].finish = KV8_FINISH_FAILED;
    e->events[idx].message = e->messages[idx];
}

static bool is_finite_code(uint32_t bits) {
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static void judge_row(void *cookie, size_t row, int32_t thread_idx) {
    (void)thread_idx;
    kv8_engine *const e = cookie;
    const float *const logits = logits_of(e, (int32_t)row);
    uint32_t any = 0;
    for (int32_t i = 0; i < e->info.vocab_size; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof bits);
        any |= !is_finite_code(bits);
    }
    int32_t id = any ? 0 : -1;
    while (any && isfinite(logits[id])) id++;
    e->bad_ids[row] = id;
    e->bad_logits[row] = id < 0 ? 0 : logits[id];
}

/* Fails the share when one of its rows is no numbers. */
static void judge_share(kv8_engine *e, int32_t idx) {
    kv8_share *const s = &e->shares[idx];
    for (int32_t i = 0; i < s->row->num_logits; i++) {
        const int32_t row = s->first_logits + i, id = e->bad_ids[row];
        if (id < 0) continue;
        const float logit = e->bad_logits[row];
        snprintf(e->messages[idx], sizeof e->messages[idx],
                 "the logits after token %d (row %d of a step of %d) are not finite: %s at id %d",
                 seen_from(s) + i, e->logit_rows[row], e->indptr[e->num_shares],
                 isnan(logit) ? "NaN"
                 : logit > 0  ? "inf"
                              : "-inf",
                 id);
        fail_share(e, idx);
        return;
    }
}

/* --- draw --- */

static void forbid(uint32_t *mask, const int32_t *ids, int32_t num) {
    for (int32_t i = 0; i < num; i++) mask[ids[i] / 32] &= ~(1u << (ids[i] % 32));
}

/* The ids that may follow: of the request's mask, and none that would end it before min_tokens. */
static void fill_mask(const kv8_engine *e, const kv8_running *r, uint32_t *mask) {
    const bool too_short = is_too_short(r);
    memset(mask, r->spec.mask == NULL ? 0xff : 0, (size_t)e->mask_words * sizeof *mask);
    if (r->spec.mask != NULL) r->spec.mask(r->spec.mask_cookie, mask);
    if (too_short) forbid(mask, r->spec.stop_ids, r->spec.num_stop_ids);
    if (too_short && !r->spec.ignore_eos) forbid(mask, e->info.eos, e->info.num_eos);
}

/* mask NULL: every id may come. */
static void take_token(kv8_engine *e, int32_t share_idx, int32_t token, const uint32_t *mask) {
    kv8_share *const s = &e->shares[share_idx];
    if (mask == NULL || (mask[token / 32] >> (token % 32) & 1) != 0) {
        e->events[share_idx].token = token;
        return;
    }
    snprintf(e->messages[share_idx], sizeof e->messages[share_idx],
             "after %d tokens no id may follow", s->running->num_tokens);
    fail_share(e, share_idx);
}

static void draw_token(void *cookie, size_t share_idx, int32_t thread_idx) {
    kv8_engine *const e = cookie;
    kv8_share *const s = &e->shares[share_idx];
    const kv8_running *const r = s->running;
    if (!s->row->samples || e->events[share_idx].finish == KV8_FINISH_FAILED) return;
    const kv8_history history = {r->token_ids, r->num_prompt, r->num_tokens};
    uint32_t *const words = e->masks + (size_t)thread_idx * (size_t)e->mask_words;
    const uint32_t *const mask = has_mask(r) ? words : NULL;
    if (mask != NULL) fill_mask(e, r, words);
    const int32_t token = kv8_sampler_draw(e->samplers[thread_idx], &r->sampling, &history, mask,
                                           logits_of(e, s->first_logits + s->row->num_logits - 1));
    take_token(e, (int32_t)share_idx, token, mask);
}

/* --- logprobs --- */

static kv8_logprob *tops_of(const kv8_engine *e, int32_t row) {
    return e->tops + (size_t)row * KV8_MAX_LOGPROBS;
}

/* A prompt's rows lie side by side from the share's first on, the token's own in its row's place.
 */
static void log_row(void *cookie, size_t row_idx, int32_t thread_idx) {
    const kv8_engine *const e = cookie;
    const int32_t row = (int32_t)row_idx, share_idx = e->share_of[row];
    const kv8_share *const s = &e->shares[share_idx];
    const kv8_request *const spec = &s->running->spec;
    const int32_t i = row - s->first_logits;
    const int32_t drawn = i == s->row->num_logits - 1 ? e->events[share_idx].token : -1;
    kv8_sampler *const sampler = e->samplers[thread_idx];
    if (e->events[share_idx].finish == KV8_FINISH_FAILED) return;
    if (i < num_prompt_rows(s))
        e->logprobs[row] = kv8_sampler_logprobs(
            sampler, logits_of(e, row), s->running->token_ids[seen_from(s) + i + 1],
            spec->prompt_logprobs,
            tops_of(e, s->first_logits) + (size_t)i * (size_t)spec->prompt_logprobs);
    else if (drawn >= 0 && spec->num_logprobs > 0)
        e->logprobs[row] = kv8_sampler_logprobs(sampler, logits_of(e, row), drawn,
                                                spec->num_logprobs, tops_of(e, row));
}

static void tell_logprobs(const kv8_engine *e, const kv8_share *s, kv8_event *event) {
    const int32_t last = s->first_logits + s->row->num_logits - 1;
    if (s->running->is_plain) return;
    if (event->token >= 0 && s->running->spec.num_logprobs > 0) {
        event->logprob = e->logprobs[last];
        event->top = tops_of(e, last);
    }
    event->num_prompt_logprobs = num_prompt_rows(s);
    if (event->num_prompt_logprobs == 0) return;
    event->prompt_first = seen_from(s) + 1;
    event->prompt_logprob = e->logprobs + s->first_logits;
    event->prompt_top = tops_of(e, s->first_logits);
}

/* --- tell --- */

/* What is known of the rows before they are computed. */
static void begin_events(kv8_engine *e) {
    for (int32_t i = 0; i < e->num_shares; i++) {
        const kv8_running *const running = e->shares[i].running;
        const kv8_scheduled_row *const row = e->shares[i].row;
        e->events[i] = (kv8_event){.request = running->id,
                                   .num_taken = row->num_tokens,
                                   .num_computed = row->first + row->num_tokens,
                                   .token = -1,
                                   .user = running->spec.user,
                                   .num_cached = row->num_cached};
    }
}

/* Keys and values in reach of a sequence, whose last query stands before `end`. */
static double kv_read(const kv8_engine *e, int32_t end) {
    const int64_t window = kv8_min_i64(end, (int64_t)e->info.window_left + 1);
    return e->kv_bytes * end + e->window_kv_bytes * (double)window;
}

static uint64_t count_read(const kv8_engine *e) {
    double bytes = kv8_model_step_bytes(&e->info, e->indptr[e->num_shares], 0);
    for (int32_t i = 0; i < e->num_shares; i++) bytes += kv_read(e, end_of(&e->shares[i]));
    return (uint64_t)bytes;
}

static void tell(kv8_engine *e, int32_t idx) {
    const kv8_share *const s = &e->shares[idx];
    kv8_event *const event = &e->events[idx];
    kv8_running *const r = s->running;
    const int64_t prompt_end = kv8_min_i64(end_of(s), r->num_prompt);
    e->stats.prompt_tokens += (uint64_t)kv8_max_i64(0, prompt_end - s->row->first);
    e->stats.generated_tokens += event->token >= 0;
    if (event->finish != KV8_FINISH_FAILED) {
        tell_logprobs(e, s, event);
        if (!r->is_plain && r->spec.visit != NULL && s->row->num_logits > 0)
            r->spec.visit(r->spec.visit_cookie, seen_from(s), s->row->num_logits,
                          logits_of(e, s->first_logits));
        if (s->row->samples)
            event->finish = kv8_running_take(r, event->token, &e->info);
        else if (end_of(s) == r->num_tokens)
            event->finish = KV8_FINISH_LENGTH;
    }
    if (event->finish == KV8_FINISH_NONE) return;
    r->rests = r->spec.hold && event->finish != KV8_FINISH_FAILED;
    if (r->rests) {
        kv8_scheduler_rest(e->scheduler, r->handle);
        return;
    }
    KV8_MUST(kv8_scheduler_end(e->scheduler, r->handle));
    kv8_engine_forget(e, r);
}

/* Requests that expired are told behind the step's. */
static void tell_expired(kv8_engine *e, const kv8_schedule *schedule) {
    for (int32_t i = 0; i < schedule->num_expired; i++) {
        kv8_running *const r = schedule->expired[i];
        e->events[e->num_shares + i] = (kv8_event){
            .request = r->id, .token = -1, .finish = KV8_FINISH_EXPIRED, .user = r->spec.user};
        kv8_engine_forget(e, r);
    }
}

/* --- the step --- */

static void draw_on_host(kv8_engine *e) {
    KV8_RANGE("draw of %d rows", e->num_rows);
    kv8_threads_run(e->threads, (size_t)e->num_rows, judge_row, e);
    for (int32_t i = 0; i < e->num_shares; i++) judge_share(e, i);
    kv8_threads_run(e->threads, (size_t)e->num_shares, draw_token, e);
    kv8_threads_run(e->threads, (size_t)e->num_rows, log_row, e);
}

static void fill_device_mask(void *cookie, size_t row, int32_t thread_idx) {
    (void)thread_idx;
    const kv8_engine *const e = cookie;
    const kv8_draw *const draw = &e->draws[row];
    if (draw->mask < 0) return;
    fill_mask(e, e->shares[e->share_of[row]].running,
              kv8_device_sampler_mask(e->device_sampler, draw->mask));
}

/* Draws are listed and masks filled while the GPU computes. */
static kv8_status draw_on_device(kv8_engine *e) {
    KV8_RANGE("draw of %d rows", e->num_rows);
    int32_t num_masks = 0;
    if (e->step_draws) return kv8_device_sampler_take(e->device_sampler, &e->drawn[0]);
    list_draws(e);
    for (int32_t row = 0; row < e->num_rows; row++) {
        const kv8_share *const s = &e->shares[e->share_of[row]];
        if (row == sampled_row(s) && has_mask(s->running)) e->draws[row].mask = num_masks++;
    }
    if (num_masks > 0) kv8_threads_run(e->threads, (size_t)e->num_rows, fill_device_mask, e);
    KV8_TRY(kv8_device_sampler_begin(e->device_sampler, kv8_model_device_logits(e->model),
                                     kv8_model_device_maxima(e->model), e->draws, e->num_rows));
    return kv8_device_sampler_end(e->device_sampler, e->draws, e->num_rows, e->drawn, e->tops,
                                  KV8_MAX_LOGPROBS);
}

/* A prompt's rows lie side by side, as log_row() leaves them. */
static void pack_tops(const kv8_engine *e, const kv8_share *s) {
    kv8_logprob *const to = tops_of(e, s->first_logits);
    for (int32_t i = 1; i < num_prompt_rows(s); i++) {
        const size_t num = (size_t)s->running->spec.prompt_logprobs;
        memmove(to + (size_t)i * num, tops_of(e, s->first_logits + i), num * sizeof *to);
    }
}

static void take_drawn(kv8_engine *e) {
    for (int32_t row = 0; row < e->num_rows; row++) {
        e->bad_ids[row] = e->drawn[row].bad_id;
        e->bad_logits[row] = e->drawn[row].bad;
        e->logprobs[row] = e->drawn[row].logprob;
    }
    for (int32_t i = 0; i < e->num_shares; i++) {
        judge_share(e, i);
        pack_tops(e, &e->shares[i]);
        const int32_t row = sampled_row(&e->shares[i]);
        if (row < 0 || e->events[i].finish == KV8_FINISH_FAILED) continue;
        const int32_t mask = e->draws[row].mask;
        take_token(e, i, e->drawn[row].token,
                   mask < 0 ? NULL : kv8_device_sampler_mask(e->device_sampler, mask));
    }
}

/* Everything between the model and the scheduler; pages of rows that failed are nobody's to find.
 */
static void choose(kv8_engine *e) {
    const uint64_t begin = kv8_time_ns();
    if (e->draws_on_device)
        take_drawn(e);
    else
        draw_on_host(e);
    for (int32_t i = 0; i < e->num_shares; i++)
        e->chosen[i] =
            e->events[i].finish == KV8_FINISH_FAILED ? KV8_ROW_FAILED : e->events[i].token;
    e->stats.sample_ns += kv8_time_ns() - begin;
}

static void swap_events(kv8_engine *e) {
    kv8_event *const before = e->events;
    e->events = e->events_before;
    e->events_before = before;
}

/* Nothing of a step that failed has happened. */
static void abandon(kv8_engine *e) {
    kv8_scheduler_abandon(e->scheduler);
    e->num_shares = e->schedule.num_rows = 0;
}

/* Those that expired are told all the same: what failed fails again in the next step. */
static bool fails(const kv8_engine *e, kv8_status status) {
    return status != KV8_OK && e->schedule.num_expired == 0;
}

kv8_status kv8_engine_begin(kv8_engine *e) {
    assert(!e->is_under_way);
    const uint64_t begin = kv8_time_ns();
    kv8_status status = kv8_scheduler_plan(e->scheduler, begin, &e->schedule);
    e->compute_ns = kv8_time_ns();
    e->stats.schedule_ns += e->compute_ns - begin;
    e->num_shares = 0;
    e->is_computing = false;
    swap_events(e);
    if (status == KV8_OK && e->schedule.num_rows > 0) {
        gather(e, &e->schedule);
        e->is_computing = e->draws_on_device;
        if (e->is_computing) status = compute(e);
        if (status == KV8_OK) kv8_scheduler_publish(e->scheduler);
    }
    if (status != KV8_OK) abandon(e);
    e->is_under_way = !fails(e, status);
    if (e->is_under_way) return KV8_OK;
    swap_events(e);
    return status;
}

/* The rows of the schedule, chosen and told. */
static kv8_status finish_rows(kv8_engine *e) {
    kv8_status status = KV8_OK;
    begin_events(e); /* while a GPU computes */
    const uint64_t read_bytes = count_read(e);
    if (!e->is_computing) {
        e->compute_ns = kv8_time_ns();
        status = compute(e);
    }
    if (status == KV8_OK && e->draws_on_device) status = draw_on_device(e);
    if (status != KV8_OK) {
        abandon(e);
        return status;
    }
    const uint64_t begin = e->compute_ns;
    e->stats.model_ns += kv8_time_ns() - begin;
    e->stats.num_steps++;
    choose(e);
    kv8_scheduler_took(e->scheduler, (double)(kv8_time_ns() - begin));
    kv8_scheduler_commit(e->scheduler, e->chosen);
    e->stats.read_bytes += read_bytes;
    for (int32_t i = 0; i < e->num_shares; i++) tell(e, i);
    const uint64_t took = kv8_time_ns() - begin;
    for (int32_t i = 0; i < e->num_shares; i++) e->events[i].step_ns = took;
    return KV8_OK;
}

kv8_status kv8_engine_finish(kv8_engine *e, int32_t *num_events_out) {
    assert(e->is_under_way);
    *num_events_out = 0;
    e->is_under_way = false;
    const kv8_status status = e->schedule.num_rows > 0 ? finish_rows(e) : KV8_OK;
    if (fails(e, status)) return status;
    tell_expired(e, &e->schedule);
    *num_events_out = e->num_shares + e->schedule.num_expired;
    return KV8_OK;
}

kv8_status kv8_engine_step(kv8_engine *engine, int32_t *num_events_out) {
    KV8_REQUIRE(engine, num_events_out);
    *num_events_out = 0;
    KV8_TRY(kv8_engine_begin(engine));
    return kv8_engine_finish(engine, num_events_out);
}

const kv8_event *kv8_engine_event(const kv8_engine *engine, int32_t event_idx) {
    return &(engine->is_under_way ? engine->events_before : engine->events)[event_idx];
}
