/* test_cli.c - the program as a user meets it: every verb on the model that ships, JSON alone on
 * stdout, the golden numbers through the command line, and every kind of bad input refused in one
 * line with status 2 and no file left behind.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <limits.h>

#include "golden.h"
#include "program.h"

#define MODEL "models/tiny-gpt-oss"

static char dir[64];                    /* holds everything these tests write */
static char out_path[96], err_path[96]; /* of the last run */

static const char *in_dir(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *const path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", dir, name);
    return path;
}

static program_result run(const char *const args[]) {
    return program_run(args, out_path, err_path, 0);
}
#define RUN(...) run((const char *const[]){__VA_ARGS__, NULL})
/* Work for the model, on one thread: test programs already run side by side. */
#define WORK(...) RUN(__VA_ARGS__, "--threads", "1")

static void write_text(const char *name, const char *text) {
    spill(in_dir(name), text, strlen(text));
}

static int count_files(const char *directory) {
    DIR *const opened = opendir(directory);
    assert_non_null(opened);
    int num = 0;
    while (readdir(opened) != NULL) num++;
    closedir(opened);
    return num - 2;
}

/* Refused: status 2, nothing on stdout, one line on stderr that begins with the program's name and
 * holds `part`. */
static void assert_refusal(program_result *result, const char *part) {
    if (result->status != 2)
        fail_msg("status %d, wanted 2 naming \"%s\": %s", result->status, part, result->err);
    if (result->out != NULL) assert_string_equal(result->out, "");
    const char *const newline = strchr(result->err, '\n');
    if (strncmp(result->err, "kv8", 3) != 0 || newline == NULL || newline[1] != '\0')
        fail_msg("not one line of kv8's: \"%s\"", result->err);
    if (strstr(result->err, part) == NULL)
        fail_msg("\"%s\" does not name \"%s\"", result->err, part);
    program_free(result);
}
#define ASSERT_REFUSED(part, ...)                   \
    do {                                            \
        program_result refused_ = RUN(__VA_ARGS__); \
        assert_refusal(&refused_, (part));          \
    } while (0)

/* --- golden values --- */

static void write_ids(const char *name, const int32_t *ids, size_t num) {
    json_t *const list = json_array();
    for (size_t i = 0; i < num; i++) json_array_append_new(list, json_integer(ids[i]));
    assert_int_equal(json_dump_file(list, in_dir(name), 0), 0);
    json_decref(list);
}

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
        const char *const end = strstr(begin, ".SH SEE"); /* NULL in --help */
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
    static const char *const verbs[] = {"compare", "generate", "score", "info"};
    for (size_t i = 0; i < 4; i++) {
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
    for (size_t i = 0; i < 4; i++) assert_non_null(strstr(result.out, verbs[i]));
    program_free(&result);
    result = RUN("--version");
    assert_int_equal(result.status, 0);
    assert_memory_equal(result.out, "kv8 ", 4);
    assert_non_null(strstr(result.out, kv8_version()));
    program_free(&result);
}

