/* model_load.c - kv8 bench load: how fast a checkpoint comes into a GPU's memory, beside what
 * bounds it: the disk, read as dd reads it, and a copy from page-locked memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"

enum { PIECE_BYTES = 16 << 20, MAX_FILES = 1024 };

typedef struct load_args {
    const char *model, *device;
    int32_t threads;
    bool json;
} load_args;

/* The checkpoint's files. */
typedef struct file_list {
    char *paths[MAX_FILES];
    int32_t num;
    bool is_full; /* no memory, or more files than that */
} file_list;

typedef struct load_rates {
    double bytes;                /* of tensors */
    double copy_gb_s, disk_gb_s; /* what bounds loading; of the disk, and from the page cache */
    double cached_gb_s;
    double cold_seconds,
        warm_seconds; /* of opening the model, its files on disk alone, and cached */
} load_rates;

/* --- files --- */

/* A kv8_model_visit_tensors visitor. */
static int add_file(void *cookie, const kv8_tensor_info *tensor) {
    file_list *const list = cookie;
    char *const path = strdup(tensor->file);
    list->is_full = path == NULL || list->num == MAX_FILES;
    if (list->is_full) {
        free(path);
        return 1;
    }
    for (int32_t i = 0; i < list->num; i++) {
        if (strcmp(list->paths[i], path) != 0) continue;
        free(path);
        return 0;
    }
    list->paths[list->num++] = path;
    return 0;
}

static int list_files(const load_args *args, file_list *list) {
    cli_model model;
    int status = cli_model_open(&model, &(cli_opening){.directory = args->model, .threads = 1});
    if (status == CLI_OK) kv8_model_visit_tensors(model.model, add_file, list);
    if (status == CLI_OK && list->is_full) status = cli_fail("too many files to list");
    cli_model_close(&model);
    return status;
}

/* Out of the page cache, so that they are read from the disk again; only what is written there. */
static int forget_files(const file_list *list) {
    for (int32_t i = 0; i < list->num; i++) {
        const int fd = open(list->paths[i], O_RDONLY);
        if (fd < 0) return cli_fail("%s: %s", list->paths[i], strerror(errno));
        (void)fdatasync(fd);
        const int error = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
        if (error != 0) return cli_fail("%s: %s", list->paths[i], strerror(error));
    }
    return CLI_OK;
}

/* All files one after another by read(), as dd does. */
static int read_files(const file_list *list, double *gb_s_out) {
    char *const buffer = malloc(PIECE_BYTES);
    if (buffer == NULL) return cli_fail("no memory to read into");
    const double begin = cli_seconds();
    double bytes = 0;
    int status = CLI_OK;
    for (int32_t i = 0; status == CLI_OK && i < list->num; i++) {
        const int fd = open(list->paths[i], O_RDONLY);
        ssize_t got = 0;
        while (fd >= 0 && cli_interrupted() == 0 && (got = read(fd, buffer, PIECE_BYTES)) > 0)
            bytes += (double)got;
        if (fd < 0 || got < 0) status = cli_fail("%s: %s", list->paths[i], strerror(errno));
        if (fd >= 0) close(fd);
        if (status == CLI_OK) status = cli_interrupted();
    }
    free(buffer);
    *gb_s_out = bytes / (cli_seconds() - begin) * 1e-9;
    return status;
}

/* --- the GPU --- */

/* The best of a few runs of copies of one page-locked piece. */
static kv8_status time_copies(kv8_stream *stream, void *to, const void *from, double *gb_s_out) {
    enum { RUNS = 5, COPIES = 32 };
    for (int run = 0; run < RUNS; run++) {
        const double begin = cli_seconds();
        for (int i = 0; i < COPIES; i++) {
            const kv8_status status = kv8_stream_copy(stream, to, from, PIECE_BYTES);
            if (status != KV8_OK) return status;
        }
        const kv8_status status = kv8_stream_synchronize(stream);
        if (status != KV8_OK) return status;
        const double gb_s = (double)COPIES * PIECE_BYTES / (cli_seconds() - begin) * 1e-9;
        if (gb_s > *gb_s_out) *gb_s_out = gb_s;
    }
    return KV8_OK;
}

static kv8_status measure_copy(int32_t device_idx, double *gb_s_out) {
    kv8_device *device = NULL;
    kv8_stream *stream = NULL;
    void *host = NULL, *memory = NULL;
    kv8_status status = kv8_device_open(&device, device_idx);
    if (status == KV8_OK) status = kv8_stream_create(&stream, device);
    if (status == KV8_OK) status = kv8_device_alloc_host(device, PIECE_BYTES, &host);
    if (status == KV8_OK) status = kv8_device_alloc(device, PIECE_BYTES, &memory);
    if (status == KV8_OK) status = time_copies(stream, memory, host, gb_s_out);
    if (device != NULL) {
        kv8_device_free(device, memory);
        kv8_device_free_host(device, host);
    }
    kv8_stream_destroy(stream);
    kv8_device_close(device);
    return status;
}

