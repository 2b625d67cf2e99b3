/* test_serving.c - what a server needs of the engine: prompts that share pages, requests that give
 * their pages back and come again, priorities, deadlines, masks, logprobs of prompts, figures.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "engine_runs.h"
#include "model.h"

static kv8_engine_stats stats_of(const kv8_engine *engine) {
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    assert_ok(kv8_engine_get_stats(engine, &stats));
    return stats;
}

/* --- pages --- */

/* Six requests in a pool that holds two and a half: each gives the tokens that it gives alone. */
static void preempted_requests_give_their_own_tokens(void **state) {
    (void)state;
    enum { NUM = 6, PROMPT = 40, ANSWER = 60 };
    int32_t alone[NUM][ANSWER];
    for (int i = 0; i < NUM; i++) continue_by_hand(ids + 50 * i, PROMPT, alone[i], ANSWER);
    for (int shares = 0; shares < 2; shares++) {
        kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
        options.step_tokens = 64;
        options.share_prefixes = shares;
        bench b = open_pool_bench(17, NUM, &options);
        outcome outcomes[NUM];
        for (int i = 0; i < NUM; i++) {
            const kv8_request request = request_of(ids + 50 * i, PROMPT, ANSWER);
            submit(b.engine, &request, &outcomes[i]);
        }
        run_engine(b.engine, outcomes, NUM);
        for (int i = 0; i < NUM; i++) {
            assert_int_equal(outcomes[i].finish, KV8_FINISH_LENGTH);
            assert_int_equal(outcomes[i].num_tokens, ANSWER);
            assert_memory_equal(outcomes[i].tokens, alone[i], sizeof alone[i]);
        }
        const kv8_engine_stats stats = stats_of(b.engine);
        assert_true(stats.num_preemptions >= 1);
        assert_int_equal(stats.pages_used, 0);
        close_bench(&b);
    }
}

static void prompts_share_pages_within_a_salt(void **state) {
    (void)state;
    int32_t alone[5];
    continue_by_hand(ids, 100, alone, 5);
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.share_prefixes = 1;
    bench b = open_pool_bench(64, 4, &options);
    static const struct {
        uint64_t salt;
        int32_t cached;
    } cases[] = {{0, 0}, {0, 96}, {7, 0}, {7, 96}, {0, 96}};
    outcome o[5];
    int32_t num_events = 0;
    for (int i = 0; i < 5; i++) {
        kv8_request request = request_of(ids, 100, 5);
        request.cache_salt = cases[i].salt;
        submit(b.engine, &request, &o[i]);
        if (i == 2) { /* it runs while the next finds its pages */
            assert_ok(kv8_engine_step(b.engine, &num_events));
            assert_int_equal(kv8_engine_event(b.engine, 0)->token, alone[0]);
            continue;
        }
        run_engine(b.engine, &o[i], 1);
        assert_int_equal(o[i].num_cached, cases[i].cached);
        assert_memory_equal(o[i].tokens, alone, sizeof alone);
    }
    const kv8_engine_stats stats = stats_of(b.engine);
    assert_int_equal(stats.prefix_queries, 500);
    assert_int_equal(stats.prefix_hits, 3 * 96);
    assert_int_equal(stats.prompt_tokens, 500 - 3 * 96);
    assert_int_equal(stats.generated_tokens, 25);
    close_bench(&b);
}

