/* cmd_generate.c - kv8 generate: continues a prompt, a chat or a list of ids, and streams the text
 * as it is decoded, whole characters only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

enum { STEP_TOKENS = 256, DEFAULT_MAX_TOKENS = 256 };

typedef struct generate_args {
    const char *model, *prompt, *prompt_file, *chat, *chat_file, *tokens;
    const char *kv, *scales, *system, *reasoning, *without, *device, *path;
    int32_t max_tokens, threads; /* max_tokens 0 = not given */
    int32_t num_logprobs;
    kv8_sampling sampling;
    bool ignore_eos, json, batch_invariant;
} generate_args;

static bool is_chat(const generate_args *args) {
    return args->chat != NULL || args->chat_file != NULL;
}

static int check(const generate_args *args) {
    static const char *const levels[] = {"low", "medium", "high"};
    const int num_inputs = (args->prompt != NULL) + (args->prompt_file != NULL) +
                           (args->chat != NULL) + (args->chat_file != NULL) +
                           (args->tokens != NULL);
    if (num_inputs != 1)
        return cli_fail(
            "exactly one of --prompt, --prompt-file, --chat, --chat-file and --tokens "
            "is needed, not %d",
            num_inputs);
    if (!is_chat(args) && (args->system != NULL || args->reasoning != NULL))
        return cli_fail("--system and --reasoning go with --chat");
    if (args->num_logprobs > 0 && !args->json) return cli_fail("--logprobs goes with --json");
    if (args->reasoning != NULL && cli_word("reasoning", args->reasoning, levels, 3) < 0)
        return CLI_FAILED;
    return -1;
}

static int parse(generate_args *args, int argc, char **argv) {
    kv8_sampling *const sampling = &args->sampling;
    const cli_option options[] = {
        {"prompt", "TEXT", "continue this text; control tokens in it count as such", CLI_TEXT,
         &args->prompt},
        {"prompt-file", "FILE", "the same from a file, - = stdin", CLI_TEXT, &args->prompt_file},
        {"chat", "TEXT", "answer this message, in the harmony format", CLI_TEXT, &args->chat},
        {"chat-file", "FILE", "the same from a file, - = stdin", CLI_TEXT, &args->chat_file},
        {"tokens", "FILE", "continue the ids of this JSON array, - = stdin", CLI_TEXT,
         &args->tokens},
        {"system", "TEXT", "instructions that go before the chat's message", CLI_TEXT,
         &args->system},
        {"reasoning", "LEVEL", "low, medium or high (medium)", CLI_TEXT, &args->reasoning},
        {"kv", "SETTING", "how the KV cache is stored, see kv8 compare --help (f32)", CLI_TEXT,
         &args->kv},
        {"scales", "FILE",
         "scales of the FP8 formats, see kv8 calibrate; without --kv the\n"
         "mix of formats in it is how the cache is stored",
         CLI_TEXT, &args->scales},
        {"max-tokens", "N", "most tokens to generate (256, or what the context still holds)",
         CLI_INT, &args->max_tokens, 1, INT32_MAX},
        {"temperature", "T", "0 takes the likeliest token every time (0)", CLI_FLOAT,
         &sampling->temperature, 0, 100},
        {"top-k", "K", "draw from the K likeliest tokens; 0 = all (0)", CLI_INT, &sampling->top_k,
         0, INT32_MAX},
        {"top-p", "P", "draw from the likeliest that make up P of the probability (1)", CLI_FLOAT,
         &sampling->top_p, 1e-6, 1},
        {"min-p", "P", "draw from those of P times the likeliest's probability (0)", CLI_FLOAT,
         &sampling->min_p, 0, 1},
        {"repeat-penalty", "R", "divides logits of tokens already there; 1 = none (1)", CLI_FLOAT,
         &sampling->repetition_penalty, 0.01, 100},
        {"presence-penalty", "R", "taken from logits of generated tokens (0)", CLI_FLOAT,
         &sampling->presence_penalty, -100, 100},
        {"frequency-penalty", "R", "the same, times how often they came (0)", CLI_FLOAT,
         &sampling->frequency_penalty, -100, 100},
        {"seed", "N", "of the random draws when T is above 0 (0)", CLI_SEED, &sampling->seed},
        {"logprobs", "N", "with --json: logprobs of each token and the N likeliest", CLI_INT,
         &args->num_logprobs, 1, 32},
        {"ignore-eos", NULL, "go on after an end-of-text token", CLI_FLAG, &args->ignore_eos},
        {"without", "PART", "the model without its sinks, window, or sinks,window", CLI_TEXT,
         &args->without},
        {"device", "DEVICE", "what computes: cpu, cuda or cuda:N, the Nth GPU (cpu)", CLI_TEXT,
         &args->device},
        {"path", "NAME",
         "steps of a token a request on a GPU: persistent, graph or eager (the first that can be)",
         CLI_TEXT, &args->path},
        {"batch-invariant", NULL, "no token's bits depend on what else runs", CLI_FLAG,
         &args->batch_invariant},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print one JSON object: tokens (the new ids), text, ...", CLI_FLAG,
         &args->json},
    };
    const cli_command command = {
        .usage = "kv8 generate MODEL --prompt TEXT | --chat TEXT | --tokens FILE [options]",
        .about =
            "Generates tokens and streams their text. A chat's channels other than the\n"
            "final answer are marked, and dimmed on a terminal.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    const int status = cli_parse(&command, argc, argv, &args->model);
    return status >= 0 ? status : check(args);
}

