/* test_bench.c - kv8 bench: its rows say what they claim (bytes, products, shares), its formats
 * are valid, its mistakes are one line.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <time.h>

#include <kv8/machine.h>

#include "program.h"

static program_result bench(const char *const args[]) {
    char out[64], err[64];
    snprintf(out, sizeof out, "/tmp/kv8-test-bench-%d.out", (int)getpid());
    snprintf(err, sizeof err, "/tmp/kv8-test-bench-%d.err", (int)getpid());
    const program_result result = program_run(args, out, err, 0);
    unlink(out);
    unlink(err);
    return result;
}

static double number(const json_t *row, const char *key) {
    const json_t *const value = json_object_get(row, key);
    if (!json_is_number(value)) fail_msg("row has no number \"%s\"", key);
    return json_number_value(value);
}

static json_t *rows_of(const program_result *result) {
    json_t *const root = program_json(result);
    json_t *const rows = json_incref(json_object_get(root, "rows"));
    assert_true(json_is_array(rows));
    json_decref(root);
    return rows;
}

static void near(double got, double want) {
    if (!(fabs(got - want) <= 1e-3 * fabs(want))) fail_msg("got %g, want %g", got, want);
}

/* Shape 8/2/64, batch 3: 256 keys of 2 heads x 64 codes, K and V; int8 adds two f16 scales. */
static void attention_rows_count_bytes_and_products(void **state) {
    (void)state;
    const char *const args[] = {"bench",  "attention", "--shape",   "tiny",    "--context",
                                "256",    "--kv",      "e4m3,int8", "--batch", "3",
                                "--pool", "4",         "--qo-len",  "16",      "--seconds",
                                "0",      "--threads", "1",         "--json",  NULL};
    program_result result = bench(args);
    json_t *const rows = rows_of(&result);
    assert_int_equal(json_array_size(rows), 4); /* decode and prefill of two formats */
    for (size_t i = 0; i < 4; i++) {
        const json_t *const row = json_array_get(rows, i);
        const bool int8 = strcmp(json_string_value(json_object_get(row, "kv")), "int8") == 0;
        const bool decode = strcmp(json_string_value(json_object_get(row, "phase")), "decode") == 0;
        const double us = number(row, "us");
        const double bytes = 3.0 * 256 * 2 * 2 * (64 + (int8 ? 2 : 0));
        /* Causal: row r of 16 sees 241 + r keys. */
        const double pairs = decode ? 256 : 16 * 241 + 120;
        const double flops = 2 * 2 * 3 * pairs * 8 * 64;
        assert_true(us > 0 && number(row, "us_min") <= us && us <= number(row, "us_max"));
        near(number(row, "gb_s"), bytes / us * 1e-3);
        near(number(row, "gflop_s"), flops / us * 1e-3);
        const double read_us = bytes / number(row, "read_ceiling_gb_s") * 1e-3;
        const double dot_us = flops / number(row, "dot_ceiling_gflop_s") * 1e-3;
        near(number(row, "share"), fmax(read_us, dot_us) / us);
        assert_string_equal(json_string_value(json_object_get(row, "ceiling")),
                            read_us > dot_us ? "read" : "dot");
        assert_int_equal(number(row, "threads"), 1);
    }
    json_decref(rows);
    program_free(&result);
}

/* A window of 15 leaves 16 keys to a decode step. */
static void a_window_counts_only_what_it_sees(void **state) {
    (void)state;
    const char *const args[] = {"bench",  "attention", "--heads", "4/1/32",   "--context",
                                "200",    "--kv",      "bf16",    "--window", "15",
                                "--pool", "1",         "--phase", "decode",   "--seconds",
                                "0",      "--threads", "1",       "--json",   NULL};
    program_result result = bench(args);
    json_t *const rows = rows_of(&result);
    const json_t *const row = json_array_get(rows, 0);
    near(number(row, "gb_s"), 16 * 2 * 32 * 2 / number(row, "us") * 1e-3);
    json_decref(rows);
    program_free(&result);
}

