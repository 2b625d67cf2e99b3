/* kv8.c - the program: picks the verb. Each verb lives in its cmd_<verb>.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "cli.h"

static const struct verb {
    const char *name, *about;
    int (*run)(int argc, char **argv);
} verbs[] = {
    {"compare", "what storing the KV cache in a format does to a model", cmd_compare},
    {"generate", "continue a prompt or answer a chat", cmd_generate},
    {"score", "loss of a model on given tokens", cmd_score},
    {"serve", "the model to clients of OpenAI's API", cmd_serve},
    {"simulate", "what a server would do under load", cmd_simulate},
    {"calibrate", "scales fitted to a text, and the cheapest KV formats", cmd_calibrate},
    {"bench", "kernels and models beside this machine's limits", cmd_bench},
    {"info", "this machine, and the facts of a model", cmd_info},
};
enum { NUM_VERBS = sizeof verbs / sizeof verbs[0] };

static int print_usage(void) {
    printf(
        "usage: kv8 VERB [MODEL] [options]\n\n"
        "Attention over a paged KV cache in FP8, INT8 or bf16, and what it does to gpt-oss.\n"
        "MODEL is a checkpoint directory (config.json, safetensors, tokenizer.json).\n\nverbs:\n");
    for (int i = 0; i < NUM_VERBS; i++) printf("  %-10s %s\n", verbs[i].name, verbs[i].about);
    printf(
        "\nkv8 VERB --help lists a verb's options, kv8 --version prints the version.\n"
        "KV8_ISA=scalar|avx2|avx512|avx512_bf16|amx|neon|neon_bf16 in the environment lowers the\n"
        "instruction set. NO_COLOR turns colours off. Exit status: 0, 2 after an error, 130 after\n"
        "Ctrl-C, 143 after SIGTERM.\n");
    return cli_finish_stdout();
}

static int fail_verb(const char *word) {
    const char *names[NUM_VERBS];
    for (int i = 0; i < NUM_VERBS; i++) names[i] = verbs[i].name;
    const char *const nearest = cli_nearest(word, names, NUM_VERBS);
    return cli_fail("unknown verb \"%s\"%s%s; kv8 --help lists them", word,
                    nearest == NULL ? "" : ", did you mean ", nearest == NULL ? "" : nearest);
}

static const struct verb *find_verb(const char *name) {
    for (int i = 0; i < NUM_VERBS; i++) {
        if (strcmp(verbs[i].name, name) == 0) return &verbs[i];
    }
    return NULL;
}

int main(int argc, char **argv) {
    cli_hold_streams();
    const char *const word = argc > 1 ? argv[1] : "";
    const bool is_help = strcmp(word, "help") == 0;
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || (is_help && argc == 2))
        return print_usage();
    if (strcmp(word, "--version") == 0) {
        printf("kv8 %s\n", kv8_version());
        return cli_finish_stdout();
    }
    if (argc < 2) return cli_fail("which verb? kv8 --help lists them");
    const struct verb *const verb = find_verb(is_help ? argv[2] : word);
    if (verb == NULL) return fail_verb(is_help ? argv[2] : word);
    cli_set_verb(verb->name);
    cli_catch_faults();
    if (!is_help) {
        const int status = verb->run(argc - 1, argv + 1);
        if (status != 0 && status == cli_interrupted()) (void)cli_fail("interrupted");
        return status;
    }
    char help[] = "--help";
    char *help_argv[] = {argv[2], help, NULL};
    return verb->run(2, help_argv);
}
