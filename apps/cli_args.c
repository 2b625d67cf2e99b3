/* cli_args.c - the arguments of a verb, by getopt_long over one table that --help prints too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MAX_OPTIONS = 32 };

static void print_option(const char *name, const char *argument, const char *help) {
    char left[64];
    snprintf(left, sizeof left, "--%s%s%s", name, argument == NULL ? "" : " ",
             argument == NULL ? "" : argument);
    /* Further lines of the help stand under the first. */
    printf("  %-22s", left);
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

/* The long options that getopt wants; the index of --help is num_options. */
static void fill_long_options(const cli_command *command, struct option *out) {
    for (size_t i = 0; i < command->num_options; i++)
        out[i] = (struct option){
            .name = command->options[i].name,
            .has_arg = command->options[i].kind == CLI_FLAG ? no_argument : required_argument};
    out[command->num_options] = (struct option){.name = "help"};
}

int cli_parse(const cli_command *command, int argc, char **argv, const char **model_out) {
    struct option long_options[MAX_OPTIONS + 2] = {{0}};
    if (command->num_options > MAX_OPTIONS) return cli_fail("too many options");
    fill_long_options(command, long_options);
    opterr = 0; /* errors are ours: one line each */
    optind = 1;
    for (;;) {
        int idx = -1;
        const char *const word = optind < argc ? argv[optind] : "";
        const int found = getopt_long(argc, argv, ":h", long_options, &idx);
        if (found == -1) break;
        if (found == 'h' || (found == 0 && (size_t)idx == command->num_options)) {
            print_help(command);
            return cli_finish_stdout();
        }
        if (found == ':') return cli_fail("%s needs a value", argv[optind - 1]);
        if (found != 0) {
            /* A flag given a value, an ambiguous prefix, or a name nobody knows. */
            const char *const given = word[0] == '-' ? word : argv[optind - 1];
            return cli_fail("unknown or misused option %s; see its --help", given);
        }
        const int status = set_value(&command->options[idx], optarg);
        if (status >= 0) return status;
    }
    *model_out = optind < argc ? argv[optind] : NULL;
    if (*model_out == NULL && !command->model_is_optional)
        return cli_fail("which model? usage: %s", command->usage);
    if (optind + 1 < argc)
        return cli_fail("one model at a time, \"%s\" is left over", argv[optind + 1]);
    return -1;
}
