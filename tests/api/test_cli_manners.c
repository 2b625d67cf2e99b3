/* test_cli_manners.c - how the program behaves when something is amiss around it: misspelt words,
 * names that are no UTF-8, files cut short while they are in use, terminals that want no colours.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cli_testing.h"

/* --- words --- */

static void misspelt_words_get_a_suggestion(void **state) {
    (void)state;
    ASSERT_REFUSED("did you mean compare", "compar", MODEL);
    ASSERT_REFUSED("did you mean generate", "help", "genreate");
    ASSERT_REFUSED("unknown verb \"run\"; kv8 --help lists them", "run");
    ASSERT_REFUSED("unknown option --propmt, did you mean --prompt; see kv8 generate --help",
                   "generate", MODEL, "--propmt", "x");
    ASSERT_REFUSED("unknown option --tread=2, did you mean --threads; see kv8 score --help",
                   "score", MODEL, "--tread=2");
    ASSERT_REFUSED("unknown option --contxet, did you mean --context", "bench", "attention",
                   "--contxet", "8");
    ASSERT_REFUSED("unknown option --voltage; see kv8 info --help", "info", "--voltage");
    ASSERT_REFUSED("--w may be --windows or another option", "compare", MODEL, "--w", "2");
    ASSERT_REFUSED("--json takes no value: --json=1", "info", "--json=1");
    static const struct {
        const char *kv, *nearest;
    } settings[] = {{"e4m", "e4m3?"},
                    {"k=in8,v=e4m3", "int8?"},
                    {"bf61", "bf16?"},
                    {"e4m3@ful", "full?"},
                    {"e4m3@slidng", "sliding?"}};
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        char part[32];
        snprintf(part, sizeof part, "did you mean %s", settings[i].nearest);
        ASSERT_REFUSED(part, "score", MODEL, "--tokens", "x", "--kv", settings[i].kv);
        ASSERT_REFUSED(part, "compare", MODEL, "--text", "x", "--kv", settings[i].kv);
        ASSERT_REFUSED(part, "generate", MODEL, "--prompt", "x", "--kv", settings[i].kv);
        ASSERT_REFUSED(part, "bench", "model", MODEL, "--kv", settings[i].kv);
    }
}

/* --- names that are no UTF-8 --- */

static void names_of_any_bytes_reach_json(void **state) {
    (void)state;
    link_model("m\xff");
    const char *const model = in_dir("m\xff");
    char clean[PATH_MAX];
    snprintf(clean, sizeof clean, "%s/m\xef\xbf\xbd", dir);
    program_result result = RUN("info", model, "--json");
    json_t *root = program_json(&result);
    const json_t *const facts = json_object_get(root, "model");
    assert_string_equal(json_string_value(json_object_get(facts, "directory")), clean);
    const json_t *const tensor = json_array_get(json_object_get(facts, "tensors"), 0);
    assert_non_null(strstr(json_string_value(json_object_get(tensor, "file")), clean));
    json_decref(root);
    program_free(&result);

    char *const held = slurp(MODEL "/held.txt", NULL);
    spill(in_dir("t\xfe"), held, 4000);
    free(held);
    result = WORK("compare", model, "--text", in_dir("t\xfe"), "--windows", "1", "--window-len",
                  "32", "--greedy", "0", "--recall", "0", "--kv", "e4m3", "--json", "--report",
                  in_dir("r\xfd"), "--plot", in_dir("p.svg"));
    root = program_json(&result);
    assert_string_equal(json_string_value(json_object_get(root, "model")), clean);
    assert_non_null(strstr(json_string_value(json_object_get(root, "text")), "t\xef\xbf\xbd"));
    json_decref(root);
    char *const report = slurp(in_dir("r\xfd"), NULL);
    assert_string_equal(report, result.out);
    free(report);
    char *const svg = slurp(in_dir("p.svg"), NULL);
    assert_non_null(strstr(svg, "m\xef\xbf\xbd"));
    assert_null(strchr(svg, '\xff'));
    free(svg);
    program_free(&result);

    result = RUN("bench", "model", model, "--kv", "e4m3", "--depth", "0", "--prompt", "8", "--gen",
                 "0", "--repetitions", "1", "--threads", "1", "--json");
    root = program_json(&result);
    const json_t *const row = json_array_get(json_object_get(root, "rows"), 0);
    assert_string_equal(json_string_value(json_object_get(row, "model_filename")), clean);
    json_decref(root);
    program_free(&result);
}

