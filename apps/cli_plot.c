/* cli_plot.c - runs gnuplot through a pipe, and draws the SVG of a comparison with it: per KV
 * setting its KL divergence (log axis), its bytes per token and its speed, as bars with their
 * figures.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"

extern char **environ;

/* --- running gnuplot --- */

/* A gnuplot under way, and what it writes to stderr. */
typedef struct gnuplot {
    pid_t pid;
    FILE *words;
} gnuplot;

/* Starts gnuplot with stdin from in_fd (-1 = nothing) and stdout to out_fd (-1 = nowhere).
 * close_fd (-1 = none) is the end of the pipe that must not stay open in the child. */
static int start_gnuplot(char *const argv[], int in_fd, int out_fd, int close_fd, gnuplot *out) {
    out->words = tmpfile();
    if (out->words == NULL) return cli_fail("no temporary file: %s", strerror(errno));
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions) != 0) return cli_fail("no memory for gnuplot");
    int error = 0;
    if (in_fd >= 0) error |= posix_spawn_file_actions_adddup2(&actions, in_fd, STDIN_FILENO);
    if (out_fd >= 0) {
        error |= posix_spawn_file_actions_adddup2(&actions, out_fd, STDOUT_FILENO);
    } else {
        error |=
            posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    }
    error |= posix_spawn_file_actions_adddup2(&actions, fileno(out->words), STDERR_FILENO);
    if (close_fd >= 0) error |= posix_spawn_file_actions_addclose(&actions, close_fd);
    if (error == 0) error = posix_spawnp(&out->pid, "gnuplot", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error == 0) return CLI_OK;
    fclose(out->words);
    if (error == ENOENT)
        return cli_fail("--plot needs gnuplot, which is not installed (package gnuplot-nox)");
    return cli_fail("gnuplot does not start: %s", strerror(error));
}

/* The first line of gnuplot's that says something. */
static void read_words(FILE *words, char *line, int size) {
    rewind(words);
    do {
        if (fgets(line, size, words) == NULL) {
            snprintf(line, (size_t)size, "it says nothing");
            return;
        }
        line[strcspn(line, "\n")] = '\0';
    } while (line[strspn(line, " \t^")] == '\0');
}

static int wait_for_gnuplot(gnuplot *running) {
    int state = 0;
    char line[256];
    while (waitpid(running->pid, &state, 0) < 0 && errno == EINTR) continue;
    read_words(running->words, line, sizeof line);
    fclose(running->words);
    if (WIFEXITED(state) && WEXITSTATUS(state) == 0) return CLI_OK;
    if (cli_interrupted() != 0) return cli_interrupted();
    const bool ended = WIFEXITED(state);
    return cli_fail("gnuplot ended by %s %d: %s", ended ? "status" : "signal",
                    ended ? WEXITSTATUS(state) : WTERMSIG(state), line);
}

int cli_plot_check(void) {
    char name[] = "gnuplot", version[] = "--version";
    char *const argv[] = {name, version, NULL};
    gnuplot running;
    const int status = start_gnuplot(argv, -1, -1, -1, &running);
    return status == CLI_OK ? wait_for_gnuplot(&running) : status;
}

/* gnuplot calls every SVG "Gnuplot"; browsers show that as the picture's name. */
static int set_title(FILE *file, const char *title) {
    static const char theirs[] = "<title>Gnuplot</title>";
    const long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    char *const text = size < 0 ? NULL : malloc((size_t)size + 1);
    if (text == NULL) return cli_fail("no memory for the plot");
    rewind(file);
    text[fread(text, 1, (size_t)size, file)] = '\0';
    char *const at = strstr(text, theirs);
    if (at == NULL) { /* another gnuplot's; the picture is whole */
        free(text);
        return CLI_OK;
    }
    *at = '\0';
    rewind(file);
    fprintf(file, "%s<title>", text);
    for (const char *c = title; *c != '\0'; c++) {
        const char *const entity = *c == '&'   ? "&amp;"
                                   : *c == '<' ? "&lt;"
                                   : *c == '>' ? "&gt;"
                                               : NULL;
        if (entity != NULL) {
            fputs(entity, file);
        } else {
            fputc((unsigned char)*c < 0x20 ? '?' : *c, file);
        }
    }
    fprintf(file, "</title>%s", at + sizeof theirs - 1);
    free(text);
    /* A title shorter than gnuplot's leaves bytes behind the end. */
    const long end = fflush(file) == 0 ? ftell(file) : -1;
    if (end < 0 || ftruncate(fileno(file), end) != 0)
        return cli_fail("cannot write the plot: %s", strerror(errno));
    return CLI_OK;
}

