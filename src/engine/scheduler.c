/* scheduler.c - the order of requests, the budget of a step, preemption.
 *
 * The place of a request never changes, so both lists below stay sorted by it: `running` is an
 * array (a step visits all of it anyway), `waiting` a heap whose first is the next to be admitted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "scheduler.h"

#include <stddef.h>
#include <string.h>

#include "pace.h"
#include "waiting.h"

typedef enum stage { GONE = 0, WAITS, RUNS, RESTS } stage;

typedef struct request {
    /* What every step reads of those that run, in one line of the cache. */
    _Alignas(KV8_ALIGNMENT) uint32_t generation; /* of the handle that is or was last valid */
    stage stage;
    int32_t row;    /* in the planned step, -1 = none */
    bool has_begun; /* was admitted once: no deadline ends it any more, and it counts as preempted
                     * while it waits */
    bool all_logits;
    bool to_publish;           /* what it has computed fills a page that nobody finds yet */
    int32_t num_tokens, limit; /* limit: of num_tokens */
    int32_t num_computed;      /* tokens whose K and V the sequence holds */
    int32_t num_reached;       /* the most they have been: of those before, no logits are wanted */
    int32_t num_cached;
    int32_t max_chunk;
    int32_t *tokens; /* [limit], the owner's */
    void *owner;
    kv8_seq seq; /* KV8_SEQ_NONE while it waits */

    int32_t prompt_len;
    uint64_t salt;
    kv8_request_id parent; /* 0 = none */
    kv8_waiting place;     /* order: arrival + priority * patience */
    uint64_t deadline_ns;
} request;
_Static_assert(offsetof(request, prompt_len) <= KV8_ALIGNMENT, "one line");

struct kv8_scheduler {
    kv8_scheduler_options options;
    int32_t num_slots, num_groups;
    request *slots;      /* [num_slots] */
    int32_t *free_slots; /* stack */
    int32_t num_free;
    int32_t *running; /* [max_running] slots, sorted */
    int32_t num_running;
    kv8_waiting *waiting; /* [num_waiting] of num_slots */
    int32_t num_waiting;
    int32_t num_new;         /* of those that wait, never admitted */
    kv8_scheduled_row *rows; /* [max_running] */
    int32_t num_rows, tokens_left, logits_left;
    int32_t num_decoding, prompt_tokens; /* of the planned step */
    kv8_pace pace;
    int64_t *growth; /* [num_groups] pages that those running still take, while a plan admits */
    void **expired;  /* [num_slots] */
    uint64_t next_serial;
    kv8_scheduler_stats stats;
};

/* --- the order --- */

static void wait_push(kv8_scheduler *s, int32_t slot) {
    kv8_waiting_push(s->waiting, &s->num_waiting, s->slots[slot].place);
    s->num_new += !s->slots[slot].has_begun;
}
static void wait_remove(kv8_scheduler *s, int32_t i) {
    s->num_new -= !s->slots[s->waiting[i].slot].has_begun;
    kv8_waiting_remove(s->waiting, &s->num_waiting, i);
}

static int32_t run_insert(kv8_scheduler *s, int32_t slot) {
    int32_t i = s->num_running++;
    const kv8_waiting *const place = &s->slots[slot].place;
    for (; i > 0 && kv8_comes_before(place, &s->slots[s->running[i - 1]].place); i--)
        s->running[i] = s->running[i - 1];
    s->running[i] = slot;
    return i;
}
static void run_remove(kv8_scheduler *s, int32_t i) {
    s->num_running--;
    memmove(&s->running[i], &s->running[i + 1],
            (size_t)(s->num_running - i) * sizeof s->running[0]);
}

/* --- create --- */

