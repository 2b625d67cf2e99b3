/* test_cli.c - the program as a user meets it: every verb on the model that ships, JSON alone on
 * stdout, the golden numbers through the command line, nothing left behind by an interrupt.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"
#include "golden.h"

/* --- help --- */

/* Every option of --help stands in the man page, and the other way round. */
static void compare_with_man_page(const char *verb, const char *help) {
    char path[64];
    snprintf(path, sizeof path, "man/kv8-%s.1", verb);
    char *const man = slurp(path, NULL);
    char *to = man; /* roff writes \- for - */
    for (const char *from = man; *from != '\0'; from++) {
        if (*from != '\\' || from[1] != '-') *to++ = *from;
    }
    *to = '\0';
    const char *const pages[2] = {help, man};
    for (int i = 0; i < 2; i++) {
        const char *const begin = strstr(pages[i], i == 0 ? "options:" : ".SH OPTIONS");
        const char *end = strstr(begin, ".SH EXAMPLES"); /* NULL in --help */
        if (end == NULL) end = strstr(begin, ".SH SEE");
        for (const char *at = begin; (at = strstr(at, "--")) != NULL && (end == NULL || at < end);
             at += 2) {
            char name[64];
            const size_t length = 2 + strspn(at + 2, "abcdefghijklmnopqrstuvwxyz-");
            snprintf(name, sizeof name, "%.*s", (int)length, at);
            if (strstr(pages[1 - i], name) == NULL)
                fail_msg("%s: %s is not in %s", verb, name, i == 0 ? path : "--help");
        }
    }
    free(man);
}

static void help_and_version(void **state) {
    (void)state;
    static const char *const verbs[] = {"compare", "generate", "score", "info", "calibrate"};
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++) {
        program_result result = RUN(verbs[i], "--help");
        char start[64];
        snprintf(start, sizeof start, "usage: kv8 %s ", verbs[i]);
        assert_int_equal(result.status, 0);
        assert_string_equal(result.err, "");
        assert_memory_equal(result.out, start, strlen(start));
        compare_with_man_page(verbs[i], result.out);
        program_result again = RUN("help", verbs[i]);
        assert_string_equal(again.out, result.out);
        program_free(&again);
        program_free(&result);
    }
    program_result result = RUN("--help");
    assert_int_equal(result.status, 0);
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        assert_non_null(strstr(result.out, verbs[i]));
    program_free(&result);
    result = RUN("--version");
    assert_int_equal(result.status, 0);
    assert_memory_equal(result.out, "kv8 ", 4);
    assert_non_null(strstr(result.out, kv8_version()));
    program_free(&result);
}

/* --- the verbs at work --- */

static void score_equals_golden(void **state) {
    (void)state;
    golden g = golden_open(MODEL "/golden.safetensors");
    size_t num = 0, num_ids = 0;
    const int32_t *const ids = golden_get(&g, "window.ids", &num_ids);
    const float *const nll = golden_get(&g, "window.nll", &num);
    assert_int_equal(num, num_ids - 1);
    write_ids("window.json", ids, num_ids);
    write_ids("some.json", ids, 100);
    program_result result =
        WORK("score", MODEL, "--tokens", in_dir("window.json"), "--kv", "f32", "--json");
    json_t *const root = program_json(&result);
    const json_t *const list = json_object_get(root, "nll");
    assert_int_equal(json_array_size(list), num);
    double sum = 0;
    for (size_t i = 0; i < num; i++) {
        const double value = json_real_value(json_array_get(list, i));
        sum += value;
        if (!(fabs(value - (double)nll[i]) <= 2e-4))
            fail_msg("token %zu: %g, golden %g", i, value, (double)nll[i]);
    }
    const double loss = json_real_value(json_object_get(root, "loss"));
    assert_true(fabs(loss - sum / (double)num) <= 1e-6);
    json_decref(root);
    program_free(&result);

    result = WORK("score", MODEL, "--tokens", in_dir("some.json"), "--kv", "k=int8,v=e4m3@full");
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "99 tokens scored, KV k=int8,v=e4m3@full: loss "));
    program_free(&result);
    golden_close(&g);
}

