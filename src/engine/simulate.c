/* simulate.c - the scheduler on a clock of its own: arrivals are drawn, steps take what the model
 * of their time says, and every token's moment is noted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "scheduler.h"
#include "step_time.h"

enum { PAGE_SIZE = 16, DEFAULT_REQUESTS = 64, DEFAULT_STEP_TOKENS = 2048, MAX_COUNT = 1 << 24 };
enum { STEPS_OF_PROGRESS = 256 };
static const double MAX_SECONDS = 1e8; /* of arrivals on average: ns are exact enough, and fit */

typedef struct visitor {
    kv8_request_id request;
    double arrived_ns, last_ns; /* last: of its latest token; 0 = none yet */
    int32_t num_tokens;
} visitor;

typedef struct simulation {
    kv8_simulation_options options; /* resolved */
    kv8_step_time time;
    kv8_pages *pages;
    kv8_scheduler *scheduler;
    visitor *visitors; /* [num_requests], by arrival */
    int32_t num_arrived, num_ended;
    int32_t *text;   /* of all of them: what it says is nowhere read */
    int32_t *chosen; /* [max_requests] */
    double *ttft, *itl;
    size_t num_ttft, num_itl;
    double now_ns, first_ns, running_ns, step_ns; /* running: requests * time */
    uint64_t num_steps;
} simulation;

/* --- options --- */

static kv8_status check_count(const char *name, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s is %lld, must be %lld to %lld", name, (long long)value,
                    (long long)low, (long long)high);
}

static kv8_status check_term(const char *name, double ns) {
    if (ns >= 0 && ns < 1e15) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s is %g, must be 0 to 1e15", name, ns);
}

static kv8_status resolve(simulation *s, const kv8_simulation_options *options) {
    s->options = *options;
    kv8_simulation_options *const o = &s->options;
    KV8_READ_STRUCT(kv8_step_time, &s->time, options->time);
    KV8_TRY(check_count("num_sizes", s->time.num_sizes, 1, KV8_STEP_SIZES));
    for (int32_t i = 0; i < s->time.num_sizes; i++) {
        const int32_t before = i == 0 ? 0 : s->time.sizes[i - 1];
        KV8_TRY(check_count("a size of steps", s->time.sizes[i], before + 1, MAX_COUNT));
        KV8_TRY(check_term("a step's time", s->time.ns[i]));
        if (!(s->time.ns[i] > 0))
            return kv8_fail(KV8_ERR_INVALID, "a step of %d tokens must take time",
                            s->time.sizes[i]);
    }
    KV8_TRY(check_term("decode_key_ns", s->time.decode_key_ns));
    KV8_TRY(check_term("prefill_key_ns", s->time.prefill_key_ns));
    if (!(o->requests_per_s >= 0) || !isfinite(o->requests_per_s))
        return kv8_fail(KV8_ERR_INVALID, "requests_per_s is %g, must be 0 or more",
                        o->requests_per_s);
    KV8_TRY(check_count("num_requests", o->num_requests, 1, MAX_COUNT));
    if (o->requests_per_s > 0 && o->num_requests / o->requests_per_s > MAX_SECONDS)
        return kv8_fail(KV8_ERR_INVALID,
                        "requests_per_s is %g, must be at least %g for %d requests",
                        o->requests_per_s, o->num_requests / MAX_SECONDS, o->num_requests);
    KV8_TRY(check_count("prompt_len", o->prompt_len, 1, MAX_COUNT));
    KV8_TRY(check_count("max_tokens", o->max_tokens, 1, MAX_COUNT));
    KV8_TRY(check_count("max_requests", o->max_requests, 0, MAX_COUNT));
    KV8_TRY(check_count("step_tokens", o->step_tokens, 0, MAX_COUNT));
    if (o->step_tokens == 0) o->step_tokens = DEFAULT_STEP_TOKENS;
    if (o->max_requests == 0) o->max_requests = DEFAULT_REQUESTS;
    o->max_requests = (int32_t)kv8_min_i64(o->max_requests, o->step_tokens);
    o->max_requests = (int32_t)kv8_min_i64(o->max_requests, o->num_requests);
    const int64_t longest = kv8_ceil_div((int64_t)o->prompt_len + o->max_tokens, PAGE_SIZE);
    if (o->pool_tokens == 0) o->pool_tokens = (longest + 1) * PAGE_SIZE * o->max_requests;
    return check_count("pool_tokens", o->pool_tokens, PAGE_SIZE, (int64_t)INT32_MAX * PAGE_SIZE);
}