static kv8_status check_options(const kv8_scheduler_options *options) {
    if (options->pages == NULL) return kv8_fail(KV8_ERR_INVALID, "pages is NULL");
    if (options->max_running < 1)
        return kv8_fail(KV8_ERR_INVALID, "max_running is %d, must be at least 1",
                        options->max_running);
    if (options->max_waiting < 0 || options->max_waiting > INT32_MAX - options->max_running)
        return kv8_fail(KV8_ERR_INVALID, "max_waiting is %d, must be 0 to %d", options->max_waiting,
                        INT32_MAX - options->max_running);
    if (options->max_step_tokens < options->max_running)
        return kv8_fail(KV8_ERR_INVALID,
                        "max_step_tokens is %d, must be at least max_running, %d: every running "
                        "request decodes in every step",
                        options->max_step_tokens, options->max_running);
    if (options->max_step_logits < options->max_running)
        return kv8_fail(KV8_ERR_INVALID, "max_step_logits is %d, must be at least max_running, %d",
                        options->max_step_logits, options->max_running);
    return KV8_OK;
}

static kv8_status take(kv8_scheduler *s, int32_t count, size_t size, void *out) {
    void *array = NULL;
    KV8_TRY(kv8_alloc(s->options.allocator, (size_t)count, size, "scheduler", &array));
    memcpy(out, &array, sizeof array);
    return KV8_OK;
}

kv8_status kv8_scheduler_create(kv8_scheduler **out, const kv8_scheduler_options *options) {
    *out = NULL;
    KV8_TRY(check_options(options));
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_scheduler), "scheduler", &memory));
    kv8_scheduler *const s = memory;
    s->options = *options;
    const int32_t n = s->num_slots = options->max_running + options->max_waiting;
    s->num_groups = kv8_pages_num_groups(options->pages);
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(take(s, n, sizeof s->slots[0], &s->slots));
    KV8_TRY_GOTO(take(s, n, sizeof s->free_slots[0], &s->free_slots));
    KV8_TRY_GOTO(take(s, n, sizeof s->waiting[0], &s->waiting));
    KV8_TRY_GOTO(take(s, n, sizeof s->expired[0], &s->expired));
    KV8_TRY_GOTO(take(s, options->max_running, sizeof s->running[0], &s->running));
    KV8_TRY_GOTO(take(s, options->max_running, sizeof s->rows[0], &s->rows));
    KV8_TRY_GOTO(take(s, s->num_groups, sizeof s->growth[0], &s->growth));
    for (int32_t i = 0; i < n; i++) s->free_slots[i] = n - 1 - i;
    s->num_free = n;
    *out = s;
    return KV8_OK;
fail:
    kv8_scheduler_destroy(s);
    return status;
}

void kv8_scheduler_destroy(kv8_scheduler *s) {
    if (s == NULL) return;
    const kv8_allocator *const allocator = s->options.allocator;
    const size_t n = (size_t)s->num_slots, running = (size_t)s->options.max_running;
    for (size_t i = 0; s->slots != NULL && i < n; i++) {
        if (s->slots[i].stage == RUNS || s->slots[i].stage == RESTS)
            KV8_MUST(kv8_pages_seq_destroy(s->options.pages, s->slots[i].seq));
    }
    kv8_release(allocator, s->slots, n, sizeof s->slots[0]);
    kv8_release(allocator, s->free_slots, n, sizeof s->free_slots[0]);
    kv8_release(allocator, s->waiting, n, sizeof s->waiting[0]);
    kv8_release(allocator, s->expired, n, sizeof s->expired[0]);
    kv8_release(allocator, s->running, running, sizeof s->running[0]);
    kv8_release(allocator, s->rows, running, sizeof s->rows[0]);
    kv8_release(allocator, s->growth, (size_t)s->num_groups, sizeof s->growth[0]);
    kv8_release(allocator, s, 1, sizeof *s);
}

/* --- requests --- */

static kv8_request_id handle_of(const kv8_scheduler *s, int32_t slot) {
    return (kv8_request_id)((uint64_t)s->slots[slot].generation << 32 | (uint32_t)slot);
}
/* The slot, -1 when the request is gone. */
static int32_t slot_of(const kv8_scheduler *s, kv8_request_id handle) {
    const int64_t slot = handle & 0xffffffff;
    if (handle < 0 || slot >= s->num_slots) return -1;
    const bool is_it =
        s->slots[slot].stage != GONE && s->slots[slot].generation == (uint64_t)handle >> 32;
    return is_it ? (int32_t)slot : -1;
}

