/* test_calibrate.c - kv8 calibrate as a user meets it: one file whatever the ranks, every form
 * there and back, a swapped file caught, a mix within its budget that compare and generate apply.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"

#define TEXT       MODEL "/held.txt"
#define SHORT_TEXT "--text", TEXT, "--max-tokens", "512", "--window-len", "128"

static void assert_worked(program_result *result) {
    if (result->status != 0) fail_msg("status %d: %s", result->status, result->err);
    program_free(result);
}
#define ASSERT_WORKED(...)                         \
    do {                                           \
        program_result worked_ = RUN(__VA_ARGS__); \
        assert_worked(&worked_);                   \
    } while (0)

static void assert_same_file(const char *a, const char *b) {
    size_t size_a = 0, size_b = 0;
    char *const bytes_a = slurp(in_dir(a), &size_a), *const bytes_b = slurp(in_dir(b), &size_b);
    if (size_a != size_b || memcmp(bytes_a, bytes_b, size_a) != 0)
        fail_msg("%s and %s differ", a, b);
    free(bytes_a);
    free(bytes_b);
}

static json_t *load(const char *name) {
    json_t *const root = json_load_file(in_dir(name), 0, NULL);
    assert_non_null(root);
    return root;
}

static void file_and_report_agree(void **state) {
    (void)state;
    program_result result = WORK("calibrate", MODEL, SHORT_TEXT, "-o", in_dir("a.json"), "--with-q",
                                 "--report", in_dir("r.json"));
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "512 tokens of"));
    assert_non_null(strstr(result.out, "SQNR dB"));
    program_free(&result);
    json_t *const file = load("a.json"), *const report = load("r.json");
    const json_t *const heads = json_object_get(report, "heads");
    assert_int_equal(json_array_size(heads), 6 * 2 * 2);
    size_t i;
    json_t *head;
    json_array_foreach((json_t *)(uintptr_t)heads, i, head) {
        const json_t *const row = json_array_get(json_object_get(file, "scales"), i / 4);
        const double scale = json_number_value(json_array_get(row, i % 4));
        assert_true(json_number_value(json_object_get(head, "scale")) == scale);
        const double amax = json_number_value(json_object_get(head, "amax"));
        assert_true(fabs(scale * 448 / amax - 1) < 1e-6);
        assert_true(json_number_value(json_object_get(head, "sqnr_db")) > 31);
    }
    assert_int_equal(json_array_size(json_array_get(json_object_get(file, "q_scales"), 5)), 8);
    assert_int_equal(json_integer_value(json_object_get(file, "tokens")), 512);
    json_decref(file);
    json_decref(report);
}

/* mpirun starts the ranks; a build without MPI says so instead. */
static void one_file_whatever_the_ranks(void **state) {
    (void)state;
    if (system("mpirun --version >/dev/null 2>&1") != 0) skip();
    ASSERT_WORKED("calibrate", MODEL, SHORT_TEXT, "-o", in_dir("one.json"), "--threads", "1");
    static const char *const ways[] = {"data", "heads"};
    for (int num = 2; num <= (test_is_short() ? 2 : 4); num += 2) {
        for (int way = 0; way < 2; way++) {
            char command[2048];
            snprintf(command, sizeof command,
                     "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun "
                     "--oversubscribe -n %d %s calibrate %s --text %s --max-tokens 512 "
                     "--window-len 128 --threads 1 --parallel %s -o %s >%s 2>%s",
                     num, KV8_PROGRAM, MODEL, TEXT, ways[way], in_dir("ranks.json"), out_path,
                     err_path);
            const int status = system(command);
            char *const words = slurp(err_path, NULL);
            const bool built_without = strstr(words, "built without MPI") != NULL;
            free(words);
            if (built_without) skip();
            assert_int_equal(status, 0);
            assert_same_file("one.json", "ranks.json");
        }
    }
}

