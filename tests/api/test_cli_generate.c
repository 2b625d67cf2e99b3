/* test_cli_generate.c - kv8 generate: the golden tokens through the command line, the same text
 * from every way to give a prompt, and the options of sampling.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"
#include "golden.h"

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

/* A prompt is the same from the command line, a file and stdin. */
static void prompts_come_from_files_and_stdin(void **state) {
    (void)state;
    write_text("prompt.txt", "def main():\n    x =");
    json_t *texts[3];
    texts[0] = run_for_json((const char *const[]){"generate", MODEL, "--prompt",
                                                  "def main():\n    x =", "--max-tokens", "6",
                                                  "--json", "--threads", "1", NULL});
    texts[1] =
        run_for_json((const char *const[]){"generate", MODEL, "--prompt-file", in_dir("prompt.txt"),
                                           "--max-tokens", "6", "--json", "--threads", "1", NULL});
    const int kept = dup(STDIN_FILENO), file = open(in_dir("prompt.txt"), O_RDONLY);
    assert_true(kept >= 0 && file >= 0 && dup2(file, STDIN_FILENO) == STDIN_FILENO);
    texts[2] =
        run_for_json((const char *const[]){"generate", MODEL, "--prompt-file", "-", "--max-tokens",
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
    json_t *const greedy = run_for_json(
        (const char *const[]){"generate", MODEL, "--prompt", "The river", "--max-tokens", "12",
                              "--json", "--logprobs", "2", "--threads", "1", NULL});
    json_t *const one = run_for_json((const char *const[]){
        "generate", MODEL, "--prompt", "The river", "--max-tokens", "12", "--json", "--temperature",
        "5", "--top-k", "1", "--threads", "1", NULL});
    json_t *const wild = run_for_json(
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

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generate_equals_golden),
        cmocka_unit_test(generate_streams_what_json_says),
        cmocka_unit_test(seeds_repeat_themselves),
        cmocka_unit_test(chat_finds_the_code),
        cmocka_unit_test(prompts_come_from_files_and_stdin),
        cmocka_unit_test(sampling_options_reach_the_draw),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "compare*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