/* Pages of a group that a sequence of `length` tokens holds at most, while it takes a step's, or
 * `chunk` (0 = a step's), of them. */
static int64_t most_pages(const kv8_scheduler *s, int32_t group, int32_t length, int32_t chunk) {
    const kv8_pages *const pages = s->options.pages;
    const int64_t page_size = kv8_pages_page_size(pages);
    const int64_t all = kv8_ceil_div(length, page_size);
    const int64_t reach = kv8_pages_reach(pages, group);
    if (reach < 0) return all;
    const int64_t most = chunk > 0 ? chunk : s->options.max_step_tokens;
    const int64_t step = kv8_min_i64(kv8_min_i64(s->options.max_step_tokens, most), length);
    return kv8_min_i64(all, kv8_ceil_div(reach + step, page_size) + 1);
}

kv8_status kv8_scheduler_check(const kv8_scheduler *s, const kv8_arrival *a) {
    const kv8_pages *const pages = s->options.pages;
    if (a->tokens == NULL || a->prompt_len < 1)
        return kv8_fail(KV8_ERR_INVALID, "the prompt is empty");
    if (a->max_new_tokens < 0 || a->max_chunk < 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "max_new_tokens is %d and max_chunk %d, neither may be < 0",
                        a->max_new_tokens, a->max_chunk);
    /* The last token that is chosen is never stored. */
    const int64_t stored = (int64_t)a->prompt_len + kv8_max_i64(a->max_new_tokens - 1, 0);
    if (stored > kv8_min_i64(kv8_pages_max_seq_len(pages), INT32_MAX - 1))
        return kv8_fail(
            KV8_ERR_INVALID,
            "%d prompt tokens and %d new ones are more than the %d tokens of a sequence",
            a->prompt_len, a->max_new_tokens, kv8_pages_max_seq_len(pages));
    for (int32_t g = 0; g < s->num_groups; g++) {
        const int64_t needed = most_pages(s, g, (int32_t)stored, a->max_chunk);
        if (needed > kv8_pages_num_pages(pages, g))
            return kv8_fail(KV8_ERR_INVALID,
                            "a request of %d tokens needs %lld pages of %d tokens, the pool has %d",
                            (int32_t)stored, (long long)needed, kv8_pages_page_size(pages),
                            kv8_pages_num_pages(pages, g));
    }
    return KV8_OK;
}

static int64_t order_of(const kv8_scheduler *s, const kv8_arrival *a, uint64_t now_ns) {
    int64_t offset, order;
    if (__builtin_mul_overflow((int64_t)a->priority, s->options.patience_ns, &offset) ||
        __builtin_add_overflow((int64_t)now_ns, offset, &order))
        return a->priority < 0 ? INT64_MIN : INT64_MAX;
    return order;
}

kv8_status kv8_scheduler_submit(kv8_scheduler *s, const kv8_arrival *a, uint64_t now_ns,
                                kv8_request_id *request_out) {
    if (s->num_new >= s->options.max_waiting || s->num_free == 0)
        return kv8_fail(KV8_ERR_FULL, "%d requests wait, the limit of the queue is %d", s->num_new,
                        s->options.max_waiting);
    const int32_t slot = s->free_slots[s->num_free - 1];
    request *const r = &s->slots[slot];
    const int32_t parent = slot_of(s, a->parent);
    *r = (request){.generation = r->generation % INT32_MAX + 1,
                   .stage = WAITS,
                   .all_logits = a->all_logits,
                   .salt = parent < 0 ? a->salt : s->slots[parent].salt,
                   .parent = a->parent,
                   .place = {order_of(s, a, now_ns), s->next_serial++, slot},
                   .deadline_ns = a->deadline_ns,
                   .owner = a->owner,
                   .tokens = a->tokens,
                   .num_tokens = a->prompt_len,
                   .max_chunk = a->max_chunk,
                   .num_reached = parent < 0 ? 0 : s->slots[parent].num_computed,
                   .prompt_len = a->prompt_len,
                   .limit = a->prompt_len + a->max_new_tokens,
                   .row = -1,
                   .seq = KV8_SEQ_NONE};
    s->num_free--;
    wait_push(s, slot);
    *request_out = handle_of(s, slot);
    return KV8_OK;
}

