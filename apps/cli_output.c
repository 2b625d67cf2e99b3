/* cli_output.c - what the program writes: files that appear whole or not at all, JSON, UTF-8.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"

/* --- files --- */

/* The outputs that are open. */
enum { MAX_OUTPUTS = 4 };
static struct open_output {
    char *volatile temporary; /* NULL = free */
    const char *path;
    dev_t device; /* of its directory */
    ino_t directory;
} open_outputs[MAX_OUTPUTS];

void cli_output_remove_all(void) {
    for (int i = 0; i < MAX_OUTPUTS; i++) {
        if (open_outputs[i].temporary != NULL) unlink(open_outputs[i].temporary);
    }
}

static const char *base_name(const char *path) {
    const char *const slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* Notes an output that is to be opened; of two with one name, the second would replace the first.
 */
static int note_output(const char *path, char *temporary) {
    struct open_output note = {.temporary = temporary, .path = path}, *place = NULL;
    struct stat info = {0};
    char *const copy = strdup(path);
    if (copy == NULL) return cli_fail("%s: no memory for its name", path);
    if (stat(dirname(copy), &info) == 0) note.device = info.st_dev, note.directory = info.st_ino;
    free(copy);
    for (int i = 0; i < MAX_OUTPUTS; i++) {
        const struct open_output *const other = &open_outputs[i];
        if (other->temporary == NULL) {
            place = &open_outputs[i];
        } else if (other->device == note.device && other->directory == note.directory &&
                   strcmp(base_name(other->path), base_name(path)) == 0) {
            return cli_fail("%s: two outputs would be written to it", path);
        }
    }
    if (place == NULL) return cli_fail("%s: more than %d outputs", path, (int)MAX_OUTPUTS);
    *place = note;
    return CLI_OK;
}

static void forget_output(char *temporary) {
    for (int i = 0; i < MAX_OUTPUTS; i++) {
        if (open_outputs[i].temporary == temporary) open_outputs[i].temporary = NULL;
    }
    free(temporary);
}

int cli_output_open(cli_output *output, const char *path) {
    *output = (cli_output){0};
    struct stat info;
    if (path[0] == '\0') return cli_fail("the name of an output is empty");
    /* Renaming over a device or a directory would replace or fail on it. */
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return cli_fail("%s: cannot write: not a regular file", path);
    static const char suffix[] = ".XXXXXX";
    char *const temporary = malloc(strlen(path) + sizeof suffix);
    if (temporary == NULL) return cli_fail("%s: no memory for its name", path);
    strcpy(temporary, path);
    strcat(temporary, suffix);
    const int noted = note_output(path, temporary);
    if (noted != CLI_OK) {
        free(temporary);
        return noted;
    }
    const int fd = mkstemp(temporary);
    FILE *const file = fd < 0 ? NULL : fdopen(fd, "w+b");
    if (file == NULL) {
        const int error = errno;
        if (fd >= 0) {
            close(fd);
            unlink(temporary);
        }
        forget_output(temporary);
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
    forget_output(output->temporary);
    *output = (cli_output){0};
    return CLI_OK;
}

void cli_output_abort(cli_output *output) {
    if (output->file == NULL) return;
    fclose(output->file);
    unlink(output->temporary);
    forget_output(output->temporary);
    *output = (cli_output){0};
}

/* --- JSON --- */

json_t *cli_json_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *cli_json_text(const char *text) {
    char *const clean = cli_clean_utf8(text, strlen(text));
    json_t *const string = clean == NULL ? NULL : json_string(clean);
    free(clean);
    return string;
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

/* https://no-color.org: set and not empty. */
bool cli_has_colour(void) {
    const char *const no_color = getenv("NO_COLOR"), *const term = getenv("TERM");
    return isatty(STDOUT_FILENO) && (no_color == NULL || no_color[0] == '\0') &&
           (term == NULL || strcmp(term, "dumb") != 0);
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
