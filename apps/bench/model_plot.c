/* model_plot.c - tokens per second of kv8 bench model as SVG: prefill and decode over depth, a line
 * for each KV setting, and decode over the batch where more than one was asked for.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_bench.h"

#include <string.h>

enum { PANEL_HEIGHT = 320, WIDTH = 760 };

/* A panel takes the rows that say the same about it. */
typedef enum panel_kind { PREFILL, DECODE, BATCHES, NUM_PANELS } panel_kind;

typedef struct picture {
    const model_args *args;
    const test_row *rows;
    int32_t num;
    const char *title;
} picture;

static bool belongs(const picture *p, panel_kind kind, const test_row *row) {
    switch (kind) {
        case PREFILL: return row->num_prompt > 0;
        case DECODE: return row->num_gen > 0 && row->batch == p->args->batches[0];
        default: return row->num_gen > 0 && row->depth == p->rows[0].depth;
    }
}

static bool is_drawn(const picture *p, panel_kind kind) {
    if (kind == BATCHES && p->args->num_batches < 2) return false;
    for (int32_t i = 0; i < p->num; i++) {
        if (belongs(p, kind, &p->rows[i])) return true;
    }
    return false;
}

/* The points of one setting as a block of data; false where it has none. */
static bool write_points(const picture *p, panel_kind kind, const kv8_kv_setting *setting,
                         int block, FILE *script) {
    bool any = false;
    for (int32_t i = 0; i < p->num; i++) {
        const test_row *const row = &p->rows[i];
        if (row->setting != setting || !belongs(p, kind, row)) continue;
        if (!any) fprintf(script, "$data%d << END\n", block);
        const model_speed speed = model_test_speed(row);
        fprintf(script, "%d %.6g %.6g\n", kind == BATCHES ? row->batch : row->depth, speed.mean,
                speed.deviation);
        any = true;
    }
    if (any) fprintf(script, "END\n");
    return any;
}

static void write_panel(const picture *p, panel_kind kind, int panel, int num_panels,
                        FILE *script) {
    static const char *const names[NUM_PANELS] = {"prefill", "decode", "decode by batch"};
    static const char *const colours[] = {"#4878a8", "#c44e52", "#55a868", "#8172b2",
                                          "#937860", "#64b5cd", "#8c8c8c", "#ccb974"};
    enum { NUM_COLOURS = sizeof colours / sizeof colours[0] };
    const kv8_kv_setting *drawn[MAX_SETTINGS];
    int num = 0;
    for (int32_t i = 0; i < p->num; i++) {
        const kv8_kv_setting *const setting = p->rows[i].setting;
        int known = 0;
        while (known < num && drawn[known] != setting) known++;
        if (known == num && num < MAX_SETTINGS &&
            write_points(p, kind, setting, panel * MAX_SETTINGS + num, script))
            drawn[num++] = setting;
    }
    const double height = 0.94 / num_panels, top = 0.95 - height * panel;
    fprintf(script,
            "set tmargin at screen %g\nset bmargin at screen %g\n"
            "set ylabel '%s, tokens/s'\nset xlabel '%s'\n%s\n",
            top - 0.02, top - height + 0.16 / num_panels, names[kind],
            kind == BATCHES ? "sequences at once" : "tokens already in the cache",
            kind == BATCHES ? "set logscale x 2" : "unset logscale x");
    for (int i = 0; i < num; i++) {
        fprintf(script,
                "%s $data%d using 1:2:3 with yerrorlines linewidth 2 pointtype 7 pointsize 0.6"
                " linecolor rgb '%s' title ",
                i == 0 ? "plot" : ",", panel * MAX_SETTINGS + i, colours[i % NUM_COLOURS]);
        cli_plot_quoted(drawn[i]->name, script);
    }
    fprintf(script, "\n");
}

static void write_picture(const void *cookie, FILE *script) {
    const picture *const p = cookie;
    int num_panels = 0, panel = 0;
    for (int kind = 0; kind < NUM_PANELS; kind++) num_panels += is_drawn(p, (panel_kind)kind);
    fprintf(script,
            "set terminal svg size %d,%d noenhanced font 'Helvetica,12' background '#ffffff'\n"
            "set encoding utf8\nset multiplot\nset label 1 ",
            WIDTH, 40 + PANEL_HEIGHT * num_panels);
    cli_plot_quoted(p->title, script);
    fprintf(script,
            " at screen 0.5, screen %g center font ',15'\n"
            "set border 3 linecolor rgb '#888888'\nset grid linetype 1 linecolor rgb '#e4e4e4'\n"
            "set tics nomirror scale 0.6,0 textcolor rgb '#333333'\n"
            "set key outside right top samplen 1.4\nset lmargin at screen 0.13\n"
            "set rmargin at screen 0.84\nset yrange [0:*]\n",
            1 - 14.0 / (40 + PANEL_HEIGHT * num_panels));
    for (int kind = 0; kind < NUM_PANELS; kind++) {
        if (!is_drawn(p, (panel_kind)kind)) continue;
        write_panel(p, (panel_kind)kind, panel++, num_panels, script);
        fprintf(script, "unset label 1\n");
    }
    fprintf(script, "unset multiplot\n");
}

int model_plot(const model_args *args, const test_row *rows, int32_t num, FILE *file) {
    char title[256];
    snprintf(title, sizeof title, "%s on %s", args->model,
             args->device == NULL ? "cpu" : args->device);
    const picture p = {.args = args, .rows = rows, .num = num, .title = title};
    return cli_plot_run(write_picture, &p, title, file);
}
