/* cli_output.c - what the program writes: files that appear whole or not at all, JSON, UTF-8.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

/* --- files --- */

int cli_output_open(cli_output *output, const char *path) {
    *output = (cli_output){0};
    struct stat info;
    /* Renaming over a device or a directory would replace or fail on it. */
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return cli_fail("%s: cannot write: not a regular file", path);
    static const char suffix[] = ".XXXXXX";
    char *const temporary = malloc(strlen(path) + sizeof suffix);
    if (temporary == NULL) return cli_fail("%s: no memory for its name", path);
    strcpy(temporary, path);
    strcat(temporary, suffix);
    const int fd = mkstemp(temporary);
    FILE *const file = fd < 0 ? NULL : fdopen(fd, "w+b");
    if (file == NULL) {
        const int error = errno;
        if (fd >= 0) {
            close(fd);
            unlink(temporary);
        }
        free(temporary);
        return cli_fail("%s: cannot write: %s", path, strerror(error));
    }
    *output = (cli_output){.file = file, .path = path, .temporary = temporary};
    return CLI_OK;
}

int cli_output_commit(cli_output *output) {
    const int fd = fileno(output->file);
    const mode_t mask = umask(0);
    umask(mask);
    if (ferror(output->file) || fflush(output->file) != 0 || fchmod(fd, 0666 & ~mask) != 0 ||
        fsync(fd) != 0 || rename(output->temporary, output->path) != 0) {
        const int error = errno;
        const int status = cli_fail("%s: cannot write: %s", output->path, strerror(error));
        cli_output_abort(output);
        return status;
    }
    fclose(output->file); /* everything has been synced */
    free(output->temporary);
    *output = (cli_output){0};
    return CLI_OK;
}

void cli_output_abort(cli_output *output) {
    if (output->file == NULL) return;
    fclose(output->file);
    unlink(output->temporary);
    free(output->temporary);
    *output = (cli_output){0};
}

/* --- JSON --- */

json_t *cli_json_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

int cli_write_json(json_t *root, FILE *file, const char *name) {
    if (root == NULL) return cli_fail("%s: no memory for the JSON", name);
    /* 9 digits give every f32 back exactly. */
    const int result = json_dumpf(root, file, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(root);
    if (result != 0 || fputc('\n', file) == EOF)
        return cli_fail("%s: cannot write: %s", name, strerror(errno));
    return CLI_OK;
}

int cli_finish_stdout(void) {
    if (fflush(stdout) != 0 || ferror(stdout))
        return cli_fail("stdout: cannot write: %s", strerror(errno));
    return CLI_OK;
}

/* --- UTF-8 --- */

/* Length of the valid character at bytes, 0 for none (Unicode table 3-7). */
static size_t character_length(const unsigned char *bytes, size_t length) {
    const unsigned char first = bytes[0];
    if (first < 0x80) return 1;
    const size_t size = first < 0xc2   ? 0
                        : first < 0xe0 ? 2
                        : first < 0xf0 ? 3
                        : first < 0xf5 ? 4
                                       : 0;
    if (size == 0 || size > length) return 0;
    const unsigned char second = bytes[1];
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
        return 0;
    for (size_t i = 1; i < size; i++) {
        if ((bytes[i] & 0xc0) != 0x80) return 0;
    }
    return size;
}

char *cli_clean_utf8(const char *bytes, size_t length) {
    char *const out = malloc(length * 3 + 1); /* U+FFFD takes three bytes */
    if (out == NULL) return NULL;
    size_t used = 0;
    for (size_t at = 0; at < length;) {
        const size_t size = character_length((const unsigned char *)bytes + at, length - at);
        memcpy(out + used, size > 0 ? bytes + at : "\xef\xbf\xbd", size > 0 ? size : 3);
        used += size > 0 ? size : 3;
        at += size > 0 ? size : 1;
    }
    out[used] = '\0';
    return out;
}