static void generate_equals_golden(void **state) {
    (void)state;
    /* The others go through the library's interface in test_golden. */
    static const char *const names[] = {"chat1", "text0", "text2"};
    golden g = golden_open(MODEL "/golden.safetensors");
    for (size_t i = 0; i < 3; i++) {
        char key[32], num_text[24];
        size_t num_prompt = 0, num = 0;
        snprintf(key, sizeof key, "%s.prompt", names[i]);
        const int32_t *const prompt = golden_get(&g, key, &num_prompt);
        snprintf(key, sizeof key, "%s.greedy", names[i]);
        const int32_t *const greedy = golden_get(&g, key, &num);
        write_ids("prompt.json", prompt, num_prompt);
        snprintf(num_text, sizeof num_text, "%zu", num);
        program_result result = WORK("generate", MODEL, "--tokens", in_dir("prompt.json"), "--json",
                                     "--ignore-eos", "--max-tokens", num_text);
        json_t *const root = program_json(&result);
        const json_t *const tokens = json_object_get(root, "tokens");
        assert_int_equal(json_array_size(tokens), num);
        for (size_t t = 0; t < num; t++)
            assert_int_equal(json_integer_value(json_array_get(tokens, t)), greedy[t]);
        assert_int_equal(json_integer_value(json_object_get(root, "prompt_tokens")), num_prompt);
        assert_string_equal(json_string_value(json_object_get(root, "stop")), "length");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        if (result.max_rss_kib >= 200 * 1024)
            fail_msg("%ld KiB of memory, the limit is 200 MiB", result.max_rss_kib);
#endif
        json_decref(root);
        program_free(&result);
    }
    golden_close(&g);
}

static void generate_streams_what_json_says(void **state) {
    (void)state;
    program_result json_result = WORK("generate", MODEL, "--prompt", "The :mod:`json` module",
                                      "--max-tokens", "40", "--kv", "e4m3", "--json");
    json_t *const root = program_json(&json_result);
    const char *const text = json_string_value(json_object_get(root, "text"));
    assert_true(strlen(text) > 40);
    program_result result = WORK("generate", MODEL, "--prompt", "The :mod:`json` module",
                                 "--max-tokens", "40", "--kv", "e4m3");
    assert_int_equal(result.status, 0);
    assert_string_equal(result.err, "");
    assert_memory_equal(result.out, text, strlen(text));
    assert_string_equal(result.out + strlen(text), "\n");
    json_decref(root);
    program_free(&json_result);
    program_free(&result);
}

static void threads_change_nothing_but_speed(void **state) {
    (void)state;
    const char *const ids = in_dir("few.json");
    write_text("few.json", "[1, 300, 20, 4000, 17, 17, 900, 2048, 3, 77, 1234, 5, 60, 700, 8, 9]");
    double nll[2][15];
    for (int i = 0; i < 2; i++) {
        program_result result = RUN("score", MODEL, "--tokens", ids, "--json", "--kv", "int8",
                                    "--threads", i == 0 ? "1" : "3");
        json_t *const root = program_json(&result);
        for (size_t t = 0; t < 15; t++)
            nll[i][t] = json_real_value(json_array_get(json_object_get(root, "nll"), t));
        json_decref(root);
        program_free(&result);
    }
    for (size_t t = 0; t < 15; t++) assert_true(fabs(nll[0][t] - nll[1][t]) <= 1e-4);
}

static void seeds_repeat_themselves(void **state) {
    (void)state;
    static const char *const seeds[] = {"1", "1", "2"};
    program_result results[3];
    for (int i = 0; i < 3; i++) {
        results[i] = WORK("generate", MODEL, "--prompt", "def main():", "--max-tokens", "24",
                          "--temperature", "1", "--seed", seeds[i], "--ignore-eos");
        assert_int_equal(results[i].status, 0);
    }
    assert_string_equal(results[0].out, results[1].out);
    assert_string_not_equal(results[0].out, results[2].out);
    for (int i = 0; i < 3; i++) program_free(&results[i]);
}