static void figures_count_what_runs(void **state) {
    (void)state;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.share_prefixes = 1;
    bench b = open_pool_bench(64, 2, &options);
    kv8_request request = request_of(ids, 33, 40);
    uint64_t id = 0;
    int32_t num_events = 0;
    request.hold = 1;
    for (int i = 0; i < 3; i++) {
        assert_ok(kv8_engine_submit(b.engine, &request, &id));
        assert_ok(kv8_engine_step(b.engine, &num_events));
    }
    kv8_engine_stats stats = stats_of(b.engine);
    assert_int_equal(stats.num_running, 2);
    assert_int_equal(stats.num_waiting, 1);
    assert_int_equal(stats.num_steps, 3);
    assert_int_equal(stats.pages_total, 128); /* two groups */
    assert_int_equal(stats.pages_used, 8);    /* of each three, of which two are shared */
    assert_int_equal(stats.pages_shared, 4);
    kv8_page_map map = KV8_PAGE_MAP_INIT;
    assert_ok(kv8_engine_get_page_map(b.engine, &map));
    assert_int_equal(map.num_cells, 128); /* a page each, the groups' one after the other */
    int32_t used[2] = {0, 0}, shared[2] = {0, 0};
    for (int i = 0; i < 128; i++) {
        assert_int_equal(map.pages[i], 1);
        used[i / 64] += map.used[i];
        shared[i / 64] += map.shared[i];
        assert_true(map.shared[i] <= map.used[i]);
    }
    for (int g = 0; g < 2; g++) assert_true(used[g] == 4 && shared[g] == 2);
    assert_true(stats.model_ns > 0 && stats.schedule_ns > 0 && stats.sample_ns > 0);
    assert_int_equal(stats.kv_nans, 0);
    while (num_events > 0 && stats_of(b.engine).num_resting < 2)
        assert_ok(kv8_engine_step(b.engine, &num_events));
    stats = stats_of(b.engine);
    assert_int_equal(stats.num_running, 0);
    assert_int_equal(stats.num_waiting, 1); /* for a sequence: both are held */
    assert_refused(kv8_engine_step(b.engine, &num_events), KV8_ERR_FULL, "2 at rest");
    assert_ok(kv8_engine_cancel(b.engine, 1));
    assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_int_equal(num_events, 1);
    assert_refused(kv8_engine_get_stats(b.engine, NULL), KV8_ERR_INVALID, "stats_out");
    close_bench(&b);
}

/* A prompt's step reads all weights and each key of it, the step after it one token's weights and
 * what is in reach; events say how long it took. */
static void a_step_reads_so_much(void **state) {
    (void)state;
    enum { PROMPT = 200 };
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    kv8_cache_stats cache = KV8_CACHE_STATS_INIT;
    bench b = open_pool_bench(64, 2, &options);
    const kv8_request request = request_of(ids, PROMPT, 2);
    uint64_t id = 0, before = 0;
    int32_t num_events = 0;
    assert_ok(kv8_cache_get_stats(b.cache, &cache));
    assert_int_equal(cache.page_size, 16);
    const uint64_t whole = cache.bytes_per_token_unwindowed, window = cache.bytes_per_token - whole;
    const uint64_t in_window = window * (uint64_t)(info.window_left + 1);
    const uint64_t unread_rows = (uint64_t)(info.vocab_size - 1) * 2 * (uint64_t)info.hidden_size;
    const uint64_t read[] = {info.bytes - unread_rows + whole * PROMPT + in_window,
                             info.bytes_per_decoded_token + whole * (PROMPT + 1) + in_window};
    assert_ok(kv8_engine_submit(b.engine, &request, &id));
    for (int i = 0; i < 2; i++) {
        assert_ok(kv8_engine_step(b.engine, &num_events));
        assert_int_equal(num_events, 1);
        const uint64_t after = stats_of(b.engine).read_bytes;
        assert_in_range(after - before, read[i] - 2, read[i] + 2);
        assert_true(kv8_engine_event(b.engine, 0)->step_ns > 0);
        before = after;
    }
    close_bench(&b);
}