static void bad_arguments(void **state) {
    (void)state;
    write_text("ids.json", "[1, 2, 3]");
    write_text("short.txt", "A short text.");
    const char *const ids = in_dir("ids.json"), *const text = in_dir("short.txt");
    program_result none = run((const char *const[]){NULL});
    assert_refusal(&none, "which verb");
    ASSERT_REFUSED("unknown verb \"cmpare\"", "cmpare");
    ASSERT_REFUSED("unknown verb \"-x\"", "-x");
    ASSERT_REFUSED("unknown verb \"nothing\"", "help", "nothing");
    ASSERT_REFUSED("--bogus", "score", MODEL, "--bogus", "--tokens", ids);
    ASSERT_REFUSED("-q", "info", "-q");
    ASSERT_REFUSED("--json=1", "info", "--json=1");
    ASSERT_REFUSED("--tokens needs a value", "score", MODEL, "--tokens");
    ASSERT_REFUSED("which model", "score", "--tokens", ids);
    ASSERT_REFUSED("\"other\" is left over", "score", MODEL, "other", "--tokens", ids);
    ASSERT_REFUSED("--tokens FILE is missing", "score", MODEL);
    ASSERT_REFUSED("--text FILE is missing", "compare", MODEL);
    ASSERT_REFUSED("not 0", "generate", MODEL);
    ASSERT_REFUSED("not 2", "generate", MODEL, "--prompt", "x", "--tokens", ids);
    ASSERT_REFUSED("go with --chat", "generate", MODEL, "--prompt", "x", "--system", "y");
    ASSERT_REFUSED("\"hard\", must be low", "generate", MODEL, "--chat", "x", "--reasoning",
                   "hard");
    ASSERT_REFUSED("fp8", "score", MODEL, "--tokens", ids, "--kv", "fp8");
    ASSERT_REFUSED("@odd", "compare", MODEL, "--text", text, "--kv", "bf16,e4m3@odd");
    ASSERT_REFUSED("empty", "compare", MODEL, "--text", text, "--kv", "bf16,");
    static const char *const numbers[] = {"0", "-1", "x", "", " 1", "1x", "99999999999999999999"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        ASSERT_REFUSED("--threads is", "score", MODEL, "--tokens", ids, "--threads", numbers[i]);
        ASSERT_REFUSED("--windows is", "compare", MODEL, "--text", text, "--windows", numbers[i]);
        ASSERT_REFUSED("--max-tokens is", "generate", MODEL, "--prompt", "x", "--max-tokens",
                       numbers[i]);
    }
    ASSERT_REFUSED("--window-len is", "compare", MODEL, "--text", text, "--window-len", "1");
    ASSERT_REFUSED("--temperature is", "generate", MODEL, "--prompt", "x", "--temperature", "-1");
    ASSERT_REFUSED("--temperature is", "generate", MODEL, "--prompt", "x", "--temperature", "nan");
    ASSERT_REFUSED("--seed is", "generate", MODEL, "--prompt", "x", "--seed", "-1");
    setenv("KV8_ISA", "sse9", 1);
    ASSERT_REFUSED("sse9", "info");
    unsetenv("KV8_ISA");
}

/* --- bad models --- */

/* A directory like the model's, of links to its files. */
static void link_model(const char *name) {
    static const char *const files[] = {"config.json", "generation_config.json", "tokenizer.json",
                                        "model.safetensors"};
    char target[PATH_MAX], link[PATH_MAX];
    mkdir(in_dir(name), 0700);
    for (size_t i = 0; i < 4; i++) {
        snprintf(target, sizeof target, MODEL "/%s", files[i]);
        snprintf(link, sizeof link, "%s/%s/%s", dir, name, files[i]);
        char *const whole = realpath(target, NULL);
        unlink(link);
        assert_int_equal(symlink(whole, link), 0);
        free(whole);
    }
}

/* The linked model with one file's bytes instead of the link. */
static void replace_file(const char *name, const char *file, const void *data, size_t size) {
    link_model(name);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s/%s", dir, name, file);
    unlink(path);
    if (data != NULL) spill(path, data, size);
}

/* The linked model with one change in the text of a file. */
static void change_file(const char *name, const char *file, const char *from, const char *to) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, MODEL "/%s", file);
    char *const text = slurp(path, NULL);
    const char *const at = strstr(text, from);
    assert_non_null(at);
    const size_t size = strlen(text) + strlen(to) + 1;
    char *const changed = malloc(size);
    snprintf(changed, size, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    replace_file(name, file, changed, strlen(changed));
    free(changed);
    free(text);
}

static void bad_models(void **state) {
    (void)state;
    write_text("ids.json", "[1, 2, 3]");
    const char *const ids = in_dir("ids.json"), *const bad = in_dir("bad");
    ASSERT_REFUSED("/nonexistent", "info", "/nonexistent");
    ASSERT_REFUSED("/nonexistent", "generate", "/nonexistent", "--prompt", "x");
    ASSERT_REFUSED("/nonexistent", "compare", "/nonexistent", "--text", "README.md");

    size_t size = 0;
    char *const weights = slurp(MODEL "/model.safetensors", &size);
    static const size_t cuts[] = {0, 4, 8, 100, 20000, 1000000};
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        replace_file("bad", "model.safetensors", weights, cuts[i]);
        ASSERT_REFUSED("model.safetensors", "score", bad, "--tokens", ids);
    }
    replace_file("bad", "model.safetensors", weights, size - 1);
    ASSERT_REFUSED("model.safetensors", "score", bad, "--tokens", ids);
    memset(weights, 0xff, 8); /* a header of 2^64-1 bytes */
    replace_file("bad", "model.safetensors", weights, size);
    ASSERT_REFUSED("model.safetensors", "info", bad);
    free(weights);
    replace_file("bad", "model.safetensors", NULL, 0);
    ASSERT_REFUSED("bad", "info", bad);

    static const struct {
        const char *from, *to, *part;
    } configs[] = {
        {"{", "", "config.json"},
        {"\"num_hidden_layers\": 6", "\"num_hidden_layers\": 7", "7"},
        {"\"num_hidden_layers\": 6", "\"num_hidden_layers\": -6", "num_hidden_layers"},
        {"\"hidden_size\": 256", "\"hidden_size\": \"256\"", "hidden_size"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "3"},
        {"\"model_type\": \"gpt_oss\"", "\"model_type\": \"llama\"", "llama"},
        {"\"vocab_size\": 4096", "\"vocab_size\": 4097", "4097"},
    };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        change_file("bad", "config.json", configs[i].from, configs[i].to);
        ASSERT_REFUSED(configs[i].part, "score", bad, "--tokens", ids);
    }
    replace_file("bad", "config.json", NULL, 0);
    ASSERT_REFUSED("config.json", "info", bad);

    change_file("bad", "tokenizer.json", "\"BPE\"", "\"Unigram\"");
    ASSERT_REFUSED("tokenizer.json", "generate", bad, "--prompt", "x");
    replace_file("bad", "tokenizer.json", "{\"model\":", 9);
    ASSERT_REFUSED("tokenizer.json", "generate", bad, "--chat", "x");
    replace_file("bad", "tokenizer.json", NULL, 0);
    ASSERT_REFUSED("tokenizer.json", "compare", bad, "--text", "README.md");
}