static void chat_finds_the_code(void **state) {
    (void)state;
    const char *const system =
        "Codes:\nstone-copper = 4439\npixel-maple = 2537\n"
        "pixel-orbit = 8993\ncloud-quiet = 1464\n";
    const char *const ask = "What is the code for cloud-quiet?";
    program_result result =
        WORK("generate", MODEL, "--system", system, "--chat", ask, "--reasoning", "low", "--json");
    json_t *const root = program_json(&result);
    assert_string_equal(json_string_value(json_object_get(root, "stop")), "eos");
    const json_t *const messages = json_object_get(root, "messages");
    const json_t *const last = json_array_get(messages, json_array_size(messages) - 1);
    assert_string_equal(json_string_value(json_object_get(last, "channel")), "final");
    const char *const answer = json_string_value(json_object_get(last, "content"));
    assert_string_equal(answer, "The code for cloud-quiet is 1464.");

    program_result plain =
        WORK("generate", MODEL, "--system", system, "--chat", ask, "--reasoning", "low");
    assert_int_equal(plain.status, 0);
    assert_memory_equal(plain.out, "[analysis] ", 11);
    assert_null(strchr(plain.out, '\033')); /* colours are for terminals */
    assert_null(strstr(plain.out, "<|"));
    const char *const tail = plain.out + strlen(plain.out) - strlen(answer) - 1;
    assert_memory_equal(tail, answer, strlen(answer));
    json_decref(root);
    program_free(&result);
    program_free(&plain);
}

static void info_counts(void **state) {
    (void)state;
    program_result result = RUN("info", MODEL, "--json");
    json_t *const root = program_json(&result);
    const json_t *const model = json_object_get(root, "model");
    assert_int_equal(json_integer_value(json_object_get(model, "num_layers")), 6);
    assert_int_equal(json_integer_value(json_object_get(model, "num_full_layers")), 3);
    const double millions =
        (double)json_integer_value(json_object_get(model, "num_parameters")) * 1e-6;
    assert_true(fabs(millions - 13.56) < 0.01);
    assert_int_equal(json_array_size(json_object_get(model, "tensors")),
                     json_integer_value(json_object_get(model, "num_tensors")));
    /* 6 layers x (K, V) x 2 heads x 64, and for int8 an f16 scale per head of each. */
    const json_t *const kv = json_object_get(model, "kv_bytes_per_token");
    const json_t *const full = json_object_get(model, "kv_bytes_per_token_full_layers");
    assert_int_equal(json_integer_value(json_object_get(kv, "f32")), 6144);
    assert_int_equal(json_integer_value(json_object_get(kv, "bf16")), 3072);
    assert_int_equal(json_integer_value(json_object_get(kv, "e4m3")), 1536);
    assert_int_equal(json_integer_value(json_object_get(kv, "int8")), 1536 + 48);
    assert_int_equal(json_integer_value(json_object_get(full, "e5m2")), 768);
    const json_t *const machine = json_object_get(root, "machine");
    assert_true(json_integer_value(json_object_get(machine, "threads")) >= 1);
    assert_string_equal(json_string_value(json_array_get(json_object_get(machine, "isa"), 0)),
                        "scalar");
    const json_t *const gpu = json_object_get(machine, "gpu"); /* its facts, or why there is none */
    assert_true((json_object_get(gpu, "name") != NULL) != (json_object_get(gpu, "none") != NULL));
    assert_true(json_is_array(json_object_get(machine, "cuda_images")));
    json_decref(root);
    program_free(&result);
    result = RUN("info", MODEL, "--tensors");
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "lm_head.weight"));
    program_free(&result);
    result = RUN("info", "--json");
    json_t *const bare = program_json(&result);
    assert_null(json_object_get(bare, "model"));
    json_decref(bare);
    program_free(&result);
}

static double row_number(const json_t *rows, const char *kv, const char *key) {
    size_t i = 0;
    json_t *row = NULL;
    json_array_foreach(rows, i, row) {
        if (strcmp(json_string_value(json_object_get(row, "kv")), kv) == 0) {
            const json_t *const value = json_object_get(row, key);
            if (!json_is_number(value)) fail_msg("row %s: %s is not a number", kv, key);
            return json_number_value(value);
        }
    }
    fail_msg("no row %s", kv);
    return 0;
}

