/* share_plot.c - the picture of kv8 bench attention: how near each row came to the smaller ceiling,
 * as bars in per cent, with the median time above each. One panel per phase, one group of bars
 * per context, one colour per cache format.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "bench.h"

/* Tell apart on white and in print, also for the colour-blind (after Okabe and Ito 2008). */
static const char *const colours[] = {"#0072b2", "#e69f00", "#009e73", "#cc79a7",
                                      "#56b4e9", "#d55e00", "#999999", "#f0e442"};
enum { MAX_SERIES = sizeof colours / sizeof colours[0], MAX_NAMES = 512, PANEL_HEIGHT = 340 };

typedef struct bench_bar {
    const char *panel;          /* a picture of its own, one below the other */
    char group[32], series[64]; /* the place on the axis; the colour */
    double share, us;           /* the height; the figure above it */
} bench_bar;

typedef struct picture {
    const bench_bar *bars;
    int32_t num_bars;
    const char *title, *panels[2], *groups[MAX_NAMES], *series[MAX_SERIES];
    int32_t num_panels, num_groups, num_series;
    bool png;
    double top; /* of the axis, per cent: all bars and their figures fit */
} picture;

static bool ends_with(const char *text, const char *end) {
    const size_t length = strlen(text), tail = strlen(end);
    return length > tail && strcmp(text + length - tail, end) == 0;
}

int bench_plot_check(const bench_args *args) {
    const int32_t num_series = args->num_kv * args->num_isa * args->num_threads;
    if (!ends_with(args->plot, ".svg") && !ends_with(args->plot, ".png"))
        return cli_fail("--plot is \"%s\", must end in .svg or .png", args->plot);
    if (num_series > MAX_SERIES)
        return cli_fail("--plot can tell %d series apart, these are %d", (int)MAX_SERIES,
                        num_series);
    return CLI_OK;
}

/* Its place among the names, where it is put if it is new. */
static int32_t place_of(const char *name, const char **names, int32_t capacity, int32_t *num) {
    for (int32_t i = 0; i < *num; i++) {
        if (strcmp(names[i], name) == 0) return i;
    }
    if (*num < capacity) names[(*num)++] = name;
    return *num - 1;
}

static void write_time(double us, FILE *script) {
    if (us < 1000) {
        fprintf(script, "%.0f us", us);
    } else {
        fprintf(script, us < 10000 ? "%.2f ms" : "%.1f ms", us * 1e-3);
    }
}

/* The bars of one series in a panel: place, share, time. */
static void write_data(const picture *p, int32_t panel, int32_t series, FILE *script) {
    fprintf(script, "$data%d << EOD\n", series);
    for (int32_t g = 0; g < p->num_groups; g++) {
        for (int32_t i = 0; i < p->num_bars; i++) {
            const bench_bar *const bar = &p->bars[i];
            if (strcmp(bar->panel, p->panels[panel]) != 0 ||
                strcmp(bar->group, p->groups[g]) != 0 ||
                strcmp(bar->series, p->series[series]) != 0)
                continue;
            const double width = 0.84 / p->num_series;
            fprintf(script, "%.5f %.3f \"", g + 1 - 0.42 + (series + 0.5) * width,
                    100 * bar->share);
            write_time(bar->us, script);
            fprintf(script, "\"\n");
        }
    }
    fprintf(script, "EOD\n");
}

static void write_panel(const picture *p, int32_t panel, FILE *script) {
    const double height = 1.0 / p->num_panels, top = 1 - panel * height;
    fprintf(script, "set tmargin at screen %g\nset bmargin at screen %g\n", top - 0.2 * height,
            top - 0.86 * height);
    fprintf(script, "set title ");
    cli_plot_quoted(p->panels[panel], script);
    fprintf(script, " font ',14' offset 0,-0.4\nset xtics scale 0 (");
    for (int32_t g = 0; g < p->num_groups; g++) {
        if (g > 0) fprintf(script, ", ");
        cli_plot_quoted(p->groups[g], script);
        fprintf(script, " %d", g + 1);
    }
    fprintf(script, ")\n");
    for (int32_t s = 0; s < p->num_series; s++) write_data(p, panel, s, script);
    const double half = 0.40 / p->num_series;
    for (int32_t s = 0; s < p->num_series; s++) {
        fprintf(script,
                "%s $data%d using 1:2:($1-%g):($1+%g):(0):2 with boxxyerror fillcolor rgb '%s'"
                " fillstyle solid noborder title ",
                s == 0 ? "plot" : ",", s, half, half, colours[s]);
        cli_plot_quoted(p->series[s], script);
        fprintf(script,
                ", $data%d using 1:2:3 with labels rotate by 90 left offset 0,0.4 font ',10'"
                " notitle",
                s);
    }
    fprintf(script, "\n");
}

