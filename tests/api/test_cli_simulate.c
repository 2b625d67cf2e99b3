/* test_cli_simulate.c - kv8 simulate on a file whose terms are known, on one that kv8 bench model
 * has just printed, and on files that say too little.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"

/* A machine of 10 ms a step, 1 ms a token, 1 us a key of decoding and 0.1 us a pair of a prompt, as
 * kv8 bench model would print it: prompts of 8 in one step, 4 tokens one by one. */
static void add_tests(json_t *rows, const char *kv, int depth, double key_us, int bytes) {
    const double prompt_ns = 10e6 + 8 * 1e6 + (8 * depth + 36) * 100.0;
    const double gen_ns = 4 * 11e6 + (4 * depth + 10) * key_us * 1e3;
    json_array_append_new(rows, json_pack("{s:s, s:i, s:i, s:i, s:i, s:f, s:i}", "kv", kv,
                                          "n_prompt", 8, "n_gen", 0, "n_depth", depth, "n_ubatch",
                                          512, "avg_ns", prompt_ns, "kv_bytes_per_token", bytes));
    json_array_append_new(rows, json_pack("{s:s, s:i, s:i, s:i, s:i, s:f, s:i}", "kv", kv,
                                          "n_prompt", 0, "n_gen", 4, "n_depth", depth, "n_ubatch",
                                          512, "avg_ns", gen_ns, "kv_bytes_per_token", bytes));
}

static void write_speed(const char *name, int num_depths) {
    json_t *const rows = json_array();
    for (int i = 0; i < num_depths; i++) {
        add_tests(rows, "bf16", 1000 * i, 1, 2 << 20);
        add_tests(rows, "e4m3", 1000 * i, 0.5, 1 << 20);
    }
    json_t *const root = json_pack("{s:o}", "rows", rows);
    assert_int_equal(json_dump_file(root, in_dir(name), 0), 0);
    json_decref(root);
}

static double number(const json_t *object, const char *key) {
    const json_t *const value = json_object_get(object, key);
    if (!json_is_number(value)) fail_msg("no number \"%s\"", key);
    return json_number_value(value);
}

static void assert_near(double got, double wanted) {
    if (!(fabs(got - wanted) <= 1e-4 * fabs(wanted))) fail_msg("got %.9g, not %.9g", got, wanted);
}

/* A load so small that requests meet nobody. */
static void terms_and_times_are_those_of_the_file(void **state) {
    (void)state;
    write_speed("speed.json", 3);
    json_t *const root = run_for_json(
        (const char *const[]){"simulate", "--speed", in_dir("speed.json"), "--load", "0.001,2",
                              "--prompt", "100", "--gen", "3", "--requests", "20", "--step-tokens",
                              "64", "--kv-memory", "1", "--json", NULL});
    const json_t *const rows = json_object_get(root, "rows");
    assert_int_equal(json_array_size(rows), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *const row = json_array_get(rows, i), *const time =
                                                               json_object_get(row, "step_time");
        const double key_ns = i == 0 ? 1000 : 500;
        assert_string_equal(json_string_value(json_object_get(row, "kv")),
                            i == 0 ? "bf16" : "e4m3");
        assert_near(number(row, "kv_tokens"), i == 0 ? 512 : 1024);
        for (size_t size = 0; size < 2; size++) {
            const double tokens =
                json_number_value(json_array_get(json_object_get(time, "tokens"), size));
            assert_near(tokens, size == 0 ? 1 : 8);
            assert_near(json_number_value(json_array_get(json_object_get(time, "ns"), size)),
                        10e6 + tokens * 1e6);
        }
        assert_near(number(time, "decode_key_ns"), key_ns);
        assert_near(number(time, "prefill_key_ns"), 100);
        const json_t *const loads = json_object_get(row, "loads");
        assert_int_equal(json_array_size(loads), 2);
        const json_t *const alone = json_array_get(loads, 0);
        /* Two steps of 64 and 36 tokens and 100 x 101 / 2 pairs; then 101 and 102 keys. */
        assert_near(number(json_object_get(alone, "ttft"), "p99_ms"), 20 + 100 + 5050 * 1e-4);
        assert_near(number(json_object_get(alone, "itl"), "mean_ms"), 11 + 101.5 * key_ns * 1e-6);
        assert_near(number(alone, "mean_running"), 1);
        assert_near(number(json_array_get(loads, 1), "load_per_s"), 2);
    }
    json_decref(root);
}

