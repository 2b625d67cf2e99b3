/* evaluate_recall.c - what a KV setting does when the model writes by itself: greedy continuations
 * of prompts from the text, held against f32 KV, and codes looked up in generated tables.
 *
 * A table is asked several questions. Their prompts share everything up to the question, so the
 * table is prefilled once and each question runs on a fork of that sequence; the answers of one
 * table are decoded together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include <kv8/harmony.h>

#include "evaluate_impl.h"

enum {
    MAX_PROMPT = 512,  /* tokens of a greedy prompt */
    NUM_CODES = 24,    /* of a table: about 350 tokens of the tiny model */
    NUM_QUESTIONS = 8, /* of a table, answered in one batch */
    MAX_ANSWER = 160,  /* tokens; the tiny model's answers take about 50 */
    MAX_TABLE_TEXT = 4096
};

static int32_t argmax(const float *logits, int32_t n) {
    uint64_t unused = 0;
    return kv8_sample(logits, n, 0.0f, &unused);
}

/* --- greedy continuations --- */

typedef struct greedy {
    kv8_evaluation *evaluation;
    int32_t prompt_len, length; /* length: tokens to generate */
    float *logits;              /* [vocab_size] */
    int32_t *tokens;            /* [2, num_prompts, length]: of lane 0, of the lane running */
    uint64_t decode_ns;         /* of the lane running */
} greedy;

static int32_t greedy_prompt_len(const kv8_compare_options *options) {
    const int64_t room = options->window_len - options->greedy_len; /* >= 1 */
    return (int32_t)kv8_min_i64(MAX_PROMPT, room);
}

uint64_t kv8_evaluate_greedy_units(const kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    if (options->num_greedy == 0) return 0;
    const uint64_t decode = (uint64_t)(options->greedy_len - 1) * KV8_EVALUATE_DECODE_UNITS;
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

static kv8_status continue_prompt(greedy *g, kv8_cache *cache, int32_t prompt_idx,
                                  int32_t *tokens_out) {
    kv8_evaluation *const evaluation = g->evaluation;
    kv8_seq seq = KV8_SEQ_NONE;
    KV8_TRY(kv8_cache_seq_create(cache, &seq));
    KV8_TRY(kv8_evaluate_prefill(evaluation, "greedy", cache, seq, greedy_prompt(g, prompt_idx),
                                 g->prompt_len, g->logits));
    tokens_out[0] = argmax(g->logits, evaluation->info.vocab_size);
    for (int32_t i = 1; i < g->length; i++) {
        KV8_TRY(kv8_evaluate_step(evaluation->model, cache, seq, &tokens_out[i - 1], 1, 1,
                                  g->logits, &g->decode_ns));
        tokens_out[i] = argmax(g->logits, evaluation->info.vocab_size);
        KV8_TRY(kv8_evaluate_advance(evaluation, "greedy", KV8_EVALUATE_DECODE_UNITS));
    }
    return kv8_cache_seq_destroy(cache, seq);
}

static int32_t common_prefix(const int32_t *a, const int32_t *b, int32_t n) {
    int32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

static kv8_status greedy_lane(greedy *g, int32_t lane_idx) {
    kv8_evaluation *const evaluation = g->evaluation;
    const kv8_compare_options *const options = evaluation->options;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seq_len = g->prompt_len + g->length;
    cache_options.step_tokens = kv8_evaluate_step_tokens(evaluation->model);
    cache_options.k_scale = options->k_scale;
    cache_options.v_scale = options->v_scale;
    kv8_cache *cache = NULL;
    KV8_TRY(kv8_kv_setting_cache_create(&cache, evaluation->model, &evaluation->settings[lane_idx],
                                        &cache_options));
    kv8_status status = KV8_OK;
    int64_t num_same = 0;
    g->decode_ns = 0;
    for (int32_t i = 0; status == KV8_OK && i < options->num_greedy; i++) {
        const size_t offset = (size_t)i * (size_t)g->length;
        const int32_t *const ref = g->tokens + offset;
        const size_t own = lane_idx == 0 ? 0 : (size_t)options->num_greedy * (size_t)g->length;
        int32_t *const tokens = g->tokens + own + offset;
        status = continue_prompt(g, cache, i, tokens);
        num_same += common_prefix(ref, tokens, g->length);
    }
    kv8_cache_destroy(cache);
    KV8_TRY(status);
    const double num_tokens = (double)options->num_greedy * g->length;
    kv8_compare_row *const row = &evaluation->rows[lane_idx];
    row->greedy_match = (double)num_same / num_tokens;
    if (g->length > 1)
        row->decode_tokens_per_s =
            (double)options->num_greedy * (g->length - 1) / ((double)g->decode_ns * 1e-9);
    return KV8_OK;
}

kv8_status kv8_evaluate_greedy(kv8_evaluation *evaluation) {
    const kv8_compare_options *const options = evaluation->options;
    if (options->num_greedy == 0) return KV8_OK;
    greedy g = {.evaluation = evaluation,
                .prompt_len = greedy_prompt_len(options),
                .length = options->greedy_len};
    const size_t num_logits = (size_t)evaluation->info.vocab_size;
    const size_t num_tokens = 2 * (size_t)options->num_greedy * (size_t)g.length;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, num_logits, sizeof(float), "logits", &memory));
    g.logits = memory;
    kv8_status status =
        kv8_alloc(NULL, num_tokens, sizeof(int32_t), "greedy continuations", &memory);
    g.tokens = memory;
    for (int32_t i = 0; status == KV8_OK && i < evaluation->num_lanes; i++)
        status = greedy_lane(&g, i);
    kv8_release(NULL, g.tokens, num_tokens, sizeof(int32_t));
    kv8_release(NULL, g.logits, num_logits, sizeof(float));
    return status;
}