/* --- the prompt --- */

static kv8_status render_chat(const generate_args *args, const char *message,
                              const kv8_tokenizer *tokenizer, int32_t **ids_out, size_t *num_out) {
    kv8_harmony_options options = KV8_HARMONY_OPTIONS_INIT;
    options.reasoning = args->reasoning;
    kv8_message messages[2];
    size_t num = 0;
    if (args->system != NULL)
        messages[num++] = (kv8_message){.role = KV8_ROLE_DEVELOPER, .content = args->system};
    messages[num++] = (kv8_message){.role = KV8_ROLE_USER, .content = message};
    return kv8_harmony_render(tokenizer, messages, num, &options, ids_out, num_out);
}

/* Text that was given, or read from the file; *owned_out is for free. */
static int read_text(const generate_args *args, const char **text_out, size_t *length_out,
                     char **owned_out) {
    const char *const file = is_chat(args) ? args->chat_file : args->prompt_file;
    *owned_out = NULL;
    if (file == NULL) {
        *text_out = is_chat(args) ? args->chat : args->prompt;
        *length_out = strlen(*text_out);
        return CLI_OK;
    }
    const int status = cli_read_file(file, owned_out, length_out);
    *text_out = *owned_out;
    if (status == CLI_OK && is_chat(args) && strlen(*text_out) != *length_out)
        return cli_fail("%s: a NUL byte at byte %zu of the message", file, strlen(*text_out));
    return status;
}

/* The caller frees *ids_out with kv8_free. */
static int read_prompt(const generate_args *args, const cli_model *model, int32_t **ids_out,
                       int32_t *num_out) {
    if (args->tokens != NULL)
        return cli_read_tokens(args->tokens, model->info.vocab_size, ids_out, num_out);
    const char *text = NULL;
    char *owned = NULL;
    size_t num = 0, length = 0;
    int status = read_text(args, &text, &length, &owned);
    if (status == CLI_OK) {
        const kv8_status encoded = is_chat(args)
                                       ? render_chat(args, text, model->tokenizer, ids_out, &num)
                                       : kv8_tokenizer_encode(model->tokenizer, text, length,
                                                              KV8_SPECIAL_AS_TOKENS, ids_out, &num);
        if (encoded != KV8_OK) status = cli_fail_status(encoded);
    }
    free(owned);
    if (status == CLI_OK && num == 0) status = cli_fail("the prompt is empty");
    if (status == CLI_OK && num > INT32_MAX) status = cli_fail("a prompt of %zu tokens", num);
    *num_out = (int32_t)num;
    return status;
}

/* --- what is shown --- */

/* New text on its way to the terminal; with --json it is only collected. */
typedef struct writer {
    const kv8_tokenizer *tokenizer;
    kv8_harmony_parser *parser; /* chats only */
    bool quiet, dims;           /* dims: stdout is a terminal */
    int32_t message_idx;        /* the chat message last written to; -1 = none */
    bool is_dim;
    char *bytes; /* everything decoded; the first num_shown were printed */
    size_t num_bytes, num_shown, capacity;
} writer;

