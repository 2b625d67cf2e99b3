/* cli_args.c - the arguments of a verb, by getopt_long over one table that --help prints too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

enum { MAX_OPTIONS = 48, FIRST_OPTION = 256 }; /* getopt returns characters below */

static void print_option(const char *name, const char *argument, const char *help) {
    char left[64];
    snprintf(left, sizeof left, "--%s%s%s", name, argument == NULL ? "" : " ",
             argument == NULL ? "" : argument);
    /* Further lines of the help stand under the first, all lines under a long name. */
    printf("  %-22s", left);
    if (strlen(left) >= 22) printf("\n  %-22s", "");
    for (const char *c = help; *c != '\0'; c++) {
        putchar(*c);
        if (*c == '\n') printf("  %-22s", "");
    }
    putchar('\n');
}

static void print_help(const cli_command *command) {
    printf("usage: %s\n\n%s\n\noptions:\n", command->usage, command->about);
    for (size_t i = 0; i < command->num_options; i++) {
        const cli_option *const option = &command->options[i];
        print_option(option->name, option->argument, option->help);
    }
    print_option("help", NULL, "this text");
}

static int bad_value(const cli_option *option, const char *text) {
    if (option->kind == CLI_SEED)
        return cli_fail("--%s is \"%s\", must be a whole number from 0 to 18446744073709551615",
                        option->name, text);
    return cli_fail("--%s is \"%s\", must be a %s from %.10g to %.10g", option->name, text,
                    option->kind == CLI_INT ? "whole number" : "number", option->min, option->max);
}

/* Returns -1 or CLI_FAILED. */
static int set_value(const cli_option *option, const char *text) {
    char *end = NULL;
    errno = 0;
    switch (option->kind) {
        case CLI_FLAG: *(bool *)option->value = true; return -1;
        case CLI_OUTPUT:
        case CLI_TEXT: *(const char **)option->value = text; return -1;
        case CLI_SEED: {
            const unsigned long long seed = strtoull(text, &end, 10);
            if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0)
                return bad_value(option, text);
            *(uint64_t *)option->value = seed;
            return -1;
        }
        case CLI_INT: {
            const long long number = strtoll(text, &end, 10);
            if (end == text || isspace((unsigned char)text[0]) || *end != '\0' || errno != 0 ||
                (double)number < option->min || (double)number > option->max)
                return bad_value(option, text);
            *(int32_t *)option->value = (int32_t)number;
            return -1;
        }
        case CLI_FLOAT: {
            const double number = strtod(text, &end);
            if (end == text || isspace((unsigned char)text[0]) || *end != '\0' ||
                !(number >= option->min && number <= option->max))
                return bad_value(option, text);
            *(float *)option->value = (float)number;
            return -1;
        }
    }
    return -1;
}

/* The long options that getopt wants; the index of --help is num_options. Without a value of its
 * own each, getopt takes the first of several that begin as the word does. */
static void fill_long_options(const cli_command *command, struct option *out) {
    for (size_t i = 0; i < command->num_options; i++)
        out[i] = (struct option){
            .name = command->options[i].name,
            .has_arg = command->options[i].kind == CLI_FLAG ? no_argument : required_argument,
            .val = FIRST_OPTION + (int)i};
    out[command->num_options] =
        (struct option){.name = "help", .val = FIRST_OPTION + (int)command->num_options};
}

/* What getopt_long does not take: a flag given a value, a beginning that two options share, or a
 * name nobody knows. */
static int fail_option(const cli_command *command, const char *word) {
    const char *names[MAX_OPTIONS + 1], *match = NULL;
    const char *const name = word + strspn(word, "-");
    char given[64];
    const int length = (int)strcspn(name, "=");
    snprintf(given, sizeof given, "%.*s", length, name);
    int num_matches = 0;
    for (size_t i = 0; i <= command->num_options; i++) {
        names[i] = i < command->num_options ? command->options[i].name : "help";
        if (word[1] != '-' || strncmp(names[i], given, strlen(given)) != 0) continue;
        if (strcmp(names[i], given) == 0) return cli_fail("--%s takes no value: %s", given, word);
        if (num_matches++ == 0) match = names[i];
    }
    if (num_matches == 1) return cli_fail("--%s takes no value: %s", match, word);
    if (num_matches > 1)
        return cli_fail("%s may be --%s or another option; see kv8 %s --help", word, match,
                        cli_verb());
    const char *const nearest = cli_nearest(given, names, command->num_options + 1);
    return cli_fail("unknown option %s%s%s; see kv8 %s --help", word,
                    nearest == NULL ? "" : ", did you mean --", nearest == NULL ? "" : nearest,
                    cli_verb());
}

