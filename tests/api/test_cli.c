/* test_cli.c - the program as a user meets it: help and man pages that agree, score and info on the
 * model that ships, JSON alone on stdout, what a terminal shows, nothing left behind by an
 * interrupt. generate and compare have files of their own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"
#include "golden.h"

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
    static const char *const verbs[] = {"compare", "generate",  "score",
                                        "info",    "calibrate", "serve"};
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
        cmocka_unit_test(threads_change_nothing_but_speed),
        cmocka_unit_test(info_counts),
        cmocka_unit_test(terminals_see_progress_and_channels),
        cmocka_unit_test(score_names_the_least_expected_token),
        cmocka_unit_test(interrupt_leaves_nothing),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
