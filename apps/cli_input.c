/* cli_input.c - what the program reads: a text as tokens, a JSON array of ids.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

/* --- text --- */

int cli_read_file(const char *path, char **data_out, size_t *size_out) {
    const bool is_stdin = strcmp(path, "-") == 0;
    FILE *const file = is_stdin ? stdin : fopen(path, "rb");
    if (cli_interrupted() != 0 && file == NULL) return cli_interrupted(); /* a pipe's other end */
    if (file == NULL) return cli_fail("%s: %s", path, strerror(errno));
    char *data = NULL;
    size_t size = 0, capacity = 1 << 16;
    for (;;) {
        char *const grown = realloc(data, capacity + 1);
        if (grown == NULL) {
            free(data);
            if (!is_stdin) fclose(file);
            return cli_fail("%s: no memory for %zu bytes", path, capacity);
        }
        data = grown;
        size += fread(data + size, 1, capacity - size, file);
        if (size < capacity) break;
        capacity *= 2;
    }
    const int error = ferror(file) ? errno : 0;
    if (!is_stdin) fclose(file);
    if (error != 0 || cli_interrupted() != 0) {
        free(data);
        return cli_interrupted() != 0 ? cli_interrupted()
                                      : cli_fail("%s: %s", path, strerror(error));
    }
    data[size] = '\0';
    *data_out = data;
    *size_out = size;
    return CLI_OK;
}

/* A growing array of ids. */
typedef struct id_list {
    int32_t *ids;
    size_t num, capacity;
} id_list;

static bool append_ids(id_list *list, const int32_t *ids, size_t num) {
    if (list->num + num > list->capacity) {
        const size_t capacity = (list->num + num) * 2;
        int32_t *const grown = realloc(list->ids, capacity * sizeof *grown);
        if (grown == NULL) return false;
        list->ids = grown;
        list->capacity = capacity;
    }
    if (num > 0) memcpy(list->ids + list->num, ids, num * sizeof *ids);
    list->num += num;
    return true;
}

/* The document of `length` bytes at byte `at` of the file. */
static int append_document(const kv8_tokenizer *tokenizer, const char *path, const char *text,
                           size_t at, size_t length, id_list *list) {
    const int32_t begin_id = kv8_tokenizer_special_id(tokenizer, "<|endoftext|>");
    int32_t *ids = NULL;
    size_t num = 0;
    const kv8_status status =
        kv8_tokenizer_encode(tokenizer, text + at, length, KV8_SPECIAL_AS_TEXT, &ids, &num);
    if (status != KV8_OK)
        return cli_fail("%s: document at byte %zu: %s", path, at, kv8_status_message());
    const bool fits =
        (begin_id < 0 || append_ids(list, &begin_id, 1)) && append_ids(list, ids, num);
    kv8_free(ids);
    return fits ? CLI_OK : cli_fail("%s: no memory for %zu tokens", path, list->num + num);
}

int cli_read_text(const kv8_tokenizer *tokenizer, const char *path, int32_t **ids_out,
                  int64_t *num_out) {
    char *text = NULL;
    size_t size = 0;
    int status = cli_read_file(path, &text, &size);
    if (status != CLI_OK) return status;
    id_list list = {0};
    for (size_t at = 0; status == CLI_OK && at < size;) {
        const char *const end = memchr(text + at, '\0', size - at);
        const size_t length = end == NULL ? size - at : (size_t)(end - (text + at));
        status = append_document(tokenizer, path, text, at, length, &list);
        at += length + 1;
    }
    free(text);
    if (status != CLI_OK) {
        free(list.ids);
        return status;
    }
    *ids_out = list.ids;
    *num_out = (int64_t)list.num;
    return CLI_OK;
}

/* --- ids --- */

static int take_ids(const json_t *root, const char *path, int32_t vocab_size, int32_t *ids) {
    const size_t num = json_array_size(root);
    for (size_t i = 0; i < num; i++) {
        const json_t *const item = json_array_get(root, i);
        if (!json_is_integer(item)) return cli_fail("%s: item %zu is not a whole number", path, i);
        const json_int_t id = json_integer_value(item);
        if (id < 0 || id >= vocab_size)
            return cli_fail("%s: item %zu is %lld, the vocabulary has ids 0 to %d", path, i,
                            (long long)id, vocab_size - 1);
        ids[i] = (int32_t)id;
    }
    return CLI_OK;
}

int cli_read_tokens(const char *path, int32_t vocab_size, int32_t **ids_out, int32_t *num_out) {
    char *text = NULL;
    size_t size = 0;
    int status = cli_read_file(path, &text, &size);
    if (status != CLI_OK) return status;
    json_error_t error;
    errno = 0; /* the parser does not always say that memory ran out; malloc does */
    json_t *const root = json_loadb(text, size, JSON_DECODE_ANY, &error);
    const bool no_memory = errno == ENOMEM;
    free(text);
    if (root == NULL && no_memory) return cli_fail("%s: no memory to parse it", path);
    if (root == NULL) return cli_fail("%s: not JSON: line %d: %s", path, error.line, error.text);
    const size_t num = json_array_size(root); /* 0 when it is no array */
    int32_t *ids = NULL;
    if (!json_is_array(root) || num == 0 || num > INT32_MAX) {
        status = cli_fail("%s: must be a JSON array of 1 to %d token ids", path, INT32_MAX);
    } else if ((ids = malloc(num * sizeof *ids)) == NULL) {
        status = cli_fail("%s: no memory for %zu tokens", path, num);
    } else {
        status = take_ids(root, path, vocab_size, ids);
    }
    json_decref(root);
    if (status != CLI_OK) {
        free(ids);
        return status;
    }
    *ids_out = ids;
    *num_out = (int32_t)num;
    return CLI_OK;
}
