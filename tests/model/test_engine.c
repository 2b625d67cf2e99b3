/* test_engine.c - the step loop: what a request gives does not depend on how steps are cut or who
 * else runs; every way to end; what is refused; logits that are no numbers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "engine_runs.h"
#include "gpt_oss.h"

static const int32_t prompt_len[4] = {150, 1, 40, 17}, answer_len[4] = {6, 20, 9, 1};

/* Whatever a step holds, each request gives what it gives alone. */
static void requests_together_equal_requests_alone(void **state) {
    (void)state;
    int32_t alone[4][20];
    for (int i = 0; i < 4; i++)
        continue_by_hand(ids + 100 * i, prompt_len[i], alone[i], answer_len[i]);
    static const int32_t cuts[][2] = {{0, 0}, {7, 0}, {1, 0}, {64, 1}, {512, 2}};
    for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
        bench b = open_bench(cuts[c][0], cuts[c][1]);
        outcome outcomes[4];
        for (int i = 0; i < 4; i++) {
            const kv8_request request = request_of(ids + 100 * i, prompt_len[i], answer_len[i]);
            submit(b.engine, &request, &outcomes[i]);
            assert_int_equal(outcomes[i].id, i + 1);
        }
        run_engine(b.engine, outcomes, 4);
        for (int i = 0; i < 4; i++) {
            assert_int_equal(outcomes[i].finish, KV8_FINISH_LENGTH);
            assert_int_equal(outcomes[i].num_tokens, answer_len[i]);
            assert_int_equal(outcomes[i].num_computed, prompt_len[i] + answer_len[i] - 1);
            assert_memory_equal(outcomes[i].tokens, alone[i],
                                (size_t)answer_len[i] * sizeof(int32_t));
        }
        close_bench(&b);
    }
}

/* A long prompt enters in chunks beside a request that decodes one token every step. */
static void decoding_does_not_wait_for_prompts(void **state) {
    (void)state;
    bench b = open_bench(32, 0);
    const kv8_request quick = request_of(ids, 3, 20), slow = request_of(ids + 10, 300, 1);
    uint64_t quick_id = 0, slow_id = 0;
    int32_t num_events = 0, prompt_left = 300;
    assert_ok(kv8_engine_submit(b.engine, &quick, &quick_id));
    assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_ok(kv8_engine_submit(b.engine, &slow, &slow_id));
    while (prompt_left > 0) {
        assert_ok(kv8_engine_step(b.engine, &num_events));
        assert_int_equal(num_events, 2);
        assert_int_equal(kv8_engine_event(b.engine, 0)->request, quick_id);
        assert_true(kv8_engine_event(b.engine, 0)->token >= 0);
        assert_int_equal(kv8_engine_event(b.engine, 1)->num_taken,
                         prompt_left < 31 ? prompt_left : 31);
        prompt_left -= kv8_engine_event(b.engine, 1)->num_taken;
    }
    assert_ok(kv8_engine_cancel(b.engine, quick_id));
    assert_refused(kv8_engine_cancel(b.engine, quick_id), KV8_ERR_NOT_FOUND, "request 1");
    assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_int_equal(num_events, 0);
    close_bench(&b);
}

/* Each request of one seed draws by its own position and stream, so cuts do not matter here
 * either. */
static void draws_do_not_depend_on_who_else_runs(void **state) {
    (void)state;
    outcome alone[3], together[3];
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.temperature = 1.2f;
    sampling.top_p = 0.95f;
    sampling.repetition_penalty = 1.1f;
    sampling.seed = 9;
    kv8_request request = request_of(ids, 30, 12);
    request.sampling = &sampling;
    for (int i = 0; i < 3; i++) {
        bench b = open_bench(0, 0);
        sampling.stream = (uint64_t)i;
        submit(b.engine, &request, &alone[i]);
        run_engine(b.engine, &alone[i], 1);
        close_bench(&b);
    }
    bench b = open_bench(11, 0);
    for (int i = 0; i < 3; i++) {
        sampling.stream = (uint64_t)i;
        submit(b.engine, &request, &together[i]);
    }
    run_engine(b.engine, together, 3);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(together[i].tokens, alone[i].tokens, 12 * sizeof(int32_t));
    assert_true(memcmp(alone[0].tokens, alone[1].tokens, 12 * sizeof(int32_t)) != 0);
    close_bench(&b);
}

