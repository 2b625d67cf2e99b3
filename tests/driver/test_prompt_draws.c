/* test_prompt_draws.c - logprobs of a prompt's tokens where a GPU draws, on the stand-in driver:
 * the sampler is given the tokens, and what it finds of their rows are the event's, side by side.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include <kv8/evaluate.h>

#include "engine_impl.h"
#include "logit_rows_args.h"
#include "model_fixture.h"
#include "sampler_args.h"

enum { TOPS = 2, DRAWN = 33 };

static int32_t given[PROMPT], num_rows;

/* Row r's likeliest ids are 10 r and 10 r + 1; a token given or drawn has a quarter of all weight.
 */
static void answer(const stand_in_launch *launch) {
    if (strncmp(launch->name, "kv8_draw_", 9) != 0) return;
    const kv8_draw_args *const args = launch->args;
    num_rows = (int32_t)(launch->grid[0] / launch->cluster[0]);
    for (int32_t r = 0; r < num_rows; r++) {
        given[r] = args->rows[r].token;
        args->drawn[r] = (kv8_drawn_row){.token = given[r] >= 0 ? given[r] : DRAWN,
                                         .bad_id = -1,
                                         .high = 1,
                                         .logit = 1,
                                         .sum = 1ull << 38};
        for (int32_t k = 0; k < args->rows[r].num_tops; k++)
            args->tops[r][k] = (kv8_drawn_top){10 * r + k, (float)-k};
    }
}

/* Asked for beside those of its own tokens, and alone. */
static void check_given(int32_t num_own) {
    fixture f;
    kv8_engine *engine = NULL;
    uint64_t id = 0;
    int32_t num_events = 0;
    open_fixture(&f, KV8_PATH_GRAPH);
    for (int i = 0; i < SEQS; i++) assert_ok(kv8_cache_seq_destroy(f.cache, f.seqs[i]));
    stand_in_on_launch(answer);
    const kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    assert_ok(kv8_engine_create(&engine, f.model, f.cache, &options));
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = ids;
    request.num_tokens = PROMPT;
    request.max_tokens = 2;
    request.ignore_eos = 1;
    request.prompt_logprobs = TOPS;
    request.num_logprobs = num_own;
    assert_ok(kv8_engine_submit(engine, &request, &id));
    assert_ok(kv8_engine_step(engine, &num_events));
    assert_int_equal(num_events, 1);
    assert_int_equal(num_rows, PROMPT);
    for (int i = 0; i < PROMPT; i++) assert_int_equal(given[i], i + 1 < PROMPT ? ids[i + 1] : -1);
    const kv8_event *const event = kv8_engine_event(engine, 0);
    assert_int_equal(event->token, DRAWN);
    assert_int_equal(event->prompt_first, 1);
    assert_int_equal(event->num_prompt_logprobs, PROMPT - 1);
    for (int i = 0; i < PROMPT - 1; i++) {
        assert_true(fabs((double)event->prompt_logprob[i] + log(4)) < 1e-6);
        for (int k = 0; k < TOPS; k++) {
            const kv8_logprob *const top = &event->prompt_top[i * TOPS + k];
            assert_int_equal(top->token, 10 * i + k);
            assert_true(fabs((double)top->logprob + k + 1 + log(4)) < 1e-6);
        }
    }
    if (num_own > 0) {
        assert_int_equal(event->top[0].token, 10 * (PROMPT - 1));
        assert_true(fabs((double)event->logprob + log(4)) < 1e-6);
    }
    /* Tokens that it chose itself are given no more. */
    assert_ok(kv8_engine_step(engine, &num_events));
    assert_int_equal(num_events, 1);
    assert_int_equal(given[0], -1);
    assert_int_equal(kv8_engine_event(engine, 0)->num_prompt_logprobs, 0);
    kv8_engine_destroy(engine);
    close_fixture(&f);
}
static void a_prompts_tokens_are_given(void **state) {
    (void)state;
    check_given(1);
    check_given(0);
}

/* A row's loss is its next token and a half; that token SICK has a row of no numbers. */
enum { SICK = 9 };
static void judge(const stand_in_launch *launch) {
    if (strncmp(launch->name, "kv8_logit_rows_", 15) != 0) return;
    const kv8_logit_rows_args *const args = launch->args;
    assert_int_equal(args->num_next, launch->grid[0]);
    assert_null(args->ref_logits);
    for (uint32_t i = 0; i < launch->grid[0]; i++)
        args->out[i] = (kv8_row_facts){.lse = args->next_ids[i] == SICK ? (double)NAN : 1,
                                       .loss = args->next_ids[i] + 0.5};
}

static void a_text_is_scored_where_its_logits_are(void **state) {
    (void)state;
    const kv8_score_options options = KV8_SCORE_OPTIONS_INIT;
    fixture f;
    kv8_kv_setting setting;
    float nll[8];
    open_fixture(&f, KV8_PATH_GRAPH);
    stand_in_on_launch(judge);
    assert_ok(kv8_kv_setting_parse("bf16", &setting));
    assert_ok(kv8_evaluate_score(f.model, &setting, ids, PROMPT, &options, nll));
    for (int i = 0; i + 1 < PROMPT; i++) assert_true(nll[i] == (float)ids[i + 1] + 0.5f);
    assert_int_equal(ids[PROMPT], SICK);
    assert_refused(kv8_evaluate_score(f.model, &setting, ids, PROMPT + 1, &options, nll),
                   KV8_ERR_INVALID, "the logits after token 4 are not finite");
    stand_in_on_launch(NULL);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_prompts_tokens_are_given),
                                       cmocka_unit_test(a_text_is_scored_where_its_logits_are)};
    return cmocka_run_group_tests_name("prompt draws", tests, make_model, drop_model);
}