static int run_gnuplot(cli_plot_script write_script, const void *cookie, FILE *file) {
    int ends[2];
    if (pipe(ends) != 0) return cli_fail("no pipe to gnuplot: %s", strerror(errno));
    signal(SIGPIPE, SIG_IGN); /* a gnuplot that dies early is an error message, not our death */
    char name[] = "gnuplot";
    char *const argv[] = {name, NULL};
    gnuplot running;
    const int status = start_gnuplot(argv, ends[0], fileno(file), ends[1], &running);
    close(ends[0]);
    FILE *const script = status == CLI_OK ? fdopen(ends[1], "w") : NULL;
    if (script == NULL) {
        close(ends[1]);
        if (status != CLI_OK) return status;
        wait_for_gnuplot(&running);
        return cli_fail("no memory for the plot");
    }
    write_script(cookie, script);
    fclose(script); /* what did not arrive shows in gnuplot's status */
    return wait_for_gnuplot(&running);
}

int cli_plot_run(cli_plot_script write_script, const void *cookie, const char *title, FILE *file) {
    int status = run_gnuplot(write_script, cookie, file);
    if (status != CLI_OK || title == NULL) return status;
    char *const clean = cli_clean_utf8(title, strlen(title));
    status = clean == NULL ? cli_fail("no memory for the plot") : set_title(file, clean);
    free(clean);
    return status;
}

void cli_plot_quoted(const char *text, FILE *script) {
    char *const clean = cli_clean_utf8(text, strlen(text));
    fputc('\'', script);
    for (const char *c = clean == NULL ? "" : clean; *c != '\0'; c++) {
        if (*c == '\'') fputc('\'', script);
        fputc((unsigned char)*c < 0x20 ? '?' : *c, script);
    }
    fputc('\'', script);
    free(clean);
}

/* --- the drawing --- */

/* One bar per row, the first on top: its value, and the figure written at its end. */
typedef double (*row_value)(const kv8_compare_row *row);
static double row_kl(const kv8_compare_row *row) {
    return row->kl;
}
static double row_bytes(const kv8_compare_row *row) {
    return row->bytes_per_token;
}
static double row_speed(const kv8_compare_row *row) {
    return row->tokens_per_s;
}

typedef struct panel {
    const char *title, *colour;
    row_value value;
    const char *format; /* of the figures */
    bool is_log;
    double left, right; /* of the drawing area, shares of the picture's width */
} panel;

static const panel panels[] = {
    {"KL divergence from f32 KV, nats per token (log)", "#4a7fb5", row_kl, "%.2e", true, 0.17,
     0.46},
    {"cache, bytes per token", "#7aa95c", row_bytes, "%.0f", false, 0.49, 0.72},
    {"prefill, tokens per second", "#c58940", row_speed, "%.0f", false, 0.75, 0.98},
};

/* The value axis: a bar begins at *low_out; a third of the width is left for the figures. */
static void find_range(const panel *self, const kv8_compare_row *rows, int32_t num_rows,
                       double *low_out, double *high_out) {
    double least = HUGE_VAL, most = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        const double value = self->value(&rows[i]);
        if (!isfinite(value) || value <= 0) continue;
        if (value < least) least = value;
        if (value > most) most = value;
    }
    if (most == 0) least = most = 1; /* nothing to draw */
    if (self->is_log) {
        const double low = floor(log10(least) - 0.2);
        *low_out = pow(10, low);
        *high_out = pow(10, low + (log10(most) - low) * 1.45);
    } else {
        *low_out = 0;
        *high_out = most * 1.4;
    }
}

