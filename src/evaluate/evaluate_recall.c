/* evaluate_recall.c - codes looked up in generated tables: does the model still find what stands in
 * its cache?
 *
 * A table is asked several questions. Their prompts share everything up to the question, so the
 * table is a request at rest and each question a fork of it; the answers are decoded together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include <kv8/harmony.h>

#include "evaluation.h"

enum {
    NUM_CODES = 24,    /* of a table: about 350 tokens of the tiny model */
    NUM_QUESTIONS = 8, /* of a table, answered in one batch */
    MAX_ANSWER = 160,  /* tokens; the tiny model's answers take about 50 */
    MAX_TABLE_TEXT = 4096
};

/* --- the tables --- */

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

static int32_t common_prefix(const int32_t *a, const int32_t *b, int32_t n) {
    int32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
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
    kv8_release(NULL, recall, 1, sizeof(kv8_recall));
}

uint64_t kv8_recall_units(const kv8_recall *recall, const kv8_evaluation *evaluation) {
    if (recall == NULL) return 0;
    uint64_t units = 0;
    for (int32_t i = 0; i < recall->num_tables; i++) {
        const table *const t = &recall->tables[i];
        units += (uint64_t)t->num_shared + (uint64_t)MAX_ANSWER * KV8_EVALUATE_STEP_UNITS;
        for (int32_t j = 0; j < NUM_QUESTIONS; j++)
            units += (uint64_t)(t->questions[j].num_ids - t->num_shared);
    }
    return units * (uint64_t)evaluation->num_lanes;
}

/* --- the answers --- */

/* The questions of one table being answered. */
typedef struct answers {
    uint64_t table;              /* the request that holds what the prompts share */
    uint64_t ids[NUM_QUESTIONS]; /* 0 = ended */
    kv8_harmony_parser *parsers[NUM_QUESTIONS];
} answers;

static kv8_status read_table(kv8_evaluation *evaluation, const table *t, kv8_engine *engine,
                             answers *a) {
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = t->questions[0].ids;
    request.num_tokens = t->num_shared;
    request.hold = 1;
    KV8_TRY(kv8_engine_submit(engine, &request, &a->table));
    int32_t num_events = 0;
    uint64_t ns = 0;
    do {
        KV8_TRY(kv8_evaluation_step(evaluation, "recall", engine, &num_events, &ns));
    } while (kv8_engine_event(engine, 0)->finish == KV8_FINISH_NONE);
    return KV8_OK;
}

static kv8_status ask_questions(const kv8_recall *recall, const table *t, kv8_engine *engine,
                                answers *a) {
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        kv8_request request = KV8_REQUEST_INIT;
        request.token_ids = t->questions[i].ids + t->num_shared;
        request.num_tokens = t->questions[i].num_ids - t->num_shared;
        request.max_tokens = MAX_ANSWER;
        request.parent = a->table;
        KV8_TRY(kv8_engine_submit(engine, &request, &a->ids[i]));
        KV8_TRY(kv8_harmony_parser_create(&a->parsers[i], recall->tokenizer));
    }
    return KV8_OK;
}

/* Hands the event's token to its question; harmony's stop ends the request. */
static kv8_status take_event(kv8_engine *engine, const kv8_event *event, answers *a) {
    int32_t i = 0;
    while (a->ids[i] != event->request) i++;
    if (event->token < 0) return KV8_OK;
    kv8_harmony_event said;
    KV8_TRY(kv8_harmony_parser_push(a->parsers[i], event->token, &said));
    const bool ended = event->finish != KV8_FINISH_NONE;
    if (ended || said.stop != 0) a->ids[i] = 0;
    return said.stop != 0 && !ended ? kv8_engine_cancel(engine, event->request) : KV8_OK;
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

static kv8_status ask_table(const kv8_recall *recall, kv8_evaluation *evaluation, const table *t,
                            kv8_engine *engine, answers *a, int64_t *num_right) {
    KV8_TRY(read_table(evaluation, t, engine, a));
    KV8_TRY(ask_questions(recall, t, engine, a));
    int32_t num_events = 1;
    while (num_events > 0) {
        uint64_t ns = 0;
        KV8_TRY(kv8_evaluation_step(evaluation, "recall", engine, &num_events, &ns));
        for (int32_t i = 0; i < num_events; i++)
            KV8_TRY(take_event(engine, kv8_engine_event(engine, i), a));
    }
    for (int32_t i = 0; i < NUM_QUESTIONS; i++) {
        kv8_harmony_event event;
        KV8_TRY(kv8_harmony_parser_finish(a->parsers[i], &event));
        *num_right += is_right(a->parsers[i], t->questions[i].code);
    }
    return kv8_engine_cancel(engine, a->table);
}

/* Tokens of the largest table: questions and answers are each their own, the table is shared. */
static int64_t most_tokens(const kv8_recall *recall) {
    int64_t most = 0;
    for (int32_t i = 0; i < recall->num_tables; i++) {
        const table *const t = &recall->tables[i];
        int64_t num = t->num_shared;
        for (int32_t j = 0; j < NUM_QUESTIONS; j++)
            num += t->questions[j].num_ids - t->num_shared + MAX_ANSWER;
        most = kv8_max_i64(most, num);
    }
    return most;
}

static kv8_status recall_lane(const kv8_recall *recall, kv8_evaluation *evaluation,
                              int32_t lane_idx) {
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    cache_options.max_seqs = engine_options.max_requests = NUM_QUESTIONS + 1;
    cache_options.max_seq_len = recall->max_prompt + MAX_ANSWER;
    cache_options.num_tokens = most_tokens(recall);
    cache_options.step_tokens = engine_options.step_tokens =
        kv8_evaluate_step_tokens(evaluation->model);
    kv8_lane lane;
    KV8_TRY(kv8_lane_open(&lane, evaluation, lane_idx, &cache_options, &engine_options));
    kv8_status status = KV8_OK;
    int64_t num_right = 0;
    for (int32_t i = 0; status == KV8_OK && i < recall->num_tables; i++) {
        answers a = {.parsers = {NULL}};
        status = ask_table(recall, evaluation, &recall->tables[i], lane.engine, &a, &num_right);
        for (int32_t j = 0; j < NUM_QUESTIONS; j++) kv8_harmony_parser_destroy(a.parsers[j]);
    }
    kv8_lane_close(&lane);
    const double num_asked = (double)recall->num_tables * NUM_QUESTIONS;
    if (status == KV8_OK) {
        evaluation->rows[lane_idx].recall = (double)num_right / num_asked;
        evaluation->rows[lane_idx].recall_error = kv8_share_error((double)num_right, num_asked);
    }
    return status;
}

kv8_status kv8_recall_run(kv8_recall *recall, kv8_evaluation *evaluation) {
    for (int32_t i = 0; i < evaluation->num_lanes; i++) KV8_TRY(recall_lane(recall, evaluation, i));
    return KV8_OK;
}