/* --- bad inputs --- */

static void bad_tokens(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "not JSON"},
        {"[1, 2", "not JSON"},
        {"[1, 2] 3", "not JSON"},
        {"{\"a\": 1}", "must be a JSON array"},
        {"3", "must be a JSON array"},
        {"[]", "must be a JSON array"},
        {"[1, 2.0]", "item 1 is not a whole number"},
        {"[1, \"2\"]", "item 1"},
        {"[1, 4096]", "item 1 is 4096"},
        {"[-1, 2]", "item 0 is -1"},
        {"[1, 99999999999]", "item 1 is 99999999999"},
        {"[1, 1e999]", "not JSON"},
    };
    const char *const path = in_dir("bad.json");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text("bad.json", cases[i].text);
        ASSERT_REFUSED(cases[i].part, "score", MODEL, "--tokens", path);
        ASSERT_REFUSED(cases[i].part, "generate", MODEL, "--tokens", path, "--json");
    }
    write_text("bad.json", "[7]");
    ASSERT_REFUSED("at least 2", "score", MODEL, "--tokens", path, "--json");
    ASSERT_REFUSED("/nonexistent.json", "score", MODEL, "--tokens", "/nonexistent.json");
    ASSERT_REFUSED("directory", "score", MODEL, "--tokens", dir);
}

static void too_long_contexts(void **state) {
    (void)state;
    /* rope's original context bounds the other from below in some readers: shrink both. */
    change_file("small", "config.json", "\"max_position_embeddings\": 131072",
                "\"max_position_embeddings\": 8192");
    const char *const small = in_dir("small");
    int32_t *const ids = calloc(8193, sizeof *ids);
    assert_non_null(ids);
    write_ids("long.json", ids, 8193);
    free(ids);
    const char *const path = in_dir("long.json");
    ASSERT_REFUSED("8193", "score", small, "--tokens", path);
    ASSERT_REFUSED("8193", "generate", small, "--tokens", path);
    ASSERT_REFUSED("8192", "generate", small, "--prompt", "x", "--max-tokens", "8192");
    ASSERT_REFUSED("8193", "compare", small, "--text", MODEL "/held.txt", "--window-len", "8193");
}

static void bad_texts(void **state) {
    (void)state;
    const char *const path = in_dir("bad.txt");
    write_text("bad.txt",
               "good\xff"
               "bad");
    ASSERT_REFUSED("bad.txt", "compare", MODEL, "--text", path);
    spill(path, "first\0second \xc3", 14);
    ASSERT_REFUSED("byte 6", "compare", MODEL, "--text", path);
    ASSERT_REFUSED("8", "generate", MODEL, "--prompt", "caf\xc3");
    ASSERT_REFUSED("8", "generate", MODEL, "--chat", "\xc0\x80");
    ASSERT_REFUSED("empty", "generate", MODEL, "--prompt", "");
    write_text("bad.txt", "");
    ASSERT_REFUSED("0 tokens: 0 windows", "compare", MODEL, "--text", path);
    write_text("bad.txt", "A few words are not four thousand tokens.");
    ASSERT_REFUSED("0 windows of 4096 fit, 6 were asked for", "compare", MODEL, "--text", path);
    ASSERT_REFUSED("/nonexistent.txt", "compare", MODEL, "--text", "/nonexistent.txt");
    ASSERT_REFUSED("kv8 compare", "compare", MODEL, "--text", dir);
}

