/* cli.h - what the verbs of the program share: arguments, errors, files in and out, progress, the
 * opened model, the plot. Sees include/kv8/ only; the numbers come from the library.
 *
 * A verb is a function from its arguments to an exit status. It prints at most one line to stderr,
 * "kv8 VERB: cause", when it fails, and leaves no partial file.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CLI_H
#define KV8_CLI_H

#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <kv8/kv8_engine.h>

enum { CLI_OK = 0, CLI_FAILED = 2 };
enum { CLI_MAX_THREADS = 1024 }; /* what kv8_threads_create() takes */

int cmd_compare(int argc, char **argv);
int cmd_generate(int argc, char **argv);
int cmd_score(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_simulate(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_calibrate(int argc, char **argv);
int cmd_info(int argc, char **argv);

/* --- errors (cli.c) --- */

/* Takes the places of standard streams that were closed, so that no file that is opened later is
 * written or read as one: what would go there fails as before. The program's first call. */
void cli_hold_streams(void);
/* Names the verb in every later error; "" before that. */
void cli_set_verb(const char *verb);
const char *cli_verb(void);
/* "kv8 VERB: ..." on stderr; returns CLI_FAILED. */
int cli_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The library's message, or the interrupt's status without a word. */
int cli_fail_status(kv8_status status);

/* From here on a mapped file that is cut short ends the program with a line (cli_fault.c). */
void cli_catch_faults(void);

/* --- words (cli_words.c) --- */

/* The name that a misspelt word is nearest to; NULL when none is near. */
const char *cli_nearest(const char *word, const char *const names[], size_t num);
/* Index of `text` among the names, or -1 after the error: an option's value that is none of them.
 */
int cli_word(const char *option, const char *text, const char *const names[], size_t num);
/* Reads a list of KV settings. */
int cli_parse_kv(const char *text, kv8_kv_setting *settings_out, int32_t capacity,
                 int32_t *num_out);
/* Fails with the library's message about `text`, KV settings or dtypes, and a suggestion. */
int cli_fail_kv(const char *text);

/* --- arguments (cli_args.c) --- */

/* One --option. `help` is its line of --help. CLI_OUTPUT is the path of a file that is written,
 * which must be none that an option with an argument "FILE" or "FILES" reads. */
typedef struct cli_option {
    const char *name;     /* without the dashes */
    const char *argument; /* "N", "FILE"; NULL = a flag */
    const char *help;
    enum { CLI_FLAG, CLI_TEXT, CLI_OUTPUT, CLI_INT, CLI_SEED, CLI_FLOAT } kind;
    void *value; /* bool, const char *, int32_t, uint64_t or float; keeps its default when unused */
    double min, max; /* CLI_INT and CLI_FLOAT: what is accepted */
} cli_option;

typedef struct cli_command {
    const char *usage; /* "kv8 score MODEL --tokens FILE.json [options]" */
    const char *about; /* what the verb does, lines of at most 80 characters */
    const cli_option *options;
    size_t num_options;
    bool model_is_optional;
} cli_command;

/* Reads argv into the options' values and *model_out, the one operand; with model_out NULL there is
 * none. Returns -1 to go on, or the exit status: --help prints to stdout and gives CLI_OK, a
 * mistake gives CLI_FAILED. */
int cli_parse(const cli_command *command, int argc, char **argv, const char **model_out);

/* --- interrupts (cli.c) --- */

/* From here on SIGINT (Ctrl-C) and SIGTERM are noted instead of ending the process. */
void cli_catch_interrupt(void);
/* 0, or the exit status that the noted signal asks for: 130 after SIGINT. */
int cli_interrupted(void);

/* --- files in (cli_input.c) --- */

/* A whole file, 0 after the last byte; pipes too, "-" = stdin. The caller frees. */
int cli_read_file(const char *path, char **data_out, size_t *size_out);
/* A text as a token stream: documents are separated by NUL bytes, each begins with <|endoftext|>
 * (where the tokenizer has it). The caller frees *ids_out. */
int cli_read_text(const kv8_tokenizer *tokenizer, const char *path, int32_t **ids_out,
                  int64_t *num_out);
/* A JSON array of ids, each in [0, vocab_size). The caller frees *ids_out. */
int cli_read_tokens(const char *path, int32_t vocab_size, int32_t **ids_out, int32_t *num_out);

/* --- files out (cli_output.c) --- */

/* A file that appears whole or not at all. Opened before long work, so that a path that cannot be
 * written is known at once. */
typedef struct cli_output {
    FILE *file;
    const char *path; /* borrowed */
    char *temporary;
} cli_output;
int cli_output_open(cli_output *output, const char *path);
int cli_output_commit(cli_output *output);
/* Of one never opened (all zero), or committed: nothing. */
void cli_output_abort(cli_output *output);
/* Unlinks what open outputs have written; for a program that ends at once. */
void cli_output_remove_all(void);
/* Whether the terminal behind stdout is to be coloured: not with NO_COLOR, nor a dumb one. */
bool cli_has_colour(void);

/* A JSON number, or null for NaN and infinities. */
json_t *cli_json_number(double value);
/* A JSON string, bytes that are no UTF-8 as U+FFFD: paths may hold any. NULL = no memory. */
json_t *cli_json_text(const char *text);
/* Writes and releases `root`; NULL (no memory) is an error too. */
int cli_write_json(json_t *root, FILE *file, const char *name);
/* What was printed to stdout has arrived. */
int cli_finish_stdout(void);
/* Whole UTF-8 at the start of bytes, invalid bytes as U+FFFD; the caller frees. NULL = no memory.
 */
char *cli_clean_utf8(const char *bytes, size_t length);

/* --- progress (cli_progress.c) --- */

/* A line on stderr with the time left, when stderr is a terminal. */
typedef struct cli_progress {
    bool enabled;
    double started, shown; /* seconds, monotonic */
} cli_progress;
void cli_progress_begin(cli_progress *progress);
void cli_progress_end(cli_progress *progress); /* clears the line */
/* A kv8_progress; cookie is a cli_progress. Asks to stop after an interrupt. */
int cli_progress_show(void *cookie, const char *what, uint64_t done, uint64_t total);
double cli_seconds(void);

/* --- the model (cli_model.c) --- */

typedef struct cli_model {
    kv8_device *device; /* NULL = the host computes */
    kv8_stream *stream;
    kv8_threads *threads;
    kv8_model *model;
    kv8_tokenizer *tokenizer; /* NULL unless asked for */
    kv8_model_info info;
    kv8_isa isa;
} cli_model;
/* What to open, and how. */
typedef struct cli_opening {
    const char *directory;
    const char *device;               /* --device: "cpu", "cuda", "cuda:1"; NULL = cpu */
    const kv8_model_options *options; /* but for threads and device; NULL = the defaults */
    int32_t threads;                  /* 0: all processors of this process */
    bool with_tokenizer;
} cli_opening;
int cli_model_open(cli_model *model, const cli_opening *opening);
/* The GPU that --device names, "cuda" or "cuda:N"; -1 for the host, "cpu" or NULL. */
int cli_device(const char *text, int32_t *idx_out);
/* --path, which goes with a --device that is a GPU; NULL = not given. */
int cli_path(const char *name, const char *device, kv8_model_options *options);
/* --without "sinks", "window" or both; NULL = not given. */
int cli_without(const char *list, kv8_model_options *options);
void cli_model_close(cli_model *model);

/* --- scales (cli_scales.c) --- */

/* A scale file opened for a model; all NULL without one. Borrowed from `file`. */
typedef struct cli_scales {
    kv8_scale_file *file;
    const float **k, **v;    /* [num_layers], as kv8_kv_cache_options takes them */
    const kv8_dtype *layers; /* the file's mix, as kv8_kv_setting takes it; NULL = none */
    kv8_dtype dtype;
} cli_scales;
/* path NULL: no scales. Close it after a failure too. */
int cli_scales_open(cli_scales *scales, const char *path, const cli_model *model);
void cli_scales_close(cli_scales *scales);

/* --- the plot (cli_plot.c) --- */

/* Whether gnuplot can be run; the error names the package that holds it. */
int cli_plot_check(void);
/* Runs gnuplot on what write_script writes; the picture goes into `file`. */
typedef void (*cli_plot_script)(const void *cookie, FILE *script);
/* `title` is the SVG's; NULL = the picture is no SVG. */
int cli_plot_run(cli_plot_script write_script, const void *cookie, const char *title, FILE *file);
/* Text inside gnuplot's single quotes, in UTF-8. */
void cli_plot_quoted(const char *text, FILE *script);
/* Draws KL and bytes per token of every row as SVG into `file`. */
int cli_plot_draw(const kv8_compare_row *rows, int32_t num_rows, const char *title, FILE *file);

#endif