static void every_form_there_and_back(void **state) {
    (void)state;
    static const char *const forms[] = {"kv8", "lightllm", "compressed-tensors"};
    static const char *const names[] = {"b.json", "b.json", "b.safetensors"};
    ASSERT_WORKED("calibrate", MODEL, SHORT_TEXT, "-o", in_dir("l.json"), "--format", "lightllm",
                  "--threads", "1");
    for (int i = 0; i < 3; i++) {
        ASSERT_WORKED("calibrate", MODEL, "--from", in_dir("l.json"), "--format", forms[i], "-o",
                      in_dir(names[i]));
        ASSERT_WORKED("calibrate", MODEL, "--from", in_dir(names[i]), "--format", "lightllm", "-o",
                      in_dir("c.json"));
        assert_same_file("l.json", "c.json");
    }
    ASSERT_WORKED("calibrate", MODEL, "--from", in_dir("l.json"), "--format", "sglang",
                  "--num-ranks", "2", "-o", in_dir("s.json"));
    program_result result = RUN("info", MODEL, "--scales", in_dir("s.json"), "--json");
    assert_int_equal(result.status, 0);
    json_t *const info = json_loads(result.out, 0, NULL), *const l = load("l.json");
    const json_t *const scales = json_object_get(info, "scales");
    assert_string_equal(json_string_value(json_object_get(scales, "format")), "sglang");
    /* K's are the larger ones here: layer 5, head 1 of both. */
    const json_t *const k = json_array_get(json_array_get(json_object_get(l, "scales"), 5), 1);
    for (size_t row = 10; row < 12; row++) {
        const json_t *const shown = json_array_get(
            json_object_get(json_array_get(json_object_get(scales, "rows"), row), "scales"), 1);
        assert_true(fabs(json_number_value(shown) / json_number_value(k) - 1) < 1e-6);
    }
    json_decref(info);
    json_decref(l);
    program_free(&result);
}

/* Nine keys alone, halves swapped: nothing in the file tells, the text does. */
static void swapped_file_is_caught(void **state) {
    (void)state;
    ASSERT_WORKED("calibrate", MODEL, SHORT_TEXT, "-o", in_dir("good.json"), "--format", "lightllm",
                  "--margin", "1.25", "--threads", "1");
    ASSERT_WORKED("calibrate", MODEL, SHORT_TEXT, "--check", in_dir("good.json"), "--threads", "1");
    json_t *const file = load("good.json");
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(file, "scales"), i, row) {
        json_t *const turned =
            json_pack("[O, O, O, O]", json_array_get(row, 2), json_array_get(row, 3),
                      json_array_get(row, 0), json_array_get(row, 1));
        json_array_set_new(json_object_get(file, "scales"), i, turned);
    }
    assert_int_equal(json_dump_file(file, in_dir("bad.json"), 0), 0);
    json_decref(file);
    program_result result = WORK("calibrate", MODEL, SHORT_TEXT, "--check", in_dir("bad.json"));
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.out, "layer 0 K head 0: amax"));
    assert_non_null(strstr(result.out, "K's and V's scales look swapped"));
    assert_non_null(strstr(result.err, "do not suit this model"));
    program_free(&result);
}

/* Two texts' files together are the file of both texts, window by window. */
static void merged_files_are_the_whole(void **state) {
    (void)state;
    size_t size = 0;
    char *const text = slurp(TEXT, &size);
    assert_true(size > 1500);
    spill(in_dir("a.txt"), text, 900);
    spill(in_dir("b.txt"), text + 900, 600);
    memmove(text + 901, text + 900, 600);
    text[900] = '\0'; /* begins a document */
    spill(in_dir("w.txt"), text, 1501);
    free(text);
    ASSERT_WORKED("calibrate", MODEL, "--text", in_dir("a.txt"), "-o", in_dir("a.json"));
    ASSERT_WORKED("calibrate", MODEL, "--text", in_dir("b.txt"), "-o", in_dir("b.json"));
    json_t *const a = load("a.json");
    char window[16];
    snprintf(window, sizeof window, "%d", (int)json_integer_value(json_object_get(a, "tokens")));
    json_decref(a);
    ASSERT_WORKED("calibrate", MODEL, "--text", in_dir("w.txt"), "--window-len", window, "-o",
                  in_dir("w.json"));
    char list[256];
    snprintf(list, sizeof list, "%s,", in_dir("b.json"));
    strcat(list, in_dir("a.json"));
    ASSERT_WORKED("calibrate", MODEL, "--merge", list, "-o", in_dir("m.json"));
    assert_same_file("w.json", "m.json");
    ASSERT_WORKED("calibrate", MODEL, "--from", in_dir("m.json"), "-o", in_dir("n.json"),
                  "--format", "lightllm");
    program_result result = RUN("calibrate", MODEL, "--merge", in_dir("n.json"));
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.err, "n.json: holds no counts by head"));
    program_free(&result);
}