/* --- life --- */

static kv8_status copy_nothing(void *cookie, int32_t group, int32_t to, int32_t from) {
    (void)cookie, (void)group, (void)to, (void)from;
    return KV8_OK;
}

static size_t num_gaps(const kv8_simulation_options *o) {
    return (size_t)o->num_requests * (size_t)(o->max_tokens - 1);
}

/* X(member, count). */
#define EACH_ARRAY(X)                                                      \
    X(visitors, (size_t)s->options.num_requests)                           \
    X(text, (size_t)s->options.prompt_len + (size_t)s->options.max_tokens) \
    X(chosen, (size_t)s->options.max_requests)                             \
    X(ttft, (size_t)s->options.num_requests)                               \
    X(itl, num_gaps(&s->options))

static kv8_status open_simulation(simulation *s) {
    const kv8_simulation_options *const o = &s->options;
    void *memory = NULL;
#define X(member, count)                                                               \
    KV8_TRY(kv8_alloc(o->allocator, count, sizeof *s->member, "simulation", &memory)); \
    s->member = memory;
    EACH_ARRAY(X)
#undef X
    const kv8_page_group_options group = {.window_left = -1,
                                          .num_pages = (int32_t)(o->pool_tokens / PAGE_SIZE)};
    const kv8_pages_options pages = {.allocator = o->allocator,
                                     .page_size = PAGE_SIZE,
                                     .max_seqs = o->max_requests + 1,
                                     .max_seq_len = o->prompt_len + o->max_tokens,
                                     .num_groups = 1,
                                     .groups = &group,
                                     .copy_page = copy_nothing};
    KV8_TRY(kv8_pages_create(&s->pages, &pages));
    const kv8_scheduler_options scheduler = {.allocator = o->allocator,
                                             .pages = s->pages,
                                             .max_running = o->max_requests,
                                             .max_waiting = o->num_requests,
                                             .max_step_tokens = o->step_tokens,
                                             .max_step_logits = o->max_requests,
                                             .paced = o->paced != 0};
    return kv8_scheduler_create(&s->scheduler, &scheduler);
}

static void close_simulation(simulation *s) {
    kv8_scheduler_destroy(s->scheduler);
    kv8_pages_destroy(s->pages);
#define X(member, count) kv8_release(s->options.allocator, s->member, count, sizeof *s->member);
    EACH_ARRAY(X)
#undef X
}

/* --- arrivals --- */

/* splitmix64, as a number above 0 and at most 1. */
static double draw_unit(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 1) * 0x1p-53;
}

/* Gaps between arrivals are exponential. */
static void draw_arrivals(simulation *s) {
    uint64_t state = s->options.seed;
    double at = 0;
    for (int32_t i = 0; i < s->options.num_requests; i++) {
        if (s->options.requests_per_s > 0)
            at -= log(draw_unit(&state)) * 1e9 / s->options.requests_per_s;
        s->visitors[i].arrived_ns = at;
    }
    s->now_ns = s->first_ns = s->visitors[0].arrived_ns;
}

static kv8_status admit(simulation *s) {
    for (; s->num_arrived < s->options.num_requests; s->num_arrived++) {
        visitor *const v = &s->visitors[s->num_arrived];
        if (v->arrived_ns > s->now_ns) break;
        const kv8_arrival arrival = {.tokens = s->text,
                                     .prompt_len = s->options.prompt_len,
                                     .max_new_tokens = s->options.max_tokens,
                                     .owner = v};
        KV8_TRY(kv8_scheduler_check(s->scheduler, &arrival));
        KV8_TRY(kv8_scheduler_submit(s->scheduler, &arrival, (uint64_t)v->arrived_ns, &v->request));
    }
    return KV8_OK;
}

/* --- steps --- */

static double time_of(const kv8_step_time *time, const kv8_schedule *schedule) {
    double ns = kv8_step_time_of(time, schedule->num_tokens);
    for (int32_t i = 0; i < schedule->num_rows; i++) {
        const double first = schedule->rows[i].first, num = schedule->rows[i].num_tokens;
        ns += kv8_prefill_keys(first, num) * (num > 1 ? time->prefill_key_ns : time->decode_key_ns);
    }
    return ns;
}