/* -o is --output, where a verb has it. */
static int find_output(const cli_command *command) {
    for (size_t i = 0; i < command->num_options; i++) {
        if (strcmp(command->options[i].name, "output") == 0) return (int)i;
    }
    return -1;
}

/* What follows the options. */
static int take_operand(const cli_command *command, int argc, char **argv, const char **model_out) {
    const char *const operand = optind < argc ? argv[optind] : NULL;
    const int num_taken = model_out != NULL;
    if (optind + num_taken < argc)
        return cli_fail("\"%s\" is left over; usage: %s", argv[optind + num_taken], command->usage);
    if (model_out == NULL) return -1;
    *model_out = operand;
    if (operand == NULL && !command->model_is_optional)
        return cli_fail("which model? usage: %s", command->usage);
    return -1;
}

/* Whether an input's value names that file: one path, or several with commas between. */
static bool names_file(const cli_option *input, const struct stat *file) {
    const bool is_list = strcmp(input->argument, "FILES") == 0;
    bool found = false;
    const char *at = *(const char **)input->value;
    for (size_t length; at != NULL && *at != '\0' && !found; at += length + (at[length] == ',')) {
        struct stat info;
        length = is_list ? strcspn(at, ",") : strlen(at);
        char *const path = strndup(at, length);
        found = path != NULL && stat(path, &info) == 0 && info.st_dev == file->st_dev &&
                info.st_ino == file->st_ino;
        free(path);
    }
    return found;
}

/* Whether a file lies in the model's directory and is one that models are read from. */
static bool is_of_model(const char *path, const char *model) {
    static const char *const names[] = {"config.json", "generation_config.json", "tokenizer.json"};
    static const char *const ends[] = {".safetensors", ".safetensors.index.json"};
    struct stat directory, own;
    char *const copy = strdup(path);
    const bool inside = copy != NULL && model != NULL && stat(dirname(copy), &directory) == 0 &&
                        stat(model, &own) == 0 && directory.st_dev == own.st_dev &&
                        directory.st_ino == own.st_ino;
    free(copy);
    const char *const slash = strrchr(path, '/'), *const name = slash == NULL ? path : slash + 1;
    bool found = false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        found |= strcmp(name, names[i]) == 0;
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const size_t length = strlen(name), tail = strlen(ends[i]);
        found |= length >= tail && strcmp(name + length - tail, ends[i]) == 0;
    }
    return inside && found;
}

/* Returns -1, or CLI_FAILED where an output would replace what is read. */
static int check_outputs(const cli_command *command, const char *model) {
    for (size_t i = 0; i < command->num_options; i++) {
        const cli_option *const output = &command->options[i];
        if (output->kind != CLI_OUTPUT) continue;
        const char *const path = *(const char **)output->value;
        struct stat file;
        if (path == NULL || stat(path, &file) != 0) continue;
        if (S_ISREG(file.st_mode) && is_of_model(path, model))
            return cli_fail("--%s %s would replace a file of the model", output->name, path);
        for (size_t k = 0; k < command->num_options; k++) {
            const cli_option *const input = &command->options[k];
            if (input->kind != CLI_TEXT || strncmp(input->argument, "FILE", 4) != 0) continue;
            if (names_file(input, &file))
                return cli_fail("--%s %s would replace what --%s reads", output->name, path,
                                input->name);
        }
    }
    return -1;
}

int cli_parse(const cli_command *command, int argc, char **argv, const char **model_out) {
    struct option long_options[MAX_OPTIONS + 2] = {{0}};
    if (command->num_options > MAX_OPTIONS) return cli_fail("too many options");
    fill_long_options(command, long_options);
    opterr = 0; /* errors are ours: one line each */
    optind = 1;
    for (;;) {
        const char *const word = optind < argc ? argv[optind] : "";
        const int found = getopt_long(argc, argv, ":ho:", long_options, NULL);
        if (found == -1) break;
        const int option_idx = found == 'o' ? find_output(command) : found - FIRST_OPTION;
        if (found == 'h' || option_idx == (int)command->num_options) {
            print_help(command);
            return cli_finish_stdout();
        }
        if (found == ':') return cli_fail("%s needs a value", argv[optind - 1]);
        if (option_idx < 0) return fail_option(command, word[0] == '-' ? word : argv[optind - 1]);
        const int status = set_value(&command->options[option_idx], optarg);
        if (status >= 0) return status;
    }
    const int status = take_operand(command, argc, argv, model_out);
    return status >= 0 ? status : check_outputs(command, model_out == NULL ? NULL : *model_out);
}