static double row_number(const json_t *rows, const char *kv, const char *key) {
    size_t i;
    json_t *row;
    json_array_foreach((json_t *)(uintptr_t)rows, i, row) {
        if (strcmp(json_string_value(json_object_get(row, "kv")), kv) == 0)
            return json_number_value(json_object_get(row, key));
    }
    fail_msg("no row %s", kv);
    return 0;
}

static void mix_keeps_its_budget(void **state) {
    (void)state;
    program_result result =
        WORK("calibrate", MODEL, "--text", TEXT, "--max-tokens", "128", "--window-len", "64",
             "--windows", "2", "--budget", "bytes=2000", "-o", in_dir("mix.json"), "--json");
    if (result.status != 0) fail_msg("status %d: %s", result.status, result.err);
    json_t *const root = json_loads(result.out, 0, NULL);
    const json_t *const choice = json_object_get(root, "budget");
    const json_t *const mixes = json_object_get(choice, "mixes");
    const size_t num = json_array_size(mixes);
    const size_t chosen = (size_t)json_integer_value(json_object_get(choice, "chosen"));
    /* How many mixes are unbeaten is up to noise on a text as short as this. */
    assert_true(num >= 5 && chosen < num);
    double before = 1e9, foreseen = 0;
    for (size_t i = 0; i < num; i++) {
        const json_t *const mix = json_array_get(mixes, i);
        const double bytes = json_number_value(json_object_get(mix, "bytes_per_token"));
        const double kl = json_number_value(json_object_get(mix, "predicted_kl"));
        assert_true(bytes < before && kl >= foreseen); /* a frontier */
        assert_true(json_number_value(json_object_get(mix, "kl")) > 0);
        assert_true(json_number_value(json_object_get(mix, "kl_error")) >= 0);
        before = bytes;
        foreseen = kl;
    }
    const double first =
        json_number_value(json_object_get(json_array_get(mixes, 0), "bytes_per_token"));
    const double bytes =
        json_number_value(json_object_get(json_array_get(mixes, chosen), "bytes_per_token"));
    assert_true(first == 3072 && before == 1536 && bytes <= 2000 && bytes > 1900);
    json_decref(root);
    program_free(&result);

    /* The file's mix is what compare and generate then store. */
    result =
        WORK("compare", MODEL, "--text", TEXT, "--kv", "bf16", "--windows", "1", "--window-len",
             "128", "--greedy", "0", "--recall", "0", "--scales", in_dir("mix.json"), "--json");
    assert_int_equal(result.status, 0);
    json_t *const compared = json_loads(result.out, 0, NULL);
    assert_true(row_number(json_object_get(compared, "rows"), "mix", "bytes_per_token") == bytes);
    assert_true(row_number(json_object_get(compared, "rows"), "mix", "kl") >
                row_number(json_object_get(compared, "rows"), "bf16", "kl"));
    json_decref(compared);
    program_free(&result);
    result = WORK("generate", MODEL, "--prompt", "def ", "--max-tokens", "4", "--scales",
                  in_dir("mix.json"), "--json");
    assert_int_equal(result.status, 0);
    assert_non_null(strstr(result.out, "\"kv\": \"mix\""));
    program_free(&result);
}