static void compare_small(void **state) {
    (void)state;
    const int num_files = count_files(dir);
    program_result result =
        WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len", "128",
             "--greedy", "1", "--recall", "0", "--kv", "bf16,e4m3,e5m2,int8,e4m3@full", "--plot",
             in_dir("kv.svg"), "--report", in_dir("kv.json"), "--json");
    json_t *const root = program_json(&result);
    const json_t *const rows = json_object_get(root, "rows");
    assert_int_equal(json_array_size(rows), 6);
    static const char *const keys[] = {"kl",           "top1",
                                       "dloss",        "greedy_match",
                                       "loss",         "bytes_per_token",
                                       "tokens_per_s", "decode_tokens_per_s"};
    static const char *const kvs[] = {"f32", "bf16", "e4m3", "e5m2", "int8", "e4m3@full"};
    for (size_t i = 0; i < 6; i++) {
        for (size_t k = 0; k < 8; k++) row_number(rows, kvs[i], keys[k]);
        assert_true(row_number(rows, kvs[i], "tokens_per_s") > 0);
    }
    assert_true(row_number(rows, "f32", "kl") == 0);
    assert_true(row_number(rows, "f32", "top1") == 1);
    assert_true(row_number(rows, "f32", "dloss") == 0);
    assert_true(row_number(rows, "f32", "greedy_match") == 1);
    assert_true(row_number(rows, "bf16", "kl") > 0);
    assert_true(row_number(rows, "bf16", "kl") < row_number(rows, "int8", "kl"));
    assert_true(row_number(rows, "int8", "kl") < row_number(rows, "e4m3@full", "kl"));
    assert_true(row_number(rows, "e4m3@full", "kl") < row_number(rows, "e4m3", "kl"));
    assert_true(row_number(rows, "e4m3", "kl") < row_number(rows, "e5m2", "kl"));
    assert_true(row_number(rows, "int8", "bytes_per_token") == 1584);
    assert_true(row_number(rows, "e4m3@full", "bytes_per_token") == 768 + 1536);

    char *const svg = slurp(in_dir("kv.svg"), NULL);
    assert_non_null(strstr(svg, "<svg"));
    assert_non_null(strstr(svg, "</svg>"));
    assert_non_null(strstr(svg, "e4m3@full"));
    char *const report = slurp(in_dir("kv.json"), NULL);
    assert_string_equal(report, result.out);
    free(svg);
    free(report);
    json_decref(root);
    program_free(&result);
    assert_int_equal(count_files(dir), num_files + 2);
}

static void compare_asks_for_codes(void **state) {
    (void)state;
    program_result result =
        WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len", "64",
             "--greedy", "0", "--recall", "1", "--kv", "e4m3", "--json");
    json_t *const root = program_json(&result);
    const json_t *const rows = json_object_get(root, "rows");
    /* One table, eight questions: the model can do this, and e4m3 does not take it away. */
    assert_true(row_number(rows, "f32", "recall") >= 0.75);
    assert_true(row_number(rows, "e4m3", "recall") >= 0.5);
    json_decref(root);
    program_free(&result);
}

static void compare_prints_a_table(void **state) {
    (void)state;
    program_result result =
        WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "2", "--window-len", "64",
             "--greedy", "0", "--recall", "0", "--kv", "k=int8,v=e4m3@sliding");
    assert_int_equal(result.status, 0);
    assert_string_equal(result.err, "");
    assert_non_null(strstr(result.out, "2 windows of 64 tokens"));
    assert_non_null(strstr(result.out, "\nk=int8,v=e4m3@sliding "));
    assert_non_null(strstr(result.out, "\nf32 "));
    program_free(&result);
    /* What was not run is null, not a number. */
    result = WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len",
                  "64", "--greedy", "0", "--recall", "0", "--kv", "bf16", "--json");
    json_t *const root = program_json(&result);
    const json_t *const row = json_array_get(json_object_get(root, "rows"), 1);
    assert_true(json_is_null(json_object_get(row, "recall")));
    assert_true(json_is_null(json_object_get(row, "greedy_match")));
    json_decref(root);
    program_free(&result);
}

