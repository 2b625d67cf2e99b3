/* prefix_files.c - the prefixes of a cache on disk.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* scandir, versionsort's kin */
#include "prefix_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_PATH = 4096, NAME_BYTES = sizeof "0123456789abcdef.kv8" };

/* --- names --- */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u; /* FNV-1a */
    return hash;
}

/* A file by its name, size and time; one that is not there by its name. */
static uint64_t hash_file(uint64_t hash, const char *path) {
    struct stat info;
    hash = hash_bytes(hash, path, strlen(path));
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return hash;
    const int64_t facts[3] = {info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
    return hash_bytes(hash, facts, sizeof facts);
}

static bool is_whole_path(int length) {
    return length > 0 && length < MAX_PATH;
}

static uint64_t hash_model(const char *model) {
    struct dirent **entries = NULL;
    char path[MAX_PATH];
    uint64_t hash = hash_bytes(0xcbf29ce484222325u, model, strlen(model));
    const int num = scandir(model, &entries, NULL, alphasort);
    for (int i = 0; i < num; i++) {
        if (is_whole_path(snprintf(path, sizeof path, "%s/%s", model, entries[i]->d_name)))
            hash = hash_file(hash, path);
        free(entries[i]);
    }
    free(entries);
    return hash;
}

/* The folder of this model, these scales and this setting. */
static int folder_of(const prefix_files *f, char folder[MAX_PATH]) {
    uint64_t hash = hash_model(f->model);
    if (f->scales != NULL) hash = hash_file(hash, f->scales);
    hash = hash_bytes(hash, f->setting, strlen(f->setting));
    const int length = snprintf(folder, MAX_PATH, "%s/%016" PRIx64, f->directory, hash);
    if (!is_whole_path(length + NAME_BYTES))
        return cli_fail("--snapshot-dir: the path has %zu bytes, more than a path may",
                        strlen(f->directory));
    if ((mkdir(f->directory, 0777) != 0 && errno != EEXIST) ||
        (mkdir(folder, 0700) != 0 && errno != EEXIST))
        return cli_fail("--snapshot-dir: %s: %s", folder, strerror(errno));
    return CLI_OK;
}

static void path_of(char path[MAX_PATH], const char *folder, const char *name) {
    snprintf(path, MAX_PATH, "%.*s/%s", MAX_PATH - 300, folder, name);
}

/* --- restoring --- */

static int is_snapshot(const struct dirent *entry) {
    const size_t length = strlen(entry->d_name);
    return length == NAME_BYTES - 1 && strcmp(entry->d_name + length - 4, ".kv8") == 0;
}

/* A prefix's file, and when it was used last. */
typedef struct prefix_file {
    char name[NAME_BYTES];
    struct timespec used;
} prefix_file;

static int by_time(const void *a, const void *b) {
    const prefix_file *const x = a, *const y = b;
    if (x->used.tv_sec != y->used.tv_sec) return x->used.tv_sec < y->used.tv_sec ? -1 : 1;
    if (x->used.tv_nsec != y->used.tv_nsec) return x->used.tv_nsec < y->used.tv_nsec ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The folder's files, those used longest ago first; NULL = no memory. */
static prefix_file *list_files(const char *folder, int *num_out) {
    struct dirent **entries = NULL;
    const int num = scandir(folder, &entries, is_snapshot, alphasort);
    prefix_file *const files = calloc((size_t)(num < 0 ? 0 : num) + 1, sizeof *files);
    for (int i = 0; i < num; i++) {
        char path[MAX_PATH];
        struct stat info;
        path_of(path, folder, entries[i]->d_name);
        if (files != NULL) strcpy(files[i].name, entries[i]->d_name);
        if (files != NULL && stat(path, &info) == 0) files[i].used = info.st_mtim;
        free(entries[i]);
    }
    free(entries);
    *num_out = num < 0 ? 0 : num;
    if (files != NULL) qsort(files, (size_t)*num_out, sizeof *files, by_time);
    return files;
}

static kv8_status restore_file(kv8_cache *cache, const char *path, int32_t *length_out) {
    kv8_seq seq = KV8_SEQ_NONE;
    kv8_status status = kv8_cache_load(cache, path, &seq);
    if (status != KV8_OK) return status;
    status = kv8_cache_seq_length(cache, seq, length_out);
    if (status == KV8_OK) status = kv8_cache_publish(cache, seq);
    const kv8_status ended = kv8_cache_seq_destroy(cache, seq);
    return status == KV8_OK ? ended : status;
}

/* So that its prefix, computed again, is written again; then it goes. */
static void set_aside(const char *path) {
    char aside[MAX_PATH + 16];
    snprintf(aside, sizeof aside, "%s.refused", path);
    rename(path, aside);
}

int prefix_files_restore(const prefix_files *f, kv8_cache *cache) {
    char folder[MAX_PATH], path[MAX_PATH];
    const int status = folder_of(f, folder);
    if (status != CLI_OK) return status;
    int num = 0, num_restored = 0;
    int64_t num_tokens = 0;
    prefix_file *const files = list_files(folder, &num);
    if (files == NULL) return cli_fail("no memory for a list of files");
    for (int i = 0; i < num; i++) {
        int32_t length = 0;
        path_of(path, folder, files[i].name);
        const kv8_status restored = restore_file(cache, path, &length);
        if (restored != KV8_OK) fprintf(stderr, "prefixes   refused: %s\n", kv8_status_message());
        num_restored += restored == KV8_OK;
        num_tokens += length;
        if (restored == KV8_ERR_CORRUPT) set_aside(path);
    }
    fprintf(stderr, "prefixes   %d with %lld tokens restored from %s\n", num_restored,
            (long long)num_tokens, folder);
    free(files);
    return CLI_OK;
}

/* --- saving --- */

/* Prefixes of the cache, one after the other. */
typedef struct prefix_list {
    int32_t *ids;     /* [num_ids] */
    int32_t *lengths; /* [num] */
    size_t num_ids, num;
} prefix_list;

static kv8_status collect(void *cookie, const int32_t *ids, int32_t num) {
    prefix_list *const l = cookie;
    int32_t *const all = realloc(l->ids, (l->num_ids + (size_t)num) * sizeof *all);
    if (all != NULL) l->ids = all;
    int32_t *const lengths = realloc(l->lengths, (l->num + 1) * sizeof *lengths);
    if (lengths != NULL) l->lengths = lengths;
    if (all == NULL || lengths == NULL) return KV8_ERR_NO_MEMORY;
    memcpy(all + l->num_ids, ids, (size_t)num * sizeof *ids);
    l->num_ids += (size_t)num;
    lengths[l->num++] = num;
    return KV8_OK;
}

/* Writes what the cache holds of a prefix, unless it is there; its name, "" = it holds nothing. */
static kv8_status save_prefix(kv8_cache *cache, const char *folder, const int32_t *ids, int32_t num,
                              char name[NAME_BYTES]) {
    char path[MAX_PATH];
    kv8_seq seq = KV8_SEQ_NONE;
    int32_t held = 0;
    kv8_status status = kv8_cache_prefix_hold(cache, ids, num, &seq, &held);
    if (status != KV8_OK) return status;
    name[0] = '\0';
    if (held > 0) {
        const uint64_t hash = hash_bytes(0xcbf29ce484222325u, ids, (size_t)held * sizeof *ids);
        snprintf(name, NAME_BYTES, "%016" PRIx64 ".kv8", hash);
        path_of(path, folder, name);
        /* The time says what was used last. */
        if (utimensat(AT_FDCWD, path, NULL, 0) != 0) status = kv8_cache_save(cache, seq, path);
    }
    const kv8_status ended = kv8_cache_seq_destroy(cache, seq);
    return status == KV8_OK ? ended : status;
}

static int by_name(const void *a, const void *b) {
    return strcmp(a, b);
}

/* Removes what is not among the sorted names, halves of files that a killed run left too. */
static void remove_others(const char *folder, const char (*names)[NAME_BYTES], size_t num) {
    struct dirent **entries = NULL;
    const int num_entries = scandir(folder, &entries, NULL, NULL);
    for (int i = 0; i < num_entries; i++) {
        char path[MAX_PATH];
        const char *const name = entries[i]->d_name;
        path_of(path, folder, name);
        if (strstr(name, ".kv8") != NULL && bsearch(name, names, num, NAME_BYTES, by_name) == NULL)
            unlink(path);
        free(entries[i]);
    }
    free(entries);
}

static kv8_status save_all(kv8_cache *cache, const char *folder, prefix_list *list,
                           char (*names)[NAME_BYTES]) {
    kv8_status status = KV8_OK;
    const int32_t *ids = list->ids;
    for (size_t i = 0; i < list->num && status == KV8_OK; i++) {
        status = save_prefix(cache, folder, ids, list->lengths[i], names[i]);
        ids += list->lengths[i];
    }
    if (status != KV8_OK) return status;
    qsort(names, list->num, NAME_BYTES, by_name);
    remove_others(folder, (const char(*)[NAME_BYTES])names, list->num);
    return KV8_OK;
}

int prefix_files_save(const prefix_files *f, kv8_cache *cache) {
    char folder[MAX_PATH];
    prefix_list list = {0};
    const int made = folder_of(f, folder);
    if (made != CLI_OK) return made;
    kv8_status status = kv8_cache_list_prefixes(cache, collect, &list);
    char(*const names)[NAME_BYTES] = calloc(list.num + 1, NAME_BYTES);
    if (names == NULL && status == KV8_OK) status = KV8_ERR_NO_MEMORY;
    if (status == KV8_OK) status = save_all(cache, folder, &list, names);
    if (status == KV8_OK)
        fprintf(stderr, "prefixes   %zu with %zu tokens are in %s\n", list.num, list.num_ids,
                folder);
    free(names);
    free(list.ids);
    free(list.lengths);
    return status == KV8_OK              ? CLI_OK
           : status == KV8_ERR_NO_MEMORY ? cli_fail("no memory for a list of prefixes")
                                         : cli_fail_status(status);
}