/* A budget below the noise floor: said so, and no file. */
static void failed_budget_writes_nothing(void **state) {
    (void)state;
    program_result result =
        WORK("calibrate", MODEL, "--text", TEXT, "--max-tokens", "32", "--window-len", "32",
             "--windows", "1", "--budget", "KL=1e-12", "-o", in_dir("none.json"));
    assert_int_equal(result.status, 2);
    assert_non_null(strstr(result.out, "no mix holds KL=1e-12"));
    assert_non_null(strstr(result.err, "nothing is written"));
    assert_int_not_equal(access(in_dir("none.json"), F_OK), 0);
    program_free(&result);
}

static void refusals(void **state) {
    (void)state;
    ASSERT_REFUSED("one of --text FILE, --merge FILES and --from FILE", "calibrate", MODEL);
    ASSERT_REFUSED("--output PATH is missing", "calibrate", MODEL, "--from", "x");
    ASSERT_REFUSED("--method is \"abs\"", "calibrate", MODEL, SHORT_TEXT, "--method", "abs");
    ASSERT_REFUSED(
        "must be kv8, lightllm, sglang, compressed-tensors or modelopt; did you mean lightllm?",
        "calibrate", MODEL, SHORT_TEXT, "--format", "lightlm");
    ASSERT_REFUSED("--dtype is int8", "calibrate", MODEL, SHORT_TEXT, "--dtype", "int8");
    ASSERT_REFUSED("--budget is \"KL=0\"", "calibrate", MODEL, SHORT_TEXT, "--budget", "KL=0");
    ASSERT_REFUSED("must be KL=NUMBER, top1=NUMBER or bytes=NUMBER", "calibrate", MODEL, SHORT_TEXT,
                   "--budget", "kl=1");
    ASSERT_REFUSED("as many behind them", "calibrate", MODEL, SHORT_TEXT, "--budget", "KL=1",
                   "--windows", "5");
    ASSERT_REFUSED("/nonexistent/", "calibrate", MODEL, SHORT_TEXT, "-o", "/nonexistent/s.json");
    ASSERT_REFUSED("--granularity is", "calibrate", MODEL, SHORT_TEXT, "--granularity", "layer",
                   "--format", "x");
    ASSERT_REFUSED("--format sglang holds scales of e4m3, --dtype is e5m2", "calibrate", MODEL,
                   SHORT_TEXT, "--format", "sglang", "--dtype", "e5m2", "-o", in_dir("s.json"));
    ASSERT_REFUSED("--num-ranks goes with --format sglang", "calibrate", MODEL, SHORT_TEXT,
                   "--num-ranks", "2");
    ASSERT_REFUSED("--num-ranks is 3, the model has 2 KV heads", "calibrate", MODEL, SHORT_TEXT,
                   "--format", "sglang", "--num-ranks", "3");
    static const char *const lists[] = {"", ",", "a.json,", ",a.json", "a.json,,b.json"};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        ASSERT_REFUSED("must be files with commas between", "calibrate", MODEL, "--merge",
                       lists[i]);
    ASSERT_REFUSED("--scales needs a MODEL", "info", "--scales", "x");
    /* Scales for e5m2 have no place under e4m3. */
    ASSERT_WORKED("calibrate", MODEL, SHORT_TEXT, "--dtype", "e5m2", "-o", in_dir("e5.json"),
                  "--threads", "1");
    ASSERT_REFUSED("stores e4m3, the scales are for e5m2", "generate", MODEL, "--prompt", "a",
                   "--kv", "e4m3", "--scales", in_dir("e5.json"));
    ASSERT_WORKED("generate", MODEL, "--prompt", "a", "--kv", "e5m2", "--max-tokens", "2",
                  "--scales", in_dir("e5.json"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(file_and_report_agree),
        cmocka_unit_test(one_file_whatever_the_ranks),
        cmocka_unit_test(every_form_there_and_back),
        cmocka_unit_test(swapped_file_is_caught),
        cmocka_unit_test(merged_files_are_the_whole),
        cmocka_unit_test(mix_keeps_its_budget),
        cmocka_unit_test(failed_budget_writes_nothing),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
