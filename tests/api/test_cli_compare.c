/* test_cli_compare.c - kv8 compare: rows in the order of what a format loses, table, report and
 * plot, scale files, parts of the model left out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <time.h>

#include "cli_testing.h"

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
        json_t *const root = run_for_json(args);
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

/* Removes the first file that appears in a directory, and the directory. */
static pid_t remove_when_used(const char *path) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    while (pid == 0) {
        DIR *const found = opendir(path);
        for (const struct dirent *entry; found != NULL && (entry = readdir(found)) != NULL;) {
            if (entry->d_name[0] == '.' || unlinkat(dirfd(found), entry->d_name, 0) != 0) continue;
            _exit(rmdir(path));
        }
        if (found != NULL) closedir(found);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return pid;
}

static void a_report_that_fails_loses_no_table(void **state) {
    (void)state;
    char report[PATH_MAX];
    snprintf(report, sizeof report, "%s/r.json", in_dir("gone"));
    assert_int_equal(mkdir(in_dir("gone"), 0700), 0);
    const pid_t remover = remove_when_used(in_dir("gone"));
    program_result result =
        WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len", "256",
             "--greedy", "0", "--recall", "0", "--kv", "bf16", "--report", report);
    int removed = 1;
    kill(remover, SIGTERM); /* it has ended, or waits for what will not come */
    assert_int_equal(waitpid(remover, &removed, 0), remover);
    assert_int_equal(removed, 0);
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.out, "\nbf16 "));
    assert_non_null(strstr(result.err, "/gone/r.json: cannot write: No such file or directory\n"));
    program_free(&result);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compare_small),
        cmocka_unit_test(compare_asks_for_codes),
        cmocka_unit_test(compare_prints_a_table),
        cmocka_unit_test(scales_reach_the_fp8_formats_only),
        cmocka_unit_test(parts_can_be_left_out),
        cmocka_unit_test(a_plot_that_fails_loses_no_table),
        cmocka_unit_test(a_report_that_fails_loses_no_table),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