static void forget(kv8_scheduler *s, int32_t slot) {
    s->slots[slot].stage = GONE;
    s->free_slots[s->num_free++] = slot;
}
/* Others find the full pages of what the request has computed. */
static void publish(const kv8_scheduler *s, request *r) {
    if (r->to_publish) KV8_MUST(kv8_pages_publish(s->options.pages, r->seq, r->num_computed));
    r->to_publish = false;
}
static void give_pages_back(kv8_scheduler *s, request *r) {
    publish(s, r);
    KV8_MUST(kv8_pages_seq_destroy(s->options.pages, r->seq));
    r->seq = KV8_SEQ_NONE;
    r->num_computed = 0;
}

kv8_status kv8_scheduler_end(kv8_scheduler *s, kv8_request_id handle) {
    const int32_t slot = slot_of(s, handle);
    if (slot < 0) return kv8_fail(KV8_ERR_NOT_FOUND, "the request is gone");
    const stage was = s->slots[slot].stage;
    for (int32_t i = 0; was == WAITS && i < s->num_waiting; i++)
        if (s->waiting[i].slot == slot) wait_remove(s, i);
    for (int32_t i = 0; was == RUNS && i < s->num_running; i++)
        if (s->running[i] == slot) run_remove(s, i);
    s->stats.num_resting -= was == RESTS;
    if (was != WAITS) give_pages_back(s, &s->slots[slot]);
    forget(s, slot);
    return KV8_OK;
}

void kv8_scheduler_rest(kv8_scheduler *s, kv8_request_id handle) {
    const int32_t slot = slot_of(s, handle);
    assert(slot >= 0 && s->slots[slot].stage == RUNS);
    for (int32_t i = 0; i < s->num_running; i++)
        if (s->running[i] == slot) run_remove(s, i);
    publish(s, &s->slots[slot]);
    s->slots[slot].stage = RESTS;
    KV8_MUST(kv8_pages_move_windows(s->options.pages, s->slots[slot].seq));
    s->stats.num_resting++;
}

/* --- plan --- */

static void expire(kv8_scheduler *s, uint64_t now_ns, kv8_schedule *schedule) {
    for (int32_t i = 0; i < s->num_waiting;) {
        const int32_t slot = s->waiting[i].slot;
        const request *const r = &s->slots[slot];
        if (r->has_begun || r->deadline_ns == 0 || now_ns < r->deadline_ns) {
            i++;
            continue;
        }
        s->expired[schedule->num_expired++] = r->owner;
        wait_remove(s, i); /* another one stands at i now, or rose above it and has been looked at
                            * or will be in the next step */
        forget(s, slot);
    }
    schedule->expired = s->expired;
}

static void preempt(kv8_scheduler *s, int32_t running_idx) {
    const int32_t slot = s->running[running_idx];
    run_remove(s, running_idx);
    give_pages_back(s, &s->slots[slot]);
    s->slots[slot].stage = WAITS;
    wait_push(s, slot);
    s->stats.num_preemptions++;
}

/* Room for n more tokens of the running request at index i, taken from the last of the order where
 * the pool has none: of those behind i that have no row in this step. *got_out is false when there
 * is nobody left to take from; the sequence is then as it was. */
static kv8_status make_room(kv8_scheduler *s, int32_t i, int32_t n, bool *got_out) {
    const request *const r = &s->slots[s->running[i]];
    for (;;) {
        const kv8_status status =
            kv8_pages_extend(s->options.pages, r->seq, n, r->tokens + r->num_computed);
        *got_out = status == KV8_OK;
        if (status != KV8_ERR_FULL) return status;
        int32_t victim = s->num_running - 1;
        while (victim > i && s->slots[s->running[victim]].row >= 0) victim--;
        if (victim <= i) return KV8_OK;
        preempt(s, victim);
    }
}

static bool samples_after(const request *r, int32_t n) {
    return r->num_computed + n == r->num_tokens && r->num_tokens < r->limit;
}

