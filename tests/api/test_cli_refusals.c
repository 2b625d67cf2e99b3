/* test_cli_refusals.c - every kind of bad input to the program: refused in one line with status 2,
 * nothing on stdout and no file left behind.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"

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
    ASSERT_REFUSED("--log is \"jsn\", must be text, json or none; did you mean json?", "serve",
                   MODEL, "--log", "jsn");
    ASSERT_REFUSED("--dtype is \"f64\", must be auto or bfloat16", "serve", MODEL, "--dtype",
                   "f64");
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
    static const char *const devices[] = {"gpu", "cuda:", "cuda:x", "cuda:1x", "cuda1", ""};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
        ASSERT_REFUSED("must be cpu, cuda or cuda:N", "score", MODEL, "--tokens", ids, "--device",
                       devices[i]);
    ASSERT_REFUSED("--path is \"fast\"", "generate", MODEL, "--prompt", "x", "--path", "fast");
    ASSERT_REFUSED("--path is of a model on a GPU", "generate", MODEL, "--prompt", "x", "--path",
                   "graph");
    ASSERT_REFUSED("leave nothing to measure", "bench", "model", MODEL, "--prompt", "0", "--gen",
                   "0");
    ASSERT_REFUSED("the name of an output is empty", "compare", MODEL, "--text", text, "--report",
                   "");
    ASSERT_REFUSED("neither gpt-oss-20b", "info", "random:gpt-oss-7b");
    ASSERT_REFUSED("--window-len is", "compare", MODEL, "--text", text, "--window-len", "1");
    ASSERT_REFUSED("--temperature is", "generate", MODEL, "--prompt", "x", "--temperature", "-1");
    ASSERT_REFUSED("--temperature is", "generate", MODEL, "--prompt", "x", "--temperature", "nan");
    ASSERT_REFUSED("--seed is", "generate", MODEL, "--prompt", "x", "--seed", "-1");
    setenv("KV8_ISA", "sse9", 1);
    ASSERT_REFUSED("sse9", "info");
    unsetenv("KV8_ISA");
}

/* --- bad models --- */

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

/* 1000 stacks do not fit into 2 GiB of addresses. A sanitizer needs more for itself. */
static void threads_that_do_not_start(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip();
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    skip();
#endif
#endif
    write_text("ids.json", "[1, 2, 3]");
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    const struct rlimit narrow = {.rlim_cur = 2u << 30, .rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_AS, &narrow), 0);
    program_result result =
        RUN("score", MODEL, "--tokens", in_dir("ids.json"), "--threads", "1000");
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_refusal(&result, " of 1000: Resource temporarily unavailable");
    ASSERT_REFUSED("--threads is \"1025\", must be a whole number from 1 to 1024", "score", MODEL,
                   "--tokens", in_dir("ids.json"), "--threads", "1025");
}

/* Scales that are NaN in one expert of the last layer: whoever is routed there has no numbers. */
static void logits_that_are_no_numbers_are_named(void **state) {
    (void)state;
    enum { SICK_BYTES = 4096 };
    link_model("sick");
    size_t size = 0;
    char *const weights = slurp(MODEL "/model.safetensors", &size);
    memset(weights + size - SICK_BYTES, 0xff, SICK_BYTES);
    assert_int_equal(unlink(in_dir("sick/model.safetensors")), 0);
    spill(in_dir("sick/model.safetensors"), weights, size);
    free(weights);
    int32_t ids[64];
    for (int32_t i = 0; i < 64; i++) ids[i] = 100 + 37 * i;
    write_ids("sick.json", ids, 64);
    static const char words[] = "of a step of 63) are not finite: NaN at id 0";
    program_result result = RUN("score", in_dir("sick"), "--tokens", in_dir("sick.json"));
    if (strstr(result.err, "the logits after token ") == NULL) fail_msg("\"%s\"", result.err);
    assert_refusal(&result, words);
    ASSERT_REFUSED("are not finite", "compare", in_dir("sick"), "--text", MODEL "/held.txt",
                   "--windows", "1", "--window-len", "64", "--kv", "e4m3");
    ASSERT_REFUSED("a sequence of the test failed: the logits after token", "bench", "model",
                   in_dir("sick"), "--prompt", "200", "--gen", "0", "--depth", "0", "--repetitions",
                   "1");
    result = RUN("generate", in_dir("sick"), "--prompt", "The river", "--max-tokens", "200",
                 "--ignore-eos");
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.err, "are not finite: NaN at id 0\n"));
    program_free(&result);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(bad_models),
        cmocka_unit_test(bad_tokens),
        cmocka_unit_test(too_long_contexts),
        cmocka_unit_test(bad_texts),
        cmocka_unit_test(bad_outputs_and_scales),
        cmocka_unit_test(full_stdout),
        cmocka_unit_test(threads_that_do_not_start),
        cmocka_unit_test(logits_that_are_no_numbers_are_named),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