/* --- recall: the tables --- */

typedef struct question {
    char code[8]; /* what the answer must hold */
    int32_t *ids; /* the whole prompt, malloc'ed by the tokenizer */
    int32_t num_ids;
} question;

typedef struct table {
    question questions[NUM_QUESTIONS];
    int32_t num_shared; /* ids that all its prompts begin with */
} table;

struct kv8_recall {
    const kv8_tokenizer *tokenizer;
    int32_t num_tables;
    int32_t max_prompt; /* ids of the longest prompt */
    table *tables;
    float *logits; /* [NUM_QUESTIONS, vocab_size] */
    size_t num_logits;
};

static uint64_t next_random(uint64_t *state) { /* splitmix64 (Steele et al. 2014) */
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static const char *const words[16] = {"stone", "copper", "pixel",  "maple", "orbit", "cloud",
                                      "quiet", "silver", "harbor", "ember", "delta", "river",
                                      "amber", "north",  "leaf",   "fox"};

/* The text of a table and its lines: name_idx of each, all different, and four digits. */
typedef struct table_text {
    char text[MAX_TABLE_TEXT];
    int32_t name_idx[NUM_CODES]; /* two words: name_idx / 16 and name_idx % 16 */
    int32_t code[NUM_CODES];
} table_text;

static void write_table(uint64_t *state, table_text *out) {
    int32_t names[256];
    for (int32_t i = 0; i < 256; i++) names[i] = i;
    int at = snprintf(out->text, sizeof out->text, "Codes:\n");
    for (int32_t i = 0; i < NUM_CODES; i++) {
        const int32_t pick = i + (int32_t)(next_random(state) % (uint64_t)(256 - i));
        const int32_t name = names[pick];
        names[pick] = names[i]; /* the rest of a shuffle: no name twice */
        out->name_idx[i] = name;
        out->code[i] = 1000 + (int32_t)(next_random(state) % 9000);
        at += snprintf(out->text + at, sizeof out->text - (size_t)at, "%s-%s = %d\n",
                       words[name / 16], words[name % 16], out->code[i]);
    }
}

static kv8_status render_question(const kv8_tokenizer *tokenizer, const table_text *text,
                                  int32_t line, question *out) {
    char ask[64];
    snprintf(ask, sizeof ask, "What is the code for %s-%s?", words[text->name_idx[line] / 16],
             words[text->name_idx[line] % 16]);
    snprintf(out->code, sizeof out->code, "%d", text->code[line]);
    const kv8_message messages[] = {
        {.role = KV8_ROLE_SYSTEM,
         .content = "You are a small assistant.\nReasoning: low\n\n"
                    "# Valid channels: analysis, commentary, final."},
        {.role = KV8_ROLE_DEVELOPER, .content = text->text},
        {.role = KV8_ROLE_USER, .content = ask},
    };
    const kv8_harmony_options options = KV8_HARMONY_OPTIONS_INIT;
    size_t num = 0;
    KV8_TRY(kv8_harmony_render(tokenizer, messages, 3, &options, &out->ids, &num));
    if (num == 0 || num > INT32_MAX - MAX_ANSWER)
        return kv8_fail(KV8_ERR_INVALID, "a prompt of %zu tokens", num);
    out->num_ids = (int32_t)num;
    return KV8_OK;
}

static kv8_status make_table(kv8_recall *recall, int32_t table_idx) {
    table *const t = &recall->tables[table_idx];
    uint64_t state = 0x6b7638 + (uint64_t)table_idx; /* the same tables everywhere */
    table_text text;
    write_table(&state, &text);
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        /* One question from each eighth of the table. */
        const int32_t part = NUM_CODES / NUM_QUESTIONS;
        const int32_t line = i * part + (int32_t)(next_random(&state) % (uint64_t)part);
        question *const q = &t->questions[i];
        KV8_TRY(render_question(recall->tokenizer, &text, line, q));
        const question *const first = &t->questions[0];
        const int32_t limit = (int32_t)kv8_min_i64(first->num_ids, q->num_ids) - 1;
        if (i == 0) t->num_shared = limit;
        t->num_shared =
            common_prefix(first->ids, q->ids, (int32_t)kv8_min_i64(limit, t->num_shared));
        if (q->num_ids > recall->max_prompt) recall->max_prompt = q->num_ids;
    }
    return KV8_OK;
}