/* Of how many of the next n tokens the logits are wanted. */
static int32_t logits_of(const request *r, int32_t n) {
    if (!r->all_logits) return samples_after(r, n);
    return (int32_t)kv8_max_i64(0,
                                r->num_computed + n - kv8_max_i64(r->num_computed, r->num_reached));
}

/* How many tokens of the request the step has room for. */
static int32_t chunk_of(const kv8_scheduler *s, const request *r) {
    int32_t n = (int32_t)kv8_min_i64(r->num_tokens - r->num_computed, s->tokens_left);
    if (r->max_chunk > 0 && n > r->max_chunk) n = r->max_chunk;
    const int32_t excess = logits_of(r, n) - s->logits_left;
    return excess > 0 ? n - excess : n;
}

static void add_row(kv8_scheduler *s, int32_t slot, int32_t n) {
    request *const r = &s->slots[slot];
    r->row = s->num_rows++;
    s->tokens_left -= n;
    s->logits_left -= logits_of(r, n);
    s->rows[r->row] = (kv8_scheduled_row){.request = handle_of(s, slot),
                                          .owner = r->owner,
                                          .seq = r->seq,
                                          .token_ids = r->tokens + r->num_computed,
                                          .first = r->num_computed,
                                          .num_tokens = n,
                                          .num_cached = r->num_cached,
                                          .num_logits = logits_of(r, n),
                                          .samples = samples_after(r, n)};
}

/* A row for the running request at index i, of as many tokens as the budget has; *got_out is false
 * when there is no budget or the pool has no pages for it. */
static kv8_status give_row(kv8_scheduler *s, int32_t i, bool *got_out) {
    const int32_t slot = s->running[i];
    const int32_t n = chunk_of(s, &s->slots[slot]);
    *got_out = false;
    if (n == 0) return KV8_OK;
    KV8_TRY(make_room(s, i, n, got_out));
    if (*got_out) add_row(s, slot, n);
    return KV8_OK;
}

/* Rows of running requests with one token to compute (decode), or with more (a prompt under way, a
 * preempted text anew). A decode row without room is the last of the order by then and gives its
 * own pages back; a chunk without room waits. */
static kv8_status plan_running(kv8_scheduler *s, bool decode) {
    for (int32_t i = 0; i < s->num_running && s->tokens_left > 0; i++) {
        const request *const r = &s->slots[s->running[i]];
        if (r->row >= 0 || (r->num_tokens - r->num_computed == 1) != decode) continue;
        bool got = false;
        KV8_TRY(give_row(s, i, &got));
        if (!got && decode && i > 0) preempt(s, i);
    }
    return KV8_OK;
}

/* Of the tokens that a request has, so many are computed at once: one where it decodes. */
static int32_t longest_chunk(const request *r) {
    const int32_t rest = (int32_t)kv8_max_i64(1, r->num_tokens - r->num_computed);
    return r->max_chunk > 0 && r->max_chunk < rest ? r->max_chunk : rest;
}

/* Pages that a sequence of the request's still takes of a group until it has `length` tokens: a
 * part of a page that it shares with its parent is copied. */
static int64_t pages_to_come(const kv8_scheduler *s, const request *r, int32_t g, int64_t length) {
    const kv8_pages *const pages = s->options.pages;
    const int32_t idx = kv8_seq_index(r->seq), page_size = kv8_pages_page_size(pages);
    const int32_t stored = kv8_pages_length(pages, idx);
    const int64_t held =
        kv8_ceil_div(stored, page_size) - kv8_pages_held_from(pages, idx, g) / page_size;
    const bool copies = r->stage == WAITS && stored % page_size != 0;
    return kv8_max_i64(0, most_pages(s, g, (int32_t)length, longest_chunk(r)) - held + copies);
}

/* What a request stores when it has all its tokens: the last one chosen is never read back. */
static int64_t final_length(const request *r) {
    return kv8_max_i64(r->prompt_len, r->limit - 1);
}