/* As many tokens as a budget allows: their cache is within it, one of a page more is not. */
static void a_pool_fills_its_memory(void **state) {
    (void)state;
    static const char *const settings[] = {"f32", "e4m3", "k=int8,v=e4m3@full"};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        kv8_kv_cache_options options = KV8_KV_CACHE_OPTIONS_INIT;
        kv8_kv_setting setting;
        int64_t tokens = 0, most = 0;
        options.max_seqs = 4;
        options.max_seq_len = 8192;
        options.step_tokens = 512;
        assert_ok(kv8_kv_setting_parse(settings[i], &setting));
        const uint64_t budget = 20000000;
        assert_ok(kv8_kv_setting_count_tokens(model, &setting, &options, budget, &tokens));
        assert_in_range(tokens, 1000, 4 * 8192 - 1);
        for (int more = 0; more < 2; more++) {
            kv8_cache *cache = NULL;
            kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
            options.num_tokens = tokens + more;
            assert_ok(kv8_kv_setting_cache_create(&cache, model, &setting, &options));
            assert_ok(kv8_cache_get_stats(cache, &stats));
            assert_int_equal(stats.bytes > budget, more);
            kv8_cache_destroy(cache);
        }
        assert_ok(kv8_kv_setting_count_tokens(model, &setting, &options, UINT64_MAX / 2, &most));
        assert_int_equal(most, 4 * 8192);
        assert_ok(kv8_kv_setting_count_tokens(model, &setting, &options, 1000, &tokens));
        assert_int_equal(tokens, 0);
    }
}

/* --- who goes first --- */

static void priorities_and_deadlines_order_those_that_wait(void **state) {
    (void)state;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.patience_ns = (int64_t)1e15;
    bench b = open_pool_bench(64, 1, &options);
    outcome o[4];
    int32_t num_events = 0, mark = 5;
    const kv8_request first = request_of(ids, 5, 8);
    submit(b.engine, &first, &o[0]);
    assert_ok(kv8_engine_step(b.engine, &num_events));
    static const int32_t priority[4] = {0, 1, 0, -1};
    for (int i = 1; i < 4; i++) {
        kv8_request request = request_of(ids, 5, 1);
        request.priority = priority[i];
        request.deadline_ns = i == 2 ? 1 : 0;
        request.user = i == 2 ? &mark : NULL;
        submit(b.engine, &request, &o[i]);
    }
    /* The first has begun and goes on; the second deadline came at once. */
    assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_int_equal(num_events, 2);
    assert_int_equal(kv8_engine_event(b.engine, 0)->request, o[0].id);
    const kv8_event *const expired = kv8_engine_event(b.engine, 1);
    assert_int_equal(expired->request, o[2].id);
    assert_int_equal(expired->finish, KV8_FINISH_EXPIRED);
    assert_int_equal(expired->token, -1);
    assert_ptr_equal(expired->user, &mark);
    assert_refused(kv8_engine_cancel(b.engine, o[2].id), KV8_ERR_NOT_FOUND, "request 3");
    uint64_t order[2] = {0};
    for (int ended = 0; num_events > 0;) {
        assert_ok(kv8_engine_step(b.engine, &num_events));
        for (int32_t i = 0; i < num_events; i++) {
            const kv8_event *const event = kv8_engine_event(b.engine, i);
            if (event->finish != KV8_FINISH_NONE && event->request != o[0].id)
                order[ended++] = event->request;
        }
    }
    assert_int_equal(order[0], o[3].id);
    assert_int_equal(order[1], o[1].id);
    close_bench(&b);
}

/* --- what may be drawn --- */

typedef struct fence {
    int32_t low, high; /* ids that may follow */
    int32_t calls;
} fence;

static void allow_range(void *cookie, uint32_t *words) {
    fence *const f = cookie;
    for (int32_t i = 0; i < (info.vocab_size + 31) / 32; i++) assert_int_equal(words[i], 0);
    for (int32_t i = f->low; i < f->high; i++) words[i / 32] |= 1u << (i % 32);
    f->calls++;
}