static int print_bytes(const char *bytes, size_t length) {
    char *const text = cli_clean_utf8(bytes, length);
    if (text == NULL) return cli_fail("no memory for %zu bytes of text", length);
    fputs(text, stdout);
    free(text);
    return CLI_OK;
}

static int collect(writer *w, int32_t id) {
    size_t length = 0;
    const char *const bytes = kv8_tokenizer_token_bytes(w->tokenizer, id, &length);
    if (bytes == NULL) return CLI_OK; /* the model's vocabulary has ids without a token */
    if (w->num_bytes + length > w->capacity) {
        const size_t capacity = (w->num_bytes + length) * 2;
        char *const grown = realloc(w->bytes, capacity);
        if (grown == NULL) return cli_fail("no memory for %zu bytes of text", capacity);
        w->bytes = grown;
        w->capacity = capacity;
    }
    memcpy(w->bytes + w->num_bytes, bytes, length);
    w->num_bytes += length;
    return CLI_OK;
}

/* A message of another channel than the final one gets its name before it. */
static void begin_message(writer *w, int32_t message_idx) {
    if (w->message_idx >= 0) fputs("\n\n", stdout);
    w->message_idx = message_idx;
    const kv8_message *const message = kv8_harmony_parser_message(w->parser, (size_t)message_idx);
    if (message->channel == NULL || strcmp(message->channel, "final") == 0) return;
    w->is_dim = w->dims;
    printf("%s[%s%s%s] ", w->dims ? "\033[2m" : "", message->channel,
           message->recipient == NULL ? "" : " to ",
           message->recipient == NULL ? "" : message->recipient);
}

static void end_dim(writer *w) {
    if (w->is_dim) fputs("\033[0m", stdout);
    w->is_dim = false;
}

static int show_event(writer *w, const kv8_harmony_event *event) {
    int status = CLI_OK;
    if (event->text_length > 0) {
        if (event->message_idx != w->message_idx) begin_message(w, event->message_idx);
        status = print_bytes(event->text, event->text_length);
    }
    if (event->message_done) end_dim(w);
    return status;
}

/* Takes one new token; *stop_out says whether it ends the text by its kind. */
static int write_token(writer *w, int32_t id, bool is_eos) {
    int status = collect(w, id);
    if (status != CLI_OK) return status;
    if (w->parser != NULL) {
        kv8_harmony_event event;
        const kv8_status pushed = kv8_harmony_parser_push(w->parser, id, &event);
        if (pushed != KV8_OK) return cli_fail_status(pushed);
        if (!w->quiet) status = show_event(w, &event);
    } else if (!w->quiet && !is_eos) {
        const size_t whole =
            kv8_utf8_complete_length(w->bytes + w->num_shown, w->num_bytes - w->num_shown);
        status = print_bytes(w->bytes + w->num_shown, whole);
        w->num_shown += whole;
    }
    if (status == CLI_OK && !w->quiet && (fflush(stdout) != 0 || ferror(stdout)))
        return cli_finish_stdout();
    return status;
}

/* What was held back, and the closing newline. */
static int finish_writing(writer *w, bool ended_by_eos) {
    int status = CLI_OK;
    if (w->parser != NULL) {
        kv8_harmony_event event;
        const kv8_status finished = kv8_harmony_parser_finish(w->parser, &event);
        if (finished != KV8_OK) return cli_fail_status(finished);
        if (!w->quiet) status = show_event(w, &event);
    } else if (!w->quiet && !ended_by_eos) {
        status = print_bytes(w->bytes + w->num_shown, w->num_bytes - w->num_shown);
    }
    if (w->quiet) return status;
    end_dim(w);
    fputc('\n', stdout);
    return status;
}

/* --- the run --- */

typedef struct run {
    const generate_args *args;
    cli_model *model;
    kv8_kv_setting setting;
    cli_scales scales;
    kv8_cache *cache;
    kv8_engine *engine;
    int32_t *prompt, num_prompt;
    int32_t *tokens, num_tokens, max_tokens;
    json_t *logprobs; /* one object for each token; NULL = not asked for */
    kv8_finish finish;
    double prefill_s, decode_s;
} run;