/* Of one more that runs; of all. */
static void add_growth(kv8_scheduler *s, const request *r) {
    for (int32_t g = 0; g < s->num_groups; g++)
        s->growth[g] += pages_to_come(s, r, g, final_length(r));
}
static void count_growth(kv8_scheduler *s) {
    memset(s->growth, 0, (size_t)s->num_groups * sizeof s->growth[0]);
    for (int32_t i = 0; i < s->num_running; i++) add_growth(s, &s->slots[s->running[i]]);
}

/* Every token of a request and the next one have room beside what its sequence holds, and so has
 * what those running still grow by, a part of the pool at most. Alone it has all there is. */
static bool finds_room(const kv8_scheduler *s, const request *r) {
    const kv8_pages *const pages = s->options.pages;
    enum { GROWTH_PART = 64 }; /* of the pool: seldom preempted again at once */
    if (s->num_running == 0) return true;
    const int64_t length = kv8_min_i64(r->num_tokens + 1, final_length(r));
    for (int32_t g = 0; g < s->num_groups; g++) {
        const int64_t most = kv8_pages_num_pages(pages, g) / GROWTH_PART;
        const int64_t needed = pages_to_come(s, r, g, length) + kv8_min_i64(s->growth[g], most);
        if (needed > kv8_pages_num_free(pages, g)) return false;
    }
    return true;
}

/* A sequence for a request that waits: its parent's, or what other requests have computed of its
 * text. */
static kv8_status begin_sequence(kv8_scheduler *s, request *r) {
    kv8_pages *const pages = s->options.pages;
    const int32_t parent = slot_of(s, r->parent);
    if (parent >= 0 && s->slots[parent].stage == RESTS) {
        KV8_TRY(kv8_pages_seq_fork(pages, s->slots[parent].seq, &r->seq));
        r->num_computed = s->slots[parent].num_computed;
        return KV8_OK;
    }
    const bool shares = s->options.share_prefixes && !r->all_logits;
    return kv8_pages_prefix_match(pages, r->salt, r->tokens, shares ? r->num_tokens : 0, &r->seq,
                                  &r->num_computed);
}

/* The first of those that wait runs, if it finds room; *running_idx_out is -1 if it does not. */
static kv8_status admit(kv8_scheduler *s, int32_t *running_idx_out) {
    const int32_t slot = s->waiting[0].slot;
    request *const r = &s->slots[slot];
    *running_idx_out = -1;
    const kv8_status status = begin_sequence(s, r);
    if (status == KV8_ERR_FULL) return KV8_OK;
    KV8_TRY(status);
    if (!finds_room(s, r)) {
        give_pages_back(s, r);
        return KV8_OK;
    }
    wait_remove(s, 0);
    if (!r->has_begun) {
        r->num_cached = r->num_computed < r->prompt_len ? r->num_computed : r->prompt_len;
        const bool shares = s->options.share_prefixes && r->parent == 0;
        s->stats.prefix_queries += shares ? (uint64_t)r->prompt_len : 0;
        s->stats.prefix_hits += shares ? (uint64_t)r->num_cached : 0;
    }
    r->has_begun = true;
    r->stage = RUNS;
    *running_idx_out = run_insert(s, slot);
    return KV8_OK;
}
static bool may_admit(const kv8_scheduler *s) {
    return s->num_waiting > 0 && s->tokens_left > 0 && s->num_running < s->options.max_running;
}
/* Not in a step that preempted somebody: what waits first then is what was just sent there. */
static kv8_status plan_waiting(kv8_scheduler *s) {
    if (may_admit(s)) {
        kv8_scheduler_publish(s);
        count_growth(s);
    }
    while (may_admit(s)) {
        int32_t i = -1;
        bool got = false;
        KV8_TRY(admit(s, &i));
        if (i >= 0) KV8_TRY(give_row(s, i, &got));
        if (!got) break;
        add_growth(s, &s->slots[s->running[i]]);
    }
    return KV8_OK;
}

/* What decode rows leave of the step for prompts. */
static void set_pace(kv8_scheduler *s) {
    const int32_t num_reading = s->num_running - s->num_rows + s->num_waiting;
    s->num_decoding = s->num_rows;
    if (s->options.paced)
        s->tokens_left = kv8_pace_tokens(&s->pace, s->num_decoding, num_reading, s->tokens_left);
    s->prompt_tokens = s->tokens_left;
}