static bool knows_harmony(const kv8_tokenizer *tokenizer) {
    static const char *const needed[] = {"<|start|>", "<|channel|>", "<|message|>", "<|end|>",
                                         "<|return|>"};
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++) {
        if (kv8_tokenizer_special_id(tokenizer, needed[i]) < 0) return false;
    }
    return true;
}

static kv8_status make_tables(kv8_recall *recall, const kv8_evaluation *evaluation) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, (size_t)recall->num_tables, sizeof(table), "tables", &memory));
    recall->tables = memory;
    for (int32_t i = 0; i < recall->num_tables; i++) KV8_TRY(make_table(recall, i));
    const int64_t longest = (int64_t)recall->max_prompt + MAX_ANSWER;
    if (longest > evaluation->info.max_seq_len)
        return kv8_fail(KV8_ERR_INVALID, "a table of codes takes %lld tokens, the context is %d",
                        (long long)longest, evaluation->info.max_seq_len);
    recall->num_logits = (size_t)NUM_QUESTIONS * (size_t)evaluation->info.vocab_size;
    KV8_TRY(kv8_alloc(NULL, recall->num_logits, sizeof(float), "logits", &memory));
    recall->logits = memory;
    return KV8_OK;
}

kv8_status kv8_recall_create(kv8_recall **out, const kv8_evaluation *evaluation) {
    *out = NULL;
    const kv8_compare_options *const options = evaluation->options;
    if (options->num_recall == 0 || options->tokenizer == NULL ||
        !knows_harmony(options->tokenizer))
        return KV8_OK;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_recall), "recall", &memory));
    kv8_recall *const recall = memory;
    recall->tokenizer = options->tokenizer;
    recall->num_tables = options->num_recall;
    const kv8_status status = make_tables(recall, evaluation);
    if (status != KV8_OK) {
        kv8_recall_destroy(recall);
        return status;
    }
    *out = recall;
    return KV8_OK;
}