/* --- a file cut short while it is mapped --- */

static void wait_for_output(const char *path) {
    struct stat info = {0};
    for (int i = 0; i < 3000 && (stat(path, &info) != 0 || info.st_size == 0); i++) usleep(10000);
    assert_true(info.st_size > 0);
}

static void a_cut_file_is_named(void **state) {
    (void)state;
    link_model("cut");
    char weights[PATH_MAX];
    snprintf(weights, sizeof weights, "%s/cut/model.safetensors", dir);
    unlink(weights);
    size_t size = 0;
    char *const bytes = slurp(MODEL "/model.safetensors", &size);
    spill(weights, bytes, size);
    free(bytes);
    const char *const args[] = {"generate", in_dir("cut"),  "--prompt",  "x", "--max-tokens",
                                "100000",   "--ignore-eos", "--threads", "2", NULL};
    spill(out_path, "", 0);
    const pid_t pid = program_start(args, out_path, err_path);
    wait_for_output(out_path); /* the model is open, and at work */
    assert_int_equal(truncate(weights, 20000), 0);
    program_result result = program_wait(pid, out_path, err_path);
    assert_int_equal(result.status, 2);
    char line[PATH_MAX + 100];
    snprintf(line, sizeof line,
             "kv8 generate: %s: cut short, or no longer readable, while it was in use\n", weights);
    assert_string_equal(result.err, line);
    program_free(&result);
}

/* --- outputs --- */

static void two_outputs_need_two_files(void **state) {
    (void)state;
    const int num_files = count_files(dir);
    char other[PATH_MAX];
    snprintf(other, sizeof other, "%s/./same.svg", dir);
    ASSERT_REFUSED("same.svg: two outputs would be written to it", "compare", MODEL, "--text",
                   MODEL "/held.txt", "--plot", in_dir("same.svg"), "--report", other);
    assert_int_equal(count_files(dir), num_files);
}

static void outputs_replace_no_input(void **state) {
    (void)state;
    char other[PATH_MAX], list[PATH_MAX];
    snprintf(other, sizeof other, "%s/./read", dir);
    snprintf(list, sizeof list, "%s,%s", in_dir("none"), in_dir("read"));
    spill(in_dir("read"), "text", 4);
    ASSERT_REFUSED("./read would replace what --text reads", "compare", MODEL, "--text",
                   in_dir("read"), "--plot", other);
    ASSERT_REFUSED("would replace what --merge reads", "calibrate", MODEL, "--merge", list, "-o",
                   in_dir("read"));
    ASSERT_REFUSED("--report", "calibrate", MODEL, "--from", in_dir("read"), "--report", other);
    ASSERT_REFUSED("would replace what --scales reads", "serve", MODEL, "--scales", in_dir("read"),
                   "--calibrate", in_dir("read"));
    static const char *const of_model[] = {"config.json", "./a.safetensors", "tokenizer.json"};
    for (size_t i = 0; i < sizeof of_model / sizeof of_model[0]; i++) {
        spill(in_dir(of_model[i]), "{}", 2);
        ASSERT_REFUSED("would replace a file of the model", "compare", dir, "--text",
                       in_dir("read"), "--report", in_dir(of_model[i]));
        ASSERT_REFUSED("would replace a file of the model", "calibrate", dir, "--text",
                       in_dir("read"), "-o", in_dir(of_model[i]));
        unlink(in_dir(of_model[i]));
    }
    size_t size = 0;
    char *const text = slurp(in_dir("read"), &size);
    assert_string_equal(text, "text");
    free(text);
    unlink(in_dir("read"));
}