static int time_opening(const load_args *args, load_rates *rates, double *seconds_out) {
    cli_model model;
    const double begin = cli_seconds();
    const int status = cli_model_open(
        &model,
        &(cli_opening){.directory = args->model, .device = args->device, .threads = args->threads});
    *seconds_out = cli_seconds() - begin;
    rates->bytes = (double)model.info.bytes;
    cli_model_close(&model);
    return status;
}

/* --- the result --- */

static double slower(double a, double b) {
    return a < b ? a : b;
}

static int report(const load_args *args, const load_rates *r) {
    const double cold = r->bytes / r->cold_seconds * 1e-9;
    const double warm = r->bytes / r->warm_seconds * 1e-9;
    const double cold_share = cold / slower(r->disk_gb_s, r->copy_gb_s);
    const double warm_share = warm / slower(r->cached_gb_s, r->copy_gb_s);
    if (args->json) {
        json_t *const root = json_pack(
            "{s:s, s:o, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "version", kv8_version(), "model",
            cli_json_text(args->model), "bytes", (json_int_t)r->bytes, "copy_gb_s", r->copy_gb_s,
            "disk_gb_s", r->disk_gb_s, "cached_gb_s", r->cached_gb_s, "cold_seconds",
            r->cold_seconds, "warm_seconds", r->warm_seconds, "cold_share", cold_share,
            "warm_share", warm_share);
        const int status = cli_write_json(root, stdout, "stdout");
        return status == CLI_OK ? cli_finish_stdout() : status;
    }
    printf("%s: %.2f GB\n\n", args->model, r->bytes * 1e-9);
    printf("copy from page-locked memory %8.2f GB/s\n", r->copy_gb_s);
    printf("disk, read in order          %8.2f GB/s\n", r->disk_gb_s);
    printf("page cache, read in order    %8.2f GB/s\n\n", r->cached_gb_s);
    printf("loaded from the disk         %8.2f GB/s in %.2f s, %.0f %% of the slower\n", cold,
           r->cold_seconds, 100 * cold_share);
    printf("loaded from the page cache   %8.2f GB/s in %.2f s, %.0f %% of the slower\n", warm,
           r->warm_seconds, 100 * warm_share);
    return cli_finish_stdout();
}

static int parse(load_args *args, int argc, char **argv) {
    const cli_option options[] = {
        {"device", "DEVICE", "whose memory: cuda or cuda:N, the Nth GPU (cuda)", CLI_TEXT,
         &args->device},
        {"threads", "N", "threads (all processors)", CLI_INT, &args->threads, 1, CLI_MAX_THREADS},
        {"json", NULL, "print one JSON object", CLI_FLAG, &args->json},
    };
    const cli_command command = {
        .usage = "kv8 bench load MODEL [options]",
        .about =
            "How fast a checkpoint comes into a GPU's memory, from the disk and from the page\n"
            "cache, beside the slower of reading it and a copy from page-locked memory.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    return cli_parse(&command, argc, argv, &args->model);
}

static int measure(const load_args *args, int32_t device_idx, const file_list *files,
                   load_rates *rates) {
    const kv8_status copied = measure_copy(device_idx, &rates->copy_gb_s);
    if (copied != KV8_OK) return cli_fail_status(copied);
    int status = forget_files(files);
    if (status == CLI_OK) status = read_files(files, &rates->disk_gb_s);
    if (status == CLI_OK) status = read_files(files, &rates->cached_gb_s);
    if (status == CLI_OK) status = forget_files(files);
    if (status == CLI_OK) status = time_opening(args, rates, &rates->cold_seconds);
    if (status == CLI_OK) status = time_opening(args, rates, &rates->warm_seconds);
    return status;
}

int bench_load(int argc, char **argv) {
    load_args args = {.device = "cuda"};
    int32_t device_idx = -1;
    int status = parse(&args, argc, argv);
    if (status >= 0) return status;
    status = cli_device(args.device, &device_idx);
    if (status != CLI_OK) return status;
    if (device_idx < 0) return cli_fail("--device is \"%s\", must be cuda or cuda:N", args.device);
    if (strncmp(args.model, KV8_RANDOM_PREFIX, strlen(KV8_RANDOM_PREFIX)) == 0)
        return cli_fail("%s has no files to load", args.model);
    cli_catch_interrupt();
    file_list files = {0};
    load_rates rates = {0};
    status = list_files(&args, &files);
    if (status == CLI_OK) status = measure(&args, device_idx, &files, &rates);
    if (status == CLI_OK) status = report(&args, &rates);
    for (int32_t i = 0; i < files.num; i++) free(files.paths[i]);
    return status;
}
