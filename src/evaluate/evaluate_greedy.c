/* evaluate_greedy.c - greedy continuations of prompts from the text, held against f32 KV.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "evaluation.h"

enum { MAX_PROMPT = 512 }; /* tokens of a prompt */

typedef struct greedy {
    kv8_evaluation *evaluation;
    int32_t prompt_len, length; /* length: tokens to generate */
    int32_t *tokens;            /* [2, num_greedy, length]: of lane 0, of the lane running */
    uint64_t decode_ns;         /* of the lane running */
} greedy;

static int32_t greedy_prompt_len(const kv8_compare_options *options) {
    const int64_t room = options->window_len - options->greedy_len; /* >= 1 */
    return (int32_t)kv8_min_i64(MAX_PROMPT, room);
}

uint64_t kv8_evaluate_greedy_units(const kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    if (options->num_greedy == 0) return 0;
    const uint64_t decode = (uint64_t)(options->greedy_len - 1) * KV8_EVALUATE_STEP_UNITS;
    return (uint64_t)evaluation->num_lanes * (uint64_t)options->num_greedy *
           ((uint64_t)greedy_prompt_len(options) + decode);
}

/* Prompts start at evenly spaced places of the text. */
static const int32_t *greedy_prompt(const greedy *g, int32_t prompt_idx) {
    const kv8_compare_options *const options = g->evaluation->options;
    const int64_t last_start = options->num_tokens - g->prompt_len;
    const int64_t steps = kv8_max_i64(1, options->num_greedy - 1);
    return options->token_ids + last_start / steps * prompt_idx;
}

static kv8_status continue_prompt(greedy *g, kv8_engine *engine, int32_t prompt_idx,
                                  int32_t *tokens_out) {
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = greedy_prompt(g, prompt_idx);
    request.num_tokens = g->prompt_len;
    request.max_tokens = g->length;
    request.ignore_eos = 1;
    uint64_t id = 0, ns = 0;
    KV8_TRY(kv8_engine_submit(engine, &request, &id));
    for (int32_t num = 0; num < g->length;) {
        int32_t num_events = 0;
        KV8_TRY(kv8_evaluation_step(g->evaluation, "greedy", engine, &num_events, &ns));
        if (num > 0) g->decode_ns += ns;
        const int32_t token = kv8_engine_event(engine, 0)->token;
        if (token >= 0) tokens_out[num++] = token;
    }
    return KV8_OK;
}

static int32_t common_prefix(const int32_t *a, const int32_t *b, int32_t n) {
    int32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

static kv8_status run_lane(greedy *g, kv8_engine *engine, int32_t lane_idx) {
    const int32_t num = g->evaluation->options->num_greedy;
    double sum = 0, squares = 0;
    g->decode_ns = 0;
    for (int32_t i = 0; i < num; i++) {
        const size_t offset = (size_t)i * (size_t)g->length;
        const size_t own = lane_idx == 0 ? 0 : (size_t)num * (size_t)g->length;
        int32_t *const tokens = g->tokens + own + offset;
        KV8_TRY(continue_prompt(g, engine, i, tokens));
        const double share =
            (double)common_prefix(g->tokens + offset, tokens, g->length) / g->length;
        sum += share;
        squares += share * share;
    }
    kv8_compare_row *const row = &g->evaluation->rows[lane_idx];
    row->greedy_match = sum / num;
    row->greedy_error = kv8_mean_error(sum, squares, num);
    if (g->length > 1)
        row->decode_tokens_per_s = (double)num * (g->length - 1) / ((double)g->decode_ns * 1e-9);
    return KV8_OK;
}

static kv8_status greedy_lane(greedy *g, int32_t lane_idx) {
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    cache_options.max_seq_len = g->prompt_len + g->length;
    cache_options.step_tokens = engine_options.step_tokens =
        kv8_evaluate_step_tokens(g->evaluation->model);
    kv8_lane lane;
    KV8_TRY(kv8_lane_open(&lane, g->evaluation, lane_idx, &cache_options, &engine_options));
    const kv8_status status = run_lane(g, lane.engine, lane_idx);
    kv8_lane_close(&lane);
    return status;
}

kv8_status kv8_evaluate_greedy(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    if (options->num_greedy == 0) return KV8_OK;
    greedy g = {.evaluation = evaluation,
                .prompt_len = greedy_prompt_len(options),
                .length = options->greedy_len};
    const size_t num_tokens = 2 * (size_t)options->num_greedy * (size_t)g.length;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, num_tokens, sizeof(int32_t), "greedy continuations", &memory));
    g.tokens = memory;
    kv8_status status = KV8_OK;
    for (int32_t i = 0; status == KV8_OK && i < evaluation->num_lanes; i++)
        status = greedy_lane(&g, i);
    kv8_release(NULL, g.tokens, num_tokens, sizeof(int32_t));
    return status;
}