/* 100 keys are six full pages of 16, which three requests share; each has 104 of its own. */
static void a_shared_byte_counts_once(void **state) {
    (void)state;
    const char *const args[] = {
        "bench",   "attention", "--shape", "tiny",   "--context",       "200",
        "--kv",    "e4m3,int8", "--pool",  "1",      "--shared-prefix", "100",
        "--batch", "3",         "--phase", "decode", "--seconds",       "0",
        "--json",  NULL};
    program_result result = bench(args);
    json_t *const rows = rows_of(&result);
    for (size_t i = 0; i < 2; i++) {
        const json_t *const row = json_array_get(rows, i);
        const double bytes = (96 + 3 * 104) * 2 * 2 * (64 + 2 * (double)i);
        near(number(row, "gb_s"), bytes / number(row, "us") * 1e-3);
        near(number(row, "gflop_s"), 2 * 2 * 3 * 200.0 * 8 * 64 / number(row, "us") * 1e-3);
        assert_int_equal(number(row, "shared_prefix"), 100);
    }
    json_decref(rows);
    program_free(&result);
}

/* The dot ceiling of a decode row with such queries over the same measured now. */
static double ceiling_over_now(const char *queries) {
    const char *const args[] = {"bench", "attention", "--shape", "tiny",   "--context",
                                "64",    "--kv",      "e4m3",    "--pool", "1",
                                "--q",   queries,     "--phase", "decode", "--seconds",
                                "0",     "--threads", "1",       "--json", NULL};
    program_result result = bench(args);
    json_t *const rows = rows_of(&result);
    const json_t *const row = json_array_get(rows, 0);
    const char *const kernel = json_string_value(json_object_get(row, "kernel"));
    const char *const math = json_string_value(json_object_get(row, "math"));
    char prefix[64];
    snprintf(prefix, sizeof prefix, "kv8_attention_%s_", math);
    assert_memory_equal(kernel, prefix, strlen(prefix));
    if (strcmp(queries, "f32") == 0) assert_string_equal(math, "f32");
    kv8_isa isa = KV8_ISA_SCALAR;
    while (isa < KV8_ISA_COUNT && strcmp(strstr(kernel, "__") + 2, kv8_isa_name(isa)) != 0) isa++;
    kv8_ceilings now;
    assert_ok(kv8_machine_measure_ceilings(NULL, isa, &now));
    const double want = 2 * (strcmp(math, "f32") == 0 ? now.f32_gmac_s : now.bf16_gmac_s);
    const double got = number(row, "dot_ceiling_gflop_s");
    json_decref(rows);
    program_free(&result);
    return got / want;
}

/* The ceiling of dot products is that of the arithmetic in the kernel's name: with f32 queries f32
 * multiply-adds, also where the machine has faster bf16 ones (AMX tiles: eighteen times). Beside
 * other work a factor of three is noise, and now and then more: one of four tries must agree. */
static void the_dot_ceiling_is_of_the_kernels_math(void **state) {
    (void)state;
    static const char *const queries[] = {"f32", "bf16"};
    for (int i = 0; i < 2; i++) {
        double ratio = 0;
        for (int try = 0; try < 4 && !(ratio > 1.0 / 3 && ratio < 3); try++)
            ratio = ceiling_over_now(queries[i]);
        if (!(ratio > 1.0 / 3 && ratio < 3)) fail_msg("%s queries: ratio %g", queries[i], ratio);
    }
}

static void the_math_that_is_asked_for_is_taken(void **state) {
    (void)state;
    static const char *const queries[] = {"bf16", "e4m3"};
    for (int i = 0; i < 2; i++) {
        const char *const args[] = {"bench",  "attention", "--shape", "tiny",      "--context",
                                    "64",     "--kv",      "e4m3",    "--pool",    "1",
                                    "--math", "f32",       "--q",     queries[i],  "--phase",
                                    "decode", "--seconds", "0",       "--threads", "1",
                                    "--json", NULL};
        program_result result = bench(args);
        json_t *const rows = rows_of(&result);
        const json_t *const row = json_array_get(rows, 0);
        assert_string_equal(json_string_value(json_object_get(row, "math")), "f32");
        json_decref(rows);
        program_free(&result);
    }
}

static void a_plot_is_drawn_in_the_format_of_its_name(void **state) {
    (void)state;
    static const struct {
        const char *suffix, *begins;
        size_t size;
    } formats[] = {{"svg", "<?xml", 5}, {"png", "\x89PNG", 4}};
    for (size_t i = 0; i < 2; i++) {
        char path[64], head[8] = "";
        snprintf(path, sizeof path, "/tmp/kv8-test-bench-%d.%s", (int)getpid(), formats[i].suffix);
        const char *const args[] = {"bench",    "attention", "--shape",   "tiny",   "--context",
                                    "32,64",    "--kv",      "e4m3,bf16", "--pool", "1",
                                    "--qo-len", "4",         "--plot",    path,     "--seconds",
                                    "0",        "--threads", "1",         NULL};
        program_result result = bench(args);
        assert_int_equal(result.status, 0);
        program_free(&result);
        FILE *const file = fopen(path, "rb");
        assert_non_null(file);
        assert_int_equal(fread(head, 1, sizeof head, file), sizeof head);
        assert_memory_equal(head, formats[i].begins, formats[i].size);
        if (i == 0) { /* both panels, both contexts, both series */
            char text[1 << 16] = "";
            text[fread(text, 1, sizeof text - 1, file)] = '\0';
            static const char *const parts[] = {"decode", "prefill", "e4m3",
                                                "bf16",   ">64<",    " us<"};
            for (size_t k = 0; k < sizeof parts / sizeof parts[0]; k++) {
                if (strstr(text, parts[k]) == NULL) fail_msg("no \"%s\" in %s", parts[k], path);
            }
        }
        fclose(file);
        unlink(path);
    }
}