/* A request at rest is forked; a fork goes on where its parent ended. */
static void forks_continue_their_parent(void **state) {
    (void)state;
    int32_t tokens[8];
    continue_by_hand(ids, 160, tokens, 8);
    bench b = open_bench(64, 0);
    outcome stem, forks[2], last;
    kv8_request request = request_of(ids, 150, 0);
    request.hold = 1;
    submit(b.engine, &request, &stem);
    request = request_of(ids + 150, 10, 8);
    request.parent = stem.id;
    assert_refused(kv8_engine_submit(b.engine, &request, &forks[0].id), KV8_ERR_NOT_FOUND,
                   "no request 1 at rest");
    run_engine(b.engine, &stem, 1);
    assert_int_equal(stem.finish, KV8_FINISH_LENGTH);
    submit(b.engine, &request, &forks[0]);
    request.max_tokens = 4;
    request.hold = 1;
    submit(b.engine, &request, &forks[1]);
    run_engine(b.engine, forks, 2);
    assert_memory_equal(forks[0].tokens, tokens, sizeof tokens);
    assert_memory_equal(forks[1].tokens, tokens, 4 * sizeof(int32_t));
    /* The fork's last token is not in the cache yet; its child begins with it. */
    request = request_of(&tokens[4], 1, 3);
    request.parent = forks[1].id;
    submit(b.engine, &request, &last);
    run_engine(b.engine, &last, 1);
    assert_memory_equal(last.tokens, &tokens[5], 3 * sizeof(int32_t));
    assert_ok(kv8_engine_cancel(b.engine, stem.id));
    close_bench(&b);
}

static void every_way_to_end(void **state) {
    (void)state;
    int32_t tokens[8];
    continue_by_hand(ids, 20, tokens, 8);
    int32_t at = 1;
    while (at < 8 && tokens[at] == tokens[0]) at++;
    assert_true(at < 8);
    bench b = open_bench(0, 0);
    outcome o;
    kv8_request request = request_of(ids, 20, 8);
    request.stop_ids = &tokens[at];
    request.num_stop_ids = 1;
    submit(b.engine, &request, &o);
    run_engine(b.engine, &o, 1);
    assert_int_equal(o.finish, KV8_FINISH_STOP);
    assert_int_equal(o.num_tokens, at + 1);
    /* A bias makes the model's own id come first. */
    const float bias[1] = {1e9f};
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.bias_ids = info.eos;
    sampling.bias = bias;
    sampling.num_bias = 1;
    request = request_of(ids, 20, 8);
    request.sampling = &sampling;
    request.ignore_eos = 0;
    submit(b.engine, &request, &o);
    run_engine(b.engine, &o, 1);
    assert_int_equal(o.finish, KV8_FINISH_EOS);
    assert_int_equal(o.num_tokens, 1);
    request.ignore_eos = 1;
    submit(b.engine, &request, &o);
    run_engine(b.engine, &o, 1);
    assert_int_equal(o.finish, KV8_FINISH_LENGTH);
    assert_int_equal(o.num_tokens, 8);
    request = request_of(ids, 20, 0);
    submit(b.engine, &request, &o);
    run_engine(b.engine, &o, 1);
    assert_int_equal(o.finish, KV8_FINISH_LENGTH);
    assert_int_equal(o.num_tokens, 0);
    assert_int_equal(o.num_computed, 20);
    close_bench(&b);
}

typedef struct seen_rows {
    float *logits; /* [num_rows, vocab_size] */
    int32_t num_rows;
} seen_rows;

static void see_rows(void *cookie, int32_t first, int32_t num_rows, const float *logits) {
    seen_rows *const seen = cookie;
    const size_t vocab = (size_t)info.vocab_size;
    assert_int_equal(first, seen->num_rows);
    memcpy(seen->logits + (size_t)first * vocab, logits, (size_t)num_rows * vocab * sizeof *logits);
    seen->num_rows += num_rows;
}

