/* checkpoint.c - finding, opening and merging the safetensors files of a directory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* scandir */
#include "checkpoint_impl.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_FILES = 4096, MAX_INDEX_BYTES = 100000000 };
static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";
static const char suffix[] = ".safetensors";

char *kv8_path_join(const char *directory, const char *name) {
    const size_t size = strlen(directory) + strlen(name) + 2;
    char *const path = malloc(size);
    if (path != NULL) snprintf(path, size, "%s/%s", directory, name);
    return path;
}

/* A link that leads nowhere is there too: opening it says what is wrong. */
static bool exists(const char *directory, const char *name) {
    char *const path = kv8_path_join(directory, name);
    struct stat info;
    const bool yes = path != NULL && lstat(path, &info) == 0;
    free(path);
    return yes;
}

static kv8_status reserve_files(kv8_checkpoint *checkpoint, size_t capacity) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(checkpoint->allocator, capacity, sizeof *checkpoint->files, "file table",
                      &memory));
    checkpoint->files = memory;
    checkpoint->files_capacity = capacity;
    return KV8_OK;
}

static kv8_status open_file(kv8_checkpoint *checkpoint, const char *directory, const char *name) {
    char *const path = kv8_path_join(directory, name);
    if (path == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its path", name);
    kv8_safetensors *const file = &checkpoint->files[checkpoint->num_files];
    const kv8_status status = kv8_safetensors_open(file, path, checkpoint->allocator);
    free(path);
    if (status == KV8_OK) checkpoint->num_files++;
    return status;
}

/* `second` again holds a tensor of the file of `first`. */
static kv8_status fail_double(const kv8_tensor *first, const kv8_tensor *second) {
    return kv8_fail(KV8_ERR_CORRUPT, "tensor \"%s\" is in both %s and %s", second->name,
                    first->file, second->file);
}

/* --- without an index --- */

static int is_safetensors(const struct dirent *entry) {
    const size_t length = strlen(entry->d_name), tail = sizeof suffix - 1;
    return entry->d_name[0] != '.' && length > tail &&
           strcmp(entry->d_name + length - tail, suffix) == 0;
}

static int by_dirent_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

typedef struct directory_list {
    struct dirent **entries;
    int count;
} directory_list;

static void drop_list(directory_list *list) {
    for (int i = 0; i < list->count; i++) free(list->entries[i]);
    free(list->entries);
}

/* The *.safetensors files of a directory by name, at least one; on failure nothing to drop. */
static kv8_status list_directory(const char *directory, directory_list *out) {
    out->count = scandir(directory, &out->entries, is_safetensors, by_dirent_name);
    if (out->count < 0)
        return kv8_fail(errno == ENOENT ? KV8_ERR_NOT_FOUND : KV8_ERR_IO, "%s: %s", directory,
                        strerror(errno));
    if (out->count >= 1 && out->count <= MAX_FILES) return KV8_OK;
    drop_list(out);
    if (out->count == 0)
        return kv8_fail(KV8_ERR_NOT_FOUND, "%s: no %s, %s or other *.safetensors file", directory,
                        index_name, single_name);
    return kv8_fail(KV8_ERR_INVALID, "%s: %d *.safetensors files, the limit is %d", directory,
                    out->count, (int)MAX_FILES);
}

static kv8_status open_every_file(kv8_checkpoint *checkpoint, const char *directory) {
    directory_list list;
    KV8_TRY(list_directory(directory, &list));
    kv8_status status = reserve_files(checkpoint, (size_t)list.count);
    for (int i = 0; i < list.count && status == KV8_OK; i++)
        status = open_file(checkpoint, directory, list.entries[i]->d_name);
    drop_list(&list);
    return status;
}

/* A file beside model.safetensors may hold anything but the model's tensors again: which of the two
 * were meant? */
static kv8_status check_neighbour(const kv8_checkpoint *checkpoint, const char *directory,
                                  const char *name) {
    char *const path = kv8_path_join(directory, name);
    if (path == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its path", name);
    kv8_safetensors file;
    kv8_status status = kv8_safetensors_open(&file, path, checkpoint->allocator);
    free(path);
    if (status != KV8_OK) return status;
    for (size_t t = 0; t < file.num_tensors && status == KV8_OK; t++) {
        const kv8_tensor *const first =
            kv8_safetensors_find(&checkpoint->files[0], file.tensors[t].name);
        if (first != NULL) status = fail_double(first, &file.tensors[t]);
    }
    kv8_safetensors_close(&file);
    return status;
}

static kv8_status open_single(kv8_checkpoint *checkpoint, const char *directory) {
    KV8_TRY(reserve_files(checkpoint, 1));
    KV8_TRY(open_file(checkpoint, directory, single_name));
    directory_list list;
    KV8_TRY(list_directory(directory, &list));
    kv8_status status = KV8_OK;
    for (int i = 0; i < list.count && status == KV8_OK; i++) {
        if (strcmp(list.entries[i]->d_name, single_name) != 0)
            status = check_neighbour(checkpoint, directory, list.entries[i]->d_name);
    }
    drop_list(&list);
    return status;
}

/* --- with an index --- */

/* A shard lies beside its index: a name, not a path. */
static bool plain_name(const char *name) {
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL;
}

static int by_string(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct file names of the map, sorted, borrowed from it; names_out holds one slot for every
 * entry of the map. */
static kv8_status list_shards(const char *index_path, json_t *map, const char **names_out,
                              size_t *count_out) {
    size_t count = 0;
    const char *tensor;
    json_t *value;
    json_object_foreach(map, tensor, value) {
        if (!json_is_string(value) || !plain_name(json_string_value(value)))
            return kv8_fail(KV8_ERR_CORRUPT,
                            "%s: weight_map \"%.120s\" is not the name of a file beside it",
                            index_path, tensor);
        names_out[count++] = json_string_value(value);
    }
    qsort(names_out, count, sizeof *names_out, by_string);
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++) {
        if (distinct == 0 || strcmp(names_out[distinct - 1], names_out[i]) != 0)
            names_out[distinct++] = names_out[i];
    }
    if (distinct == 0 || distinct > MAX_FILES)
        return kv8_fail(KV8_ERR_CORRUPT, "%s: weight_map names %zu files, must be 1 to %d",
                        index_path, distinct, (int)MAX_FILES);
    *count_out = distinct;
    return KV8_OK;
}

/* The file of names[] (sorted as files are) that a tensor must lie in. */
static kv8_status check_weight_map(const kv8_checkpoint *checkpoint, const char *index_path,
                                   json_t *map, const char *const *names) {
    const char *tensor;
    json_t *value;
    json_object_foreach(map, tensor, value) {
        const char *const wanted = json_string_value(value);
        size_t i = 0;
        while (strcmp(names[i], wanted) != 0) i++;
        if (kv8_safetensors_find(&checkpoint->files[i], tensor) == NULL)
            return kv8_fail(KV8_ERR_CORRUPT,
                            "%s: weight_map puts \"%.120s\" into %s, which does not hold it",
                            index_path, tensor, wanted);
    }
    for (size_t i = 0; i < checkpoint->num_files; i++) {
        for (size_t t = 0; t < checkpoint->files[i].num_tensors; t++) {
            const char *const name = checkpoint->files[i].tensors[t].name;
            if (json_object_get(map, name) == NULL)
                return kv8_fail(KV8_ERR_CORRUPT, "%s: weight_map lacks \"%s\", which %s holds",
                                index_path, name, names[i]);
        }
    }
    return KV8_OK;
}

static kv8_status open_weight_map(kv8_checkpoint *checkpoint, const char *directory,
                                  const char *index_path, json_t *map) {
    const size_t capacity = json_object_size(map);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, capacity, sizeof(char *), "shard names", &memory));
    const char **const names = memory;
    size_t count = 0;
    kv8_status status = list_shards(index_path, map, names, &count);
    if (status == KV8_OK) status = reserve_files(checkpoint, count);
    for (size_t i = 0; i < count && status == KV8_OK; i++) {
        status = open_file(checkpoint, directory, names[i]);
        if (status == KV8_ERR_NOT_FOUND) kv8_fail_within(status, "%s", index_path);
    }
    if (status == KV8_OK) status = check_weight_map(checkpoint, index_path, map, names);
    kv8_release(NULL, memory, capacity, sizeof(char *));
    return status;
}