static void write_picture(const void *cookie, FILE *script) {
    const picture *const p = cookie;
    size_t longest = 0; /* name of a series: the legend's width */
    for (int32_t i = 0; i < p->num_series; i++) {
        if (strlen(p->series[i]) > longest) longest = strlen(p->series[i]);
    }
    const int left = 84, right = 60 + 8 * (int)longest;
    int width = left + right + p->num_groups * (24 + 26 * p->num_series);
    if (width < 640) width = 640;
    fprintf(script,
            "set terminal %s size %d,%d noenhanced font '%s,12' background '#ffffff'\n"
            "set encoding utf8\nset multiplot\nset label 1 ",
            p->png ? "pngcairo" : "svg", width, PANEL_HEIGHT * p->num_panels,
            p->png ? "Sans" : "Helvetica");
    cli_plot_quoted(p->title, script);
    fprintf(script,
            " at screen 0.5, screen %g center font ',15'\n"
            "set lmargin at screen %g\nset rmargin at screen %g\n"
            "set border 1 linecolor rgb '#888888'\n"
            "set tics nomirror scale 0.6,0 textcolor rgb '#333333'\n"
            "set grid ytics linetype 1 linecolor rgb '#e4e4e4'\n"
            "set key outside right top samplen 1.4\n"
            "set xrange [0.4:%d.6]\nset yrange [0:%g]\nset ytics 0,%d\n"
            "set xlabel 'context, tokens' offset 0,0.4\nset ylabel '%% of the smaller ceiling'\n",
            1 - 0.05 / p->num_panels, (double)left / width, 1 - (double)right / width,
            p->num_groups, p->top, p->top > 250 ? 100 : 25);
    for (int32_t panel = 0; panel < p->num_panels; panel++) {
        write_panel(p, panel, script);
        if (panel == 0) fprintf(script, "unset label 1\n");
    }
    fprintf(script, "unset multiplot\n");
}

/* One bar per row: a picture per phase, a group per batch and context, a colour for the rest. */
static bench_bar bar_of(const bench_args *args, const bench_row *r) {
    bench_bar bar = {.panel = r->phase, .share = bench_row_share(r), .us = r->us.median};
    if (args->num_batch > 1) {
        snprintf(bar.group, sizeof bar.group, "%d x %d", r->batch, r->context);
    } else {
        snprintf(bar.group, sizeof bar.group, "%d", r->context);
    }
    size_t at = (size_t)snprintf(bar.series, sizeof bar.series, "%s", r->kv.name);
    if (args->num_isa > 1)
        at +=
            (size_t)snprintf(bar.series + at, sizeof bar.series - at, " %s", kv8_isa_name(r->isa));
    if (args->num_threads > 1)
        snprintf(bar.series + at, sizeof bar.series - at, " %d threads", r->threads);
    return bar;
}

/* Panels, groups and series stand in the order in which the rows name them. */
static void place_bars(picture *p) {
    double most = 1;
    for (int32_t i = 0; i < p->num_bars; i++) {
        const bench_bar *const bar = &p->bars[i];
        place_of(bar->panel, p->panels, 2, &p->num_panels);
        place_of(bar->group, p->groups, MAX_NAMES, &p->num_groups);
        place_of(bar->series, p->series, MAX_SERIES, &p->num_series);
        if (bar->share > most) most = bar->share;
    }
    p->top = 125 * most;
}

static void write_title(const bench_args *args, const bench_row *first, char *out, size_t size) {
    size_t at = (size_t)snprintf(out, size, "attention, %d/%d/%d, %s queries", args->num_qo_heads,
                                 args->num_kv_heads, args->head_dim, kv8_dtype_name(args->q));
    if (args->num_isa == 1)
        at += (size_t)snprintf(out + at, size - at, ", %s", kv8_isa_name(args->isa[0]));
    if (args->num_threads == 1)
        snprintf(out + at, size - at, ", %d thread%s", first->threads,
                 first->threads == 1 ? "" : "s");
}

int bench_plot_draw(const bench_args *args, const bench_rows *rows, FILE *file) {
    bench_bar *const bars = malloc((size_t)rows->num * sizeof *bars);
    if (bars == NULL) return cli_fail("no memory for the plot");
    for (int32_t i = 0; i < rows->num; i++) bars[i] = bar_of(args, &rows->row[i]);
    char title[256];
    write_title(args, &rows->row[0], title, sizeof title);
    picture p = {.bars = bars, .num_bars = rows->num, .title = title};
    p.png = ends_with(args->plot, ".png");
    place_bars(&p);
    const int status = cli_plot_run(write_picture, &p, p.png ? NULL : title, file);
    free(bars);
    return status;
}
