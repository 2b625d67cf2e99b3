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
    if (strcmp(what, "load") == 0) {
        cli_set_verb("bench load");
        return bench_load(argc - 1, argv + 1);
    }
    if (strcmp(what, "--help") == 0 || strcmp(what, "-h") == 0) {
        printf(
            "usage: kv8 bench attention [options]\n"
            "       kv8 bench model MODEL [options]\n"
            "       kv8 bench load MODEL [options]\n\n"
            "attention  kernels on random caches, beside this machine's limits\n"
            "model      prefill and decode speed of a model, as llama-bench counts them\n"
            "load       how fast a checkpoint comes into a GPU's memory\n\n"
            "Each has its own --help.\n");
        return cli_finish_stdout();
    }
    return cli_fail("what to measure is \"%s\", must be attention, model or load", what);
}
