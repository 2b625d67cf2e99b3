/* scheduler_world.h - what drives a scheduler in tests: a stub of a model, a shadow of every page's
 * bytes and a simulated clock.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SCHEDULER_WORLD_H
#define KV8_SCHEDULER_WORLD_H

#include "scheduler.h"

#include "testing.h"

enum { PAGE = 16, WINDOW = 24, SLACK = 64, MAX_LEN = 512, GROUPS = 2 };

/* --- a pool whose pages hold the tokens that were written there --- */

typedef struct world {
    kv8_pages *pages;
    kv8_scheduler *scheduler;
    int32_t num_pages;
    int32_t *bytes[GROUPS];         /* [num_pages, PAGE] tokens: what K and V would be made of */
    int32_t texts[16][MAX_LEN + 1]; /* of requests that no client keeps */
    int32_t num_texts;
    uint64_t random;
} world;

static inline kv8_status copy_page(void *cookie, int32_t group, int32_t to, int32_t from) {
    world *const w = cookie;
    memcpy(w->bytes[group] + to * PAGE, w->bytes[group] + from * PAGE, PAGE * sizeof(int32_t));
    return KV8_OK;
}

static inline uint32_t draw(world *w, uint32_t below) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % below);
}

static inline void open_world(world *w, int32_t num_pages, const kv8_scheduler_options *wanted) {
    *w = (world){.num_pages = num_pages, .random = 7};
    const kv8_page_group_options groups[GROUPS] = {{-1, num_pages, 0}, {WINDOW, num_pages, 1}};
    const kv8_pages_options options = {.page_size = PAGE,
                                       .max_seqs = wanted->max_running + 1,
                                       .max_seq_len = MAX_LEN,
                                       .window_slack = SLACK,
                                       .num_groups = GROUPS,
                                       .groups = groups,
                                       .copy_page = copy_page,
                                       .cookie = w};
    assert_ok(kv8_pages_create(&w->pages, &options));
    for (int g = 0; g < GROUPS; g++) {
        w->bytes[g] = calloc((size_t)num_pages * PAGE, sizeof(int32_t));
        assert_non_null(w->bytes[g]);
    }
    kv8_scheduler_options o = *wanted;
    o.pages = w->pages;
    assert_ok(kv8_scheduler_create(&w->scheduler, &o));
}
static inline void close_world(world *w) {
    kv8_scheduler_destroy(w->scheduler);
    for (int g = 0; g < GROUPS; g++) {
        assert_int_equal(kv8_pages_num_free(w->pages, g), w->num_pages);
        free(w->bytes[g]);
    }
    assert_int_equal(kv8_pages_num_seqs(w->pages), 0);
    kv8_pages_destroy(w->pages);
}

/* The stub's step: writes the row's tokens where its K and V would go, in pages that nobody else
 * holds. */
static inline void write_row(world *w, const kv8_scheduled_row *row) {
    int32_t idx;
    assert_ok(kv8_pages_find(w->pages, row->seq, &idx));
    assert_int_equal(kv8_pages_length(w->pages, idx), row->first + row->num_tokens);
    for (int32_t g = 0; g < GROUPS; g++) {
        assert_ok(kv8_pages_check_writable(w->pages, idx, g, row->num_tokens));
        const int32_t *const list = kv8_pages_list(w->pages, idx, g);
        for (int32_t t = row->first; t < row->first + row->num_tokens; t++)
            w->bytes[g][list[t / PAGE] * PAGE + t % PAGE] = row->token_ids[t - row->first];
    }
}
/* What the row's last query sees is the request's own text. */
static inline void check_seen(world *w, const kv8_scheduled_row *row, const int32_t *tokens) {
    int32_t idx;
    assert_ok(kv8_pages_find(w->pages, row->seq, &idx));
    const int32_t length = row->first + row->num_tokens;
    for (int32_t g = 0; g < GROUPS; g++) {
        const int32_t *const list = kv8_pages_list(w->pages, idx, g);
        const int32_t from = g == 0 || length - 1 < WINDOW ? 0 : length - 1 - WINDOW;
        for (int32_t t = from; t < length; t++)
            assert_int_equal(w->bytes[g][list[t / PAGE] * PAGE + t % PAGE], tokens[t]);
    }
}
/* The token that the stub chooses after `length` tokens of a text. */
static inline int32_t next_token(const int32_t *tokens, int32_t length) {
    uint32_t x = 2166136261u;
    for (int32_t t = length < 8 ? 0 : length - 8; t < length; t++)
        x = (x ^ (uint32_t)tokens[t]) * 16777619u;
    return (int32_t)((x ^ (uint32_t)length) % 50000);
}

/* Plans, runs and commits one step; schedule_out's rows stay readable. */
static inline void step(world *w, uint64_t now, kv8_schedule *schedule_out) {
    static int32_t chosen[4096];
    assert_ok(kv8_scheduler_plan(w->scheduler, now, schedule_out));
    if (schedule_out->num_tokens % 2 == 0) kv8_scheduler_publish(w->scheduler);
    for (int32_t i = 0; i < schedule_out->num_rows; i++) {
        const kv8_scheduled_row *const row = &schedule_out->rows[i];
        int32_t num = 0;
        const int32_t *const tokens = kv8_scheduler_tokens(w->scheduler, row->request, &num);
        write_row(w, row);
        if (row->samples) check_seen(w, row, tokens);
        chosen[i] = row->samples ? next_token(tokens, num) : -1;
    }
    kv8_scheduler_commit(w->scheduler, chosen);
}

/* A request's own memory of text that begins with first, first + stride, .. */
static inline int32_t *text_of(world *w, int32_t first, int32_t stride, int32_t prompt_len) {
    assert_true(w->num_texts < 16);
    int32_t *const text = w->texts[w->num_texts++];
    for (int32_t i = 0; i < prompt_len; i++) text[i] = first + stride * i;
    return text;
}

#endif