void kv8_recall_destroy(kv8_recall *recall) {
    if (recall == NULL) return;
    for (int32_t i = 0; recall->tables != NULL && i < recall->num_tables; i++) {
        for (int32_t j = 0; j < NUM_QUESTIONS; j++) kv8_free(recall->tables[i].questions[j].ids);
    }
    kv8_release(NULL, recall->tables, (size_t)recall->num_tables, sizeof(table));
    kv8_release(NULL, recall->logits, recall->num_logits, sizeof(float));
    kv8_release(NULL, recall, 1, sizeof(kv8_recall));
}

uint64_t kv8_recall_units(const kv8_recall *recall, const kv8_evaluation *evaluation) {
    if (recall == NULL) return 0;
    uint64_t units = 0;
    for (int32_t i = 0; i < recall->num_tables; i++) {
        const table *const t = &recall->tables[i];
        units += (uint64_t)t->num_shared + (uint64_t)MAX_ANSWER * KV8_EVALUATE_DECODE_UNITS;
        for (int32_t j = 0; j < NUM_QUESTIONS; j++)
            units += (uint64_t)(t->questions[j].num_ids - t->num_shared);
    }
    return units * (uint64_t)evaluation->num_lanes;
}

/* --- recall: the answers --- */

/* The questions of one table being answered. */
typedef struct answers {
    kv8_seq seqs[NUM_QUESTIONS];
    kv8_harmony_parser *parsers[NUM_QUESTIONS];
    int32_t last[NUM_QUESTIONS]; /* the token each wrote last; -1 once it has stopped */
} answers;

/* Hands a question its next token; a stop token ends it. */
static kv8_status take_token(const kv8_evaluation *evaluation, answers *a, int32_t i,
                             const float *logits) {
    const int32_t id = argmax(logits, evaluation->info.vocab_size);
    kv8_harmony_event event;
    KV8_TRY(kv8_harmony_parser_push(a->parsers[i], id, &event));
    a->last[i] = event.stop != 0 ? -1 : id;
    for (int32_t j = 0; j < evaluation->info.num_eos; j++) {
        if (id == evaluation->info.eos[j]) a->last[i] = -1;
    }
    return KV8_OK;
}

/* Prefills the table once and each question on its own fork. */
static kv8_status begin_answers(kv8_recall *recall, kv8_evaluation *evaluation, const table *t,
                                kv8_cache *cache, answers *a) {
    kv8_seq base = KV8_SEQ_NONE;
    KV8_TRY(kv8_cache_seq_create(cache, &base));
    KV8_TRY(kv8_evaluate_prefill(evaluation, "recall", cache, base, t->questions[0].ids,
                                 t->num_shared, NULL));
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        const question *const q = &t->questions[i];
        KV8_TRY(kv8_cache_seq_fork(cache, base, &a->seqs[i]));
        KV8_TRY(kv8_evaluate_prefill(evaluation, "recall", cache, a->seqs[i],
                                     q->ids + t->num_shared, q->num_ids - t->num_shared,
                                     recall->logits));
        KV8_TRY(kv8_harmony_parser_create(&a->parsers[i], recall->tokenizer));
        KV8_TRY(take_token(evaluation, a, i, recall->logits));
    }
    return kv8_cache_seq_destroy(cache, base);
}

/* One token of every question still being answered; *num_out is how many those were. */
static kv8_status step_answers(kv8_recall *recall, const kv8_evaluation *evaluation,
                               kv8_cache *cache, answers *a, int32_t *num_out) {
    kv8_seq seqs[NUM_QUESTIONS];
    int32_t which[NUM_QUESTIONS], ids[NUM_QUESTIONS], rows[NUM_QUESTIONS];
    int32_t indptr[NUM_QUESTIONS + 1] = {0};
    int32_t num = 0;
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        if (a->last[i] < 0) continue;
        which[num] = i;
        seqs[num] = a->seqs[i];
        ids[num] = a->last[i];
        rows[num] = num;
        num++;
        indptr[num] = num;
    }
    *num_out = num;
    if (num == 0) return KV8_OK;
    const kv8_step step = {.num_seqs = num,
                           .seqs = seqs,
                           .indptr = indptr,
                           .token_ids = ids,
                           .num_logit_rows = num,
                           .logit_rows = rows,
                           .logits_out = recall->logits};
    KV8_TRY(kv8_model_step(evaluation->model, cache, &step));
    const size_t vocab = (size_t)evaluation->info.vocab_size;
    for (int32_t i = 0; i < num; i++)
        KV8_TRY(take_token(evaluation, a, which[i], recall->logits + (size_t)i * vocab));
    return KV8_OK;
}