static json_t *logprobs_json(const kv8_event *event, int32_t num) {
    json_t *const top = json_array();
    for (int32_t i = 0; i < num; i++)
        json_array_append_new(top,
                              json_pack("{s:i, s:o}", "token", (int)event->top[i].token, "logprob",
                                        cli_json_number((double)event->top[i].logprob)));
    return json_pack("{s:i, s:o, s:o}", "token", (int)event->token, "logprob",
                     cli_json_number((double)event->logprob), "top", top);
}

static int take_event(run *r, const kv8_event *event, writer *w) {
    if (event->finish == KV8_FINISH_FAILED) return cli_fail("%s", event->message);
    if (event->token < 0) return CLI_OK;
    r->tokens[r->num_tokens++] = event->token;
    r->finish = event->finish;
    if (r->logprobs != NULL)
        json_array_append_new(r->logprobs, logprobs_json(event, r->args->num_logprobs));
    return write_token(w, event->token, event->finish == KV8_FINISH_EOS);
}

/* Steps until the request has ended; the prompt's progress is shown until its first token. */
static int run_request(run *r, writer *w) {
    cli_progress progress;
    cli_progress_begin(&progress);
    double first = progress.started;
    int status = CLI_OK;
    while (status == CLI_OK && r->finish == KV8_FINISH_NONE) {
        int32_t num_events = 0;
        const kv8_status stepped = kv8_engine_step(r->engine, &num_events);
        if (r->num_tokens == 0) {
            const kv8_event *const event = kv8_engine_event(r->engine, 0);
            if (stepped == KV8_OK && event->token < 0)
                cli_progress_show(&progress, "prompt", (uint64_t)event->num_computed,
                                  (uint64_t)r->num_prompt);
            else
                cli_progress_end(&progress);
            first = cli_seconds();
        }
        status = stepped == KV8_OK ? take_event(r, kv8_engine_event(r->engine, 0), w)
                                   : cli_fail_status(stepped);
        if (status == CLI_OK) status = cli_interrupted();
    }
    if (r->num_tokens == 0) cli_progress_end(&progress);
    r->prefill_s = first - progress.started;
    r->decode_s = cli_seconds() - first;
    return status;
}

static json_t *messages_json(const writer *w) {
    json_t *const list = json_array();
    for (size_t i = 0; i < kv8_harmony_parser_num_messages(w->parser); i++) {
        const kv8_message *const message = kv8_harmony_parser_message(w->parser, i);
        json_array_append_new(list, json_pack("{s:s*, s:s*, s:s}", "channel", message->channel,
                                              "recipient", message->recipient, "content",
                                              message->content == NULL ? "" : message->content));
    }
    return list;
}

static int print_json(const run *r, const writer *w) {
    json_t *const tokens = json_array();
    for (int32_t i = 0; i < r->num_tokens; i++)
        json_array_append_new(tokens, json_integer(r->tokens[i]));
    char *const text = cli_clean_utf8(w->bytes == NULL ? "" : w->bytes, w->num_bytes);
    json_t *const root = json_pack(
        "{s:s, s:i, s:s, s:o, s:o, s:o*, s:s*, s:o, s:O*}", "kv", r->setting.name, "prompt_tokens",
        r->num_prompt, "stop", r->finish == KV8_FINISH_EOS ? "eos" : "length",
        "prefill_tokens_per_s", cli_json_number(r->num_prompt / r->prefill_s), "tokens_per_s",
        cli_json_number((r->num_tokens - 1) / r->decode_s), "messages",
        w->parser == NULL ? NULL : messages_json(w), "text", text, "tokens", tokens, "logprobs",
        r->logprobs);
    free(text);
    return cli_write_json(root, stdout, "stdout");
}