/* About three round steps up to `high`. */
static double tic_step(double high) {
    const double power = pow(10, floor(log10(high / 3)));
    const double share = high / 3 / power; /* 1 .. 10 */
    return power * (share < 2 ? 1 : share < 5 ? 2 : 5);
}

static void write_panel(const panel *self, const kv8_compare_row *rows, int32_t num_rows,
                        bool with_names, FILE *script) {
    double low = 0, high = 1;
    find_range(self, rows, num_rows, &low, &high);
    fprintf(script, "set lmargin at screen %g\nset rmargin at screen %g\n", self->left,
            self->right);
    fprintf(script, "set title '%s' font ',13' offset 0,-0.6\n%s logscale x\n", self->title,
            self->is_log ? "set" : "unset");
    fprintf(script, "set xrange [%g:%g]\nset format x '%s'\nset xtics %g\n", low, high,
            self->is_log ? "%.0e" : "%g", self->is_log ? 10 : tic_step(high));
    fprintf(script, "unset ytics\n");
    if (with_names) {
        fprintf(script, "set ytics scale 0 textcolor rgb 'black' (");
        for (int32_t i = 0; i < num_rows; i++) {
            if (i > 0) fprintf(script, ", ");
            cli_plot_quoted(rows[i].kv, script);
            fprintf(script, " %d", num_rows - i);
        }
        fprintf(script, ")\n");
    }
    /* Columns: place, end of the bar, its figure. */
    fprintf(script, "$data << EOD\n");
    for (int32_t i = 0; i < num_rows; i++) {
        const double value = self->value(&rows[i]);
        const bool drawn = isfinite(value) && value > low;
        char figure[32];
        if (value == 0) {
            snprintf(figure, sizeof figure, "0");
        } else {
            snprintf(figure, sizeof figure, self->format, value);
        }
        fprintf(script, "%d %.9g \"%s\"\n", num_rows - i, drawn ? value : low, figure);
    }
    fprintf(script,
            "EOD\n"
            "plot $data using 2:1:(%.9g):2:($1-0.34):($1+0.34) with boxxyerror"
            " fillcolor rgb '%s' fillstyle solid noborder notitle,"
            " $data using 2:1:3 with labels left offset 0.6,0 notitle\n",
            low, self->colour);
}

typedef struct comparison {
    const kv8_compare_row *rows;
    int32_t num_rows;
    const char *title;
} comparison;

static void write_comparison(const void *cookie, FILE *script) {
    const comparison *const self = cookie;
    const int32_t num_rows = self->num_rows;
    const int height = 130 + 34 * num_rows;
    fprintf(script,
            "set terminal svg size 1180,%d noenhanced font 'Helvetica,13' background '#ffffff'\n"
            "set encoding utf8\n"
            "set multiplot\n"
            "set label 1 ",
            height);
    cli_plot_quoted(self->title, script);
    fprintf(script,
            " at screen 0.5, screen %g center font ',16'\n"
            "set tmargin at screen %g\nset bmargin at screen %g\n"
            "set border 1 linecolor rgb '#888888'\n"
            "set tics nomirror scale 0.6,0 textcolor rgb '#333333'\n"
            "set grid xtics linetype 1 linecolor rgb '#e4e4e4'\n"
            "set yrange [0.4:%d.6]\n",
            1 - 20.0 / height, 1 - 78.0 / height, 36.0 / height, num_rows);
    for (size_t i = 0; i < sizeof panels / sizeof panels[0]; i++) {
        write_panel(&panels[i], self->rows, num_rows, i == 0, script);
        if (i == 0) fprintf(script, "unset label 1\n");
    }
    fprintf(script, "unset multiplot\n");
}

int cli_plot_draw(const kv8_compare_row *rows, int32_t num_rows, const char *title, FILE *file) {
    const comparison all = {rows, num_rows, title};
    return cli_plot_run(write_comparison, &all, title, file);
}