static void terminals_see_progress_and_channels(void **state) {
    (void)state;
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0) skip(); /* a bare container may have none to give */
    close(terminal);
    const char *const compare[] = {
        "compare",   MODEL,      "--text", MODEL "/held.txt", "--windows", "2",    "--window-len",
        "64",        "--greedy", "0",      "--recall",        "0",         "--kv", "bf16",
        "--threads", "1",        NULL};
    char *shown = run_on_terminal(compare, false);
    assert_non_null(strstr(shown, "windows "));
    assert_non_null(strstr(shown, " %"));
    /* The line is cleared in the end: nothing stays on the screen. */
    const char *const last = strrchr(shown, '\r');
    assert_non_null(last);
    assert_string_equal(last, "\r\033[K");
    free(shown);
    const char *const chat[] = {"generate",    MODEL,
                                "--system",    "Codes:\nfox-leaf = 4439\n",
                                "--chat",      "What is the code for fox-leaf?",
                                "--reasoning", "low",
                                "--threads",   "1",
                                NULL};
    shown = run_on_terminal(chat, true);
    assert_memory_equal(shown, "\033[2m[analysis] ", 15);
    const char *const bright = strstr(shown, "\033[0m");
    assert_non_null(bright);
    assert_non_null(strstr(bright, "4439"));
    free(shown);
}

/* KL of one setting over one window with every scale of the file set to `scale`. */
static double kl_with_scale(const char *kv, const char *scale) {
    char text[1024];
    int at = snprintf(text, sizeof text,
                      "{\"version\":\"1.0\",\"architectures\":\"GptOssForCausalLM\",\"quant_type\":"
                      "\"per_tensor\",\"qmin\":-448,\"qmax\":448,\"num_layers\":6,\"num_head\":2,"
                      "\"scales_shape\":[6,2],\"scales\":[");
    for (int i = 0; i < 6; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, "%s[%s,%s]", i > 0 ? "," : "", scale,
                       scale);
    snprintf(text + at, sizeof text - (size_t)at, "]}");
    write_text("scales.json", text);
    program_result result = WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1",
                                 "--window-len", "96", "--greedy", "0", "--recall", "0", "--kv", kv,
                                 "--scales", in_dir("scales.json"), "--json");
    json_t *const root = program_json(&result);
    const double kl = row_number(json_object_get(root, "rows"), kv, "kl");
    json_decref(root);
    program_free(&result);
    return kl;
}

static void scales_reach_the_fp8_formats_only(void **state) {
    (void)state;
    /* Scales this small clip most of e4m3's range; the wide formats must not see them. */
    const double e4m3 = kl_with_scale("e4m3", "1");
    assert_true(kl_with_scale("e4m3", "0.001") > 10 * e4m3);
    assert_true(kl_with_scale("e4m3@full", "0.001") > 10 * kl_with_scale("e4m3@full", "1"));
    assert_true(kl_with_scale("bf16", "0.001") == kl_with_scale("bf16", "1"));
    assert_true(kl_with_scale("int8", "0.001") == kl_with_scale("int8", "1"));
    /* The same file serves e4m3fnuz: what fills e4m3's 448 must not clip at 240. The largest |K|
     * and |V| of the tiny model are far below 448 * 0.125. */
    const double fnuz = kl_with_scale("e4m3fnuz", "0.125");
    assert_true(fnuz < 2 * e4m3);
}

/* --- what a run is made of --- */

static json_t *generated(const char *const args[]) {
    program_result result = program_run(args, out_path, err_path, 0);
    json_t *const root = program_json(&result);
    program_free(&result);
    return root;
}

