/* file.c - files: mapped, read whole, or written so that they appear whole or not at all.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base_impl.h"

/* O_NONBLOCK: opening a named pipe would wait for a writer; regular files do not know it. */
static kv8_status open_regular(const char *path, int *fd_out, size_t *size_out) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kv8_fail(errno == ENOENT ? KV8_ERR_NOT_FOUND : KV8_ERR_IO, "%s: %s", path,
                        strerror(errno));
    struct stat info;
    if (fstat(fd, &info) != 0) {
        const int error = errno;
        close(fd);
        return kv8_fail(KV8_ERR_IO, "%s: %s", path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return kv8_fail(KV8_ERR_INVALID, "%s: not a regular file", path);
    }
    *fd_out = fd;
    *size_out = (size_t)info.st_size;
    return KV8_OK;
}

kv8_status kv8_file_map_open(kv8_file_map *map_out, const char *path) {
    *map_out = (kv8_file_map){0};
    int fd = -1;
    size_t size = 0;
    KV8_TRY(open_regular(path, &fd, &size));
    if (size == 0) {
        close(fd);
        return kv8_fail(KV8_ERR_CORRUPT, "%s: the file is empty", path);
    }
    void *const data = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    const int error = errno;
    close(fd);
    if (data == MAP_FAILED)
        return kv8_fail(KV8_ERR_IO, "%s: cannot map %zu bytes: %s", path, size, strerror(error));
    *map_out = (kv8_file_map){.data = data, .size = size};
    return KV8_OK;
}

void kv8_file_map_close(kv8_file_map *map) {
    if (map->data != NULL) munmap((void *)(uintptr_t)map->data, map->size);
    *map = (kv8_file_map){0};
}

kv8_status kv8_file_read(const char *path, size_t max_size, char **data_out, size_t *size_out) {
    int fd = -1;
    size_t size = 0;
    KV8_TRY(open_regular(path, &fd, &size));
    if (size > max_size) {
        close(fd);
        return kv8_fail(KV8_ERR_INVALID, "%s: %zu bytes, the limit is %zu", path, size, max_size);
    }
    void *memory = NULL;
    kv8_status status = kv8_alloc(NULL, size + 1, 1, path, &memory);
    char *const data = memory;
    size_t done = 0;
    while (status == KV8_OK && done < size) {
        const ssize_t got = read(fd, data + done, size - done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) status = kv8_fail(KV8_ERR_IO, "%s: %s", path, strerror(errno));
        if (got == 0) status = kv8_fail(KV8_ERR_IO, "%s: shrank while it was read", path);
        if (got > 0) done += (size_t)got;
    }
    close(fd);
    if (status != KV8_OK) {
        kv8_release(NULL, memory, size + 1, 1);
        return status;
    }
    *data_out = data;
    *size_out = size;
    return KV8_OK;
}

kv8_status kv8_file_writer_open(kv8_file_writer *writer_out, const char *path) {
    *writer_out = (kv8_file_writer){0};
    static const char suffix[] = ".XXXXXX";
    kv8_file_writer writer = {.path = strdup(path),
                              .temporary = malloc(strlen(path) + sizeof suffix)};
    if (writer.path == NULL || writer.temporary == NULL) {
        free(writer.path);
        free(writer.temporary);
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory for its name", path);
    }
    strcpy(writer.temporary, path);
    strcat(writer.temporary, suffix);
    const int fd = mkstemp(writer.temporary);
    if (fd >= 0) writer.file = fdopen(fd, "wb");
    if (writer.file == NULL) {
        const int error = errno;
        if (fd >= 0) {
            close(fd);
            unlink(writer.temporary);
        }
        free(writer.path);
        free(writer.temporary);
        return kv8_fail(KV8_ERR_IO, "%s: cannot write: %s", path, strerror(error));
    }
    fchmod(fd, 0644);
    *writer_out = writer;
    return KV8_OK;
}

kv8_status kv8_file_writer_write(kv8_file_writer *writer, const void *data, size_t size) {
    if (fwrite(data, 1, size, writer->file) != size)
        return kv8_fail(KV8_ERR_IO, "%s: write failed: %s", writer->path, strerror(errno));
    return KV8_OK;
}

static void writer_close(kv8_file_writer *writer) {
    free(writer->path);
    free(writer->temporary);
    *writer = (kv8_file_writer){0};
}

/* The rename itself survives a crash only once the directory is synced. */
static void sync_directory_of(const char *path) {
    char *const copy = strdup(path);
    if (copy == NULL) return;
    const int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(copy);
}

kv8_status kv8_file_writer_commit(kv8_file_writer *writer) {
    if (fflush(writer->file) != 0 || fsync(fileno(writer->file)) != 0)
        return kv8_fail(KV8_ERR_IO, "%s: write failed: %s", writer->path, strerror(errno));
    FILE *const file = writer->file;
    writer->file = NULL;
    if (fclose(file) != 0)
        return kv8_fail(KV8_ERR_IO, "%s: write failed: %s", writer->path, strerror(errno));
    if (rename(writer->temporary, writer->path) != 0)
        return kv8_fail(KV8_ERR_IO, "%s: cannot rename the finished file: %s", writer->path,
                        strerror(errno));
    sync_directory_of(writer->path);
    writer_close(writer);
    return KV8_OK;
}

void kv8_file_writer_abort(kv8_file_writer *writer) {
    if (writer->path == NULL) return;
    if (writer->file != NULL) fclose(writer->file);
    unlink(writer->temporary);
    writer_close(writer);
}