static kv8_status take_token(simulation *s, visitor *v) {
    if (v->num_tokens++ == 0)
        s->ttft[s->num_ttft++] = s->now_ns - v->arrived_ns;
    else
        s->itl[s->num_itl++] = s->now_ns - v->last_ns;
    v->last_ns = s->now_ns;
    if (v->num_tokens < s->options.max_tokens) return KV8_OK;
    s->num_ended++;
    return kv8_scheduler_end(s->scheduler, v->request);
}

static kv8_status run_step(simulation *s) {
    kv8_schedule schedule;
    KV8_TRY(kv8_scheduler_plan(s->scheduler, (uint64_t)s->now_ns, &schedule));
    if (schedule.num_rows == 0) { /* nobody is here */
        s->now_ns = s->visitors[s->num_arrived].arrived_ns;
        return KV8_OK;
    }
    const double ns = time_of(&s->time, &schedule);
    s->now_ns += ns;
    s->step_ns += ns;
    s->running_ns += ns * schedule.num_rows;
    s->num_steps++;
    kv8_scheduler_took(s->scheduler, ns);
    kv8_scheduler_commit(s->scheduler, s->chosen);
    kv8_scheduler_publish(s->scheduler);
    for (int32_t i = 0; i < schedule.num_rows; i++)
        if (schedule.rows[i].samples) KV8_TRY(take_token(s, schedule.rows[i].owner));
    return KV8_OK;
}

/* --- results --- */

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static kv8_spread spread_of(double *ns, size_t num) {
    if (num == 0) return (kv8_spread){0};
    double sum = 0;
    for (size_t i = 0; i < num; i++) sum += ns[i];
    qsort(ns, num, sizeof *ns, compare_doubles);
    return (kv8_spread){.mean = sum / (double)num * 1e-6,
                        .p50 = ns[(num - 1) / 2] * 1e-6,
                        .p99 = ns[(num * 99 + 99) / 100 - 1] * 1e-6};
}

static kv8_simulation results_of(const simulation *s) {
    kv8_scheduler_stats stats;
    kv8_scheduler_get_stats(s->scheduler, &stats);
    const double seconds = (s->now_ns - s->first_ns) * 1e-9;
    const double num = s->options.num_requests;
    return (kv8_simulation){.seconds = seconds,
                            .requests_per_s = num / seconds,
                            .tokens_per_s = num * s->options.max_tokens / seconds,
                            .ttft = spread_of(s->ttft, s->num_ttft),
                            .itl = spread_of(s->itl, s->num_itl),
                            .mean_running = s->running_ns / s->step_ns,
                            .num_steps = s->num_steps,
                            .num_preemptions = stats.num_preemptions};
}

static kv8_status tell_progress(const simulation *s) {
    const kv8_simulation_options *const o = &s->options;
    if (o->progress == NULL || s->num_steps % STEPS_OF_PROGRESS != 0) return KV8_OK;
    if (o->progress(o->progress_cookie, "simulate", (uint64_t)s->num_ended,
                    (uint64_t)o->num_requests) == 0)
        return KV8_OK;
    return kv8_fail(KV8_ERR_CANCELLED, "the caller asked to stop");
}

static kv8_status run(simulation *s) {
    draw_arrivals(s);
    while (s->num_ended < s->options.num_requests) {
        KV8_TRY(tell_progress(s));
        KV8_TRY(admit(s));
        KV8_TRY(run_step(s));
    }
    return KV8_OK;
}

kv8_status kv8_simulate(const kv8_simulation_options *options, kv8_simulation *simulation_out) {
    KV8_REQUIRE(options, simulation_out);
    KV8_TAKE_STRUCT(kv8_simulation_options, options);
    KV8_REQUIRE(options->time);
    simulation s = {0};
    KV8_TRY(resolve(&s, options));
    kv8_status status = open_simulation(&s);
    if (status == KV8_OK) status = run(&s);
    kv8_simulation result = {0};
    if (status == KV8_OK) result = results_of(&s);
    close_simulation(&s);
    KV8_TRY(status);
    KV8_WRITE_STRUCT(kv8_simulation, simulation_out, &result);
    return KV8_OK;
}