/* The code stands in the final channel. */
static bool is_right(const kv8_harmony_parser *parser, const char *code) {
    for (size_t i = 0; i < kv8_harmony_parser_num_messages(parser); i++) {
        const kv8_message *const message = kv8_harmony_parser_message(parser, i);
        if (message->channel != NULL && strcmp(message->channel, "final") == 0 &&
            message->content != NULL && strstr(message->content, code) != NULL)
            return true;
    }
    return false;
}

static kv8_status ask_table(kv8_recall *recall, kv8_evaluation *evaluation, const table *t,
                            kv8_cache *cache, answers *a, int64_t *num_right) {
    KV8_TRY(begin_answers(recall, evaluation, t, cache, a));
    int32_t num = 1;
    for (int32_t i = 1; i < MAX_ANSWER && num > 0; i++) {
        KV8_TRY(step_answers(recall, evaluation, cache, a, &num));
        KV8_TRY(
            kv8_evaluate_advance(evaluation, "recall", num > 0 ? KV8_EVALUATE_DECODE_UNITS : 0));
    }
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        kv8_harmony_event event;
        KV8_TRY(kv8_harmony_parser_finish(a->parsers[i], &event));
        *num_right += is_right(a->parsers[i], t->questions[i].code);
        KV8_TRY(kv8_cache_seq_destroy(cache, a->seqs[i]));
    }
    return KV8_OK;
}

static kv8_status recall_lane(kv8_recall *recall, kv8_evaluation *evaluation, int32_t lane_idx) {
    const kv8_compare_options *const options = evaluation->options;
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seqs = NUM_QUESTIONS + 1;
    cache_options.max_seq_len = recall->max_prompt + MAX_ANSWER;
    /* Questions and answers are each their own; the table is shared. */
    for (int32_t i = 0; i < recall->num_tables; i++) {
        int64_t num_tokens = recall->tables[i].num_shared;
        for (int32_t j = 0; j < NUM_QUESTIONS; j++)
            num_tokens +=
                recall->tables[i].questions[j].num_ids - recall->tables[i].num_shared + MAX_ANSWER;
        if (num_tokens > cache_options.num_tokens) cache_options.num_tokens = num_tokens;
    }
    cache_options.step_tokens = kv8_evaluate_step_tokens(evaluation->model);
    cache_options.k_scale = options->k_scale;
    cache_options.v_scale = options->v_scale;
    kv8_cache *cache = NULL;
    KV8_TRY(kv8_kv_setting_cache_create(&cache, evaluation->model, &evaluation->settings[lane_idx],
                                        &cache_options));
    kv8_status status = KV8_OK;
    int64_t num_right = 0;
    for (int32_t i = 0; status == KV8_OK && i < recall->num_tables; i++) {
        answers a = {.parsers = {NULL}};
        status = ask_table(recall, evaluation, &recall->tables[i], cache, &a, &num_right);
        for (int32_t j = 0; j < NUM_QUESTIONS; j++) kv8_harmony_parser_destroy(a.parsers[j]);
    }
    kv8_cache_destroy(cache);
    const double num_asked = (double)recall->num_tables * NUM_QUESTIONS;
    if (status == KV8_OK) evaluation->rows[lane_idx].recall = (double)num_right / num_asked;
    return status;
}

kv8_status kv8_recall_run(kv8_recall *recall, kv8_evaluation *evaluation) {
    for (int32_t i = 0; i < evaluation->num_lanes; i++) KV8_TRY(recall_lane(recall, evaluation, i));
    return KV8_OK;
}