static void a_table_and_a_picture(void **state) {
    (void)state;
    write_speed("speed.json", 2);
    program_result result =
        RUN("simulate", "--speed", in_dir("speed.json"), "--load", "1,2", "--prompt", "10", "--gen",
            "5", "--requests", "20", "--plot", in_dir("times.svg"));
    assert_int_equal(result.status, 0);
    assert_non_null(
        strstr(result.out, "bf16: a step of 1, 8 tokens takes 11, 18 ms, a key read 1000 ns"));
    assert_non_null(strstr(result.out, "| e4m3           |        2 |"));
    program_free(&result);
    char *const picture = slurp(in_dir("times.svg"), NULL);
    assert_non_null(strstr(picture, "<title>kv8 simulate: prompts of 10, 5 generated</title>"));
    assert_non_null(strstr(picture, "e4m3 p99"));
    free(picture);
}

static void what_bench_prints_is_read(void **state) {
    (void)state;
    program_result result = WORK("bench", "model", MODEL, "--depth", "0,256", "--kv", "e4m3",
                                 "--prompt", "64", "--gen", "8", "--repetitions", "1", "--json");
    assert_int_equal(result.status, 0);
    spill(in_dir("bench.json"), result.out, result.out_size);
    program_free(&result);
    json_t *const root = run_for_json(
        (const char *const[]){"simulate", "--speed", in_dir("bench.json"), "--load", "1",
                              "--requests", "5", "--kv-memory", "0.5", "--json", NULL});
    const json_t *const row = json_array_get(json_object_get(root, "rows"), 0);
    assert_true(number(row, "kv_tokens") > 1000);
    assert_true(number(json_array_get(json_object_get(row, "loads"), 0), "tokens_per_s") > 0);
    json_decref(root);
}

static void files_that_say_too_little_are_refused(void **state) {
    (void)state;
    const char *const speed = in_dir("few.json");
    write_speed("few.json", 1);
    ASSERT_REFUSED("bf16: 2 rows do not tell", "simulate", "--speed", speed);
    write_text("few.json", "{\"rows\": [{\"kv\": \"bf16\", \"n_prompt\": 1}]}");
    ASSERT_REFUSED("row 0: Object item not found: n_gen", "simulate", "--speed", speed);
    write_text("few.json",
               "{\"rows\": [{\"kv\": \"bf16\", \"n_prompt\": 8, \"n_gen\": 0, \"n_depth\": "
               "4294967296, \"n_ubatch\": 8, \"avg_ns\": 1}]}");
    ASSERT_REFUSED("few.json, row 0: n_depth is 4294967296, must be 0 to 2147483647", "simulate",
                   "--speed", speed);
    write_text("few.json", "{\"rows\": []}");
    ASSERT_REFUSED("has no \"rows\"", "simulate", "--speed", speed);
    write_text("few.json", "[");
    ASSERT_REFUSED("few.json: ", "simulate", "--speed", speed);
    ASSERT_REFUSED("--speed FILE.json is missing", "simulate");
    write_speed("few.json", 2);
    ASSERT_REFUSED("--load is \"1,x\"", "simulate", "--speed", speed, "--load", "1,x");
    ASSERT_REFUSED("one of them", "simulate", "--speed", speed, "--kv-tokens", "99", "--kv-memory",
                   "1");
    ASSERT_REFUSED("bf16: a request of 1279 tokens needs 80 pages of 16 tokens, the pool has 6",
                   "simulate", "--speed", speed, "--kv-tokens", "99");
    ASSERT_REFUSED("--kv-memory is 0.001 GiB, a token of bf16 takes 2.09715e+06 bytes", "simulate",
                   "--speed", speed, "--kv-memory", "0.001");
    ASSERT_REFUSED("bf16: requests_per_s is 1e-300, must be at least 2e-07 for 20 requests",
                   "simulate", "--speed", speed, "--load", "1e-300", "--requests", "20");
    ASSERT_REFUSED("\"extra\" is left over", "simulate", "--speed", speed, "extra");
}

static void ctrl_c_ends_it(void **state) {
    (void)state;
    write_speed("speed.json", 2);
    const char *const args[] = {
        "simulate", "--speed", in_dir("speed.json"), "--requests", "1000000", "--gen",
        "1000",     "--plot",  in_dir("ended.svg"),  NULL};
    const int num_files = count_files(dir);
    const pid_t pid = program_start(args, out_path, err_path);
    for (int i = 0; i < 3000 && count_files(dir) == num_files; i++) usleep(10000); /* the plot's */
    usleep(100000);
    kill(pid, SIGINT);
    program_result result = program_wait(pid, out_path, err_path);
    assert_int_equal(result.status, 130);
    assert_string_equal(result.err, "kv8 simulate: interrupted\n");
    assert_int_equal(count_files(dir), num_files);
    program_free(&result);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(terms_and_times_are_those_of_the_file),
        cmocka_unit_test(a_table_and_a_picture),
        cmocka_unit_test(what_bench_prints_is_read),
        cmocka_unit_test(files_that_say_too_little_are_refused),
        cmocka_unit_test(ctrl_c_ends_it),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