/* A prompt is the same from the command line, a file and stdin. */
static void prompts_come_from_files_and_stdin(void **state) {
    (void)state;
    write_text("prompt.txt", "def main():\n    x =");
    json_t *texts[3];
    texts[0] = generated((const char *const[]){"generate", MODEL, "--prompt",
                                               "def main():\n    x =", "--max-tokens", "6",
                                               "--json", "--threads", "1", NULL});
    texts[1] =
        generated((const char *const[]){"generate", MODEL, "--prompt-file", in_dir("prompt.txt"),
                                        "--max-tokens", "6", "--json", "--threads", "1", NULL});
    const int kept = dup(STDIN_FILENO), file = open(in_dir("prompt.txt"), O_RDONLY);
    assert_true(kept >= 0 && file >= 0 && dup2(file, STDIN_FILENO) == STDIN_FILENO);
    texts[2] =
        generated((const char *const[]){"generate", MODEL, "--prompt-file", "-", "--max-tokens",
                                        "6", "--json", "--threads", "1", NULL});
    dup2(kept, STDIN_FILENO);
    close(kept);
    close(file);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(json_array_size(json_object_get(texts[i], "tokens")), 6);
        assert_true(
            json_equal(json_object_get(texts[i], "tokens"), json_object_get(texts[0], "tokens")));
    }
    for (int i = 0; i < 3; i++) json_decref(texts[i]);
    ASSERT_REFUSED("/nonexistent", "generate", MODEL, "--prompt-file", "/nonexistent");
    ASSERT_REFUSED("not 2", "generate", MODEL, "--prompt", "x", "--prompt-file", "-");
    spill(in_dir("nul.txt"), "a\0b", 3);
    ASSERT_REFUSED("NUL byte at byte 1", "generate", MODEL, "--chat-file", in_dir("nul.txt"));
}

static void sampling_options_reach_the_draw(void **state) {
    (void)state;
    /* One candidate is greedy, whatever the temperature. */
    json_t *const greedy =
        generated((const char *const[]){"generate", MODEL, "--prompt", "The river", "--max-tokens",
                                        "12", "--json", "--logprobs", "2", "--threads", "1", NULL});
    json_t *const one = generated((const char *const[]){
        "generate", MODEL, "--prompt", "The river", "--max-tokens", "12", "--json", "--temperature",
        "5", "--top-k", "1", "--threads", "1", NULL});
    json_t *const wild = generated(
        (const char *const[]){"generate", MODEL, "--prompt", "The river", "--max-tokens", "12",
                              "--json", "--repeat-penalty", "50", "--threads", "1", NULL});
    assert_true(json_equal(json_object_get(greedy, "tokens"), json_object_get(one, "tokens")));
    assert_false(json_equal(json_object_get(greedy, "tokens"), json_object_get(wild, "tokens")));
    const json_t *const logprobs = json_object_get(greedy, "logprobs");
    assert_int_equal(json_array_size(logprobs), 12);
    const json_t *const first = json_array_get(logprobs, 0);
    const json_t *const top = json_object_get(first, "top");
    assert_int_equal(json_array_size(top), 2);
    assert_true(json_equal(json_object_get(first, "logprob"),
                           json_object_get(json_array_get(top, 0), "logprob")));
    assert_true(json_real_value(json_object_get(first, "logprob")) < 0);
    assert_null(json_object_get(one, "logprobs"));
    json_decref(greedy);
    json_decref(one);
    json_decref(wild);
    ASSERT_REFUSED("--logprobs goes with --json", "generate", MODEL, "--prompt", "x", "--logprobs",
                   "3");
}

/* Without sinks the loss is another; the report says what was left out. */
static void parts_can_be_left_out(void **state) {
    (void)state;
    double loss[2];
    for (int i = 0; i < 2; i++) {
        const char *const args[] = {"compare",
                                    MODEL,
                                    "--text",
                                    MODEL "/held.txt",
                                    "--windows",
                                    "1",
                                    "--window-len",
                                    "64",
                                    "--greedy",
                                    "0",
                                    "--recall",
                                    "0",
                                    "--kv",
                                    "bf16",
                                    "--json",
                                    "--threads",
                                    "1",
                                    i == 0 ? NULL : "--without",
                                    "sinks",
                                    NULL};
        json_t *const root = generated(args);
        loss[i] = json_real_value(
            json_object_get(json_array_get(json_object_get(root, "rows"), 0), "loss"));
        const char *const without = json_string_value(json_object_get(root, "without"));
        assert_true(i == 0 ? without == NULL : strcmp(without, "sinks") == 0);
        json_decref(root);
    }
    assert_true(fabs(loss[1] - loss[0]) > 0.01);
    ASSERT_REFUSED("must be sinks, window or sinks,window", "generate", MODEL, "--prompt", "x",
                   "--without", "sink");
    ASSERT_REFUSED("--without is empty", "generate", MODEL, "--prompt", "x", "--without", "");
}