static void visitors_see_every_row_once(void **state) {
    (void)state;
    enum { ROWS = 150 };
    const size_t num = (size_t)ROWS * (size_t)info.vocab_size;
    float *const wanted = logits_of(model, KV8_F32, 16, ids, ROWS, 512);
    float *const logits = malloc(num * sizeof *logits);
    for (int32_t rows = 1; rows < 64; rows += 40) {
        bench b = open_bench(0, rows);
        seen_rows seen = {logits, 0};
        kv8_request request = request_of(ids, ROWS, 0);
        request.visit = see_rows;
        request.visit_cookie = &seen;
        outcome o;
        submit(b.engine, &request, &o);
        run_engine(b.engine, &o, 1);
        assert_int_equal(seen.num_rows, ROWS);
        assert_true(max_difference(logits, wanted, num) <= 1e-4);
        close_bench(&b);
    }
    free(wanted);
    free(logits);
}

static void logprobs_come_with_tokens(void **state) {
    (void)state;
    float *const logits = logits_of(model, KV8_F32, 16, ids, 20, 512);
    const float *const last = logits + 19 * (size_t)info.vocab_size;
    double sum = 0;
    for (int32_t i = 0; i < info.vocab_size; i++) sum += exp((double)last[i]);
    bench b = open_bench(0, 0);
    kv8_request request = request_of(ids, 20, 1);
    request.num_logprobs = 3;
    uint64_t id = 0;
    int32_t num_events = 0;
    assert_ok(kv8_engine_submit(b.engine, &request, &id));
    assert_ok(kv8_engine_step(b.engine, &num_events));
    const kv8_event *const event = kv8_engine_event(b.engine, 0);
    assert_int_equal(event->token, event->top[0].token);
    assert_true(event->logprob == event->top[0].logprob);
    for (int i = 0; i < 3; i++) {
        const double wanted = (double)last[event->top[i].token] - log(sum);
        assert_true(fabs((double)event->top[i].logprob - wanted) <= 1e-3);
        assert_true(i == 0 || event->top[i].logprob <= event->top[i - 1].logprob);
    }
    free(logits);
    close_bench(&b);
}

/* Whoever meets them ends, by name; the others go on. */
static void logits_that_are_no_numbers_end_their_request(void **state) {
    (void)state;
    kv8_model *const sick = open_model(tiny_model, KV8_ISA_BEST);
    /* The embedding of one id becomes NaN: only sequences that hold it are sick. */
    kv8_gpt_oss *const own = sick->own;
    const kv8_weight *const embedding = &own->weights.embedding;
    const size_t row = (size_t)embedding->cols * 2, bytes = (size_t)embedding->rows * row;
    uint8_t *const copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, embedding->data, bytes);
    const int32_t bad = 4000; /* which the healthy prompt does not hold */
    for (int32_t i = 0; i < 40; i++) assert_true(ids[i] != bad);
    memset(copy + (size_t)bad * row, 0xff, row);
    own->weights.embedding.data = copy;
    kv8_cache *const cache = open_cache(sick, KV8_F32, 16, MAX_REQUESTS, MAX_LEN, false);
    kv8_engine *engine = NULL;
    const kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    assert_ok(kv8_engine_create(&engine, sick, cache, &options));
    int32_t poisoned[40];
    memcpy(poisoned, ids, sizeof poisoned);
    poisoned[25] = bad;
    outcome o[2], wanted;
    const kv8_request ill = request_of(poisoned, 40, 5), well = request_of(ids, 40, 5);
    submit(engine, &ill, &o[0]);
    submit(engine, &well, &o[1]);
    run_engine(engine, o, 2);
    assert_int_equal(o[0].finish, KV8_FINISH_FAILED);
    assert_int_equal(o[0].num_tokens, 0);
    if (strstr(o[0].message,
               "the logits after token 39 (row 39 of a step of 80) are not finite: "
               "NaN at id 0") == NULL)
        fail_msg("\"%s\"", o[0].message);
    assert_int_equal(o[1].finish, KV8_FINISH_LENGTH);
    wanted = (outcome){0};
    continue_by_hand(ids, 40, wanted.tokens, 5);
    assert_memory_equal(o[1].tokens, wanted.tokens, 5 * sizeof(int32_t));
    /* Scored, the first sick row is named. */
    float nll[39];
    kv8_kv_setting setting;
    const kv8_score_options score = KV8_SCORE_OPTIONS_INIT;
    assert_ok(kv8_kv_setting_parse("bf16", &setting));
    assert_refused(kv8_evaluate_score(sick, &setting, poisoned, 40, &score, nll), KV8_ERR_INVALID,
                   "the logits after token 25 (row 25 of a step of 39)");
    kv8_engine_destroy(engine);
    kv8_cache_destroy(cache);
    kv8_model_close(sick);
    free(copy);
}