static void model_rows_have_llama_bench_fields(void **state) {
    (void)state;
    const char *const args[] = {"bench",   "model",     "models/tiny-gpt-oss",
                                "--depth", "0,40",      "--prompt",
                                "24",      "--gen",     "3",
                                "--kv",    "e4m3",      "--repetitions",
                                "2",       "--threads", "1",
                                "--json",  "--batch",   "1,5",
                                NULL};
    program_result result = bench(args);
    json_t *const rows = rows_of(&result);
    assert_int_equal(json_array_size(rows), 6);
    for (size_t i = 0; i < 6; i++) {
        const json_t *const row = json_array_get(rows, i);
        const double tokens =
            (number(row, "n_prompt") + number(row, "n_gen")) * number(row, "n_parallel");
        assert_int_equal(tokens, i % 3 == 0 ? 24 : i % 3 == 1 ? 3 : 15);
        assert_int_equal(number(row, "n_depth"), i < 3 ? 0 : 40);
        assert_string_equal(json_string_value(json_object_get(row, "type_k")), "e4m3");
        const json_t *const ns = json_object_get(row, "samples_ns");
        const json_t *const ts = json_object_get(row, "samples_ts");
        assert_int_equal(json_array_size(ns), 2);
        double sum = 0;
        for (size_t s = 0; s < 2; s++) {
            const double speed = tokens * 1e9 / json_number_value(json_array_get(ns, s));
            near(json_number_value(json_array_get(ts, s)), speed);
            sum += speed;
        }
        near(number(row, "avg_ts"), sum / 2);
    }
    /* 40 tokens of 6 layers, 2 heads, K and V of 64 bytes; the experts of 5 tokens are more than
     * those of 1, and fewer than 5 times as many. */
    const double none = number(json_array_get(rows, 1), "step_bytes");
    const double deep = number(json_array_get(rows, 4), "step_bytes");
    const double five = number(json_array_get(rows, 2), "step_bytes");
    near(deep - none, 40 * 6 * 2 * 2 * 64);
    assert_true(five > 1.1 * none && five < 4 * none);
    json_decref(rows);
    program_free(&result);
}

static void csv_has_a_header_and_as_many_fields(void **state) {
    (void)state;
    const char *const args[] = {"bench",   "attention", "--shape",   "tiny",   "--context",
                                "64",      "--kv",      "e4m3",      "--pool", "1",
                                "--phase", "decode",    "--seconds", "0",      "--threads",
                                "1",       "--csv",     NULL};
    program_result result = bench(args);
    assert_int_equal(result.status, 0);
    int lines = 0, commas[3] = {0};
    for (const char *c = result.out; *c != '\0'; c++) {
        assert_true(lines < 3);
        commas[lines] += *c == ',';
        lines += *c == '\n';
    }
    assert_int_equal(lines, 2);
    assert_int_equal(commas[0], commas[1]);
    assert_memory_equal(result.out, "shape,phase,kv,", 15);
    program_free(&result);
}