static void masks_leave_the_best_of_what_may_follow(void **state) {
    (void)state;
    float *const logits = logits_of(model, KV8_F32, 16, ids, 20, 512);
    const float *const last = logits + 19 * (size_t)info.vocab_size;
    bench b = open_pool_bench(64, 4, &(kv8_engine_options)KV8_ENGINE_OPTIONS_INIT);
    fence f = {1000, 1100, 0}, none = {0, 0, 0};
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.temperature = 50;
    kv8_request request = request_of(ids, 20, 40);
    request.mask = allow_range;
    request.mask_cookie = &f;
    outcome cold, warm, barred;
    submit(b.engine, &request, &cold);
    run_engine(b.engine, &cold, 1);
    assert_int_equal(f.calls, 40);
    assert_int_equal(cold.tokens[0], 1000 + argmax_of(last + 1000, 100));
    request.sampling = &sampling;
    submit(b.engine, &request, &warm);
    run_engine(b.engine, &warm, 1);
    int32_t num_others = 0;
    for (int i = 0; i < 40; i++) {
        assert_true(cold.tokens[i] >= 1000 && cold.tokens[i] < 1100);
        assert_true(warm.tokens[i] >= 1000 && warm.tokens[i] < 1100);
        num_others += warm.tokens[i] != cold.tokens[i];
    }
    assert_true(num_others > 10);
    request.mask_cookie = &none;
    submit(b.engine, &request, &barred);
    run_engine(b.engine, &barred, 1);
    assert_int_equal(barred.finish, KV8_FINISH_FAILED);
    assert_int_equal(barred.num_tokens, 0);
    assert_string_equal(barred.message, "after 20 tokens no id may follow");
    free(logits);
    close_bench(&b);
}

/* An id that ends the request is the likeliest by far, and is not drawn before min_tokens. */
static void no_end_comes_before_min_tokens(void **state) {
    (void)state;
    bench b = open_pool_bench(64, 4, &(kv8_engine_options)KV8_ENGINE_OPTIONS_INIT);
    const float bias[2] = {1000, 900};
    const int32_t ends[2] = {info.eos[0], 77};
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.bias_ids = ends;
    sampling.bias = bias;
    sampling.num_bias = 2;
    kv8_request request = request_of(ids, 20, 9);
    request.sampling = &sampling;
    request.stop_ids = &ends[1];
    request.num_stop_ids = 1;
    request.ignore_eos = 0;
    static const int32_t wanted[3] = {1, 6, 9};
    for (int i = 0; i < 3; i++) {
        outcome o;
        request.min_tokens = i == 0 ? 0 : wanted[i] - 1;
        submit(b.engine, &request, &o);
        run_engine(b.engine, &o, 1);
        assert_int_equal(o.finish, KV8_FINISH_EOS);
        assert_int_equal(o.num_tokens, wanted[i]);
        for (int t = 0; t + 1 < wanted[i]; t++)
            assert_true(o.tokens[t] != ends[0] && o.tokens[t] != ends[1]);
    }
    /* The first token of a request that asks for nothing, as the end of one that asks for that
     * alone. */
    outcome free_run, held;
    request = request_of(ids, 20, 9);
    submit(b.engine, &request, &free_run);
    run_engine(b.engine, &free_run, 1);
    const int32_t first = free_run.tokens[0];
    request.stop_ids = &first;
    request.num_stop_ids = 1;
    request.min_tokens = 2;
    submit(b.engine, &request, &held);
    run_engine(b.engine, &held, 1);
    assert_true(held.num_tokens > 2 && held.tokens[0] != first && held.tokens[1] != first);
    uint64_t id = 0;
    request.min_tokens = 10;
    assert_refused(kv8_engine_submit(b.engine, &request, &id), KV8_ERR_INVALID,
                   "min_tokens is 10, must be 0 to max_tokens, 9");
    close_bench(&b);
}

/* --- logprobs of a prompt --- */

/* One token of the prompt; the row that it follows says how likely it was. */
static void check_logprob(const float *row, int32_t token, float logprob, const kv8_logprob *top,
                          int32_t n) {
    const double lse = log_sum_exp_of(row, info.vocab_size);
    assert_true(fabs((double)logprob - ((double)row[token] - lse)) <= 1e-3);
    assert_true(fabs((double)top[0].logprob -
                     ((double)row[argmax_of(row, info.vocab_size)] - lse)) <= 1e-3);
    for (int32_t i = 0; i < n; i++) {
        assert_true(fabs((double)top[i].logprob - ((double)row[top[i].token] - lse)) <= 1e-3);
        assert_true(i == 0 || top[i].logprob <= top[i - 1].logprob);
    }
}

