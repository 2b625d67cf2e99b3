/* cmd_bench.c - kv8 bench: picks what to measure. The measuring lives in bench/.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "bench.h"

int cmd_bench(int argc, char **argv) {
    const char *const what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "attention") == 0) {
        cli_set_verb("bench attention");
        return bench_attention(argc - 1, argv + 1);
    }
    if (strcmp(what, "model") == 0) {
        cli_set_verb("bench model");
        return bench_model(argc - 1, argv + 1);
    }
    if (strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0) {
        printf(
            "usage: kv8 bench attention [options]\n"
            "       kv8 bench model MODEL [options]\n\n"
            "attention  kernels on random caches, beside this machine's limits\n"
            "model      prefill and decode speed of a model, as llama-bench counts them\n\n"
            "Each has its own --help.\n");
        return cli_finish_stdout();
    }
    return cli_fail("what to measure is \"%s\", must be attention or model", what);
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bench_times bench_summary(double *samples, int32_t num) {
    qsort(samples, (size_t)num, sizeof *samples, compare_doubles);
    return (bench_times){
        .median = num % 2 == 1 ? samples[num / 2] : (samples[num / 2 - 1] + samples[num / 2]) / 2,
        .least = samples[0],
        .most = samples[num - 1],
        .num = num,
    };
}

uint64_t bench_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u); /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
