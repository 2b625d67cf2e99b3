/* replay_seeds.c - main of a fuzz harness in builds without libFuzzer: feeds it each file named on
 * the command line, so that every compiler builds the harness and every test run replays the seeds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path) {
    FILE *const file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return perror(path), 1;
    const long size = ftell(file);
    rewind(file);
    /* A copy of its own size, so that a sanitizer sees the first byte too far. */
    uint8_t *const data = malloc(size > 0 ? (size_t)size : 1);
    if (size < 0 || data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size)
        return perror(path), 1;
    (void)fclose(file);
    (void)LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return fprintf(stderr, "no seeds given\n"), 1;
    for (int i = 1; i < argc; i++) {
        if (replay(argv[i]) != 0) return 1;
    }
    printf("%d seeds replayed\n", argc - 1);
    return 0;
}