/* What rests keeps its pages: a step that lacks them changes nothing, and goes on when it has left.
 */
static void a_full_cache_changes_nothing(void **state) {
    (void)state;
    bench b = open_pool_bench(11, 2, &(kv8_engine_options)KV8_ENGINE_OPTIONS_INIT);
    outcome first, second;
    kv8_request a = request_of(ids, 90, 2);
    const kv8_request other = request_of(ids + 7, 90, 2);
    int32_t num_events = 0;
    a.hold = 1;
    submit(b.engine, &a, &first);
    run_engine(b.engine, &first, 1);
    submit(b.engine, &other, &second);
    for (int i = 0; i < 2; i++)
        assert_refused(kv8_engine_step(b.engine, &num_events), KV8_ERR_FULL,
                       "1 requests, and 1 at rest: extend: 90 tokens need 6 pages");
    assert_ok(kv8_engine_cancel(b.engine, first.id));
    run_engine(b.engine, &second, 1);
    int32_t tokens[2];
    continue_by_hand(ids + 7, 90, tokens, 2);
    assert_memory_equal(second.tokens, tokens, sizeof tokens);
    close_bench(&b);
}

/* Clients that vanish: of a prompt that is being read, in the midst of an answer. */
static void a_cancelled_request_leaves_its_pages_within_a_step(void **state) {
    (void)state;
    bench b = open_bench(0, 0);
    outcome stays, leaves[2];
    const kv8_request first = request_of(ids, 20, 30), second = request_of(ids + 20, 90, 30);
    kv8_request third = request_of(ids, 400, 30);
    third.max_chunk = 16;
    kv8_engine_stats stats = KV8_ENGINE_STATS_INIT;
    int32_t num_events = 0;
    submit(b.engine, &first, &stays);
    for (int i = 0; i < 3; i++) assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_ok(kv8_engine_get_stats(b.engine, &stats));
    const int32_t alone = stats.pages_used;
    submit(b.engine, &second, &leaves[0]);
    submit(b.engine, &third, &leaves[1]);
    for (int i = 0; i < 3; i++) assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_ok(kv8_engine_get_stats(b.engine, &stats));
    assert_int_equal(stats.num_running, 3);
    assert_true(stats.pages_used > alone);
    for (int i = 0; i < 2; i++) assert_ok(kv8_engine_cancel(b.engine, leaves[i].id));
    assert_ok(kv8_engine_step(b.engine, &num_events));
    assert_ok(kv8_engine_get_stats(b.engine, &stats));
    assert_int_equal(stats.num_running, 1);
    assert_int_equal(stats.pages_used, alone); /* of 27 tokens, as of 23 */
    assert_ok(kv8_engine_cancel(b.engine, stays.id));
    assert_ok(kv8_engine_get_stats(b.engine, &stats));
    assert_int_equal(stats.pages_used, 0);
    close_bench(&b);
}

