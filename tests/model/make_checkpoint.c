/* make_checkpoint.c - synthesises a valid gpt-oss checkpoint of any shape: config.json, and
 * safetensors files in shards with an index. Small tensors are random; of each large one the first
 * 64 KiB are, and the rest is a hole of zeros, so that 20b takes 13.8 GB in name and some 50 MB on
 * disk; with --full they are written, the same MiB over and over.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <getopt.h>
#include <sys/stat.h>

#include "checkpoint_files.h"

enum { WHOLE_BYTES = 1 << 20, HEAD_BYTES = 64 << 10, MAX_SHARDS = 64 };

static const struct {
    const char *name;
    checkpoint_shape shape;
    int64_t shards;
} presets[] = {
    {"tiny", {6, 256, 256, 8, 2, 64, 8, 4, 4096, 128, 131072}, 1},
    {"20b", {24, 2880, 2880, 64, 8, 64, 32, 4, 201088, 128, 131072}, 3},
    {"120b", {36, 2880, 2880, 64, 8, 64, 128, 4, 201088, 128, 131072}, 15},
};

static int usage(FILE *to) {
    fputs(
        "usage: make_checkpoint DIRECTORY [--preset tiny|20b|120b] [--shards N] [--seed N]\n"
        "       [--layers N] [--hidden N] [--intermediate N] [--heads N] [--kv-heads N]\n"
        "       [--head-dim N] [--experts N] [--experts-per-token N] [--vocab N] [--window N]\n"
        "       [--max-seq-len N] [--full]\n"
        "Writes a random but valid gpt-oss checkpoint; large tensors are mostly holes, but with "
        "--full.\n",
        to);
    return to == stdout ? 0 : 2;
}

/* Data of one tensor at the file's position; a hole is skipped. */
static void write_data(FILE *file, const file_tensor *tensor, bool full, uint64_t *rng) {
    static uint8_t buffer[WHOLE_BYTES];
    const bool is_small = tensor->bytes <= WHOLE_BYTES;
    const size_t head = is_small ? (size_t)tensor->bytes : full ? WHOLE_BYTES : HEAD_BYTES;
    fill_tensor(tensor, rng, buffer, head);
    fwrite(buffer, 1, head, file);
    for (uint64_t at = head; full && at < tensor->bytes; at += head)
        fwrite(buffer, 1, tensor->bytes - at < head ? (size_t)(tensor->bytes - at) : head, file);
    if (!full && fseeko(file, (off_t)(tensor->bytes - head), SEEK_CUR) != 0) abort();
}

static void write_shard(const char *directory, const char *name, const file_tensor *tensors,
                        size_t count, bool full, uint64_t *rng) {
    FILE *const file = open_or_abort(directory, name);
    write_header(file, tensors, count, 0);
    for (size_t i = 0; i < count; i++) write_data(file, &tensors[i], full, rng);
    const off_t end = ftello(file);
    if (fflush(file) != 0 || ftruncate(fileno(file), end) != 0) abort();
    close_or_abort(file);
}

/* Splits the list into `shards` runs of about equal bytes. */
static void write_all(const char *directory, const file_tensor *tensors, size_t count,
                      size_t shards, bool full, uint64_t seed) {
    static char names[MAX_SHARDS][64];
    const char *files[MAX_SHARDS];
    int *const file_of = calloc(count, sizeof *file_of);
    if (file_of == NULL) abort();
    uint64_t total = 0, done = 0, rng = seed;
    for (size_t i = 0; i < count; i++) total += tensors[i].bytes;
    for (size_t s = 0, first = 0; s < shards; s++) {
        size_t last = first;
        while (last < count && (s + 1 == shards || done < total / shards * (s + 1))) {
            done += tensors[last].bytes;
            file_of[last++] = (int)s;
        }
        snprintf(names[s], sizeof names[s], "model-%05zu-of-%05zu.safetensors", s, shards - 1);
        files[s] = shards == 1 ? "model.safetensors" : names[s];
        write_shard(directory, files[s], tensors + first, last - first, full, &rng);
        first = last;
    }
    if (shards > 1) write_index(directory, tensors, count, files, file_of);
    free(file_of);
}

int main(int argc, char **argv) {
    checkpoint_shape shape = presets[0].shape;
    int64_t shards = presets[0].shards, seed = 1;
    bool full = false;
    const struct option options[] = {{"help", no_argument, NULL, 'h'},
                                     {"preset", required_argument, NULL, 'p'},
                                     {"shards", required_argument, NULL, 0},
                                     {"seed", required_argument, NULL, 0},
                                     {"layers", required_argument, NULL, 0},
                                     {"hidden", required_argument, NULL, 0},
                                     {"intermediate", required_argument, NULL, 0},
                                     {"heads", required_argument, NULL, 0},
                                     {"kv-heads", required_argument, NULL, 0},
                                     {"head-dim", required_argument, NULL, 0},
                                     {"experts", required_argument, NULL, 0},
                                     {"experts-per-token", required_argument, NULL, 0},
                                     {"vocab", required_argument, NULL, 0},
                                     {"window", required_argument, NULL, 0},
                                     {"max-seq-len", required_argument, NULL, 0},
                                     {"full", no_argument, NULL, 'f'},
                                     {NULL, 0, NULL, 0}};
    int64_t *const values[] = {NULL,
                               NULL,
                               &shards,
                               &seed,
                               &shape.layers,
                               &shape.hidden,
                               &shape.intermediate,
                               &shape.heads,
                               &shape.kv_heads,
                               &shape.head_dim,
                               &shape.experts,
                               &shape.experts_per_token,
                               &shape.vocab,
                               &shape.window,
                               &shape.max_seq_len};
    for (int which = 0, got; (got = getopt_long(argc, argv, "", options, &which)) != -1;) {
        if (got == 'h') return usage(stdout);
        if (got == '?') return usage(stderr);
        if (got == 'f') full = true;
        if (got == 'f') continue;
        if (got == 0) {
            char *end = NULL;
            *values[which] = strtoll(optarg, &end, 10);
            if (*end != '\0' || *values[which] < 1) return usage(stderr);
            continue;
        }
        size_t p = 0;
        while (p < sizeof presets / sizeof presets[0] && strcmp(presets[p].name, optarg) != 0) p++;
        if (p == sizeof presets / sizeof presets[0]) return usage(stderr);
        shape = presets[p].shape;
        shards = presets[p].shards;
    }
    if (optind + 1 != argc || shards > MAX_SHARDS) return usage(stderr);
    const char *const directory = argv[optind];
    if (mkdir(directory, 0777) != 0 && errno != EEXIST) {
        perror(directory);
        return 2;
    }
    file_tensor *const tensors = calloc(num_checkpoint_tensors(&shape), sizeof *tensors);
    if (tensors == NULL) abort();
    const size_t count = list_tensors(&shape, tensors);
    write_config(directory, &shape);
    write_all(directory, tensors, count, (size_t)shards, full, (uint64_t)seed);
    free(tensors);
    return 0;
}
