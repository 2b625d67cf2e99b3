/* cli_testing.h - a directory for a test of the program to write in, the program run there, and
 * what a refusal looks like.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TEST_CLI_TESTING_H
#define KV8_TEST_CLI_TESTING_H

#include <dirent.h>
#include <limits.h>

#include "program.h"

#define MODEL "models/tiny-gpt-oss"

static char dir[64];                    /* holds everything these tests write */
static char out_path[96], err_path[96]; /* of the last run */

static inline const char *in_dir(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *const path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", dir, name);
    return path;
}

static inline program_result run(const char *const args[]) {
    return program_run(args, out_path, err_path, 0);
}
#define RUN(...) run((const char *const[]){__VA_ARGS__, NULL})
/* Work for the model, on one thread: test programs already run side by side. */
#define WORK(...) RUN(__VA_ARGS__, "--threads", "1")

/* What the program prints under --json; the caller's to release. */
static inline json_t *run_for_json(const char *const args[]) {
    program_result result = program_run(args, out_path, err_path, 0);
    json_t *const root = program_json(&result);
    program_free(&result);
    return root;
}

static inline void write_text(const char *name, const char *text) {
    spill(in_dir(name), text, strlen(text));
}

static inline int count_files(const char *directory) {
    DIR *const opened = opendir(directory);
    assert_non_null(opened);
    int num = 0;
    while (readdir(opened) != NULL) num++;
    closedir(opened);
    return num - 2;
}

/* Refused: status 2, nothing on stdout, one line on stderr that begins with the program's name and
 * holds `part`. */
static inline void assert_refusal(program_result *result, const char *part) {
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

static inline void write_ids(const char *name, const int32_t *ids, size_t num) {
    json_t *const list = json_array();
    for (size_t i = 0; i < num; i++) json_array_append_new(list, json_integer(ids[i]));
    assert_int_equal(json_dump_file(list, in_dir(name), 0), 0);
    json_decref(list);
}

/* A directory like the model's, of links to its files. */
static inline void link_model(const char *name) {
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

/* Runs the program with stdout or stderr on a terminal and gives back what that showed. */
static inline char *run_on_terminal(const char *const args[], bool out_is_terminal) {
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

static inline int set_up(void **state) {
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

static inline int tear_down(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

#endif