/* A gnuplot that starts and then fails: its words are shown, and the table was printed before. */
static void a_plot_that_fails_loses_no_table(void **state) {
    (void)state;
    char path[PATH_MAX + 64];
    write_text("gnuplot",
               "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\ncat >/dev/null\n"
               "echo 'no such terminal' >&2\nexit 1\n");
    assert_int_equal(chmod(in_dir("gnuplot"), 0700), 0);
    char *const kept = strdup(getenv("PATH"));
    snprintf(path, sizeof path, "%s:%s", dir, kept);
    setenv("PATH", path, 1);
    program_result result =
        WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len", "64",
             "--greedy", "0", "--recall", "0", "--kv", "bf16", "--plot", in_dir("no.svg"));
    setenv("PATH", kept, 1);
    free(kept);
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.out, "1 window of 64 tokens, 1 thread,"));
    assert_non_null(strstr(result.out, "\nbf16 "));
    assert_string_equal(result.err, "kv8 compare: gnuplot ended by status 1: no such terminal\n");
    assert_null(slurp_regular(in_dir("no.svg"), NULL));
    program_free(&result);
}

static void score_names_the_least_expected_token(void **state) {
    (void)state;
    static const int32_t few[] = {1, 2, 3, 4};
    write_ids("few.json", few, 4);
    program_result result = WORK("score", MODEL, "--tokens", in_dir("few.json"));
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "3 tokens scored"));
    assert_non_null(strstr(result.out, "\nleast expected: token "));
    program_free(&result);
}

static void interrupt_leaves_nothing(void **state) {
    (void)state;
    const int num_files = count_files(dir);
    const char *const compare[] = {"compare",   MODEL,
                                   "--text",    MODEL "/held.txt",
                                   "--plot",    in_dir("i.svg"),
                                   "--report",  in_dir("i.json"),
                                   "--windows", "16",
                                   NULL};
    program_result result = program_run(compare, out_path, err_path, 700);
    assert_int_equal(result.status, 130);
    assert_string_equal(result.out, "");
    assert_string_equal(result.err, "kv8 compare: interrupted\n");
    program_free(&result);
    assert_int_equal(count_files(dir), num_files);
    const char *const generate[] = {"generate", MODEL,          "--prompt", "x", "--max-tokens",
                                    "100000",   "--ignore-eos", "--json",   NULL};
    result = program_run(generate, out_path, err_path, 700);
    assert_int_equal(result.status, 130);
    assert_string_equal(result.out, "");
    program_free(&result);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(help_and_version),
        cmocka_unit_test(score_equals_golden),
        cmocka_unit_test(generate_equals_golden),
        cmocka_unit_test(generate_streams_what_json_says),
        cmocka_unit_test(threads_change_nothing_but_speed),
        cmocka_unit_test(seeds_repeat_themselves),
        cmocka_unit_test(chat_finds_the_code),
        cmocka_unit_test(info_counts),
        cmocka_unit_test(compare_small),
        cmocka_unit_test(compare_asks_for_codes),
        cmocka_unit_test(compare_prints_a_table),
        cmocka_unit_test(terminals_see_progress_and_channels),
        cmocka_unit_test(scales_reach_the_fp8_formats_only),
        cmocka_unit_test(prompts_come_from_files_and_stdin),
        cmocka_unit_test(sampling_options_reach_the_draw),
        cmocka_unit_test(parts_can_be_left_out),
        cmocka_unit_test(a_plot_that_fails_loses_no_table),
        cmocka_unit_test(score_names_the_least_expected_token),
        cmocka_unit_test(interrupt_leaves_nothing),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