/* Runs the program as a shell does that has closed the descriptors from `first` to `last`. */
static int run_with_closed(int first, int last, const char *const args[]) {
    char *argv[MAX_ARGS + 2] = {(char *)(uintptr_t)KV8_PROGRAM};
    for (int i = 0; args[i] != NULL; i++) argv[i + 1] = (char *)(uintptr_t)args[i];
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd <= 2; fd++) dup2(null, fd);
        close(null);
        for (int fd = first; fd <= last; fd++) close(fd);
        execv(argv[0], argv);
        _exit(98);
    }
    int state = 0;
    assert_int_equal(waitpid(pid, &state, 0), pid);
    return WEXITSTATUS(state);
}

/* A file that is opened first would otherwise be the stream: gnuplot's pipe stdin, a report stdout.
 */
static void closed_streams_are_no_files(void **state) {
    (void)state;
    const char *const compare[] = {"compare",
                                   MODEL,
                                   "--text",
                                   MODEL "/held.txt",
                                   "--windows",
                                   "1",
                                   "--greedy",
                                   "0",
                                   "--window-len",
                                   "32",
                                   "--recall",
                                   "0",
                                   "--kv",
                                   "e4m3",
                                   "--threads",
                                   "1",
                                   "--plot",
                                   in_dir("closed.svg"),
                                   NULL};
    assert_int_equal(run_with_closed(0, 0, compare), 0);
    char *const svg = slurp(in_dir("closed.svg"), NULL);
    assert_non_null(strstr(svg, "</svg>"));
    free(svg);
    assert_int_equal(run_with_closed(0, 1, compare), 2); /* no table: nobody could read it */
}

static void the_svg_has_the_title_and_f32_one_row(void **state) {
    (void)state;
    program_result result = WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1",
                                 "--window-len", "32", "--greedy", "0", "--recall", "0", "--kv",
                                 "f32,e4m3,f32", "--json", "--plot", in_dir("title.svg"));
    json_t *const root = program_json(&result);
    assert_int_equal(json_array_size(json_object_get(root, "rows")), 2);
    json_decref(root);
    program_free(&result);
    char *const svg = slurp(in_dir("title.svg"), NULL);
    const char *const title = strstr(svg, "<title>");
    assert_non_null(title);
    assert_memory_equal(title, "<title>KV cache formats on " MODEL ": 1 window",
                        strlen("<title>KV cache formats on " MODEL ": 1 window"));
    assert_null(strstr(svg, "<title>Gnuplot"));
    assert_non_null(strstr(svg, "</svg>"));
    free(svg);
    result = WORK("compare", MODEL, "--text", MODEL "/held.txt", "--windows", "1", "--window-len",
                  "32", "--greedy", "0", "--recall", "0", "--kv", "f32");
    assert_int_equal(result.status, 0);
    program_free(&result);
}

/* --- terminals and signals --- */

static void colours_can_be_turned_off(void **state) {
    (void)state;
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0) skip(); /* a bare container may have none to give */
    close(terminal);
    const char *const chat[] = {"generate",    MODEL,
                                "--system",    "Codes:\nfox-leaf = 4439\n",
                                "--chat",      "What is the code for fox-leaf?",
                                "--reasoning", "low",
                                "--threads",   "1",
                                NULL};
    static const char *const variables[][2] = {{"NO_COLOR", "1"}, {"TERM", "dumb"}};
    for (size_t i = 0; i < 2; i++) {
        setenv(variables[i][0], variables[i][1], 1);
        char *const shown = run_on_terminal(chat, true);
        unsetenv(variables[i][0]);
        assert_memory_equal(shown, "[analysis] ", 11);
        assert_null(strchr(shown, '\033'));
        free(shown);
    }
    setenv("NO_COLOR", "", 1); /* empty is not set */
    char *const shown = run_on_terminal(chat, true);
    unsetenv("NO_COLOR");
    assert_memory_equal(shown, "\033[2m[analysis] ", 15);
    free(shown);
    const char *const compare[] = {
        "compare",   MODEL,      "--text", MODEL "/held.txt", "--windows", "1",    "--window-len",
        "64",        "--greedy", "0",      "--recall",        "0",         "--kv", "bf16",
        "--threads", "1",        NULL};
    setenv("TERM", "dumb", 1);
    char *const progress = run_on_terminal(compare, false);
    unsetenv("TERM");
    assert_string_equal(progress, "");
    free(progress);
}