static kv8_status open_indexed(kv8_checkpoint *checkpoint, const char *directory) {
    char *const path = kv8_path_join(directory, index_name);
    if (path == NULL) return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its path", index_name);
    char *text = NULL;
    size_t size = 0;
    json_t *root = NULL;
    kv8_status status = kv8_file_read(path, MAX_INDEX_BYTES, &text, &size);
    if (status != KV8_OK) goto done;
    status = kv8_json_parse_object(&root, path, text, size);
    if (status != KV8_OK) goto done;
    json_t *const map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        status = kv8_fail(KV8_ERR_CORRUPT, "%s: weight_map is missing or no object", path);
        goto done;
    }
    status = open_weight_map(checkpoint, directory, path, map);
done:
    json_decref(root);
    kv8_release(NULL, text, size + 1, 1);
    free(path);
    return status;
}

/* --- all files as one --- */

static int by_tensor_name(const void *a, const void *b) {
    const kv8_tensor *const x = *(const kv8_tensor *const *)a;
    const kv8_tensor *const y = *(const kv8_tensor *const *)b;
    return strcmp(x->name, y->name);
}

static kv8_status merge_names(kv8_checkpoint *checkpoint) {
    size_t count = 0;
    for (size_t i = 0; i < checkpoint->num_files; i++) count += checkpoint->files[i].num_tensors;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(checkpoint->allocator, count, sizeof *checkpoint->by_name, "tensor names",
                      &memory));
    checkpoint->by_name = memory;
    checkpoint->num_tensors = count;
    size_t at = 0;
    for (size_t i = 0; i < checkpoint->num_files; i++) {
        const kv8_safetensors *const file = &checkpoint->files[i];
        for (size_t t = 0; t < file->num_tensors; t++)
            checkpoint->by_name[at++] = &file->tensors[t];
    }
    qsort(checkpoint->by_name, count, sizeof *checkpoint->by_name, by_tensor_name);
    for (size_t i = 1; i < count; i++) {
        const kv8_tensor *const a = checkpoint->by_name[i - 1], *const b = checkpoint->by_name[i];
        if (strcmp(a->name, b->name) == 0) return fail_double(a, b);
    }
    return KV8_OK;
}