static void prompts_have_logprobs_once_however_they_are_cut(void **state) {
    (void)state;
    enum { PROMPT = 70, TOP = 3 };
    float *const logits = logits_of(model, KV8_F32, 16, ids, PROMPT, 512);
    static const int32_t cuts[][2] = {{0, 128}, {64, 8}, {7, 0}};
    for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
        kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
        options.step_tokens = cuts[c][0];
        options.logit_rows = cuts[c][1];
        options.share_prefixes = 1;
        bench b = open_pool_bench(64, 4, &options);
        for (int again = 0; again < 2; again++) { /* nothing is taken from the first */
            kv8_request request = request_of(ids, PROMPT, 2);
            request.prompt_logprobs = TOP;
            request.num_logprobs = 1;
            uint64_t id = 0;
            int32_t num_events = 0, next = 1;
            assert_ok(kv8_engine_submit(b.engine, &request, &id));
            do {
                assert_ok(kv8_engine_step(b.engine, &num_events));
                const kv8_event *const event = kv8_engine_event(b.engine, 0);
                for (int32_t i = 0; i < event->num_prompt_logprobs; i++, next++) {
                    assert_int_equal(event->prompt_first + i, next);
                    check_logprob(logits + (size_t)(next - 1) * (size_t)info.vocab_size, ids[next],
                                  event->prompt_logprob[i], &event->prompt_top[i * TOP], TOP);
                }
                if (next == PROMPT && event->token >= 0)
                    assert_int_equal(event->top[0].token, event->token);
            } while (kv8_engine_event(b.engine, 0)->finish == KV8_FINISH_NONE);
            assert_int_equal(next, PROMPT);
        }
        close_bench(&b);
    }
    free(logits);
}

/* --- a model that fails --- */

static kv8_status refuse(kv8_model *m, kv8_cache *cache, const kv8_step *step) {
    (void)m, (void)cache, (void)step;
    return kv8_fail(KV8_ERR_DEVICE, "the model refuses");
}

static void a_step_that_fails_changes_no_request(void **state) {
    (void)state;
    int32_t alone[2][12];
    for (int i = 0; i < 2; i++) continue_by_hand(ids + 200 * i, 150, alone[i], 12);
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.step_tokens = 100;
    bench b = open_pool_bench(64, 4, &options);
    const kv8_architecture *const sound = model->architecture;
    kv8_architecture broken = *sound;
    broken.compute = refuse;
    outcome o[2];
    for (int i = 0; i < 2; i++) {
        const kv8_request request = request_of(ids + 200 * i, 150, 12);
        submit(b.engine, &request, &o[i]);
    }
    for (int32_t step = 0, num_events = 1; num_events > 0; step++) {
        model->architecture = &broken;
        if (o[0].finish == KV8_FINISH_NONE || o[1].finish == KV8_FINISH_NONE)
            assert_refused(kv8_engine_step(b.engine, &num_events), KV8_ERR_DEVICE, "refuses");
        model->architecture = sound;
        assert_ok(kv8_engine_step(b.engine, &num_events));
        for (int32_t i = 0; i < num_events; i++) {
            const kv8_event *const event = kv8_engine_event(b.engine, i);
            outcome *const to = &o[event->request - 1];
            if (event->token >= 0) to->tokens[to->num_tokens++] = event->token;
            to->finish = event->finish;
        }
    }
    for (int i = 0; i < 2; i++) assert_memory_equal(o[i].tokens, alone[i], sizeof alone[i]);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(preempted_requests_give_their_own_tokens),
        cmocka_unit_test(prompts_share_pages_within_a_salt),
        cmocka_unit_test(figures_count_what_runs),
        cmocka_unit_test(a_step_reads_so_much),
        cmocka_unit_test(a_pool_fills_its_memory),
        cmocka_unit_test(priorities_and_deadlines_order_those_that_wait),
        cmocka_unit_test(masks_leave_the_best_of_what_may_follow),
        cmocka_unit_test(no_end_comes_before_min_tokens),
        cmocka_unit_test(prompts_have_logprobs_once_however_they_are_cut),
        cmocka_unit_test(a_step_that_fails_changes_no_request),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