static void bad_outputs_and_scales(void **state) {
    (void)state;
    const char *const text = MODEL "/held.txt";
    ASSERT_REFUSED("/nonexistent/x.svg: cannot write", "compare", MODEL, "--text", text, "--plot",
                   "/nonexistent/x.svg");
    ASSERT_REFUSED("not a regular file", "compare", MODEL, "--text", text, "--plot", dir);
    ASSERT_REFUSED("not a regular file", "compare", MODEL, "--text", text, "--report", "/dev/null");
    const char *const scales = in_dir("scales.json");
    write_text("scales.json", "{}");
    ASSERT_REFUSED("scales.json", "compare", MODEL, "--text", text, "--scales", scales, "--report",
                   in_dir("report.json"));
    ASSERT_REFUSED("/nonexistent.json", "compare", MODEL, "--text", text, "--scales",
                   "/nonexistent.json");
    char *const saved = strdup(getenv("PATH"));
    setenv("PATH", "/nonexistent", 1);
    ASSERT_REFUSED("gnuplot-nox", "compare", MODEL, "--text", text, "--plot", in_dir("x.svg"));
    setenv("PATH", saved, 1);
    free(saved);
    assert_int_equal(access(in_dir("x.svg"), F_OK), -1);
    assert_int_equal(access(in_dir("report.json"), F_OK), -1);
}

static void full_stdout(void **state) {
    (void)state;
    const char *const args[] = {"--help", NULL};
    program_result result = program_run(args, "/dev/full", err_path, 0);
    assert_refusal(&result, "stdout: cannot write: No space left");
    const char *const generate[] = {"generate", MODEL, "--prompt", "x", "--max-tokens", "4", NULL};
    result = program_run(generate, "/dev/full", err_path, 0);
    assert_refusal(&result, "stdout: cannot write");
    const char *const json[] = {"info", "--json", NULL};
    result = program_run(json, "/dev/full", err_path, 0);
    assert_refusal(&result, "stdout: cannot write");
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
            if (!json_is_real(value)) fail_msg("row %s: %s is not a number", kv, key);
            return json_real_value(value);
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

/* Runs the program with stdout or stderr on a terminal and gives back what that showed. */
static char *run_on_terminal(const char *const args[], bool out_is_terminal) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
    assert_true(master >= 0);
    assert_int_equal(grantpt(master), 0);
    assert_int_equal(unlockpt(master), 0);
    const char *const name = ptsname(master);
    const int keep = open(name, O_RDWR | O_NOCTTY); /* else the text goes with its last writer */
    assert_true(keep >= 0);
    program_result result =
        program_run(args, out_is_terminal ? name : out_path, out_is_terminal ? err_path : name, 0);
    assert_int_equal(result.status, 0);
    char *const shown = calloc(1, 1 << 16);
    assert_non_null(shown);
    size_t size = 0;
    for (ssize_t got; (got = read(master, shown + size, (1 << 16) - 1 - size)) > 0;)
        size += (size_t)got;
    close(keep);
    close(master);
    program_free(&result);
    return shown;
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
    assert_string_equal(result.err, "");
    program_free(&result);
    assert_int_equal(count_files(dir), num_files);
    const char *const generate[] = {"generate", MODEL,          "--prompt", "x", "--max-tokens",
                                    "100000",   "--ignore-eos", "--json",   NULL};
    result = program_run(generate, out_path, err_path, 700);
    assert_int_equal(result.status, 130);
    assert_string_equal(result.out, "");
    program_free(&result);
}

static int set_up(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/kv8-cli-XXXXXX");
    if (mkdtemp(dir) == NULL) return -1;
    snprintf(out_path, sizeof out_path, "%s/stdout", dir);
    snprintf(err_path, sizeof err_path, "%s/stderr", dir);
    unsetenv("TERM");
    spill(out_path, "", 0); /* so that counting files always counts these two */
    spill(err_path, "", 0);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(help_and_version),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(bad_models),
        cmocka_unit_test(bad_tokens),
        cmocka_unit_test(too_long_contexts),
        cmocka_unit_test(bad_texts),
        cmocka_unit_test(bad_outputs_and_scales),
        cmocka_unit_test(full_stdout),
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
        cmocka_unit_test(interrupt_leaves_nothing),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