static void mistakes_are_one_line(void **state) {
    (void)state;
    const struct {
        const char *args[8], *part;
    } cases[] = {
        {{"bench", NULL}, "must be attention, model or load"},
        {{"bench", "attention", "--shape", "gpt-9", NULL}, "gpt-9"},
        {{"bench", "attention", "--heads", "8/2", NULL}, "8/2"},
        {{"bench", "attention", "--batch", "1,,2", NULL}, "1,,2"},
        {{"bench", "attention", "--batch", "0", NULL}, "from 1 to"},
        {{"bench", "attention", "--batch", " 1", NULL}, "from 1 to"},
        {{"bench", "attention", "--batch", "1,", NULL}, "from 1 to"},
        {{"bench", "attention", "--context", "99999999999", NULL}, "99999999999"},
        {{"bench", "attention", "--heads", "99999999999/1/1", NULL}, "99999999999/1/1"},
        {{"bench", "attention", "--heads", "8/2/64/1", NULL}, "must be QUERY/KV/DIM"},
        {{"bench", "attention", "--heads", "65536/65536/65536", NULL}, "4294967296 values"},
        {{"bench", "attention", "--heads", "7/2/64", "--context", "99999", NULL}, "7"},
        {{"bench", "attention", "--kv", "fp3", NULL}, "fp3"},
        {{"bench", "attention", "--kv", "e4m", NULL}, "did you mean e4m3?"},
        {{"bench", "attention", "--kv", "", NULL}, "must be names with commas"},
        {{"bench", "attention", "--kv", "e4m3,", NULL}, "must be names with commas"},
        {{"bench", "attention", "--isa", "", NULL}, "must be names with commas"},
        {{"bench", "attention", "--phase", "", NULL}, "must be names with commas"},
        {{"bench", "attention", "--shape", "lama", NULL}, "did you mean llama"},
        {{"bench", "attention", "--csv", "--json", NULL}, "one of them"},
        {{"bench", "attention", "--qo-len", "4", "--phase", "decode", NULL}, "goes with --phase"},
        {{"bench", "attention", "--isa", "sse9", NULL}, "sse9"},
        {{"bench", "attention", "--phase", "train", NULL}, "train"},
        {{"bench", "attention", "--math", "f64", NULL}, "must be auto, f32 or bf16"},
        {{"bench", "attention", "--math", "bf16", "--q", "f32", NULL}, "math is bf16, with q f32"},
        {{"bench", "attention", "--shared-prefix", "9000", NULL}, "--context has only 8192"},
        {{"bench", "attention", "--shared-prefix", "9", "--device", "cuda", NULL}, "go with"},
        {{"bench", "attention", "extra", NULL}, "extra"},
        {{"bench", "attention", "--check", NULL}, "--check goes with --device cuda"},
        {{"bench", "attention", "--sick", "scales", NULL}, "--sick scales goes with --device cuda"},
        {{"bench", "attention", "--sick", "nan", NULL},
         "must be none, nan-q, nan-k, nan-v or scales"},
        {{"bench", "attention", "--plot", "x.gif", NULL}, "must end in .svg or .png"},
        {{"bench", "model", "models/tiny-gpt-oss", "--depth", "0,131000", NULL},
         "--depth 131000 and a test of 512 tokens: the model's context holds 131072"},
        {{"bench", "attention", "--plot", "/nonexistent/x.svg", NULL}, "/nonexistent/x.svg"},
        {{"bench", "model", NULL}, "which model"},
        {{"bench", "model", "no/such/model", NULL}, "no/such/model"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        program_result result = bench(cases[i].args);
        assert_int_equal(result.status, 2);
        assert_int_equal(result.out_size, 0);
        if (strstr(result.err, cases[i].part) == NULL)
            fail_msg("\"%s\" does not name \"%s\"", result.err, cases[i].part);
        assert_ptr_equal(strchr(result.err, '\n'), result.err + result.err_size - 1);
        program_free(&result);
    }
}

/* Filling the caches is the longest part of a run. */
static void an_interrupt_ends_the_filling(void **state) {
    (void)state;
    const char *const args[] = {"bench",     "attention", "--context", "65536",   "--kv",
                                "bf16",      "--pool",    "4096",      "--phase", "decode",
                                "--threads", "1",         NULL};
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    program_result result = program_run(args, "/dev/null", "/dev/null", 400);
    clock_gettime(CLOCK_MONOTONIC, &end);
    assert_int_equal(result.status, 130);
    assert_true(end.tv_sec - begin.tv_sec < 6); /* filling 4 GiB takes many times that */
    program_free(&result);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_rows_count_bytes_and_products),
        cmocka_unit_test(a_window_counts_only_what_it_sees),
        cmocka_unit_test(the_math_that_is_asked_for_is_taken),
        cmocka_unit_test(a_shared_byte_counts_once),
        cmocka_unit_test(the_dot_ceiling_is_of_the_kernels_math),
        cmocka_unit_test(a_plot_is_drawn_in_the_format_of_its_name),
        cmocka_unit_test(model_rows_have_llama_bench_fields),
        cmocka_unit_test(csv_has_a_header_and_as_many_fields),
        cmocka_unit_test(mistakes_are_one_line),
        cmocka_unit_test(an_interrupt_ends_the_filling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