static void bad_requests_are_refused_by_name(void **state) {
    (void)state;
    bench b = open_bench(0, 0);
    static const int32_t bad_id[] = {1, -5};
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    sampling.top_p = 2;
    kv8_request cases[9];
    static const char *const parts[9] = {"without a token",
                                         "token 1 is id -5",
                                         "limit of max_seq_len is 512",
                                         "max_tokens is -1",
                                         "num_logprobs is 33, must be 0 to 32",
                                         "top_p is 2",
                                         "stop id 1 is id -5",
                                         "max_chunk -2",
                                         "token: 3 ids, or NULL"};
    for (int i = 0; i < 9; i++) cases[i] = request_of(ids, 500, 13);
    cases[0].num_tokens = 0;
    cases[1].token_ids = bad_id;
    cases[1].num_tokens = 2;
    cases[2].max_tokens = 14;
    cases[3].max_tokens = -1;
    cases[4].num_logprobs = 33;
    cases[5].sampling = &sampling;
    cases[6].stop_ids = bad_id;
    cases[6].num_stop_ids = 2;
    cases[7].max_chunk = -2;
    cases[8].token_ids = NULL;
    cases[8].num_tokens = 3;
    uint64_t id = 77;
    for (int i = 0; i < 9; i++)
        assert_refused(kv8_engine_submit(b.engine, &cases[i], &id), KV8_ERR_INVALID, parts[i]);
    assert_int_equal(id, 77);
    const kv8_request longest = request_of(ids, 500, 13), one = request_of(ids, 1, 1);
    for (int i = 0; i < MAX_REQUESTS; i++) assert_ok(kv8_engine_submit(b.engine, &longest, &id));
    assert_refused(kv8_engine_submit(b.engine, &one, &id), KV8_ERR_FULL, "max_requests");
    close_bench(&b);
    kv8_engine *engine = NULL;
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    b = open_bench(0, 0);
    options.step_tokens = 513;
    assert_refused(kv8_engine_create(&engine, model, b.cache, &options), KV8_ERR_INVALID,
                   "step_tokens is 513, must be 0 (512) to 512");
    assert_null(engine);
    close_bench(&b);
}

/* Every allocation of create and submit may fail; a step allocates nothing. */
static void allocation_failures_leak_nothing(void **state) {
    (void)state;
    kv8_cache *const cache = open_cache(model, KV8_F32, 16, 2, 64, false);
    const kv8_request request = request_of(ids, 20, 3);
    int64_t failures = 0;
    for (bool done = false; !done; failures++) {
        failing_heap heap = {.fail_at = failures};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
        options.allocator = &allocator;
        kv8_engine *engine = NULL;
        uint64_t id = 0;
        kv8_status status = kv8_engine_create(&engine, model, cache, &options);
        assert_true((status == KV8_OK) == (engine != NULL));
        if (status == KV8_OK) status = kv8_engine_submit(engine, &request, &id);
        done = status == KV8_OK;
        if (done) {
            outcome o = {.id = id};
            const int64_t calls = heap.calls;
            run_engine(engine, &o, 1);
            assert_int_equal(heap.calls, calls);
            assert_int_equal(o.num_tokens, 3);
        } else {
            assert_int_equal(status, KV8_ERR_NO_MEMORY);
        }
        kv8_engine_destroy(engine);
        assert_int_equal(heap.live, 0);
    }
    assert_true(failures > 10);
    kv8_cache_destroy(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_together_equal_requests_alone),
        cmocka_unit_test(decoding_does_not_wait_for_prompts),
        cmocka_unit_test(draws_do_not_depend_on_who_else_runs),
        cmocka_unit_test(forks_continue_their_parent),
        cmocka_unit_test(every_way_to_end),
        cmocka_unit_test(visitors_see_every_row_once),
        cmocka_unit_test(logprobs_come_with_tokens),
        cmocka_unit_test(logits_that_are_no_numbers_end_their_request),
        cmocka_unit_test(a_full_cache_changes_nothing),
        cmocka_unit_test(a_cancelled_request_leaves_its_pages_within_a_step),
        cmocka_unit_test(bad_requests_are_refused_by_name),
        cmocka_unit_test(allocation_failures_leak_nothing),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