static void signals_end_it_with_their_status(void **state) {
    (void)state;
    static const struct { int signal, status; } cases[] = {{SIGINT, 130}, {SIGTERM, 143}};
    const char *const args[] = {"generate", MODEL,          "--prompt",  "x", "--max-tokens",
                                "100000",   "--ignore-eos", "--threads", "1", NULL};
    for (size_t i = 0; i < 2; i++) {
        spill(out_path, "", 0);
        const pid_t pid = program_start(args, out_path, err_path);
        wait_for_output(out_path);
        kill(pid, cases[i].signal);
        program_result result = program_wait(pid, out_path, err_path);
        assert_int_equal(result.status, cases[i].status);
        assert_string_equal(result.err, "kv8 generate: interrupted\n");
        program_free(&result);
    }
    program_result help = RUN("--help");
    assert_non_null(strstr(help.out, "143 after SIGTERM"));
    program_free(&help);
}

static void ctrl_c_ends_the_wait_for_a_pipe(void **state) {
    (void)state;
    const char *const pipe_name = in_dir("pipe");
    assert_int_equal(mkfifo(pipe_name, 0600), 0);
    const char *const args[] = {"simulate", "--speed", pipe_name, NULL};
    const pid_t pid = program_start(args, out_path, err_path);
    int writer = -1; /* opens once the program reads */
    for (int i = 0; i < 3000 && writer < 0; i++, usleep(10000))
        writer = open(pipe_name, O_WRONLY | O_NONBLOCK);
    assert_true(writer >= 0);
    kill(pid, SIGINT);
    close(writer);
    program_result result = program_wait(pid, out_path, err_path);
    assert_int_equal(result.status, 130);
    assert_string_equal(result.err, "kv8 simulate: interrupted\n");
    program_free(&result);
}

/* --- info --- */

static void info_is_short(void **state) {
    (void)state;
    program_result result = RUN("info");
    assert_int_equal(result.status, 0);
    int lines = 0;
    for (const char *c = result.out; *c != '\0'; c++) lines += *c == '\n';
    assert_true(lines <= 8);
    assert_non_null(strstr(result.out, "CUDA kernels"));
    assert_null(strstr(result.out, "kv8_decode"));
    program_free(&result);
    result = RUN("info", MODEL, "--json");
    json_t *const root = program_json(&result);
    const json_t *const model = json_object_get(root, "model");
    assert_int_equal(json_integer_value(json_object_get(model, "num_experts_per_token")), 4);
    json_decref(root);
    program_free(&result);
    ASSERT_REFUSED("--tensors needs a MODEL", "info", "--tensors");
    ASSERT_REFUSED("--json lists them always", "info", MODEL, "--tensors", "--json");
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(misspelt_words_get_a_suggestion),
        cmocka_unit_test(names_of_any_bytes_reach_json),
        cmocka_unit_test(a_cut_file_is_named),
        cmocka_unit_test(two_outputs_need_two_files),
        cmocka_unit_test(outputs_replace_no_input),
        cmocka_unit_test(closed_streams_are_no_files),
        cmocka_unit_test(the_svg_has_the_title_and_f32_one_row),
        cmocka_unit_test(colours_can_be_turned_off),
        cmocka_unit_test(signals_end_it_with_their_status),
        cmocka_unit_test(ctrl_c_ends_the_wait_for_a_pipe),
        cmocka_unit_test(info_is_short),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]); /* "info*": for work on one part */
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