kv8_status kv8_scheduler_plan(kv8_scheduler *s, uint64_t now_ns, kv8_schedule *schedule_out) {
    *schedule_out = (kv8_schedule){0};
    s->num_rows = 0;
    s->tokens_left = s->options.max_step_tokens;
    s->logits_left = s->options.max_step_logits;
    expire(s, now_ns, schedule_out);
    const uint64_t preemptions = s->stats.num_preemptions;
    kv8_status status = plan_running(s, true);
    set_pace(s);
    if (status == KV8_OK) status = plan_running(s, false);
    if (status == KV8_OK && s->stats.num_preemptions == preemptions) status = plan_waiting(s);
    if (status == KV8_OK && s->num_rows == 0 && s->num_running + s->num_waiting > 0)
        status = kv8_fail_within(KV8_ERR_FULL, "%d requests, and %d at rest",
                                 s->num_running + s->num_waiting, s->stats.num_resting);
    if (status != KV8_OK) {
        kv8_scheduler_abandon(s);
        return status;
    }
    s->prompt_tokens -= s->tokens_left;
    schedule_out->rows = s->rows;
    schedule_out->num_rows = s->num_rows;
    schedule_out->num_tokens = s->num_decoding + s->prompt_tokens;
    return KV8_OK;
}

/* --- after the step --- */

void kv8_scheduler_took(kv8_scheduler *s, double ns) {
    kv8_pace_learn(&s->pace, s->num_decoding, s->prompt_tokens, ns);
}

void kv8_scheduler_commit(kv8_scheduler *s, const int32_t *tokens) {
    const int32_t page_size = kv8_pages_page_size(s->options.pages);
    for (int32_t i = 0; i < s->num_rows; i++) {
        const kv8_scheduled_row *const row = &s->rows[i];
        request *const r = &s->slots[slot_of(s, row->request)];
        const bool failed = tokens[i] == KV8_ROW_FAILED;
        if (failed) publish(s, r); /* what was computed before */
        r->row = -1;
        r->num_computed += row->num_tokens;
        if (r->num_reached < r->num_computed) r->num_reached = r->num_computed;
        if (failed) continue;
        if (row->samples) r->tokens[r->num_tokens++] = tokens[i];
        if (!s->options.share_prefixes) continue;
        r->to_publish |= row->num_tokens > 1 || r->num_computed % page_size == 0;
        /* A chunk's pages may lie behind a window once the sequence grows: they cannot wait. */
        if (row->num_tokens > 1) publish(s, r);
    }
    s->num_rows = 0;
}

void kv8_scheduler_publish(kv8_scheduler *s) {
    for (int32_t i = 0; i < s->num_running; i++) publish(s, &s->slots[s->running[i]]);
}

void kv8_scheduler_abandon(kv8_scheduler *s) {
    for (int32_t i = 0; i < s->num_rows; i++) {
        const int32_t slot = slot_of(s, s->rows[i].request);
        request *const r = &s->slots[slot];
        r->row = -1;
        if (kv8_pages_truncate(s->options.pages, r->seq, r->num_computed) == KV8_OK) continue;
        /* A window's pages are gone: the text is computed anew. */
        for (int32_t k = 0; k < s->num_running; k++)
            if (s->running[k] == slot) preempt(s, k);
    }
    s->num_rows = 0;
}

/* --- facts --- */

const int32_t *kv8_scheduler_tokens(const kv8_scheduler *s, kv8_request_id handle,
                                    int32_t *num_out) {
    const int32_t slot = slot_of(s, handle);
    if (slot < 0) return NULL;
    *num_out = s->slots[slot].num_tokens;
    return s->slots[slot].tokens;
}

void kv8_scheduler_get_stats(const kv8_scheduler *s, kv8_scheduler_stats *stats_out) {
    *stats_out = s->stats;
    stats_out->num_running = s->num_running;
    stats_out->num_waiting = s->num_waiting;
}