static int submit(run *r) {
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    kv8_engine_options engine_options = KV8_ENGINE_OPTIONS_INIT;
    kv8_request request = KV8_REQUEST_INIT;
    cache_options.max_seq_len = r->num_prompt + r->max_tokens;
    cache_options.step_tokens = engine_options.step_tokens = STEP_TOKENS;
    cache_options.k_scale = r->scales.k;
    cache_options.v_scale = r->scales.v;
    cache_options.scale_dtype = r->scales.dtype;
    request.token_ids = r->prompt;
    request.num_tokens = r->num_prompt;
    request.max_tokens = r->max_tokens;
    request.sampling = &r->args->sampling;
    request.ignore_eos = r->args->ignore_eos;
    request.num_logprobs = r->args->num_logprobs;
    uint64_t id = 0;
    kv8_status status =
        kv8_kv_setting_cache_create(&r->cache, r->model->model, &r->setting, &cache_options);
    if (status == KV8_OK)
        status = kv8_engine_create(&r->engine, r->model->model, r->cache, &engine_options);
    if (status == KV8_OK) status = kv8_engine_submit(r->engine, &request, &id);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* Sizes everything from the prompt and the model's context. */
static int prepare(run *r) {
    const int32_t context = r->model->info.max_seq_len;
    if (r->num_prompt >= context)
        return cli_fail(
            "the prompt has %d tokens, the model's context holds %d and one more is "
            "needed for the answer",
            r->num_prompt, context);
    const int32_t room = context - r->num_prompt;
    if (r->args->max_tokens > room)
        return cli_fail("--max-tokens is %d, after %d tokens of prompt the context of %d holds %d",
                        r->args->max_tokens, r->num_prompt, context, room);
    r->max_tokens = r->args->max_tokens;
    if (r->max_tokens == 0) r->max_tokens = room < DEFAULT_MAX_TOKENS ? room : DEFAULT_MAX_TOKENS;
    r->tokens = malloc((size_t)r->max_tokens * sizeof *r->tokens);
    if (r->tokens == NULL) return cli_fail("no memory for %d tokens", r->max_tokens);
    if (r->args->num_logprobs > 0 && (r->logprobs = json_array()) == NULL)
        return cli_fail("no memory for logprobs");
    return submit(r);
}

static int generate(run *r) {
    writer w = {.tokenizer = r->model->tokenizer,
                .quiet = r->args->json,
                .dims = cli_has_colour(),
                .message_idx = -1};
    int status = prepare(r);
    if (status == CLI_OK && is_chat(r->args)) {
        const kv8_status created = kv8_harmony_parser_create(&w.parser, w.tokenizer);
        if (created != KV8_OK) status = cli_fail_status(created);
    }
    if (status == CLI_OK) {
        status = run_request(r, &w);
        /* A text cut short by Ctrl-C still ends its line and its colour. */
        const bool begun = r->num_tokens > 0 && status != CLI_FAILED;
        const int finished = begun ? finish_writing(&w, r->finish == KV8_FINISH_EOS) : status;
        if (status == CLI_OK) status = finished;
    }
    if (status == CLI_OK && r->args->json) status = print_json(r, &w);
    kv8_harmony_parser_destroy(w.parser);
    free(w.bytes);
    return status == CLI_OK ? cli_finish_stdout() : status;
}

int cmd_generate(int argc, char **argv) {
    generate_args args = {.sampling = KV8_SAMPLING_INIT};
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    kv8_kv_setting setting;
    const char *const kv = args.kv != NULL ? args.kv : "f32";
    if (kv8_kv_setting_parse(kv, &setting) != KV8_OK) return cli_fail_kv(kv);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    status = cli_without(args.without, &options);
    if (status == CLI_OK) status = cli_path(args.path, args.device, &options);
    if (args.batch_invariant) options.batch_invariant = 1;
    if (status != CLI_OK) return status;
    cli_catch_interrupt();
    cli_model model;
    status = cli_model_open(&model, &(cli_opening){.directory = args.model,
                                                   .device = args.device,
                                                   .options = &options,
                                                   .threads = args.threads,
                                                   .with_tokenizer = true});
    if (status == CLI_OK) {
        run r = {.args = &args, .model = &model, .setting = setting};
        status = cli_scales_open(&r.scales, args.scales, &model);
        if (args.kv == NULL && r.scales.layers != NULL)
            r.setting = (kv8_kv_setting){.name = "mix", .layers = r.scales.layers};
        if (status == CLI_OK) status = read_prompt(&args, &model, &r.prompt, &r.num_prompt);
        if (status == CLI_OK) status = generate(&r);
        kv8_engine_destroy(r.engine);
        kv8_cache_destroy(r.cache);
        cli_scales_close(&r.scales);
        kv8_free(r.prompt);
        free(r.tokens);
        json_decref(r.logprobs);
    }
    cli_model_close(&model);
    return status;
}
