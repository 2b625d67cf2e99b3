/* program.h - running the built program from a test: its arguments in, its status, stdout, stderr
 * and peak memory out. KV8_PROGRAM is its path, from the build.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TEST_PROGRAM_H
#define KV8_TEST_PROGRAM_H

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "testing.h"

enum { MAX_ARGS = 32 };

typedef struct program_result {
    int status; /* exit status, or 128 + signal */
    char *out, *err;
    size_t out_size, err_size;
    long max_rss_kib;
} program_result;

static inline char *slurp(const char *path, size_t *size_out) {
    FILE *const file = fopen(path, "rb");
    if (file == NULL) fail_msg("%s: %s", path, strerror(errno));
    fseek(file, 0, SEEK_END);
    const size_t size = (size_t)ftell(file);
    rewind(file);
    char *const data = malloc(size + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, size, file), size);
    data[size] = '\0';
    fclose(file);
    if (size_out != NULL) *size_out = size;
    return data;
}

static inline void spill(const char *path, const void *data, size_t size) {
    FILE *const file = fopen(path, "wb");
    if (file == NULL) fail_msg("%s: %s", path, strerror(errno));
    assert_int_equal(fwrite(data, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* NULL for a device or a terminal. */
static inline char *slurp_regular(const char *path, size_t *size_out) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISREG(info.st_mode) ? slurp(path, size_out) : NULL;
}

/* Starts `kv8 args...` (args ends with NULL) with stdout to out_path, stderr to err_path. */
static inline pid_t program_start(const char *const args[], const char *out_path,
                                  const char *err_path) {
    char *argv[MAX_ARGS + 2] = {(char *)(uintptr_t)KV8_PROGRAM};
    for (int i = 0; args[i] != NULL; i++) {
        assert_true(i < MAX_ARGS);
        argv[i + 1] = (char *)(uintptr_t)args[i];
    }
    fflush(NULL);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        const int out = open(out_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        const int err = open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (out < 0 || err < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(99);
        execv(argv[0], argv);
        _exit(98);
    }
    return pid;
}

static inline program_result program_wait(pid_t pid, const char *out_path, const char *err_path) {
    int state = 0;
    struct rusage usage;
    while (wait4(pid, &state, 0, &usage) < 0 && errno == EINTR) continue;
    program_result result = {
        .status = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state),
        .max_rss_kib = usage.ru_maxrss};
    result.out = slurp_regular(out_path, &result.out_size);
    result.err = slurp_regular(err_path, &result.err_size);
    return result;
}

/* Runs it to its end; sends SIGINT after interrupt_ms (0 = never). */
static inline program_result program_run(const char *const args[], const char *out_path,
                                         const char *err_path, int interrupt_ms) {
    const pid_t pid = program_start(args, out_path, err_path);
    if (interrupt_ms > 0) {
        usleep((useconds_t)interrupt_ms * 1000);
        kill(pid, SIGINT);
    }
    return program_wait(pid, out_path, err_path);
}

static inline void program_free(program_result *result) {
    free(result->out);
    free(result->err);
    *result = (program_result){0};
}

/* The one JSON object on stdout; the caller releases it. */
static inline json_t *program_json(const program_result *result) {
    if (result->status != 0) fail_msg("status %d: %s", result->status, result->err);
    json_error_t error;
    json_t *const root = json_loadb(result->out, result->out_size, 0, &error);
    if (root == NULL) fail_msg("stdout is not one JSON value: %s: %s", error.text, result->out);
    assert_true(json_is_object(root));
    assert_string_equal(result->err, "");
    return root;
}

#endif