kv8_status kv8_checkpoint_open(kv8_checkpoint *out, const char *directory,
                               const kv8_allocator *allocator) {
    *out = (kv8_checkpoint){.allocator = allocator};
    kv8_status status;
    if (exists(directory, index_name)) {
        KV8_TRY_GOTO(open_indexed(out, directory));
    } else if (exists(directory, single_name)) {
        KV8_TRY_GOTO(open_single(out, directory));
    } else {
        KV8_TRY_GOTO(open_every_file(out, directory));
    }
    KV8_TRY_GOTO(merge_names(out));
    return KV8_OK;
fail:
    kv8_checkpoint_close(out);
    return status;
}

/* A file of no bytes: its label, then its tensors' names. */
static kv8_status copy_tensors(kv8_safetensors *file, const char *label, const kv8_tensor *tensors,
                               size_t num_tensors) {
    size_t size = strlen(label) + 1;
    void *memory = NULL;
    for (size_t i = 0; i < num_tensors; i++) size += strlen(tensors[i].name) + 1;
    KV8_TRY(kv8_alloc(file->allocator, size, 1, "tensor names", &memory));
    file->strings = memory;
    file->strings_size = size;
    KV8_TRY(kv8_alloc(file->allocator, num_tensors, sizeof *tensors, "tensors", &memory));
    file->tensors = memory;
    file->num_tensors = num_tensors;
    char *at = strcpy(file->strings, label) + strlen(label) + 1;
    for (size_t i = 0; i < num_tensors; i++) {
        file->tensors[i] = tensors[i];
        file->tensors[i].file = file->strings;
        file->tensors[i].name = strcpy(at, tensors[i].name);
        at += strlen(at) + 1;
        file->data_bytes += tensors[i].bytes;
    }
    return KV8_OK;
}

kv8_status kv8_checkpoint_of(kv8_checkpoint *out, const char *label, const kv8_tensor *tensors,
                             size_t num_tensors, const kv8_allocator *allocator) {
    *out = (kv8_checkpoint){.allocator = allocator};
    kv8_status status;
    KV8_TRY_GOTO(reserve_files(out, 1));
    out->num_files = 1;
    out->files[0].allocator = allocator;
    KV8_TRY_GOTO(copy_tensors(&out->files[0], label, tensors, num_tensors));
    KV8_TRY_GOTO(merge_names(out));
    return KV8_OK;
fail:
    kv8_checkpoint_close(out);
    return status;
}

void kv8_checkpoint_close(kv8_checkpoint *checkpoint) {
    const kv8_allocator *const allocator = checkpoint->allocator;
    for (size_t i = 0; i < checkpoint->num_files; i++) kv8_safetensors_close(&checkpoint->files[i]);
    kv8_release(allocator, checkpoint->files, checkpoint->files_capacity,
                sizeof *checkpoint->files);
    kv8_release(allocator, checkpoint->by_name, checkpoint->num_tensors,
                sizeof *checkpoint->by_name);
    *checkpoint = (kv8_checkpoint){0};
}

int64_t kv8_checkpoint_find(const kv8_checkpoint *checkpoint, const char *name) {
    size_t low = 0, high = checkpoint->num_tensors;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const int order = strcmp(checkpoint->by_name[middle]->name, name);
        if (order == 0) return (int64_t)middle;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}
