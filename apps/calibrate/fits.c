/* fits.c - fitting every layer, and what is shown of it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "fits.h"

#include <math.h>
#include <stdlib.h>

static const char *const sides[] = {"K", "V"};

static size_t num_columns(const fits *f) {
    return f->per_tensor ? 2 : 2 * (size_t)f->num_kv_heads;
}

static const kv8_fit *head_fit(const fits *f, int32_t layer, int kv, int32_t head) {
    return &f->heads[((size_t)layer * 2 + (size_t)kv) * (size_t)f->num_kv_heads + (size_t)head];
}

/* --- fitting --- */

static kv8_status fit_column(fits *f, const kv8_observer *observer, int32_t layer, size_t column) {
    const size_t at = (size_t)layer * num_columns(f) + column;
    const int32_t heads = f->num_kv_heads;
    const int kv = f->per_tensor ? (int)column : (int)column / heads;
    const int32_t first = f->per_tensor ? 0 : (int32_t)column % heads;
    const int32_t last = f->per_tensor ? heads - 1 : first;
    kv8_fit fit = KV8_FIT_INIT;
    kv8_status status = kv8_observer_fit(observer, (kv8_observed_tensor)kv, layer,
                                         f->per_tensor ? -1 : first, &f->options, &fit);
    f->scales[at] = fit.scale;
    f->amax[at] = fit.amax;
    f->sqnr_db[at] = fit.sqnr_db;
    f->clip_rate[at] = fit.clip_rate;
    f->num_tokens = fit.num_rows;
    for (int32_t head = first; head <= last && status == KV8_OK; head++) {
        kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
        status = kv8_observer_get(observer, (kv8_observed_tensor)kv, layer, head, &seen);
        for (int32_t bin = 0; status == KV8_OK && bin < KV8_OBSERVE_BINS; bin++)
            f->histogram[at * KV8_OBSERVE_BINS + (size_t)bin] += seen.histogram[bin];
        f->zeros[at] += seen.zeros;
        f->nans[at] += seen.nans;
        f->infs[at] += seen.infs;
    }
    return status;
}

static kv8_status fit_layer(fits *f, const kv8_observer *observer, int32_t layer) {
    kv8_status status = KV8_OK;
    for (size_t column = 0; status == KV8_OK && column < num_columns(f); column++)
        status = fit_column(f, observer, layer, column);
    for (int32_t i = 0; status == KV8_OK && i < 2 * f->num_kv_heads; i++) {
        kv8_fit *const fit = &f->heads[(size_t)layer * 2 * (size_t)f->num_kv_heads + (size_t)i];
        *fit = (kv8_fit)KV8_FIT_INIT;
        status = kv8_observer_fit(observer, (kv8_observed_tensor)(i / f->num_kv_heads), layer,
                                  i % f->num_kv_heads, &f->options, fit);
    }
    for (int32_t i = 0; status == KV8_OK && i < f->num_qo_heads; i++) {
        kv8_fit fit = KV8_FIT_INIT;
        status = kv8_observer_fit(observer, KV8_OBSERVED_Q, layer, i, &f->options, &fit);
        f->q_scales[layer * f->num_qo_heads + i] = fit.scale;
    }
    return status;
}

int fits_make(fits *fits_out, const kv8_observer *observer, const kv8_fit_options *options,
              bool per_tensor) {
    kv8_observer_options shape = KV8_OBSERVER_OPTIONS_INIT;
    kv8_status status = kv8_observer_get_options(observer, &shape);
    fits f = {.num_layers = shape.num_layers,
              .num_kv_heads = shape.num_kv_heads,
              .num_qo_heads = shape.num_qo_heads,
              .per_tensor = per_tensor,
              .options = *options};
    const size_t layers = (size_t)f.num_layers, cells = layers * num_columns(&f);
    f.heads = calloc(layers * 2 * (size_t)f.num_kv_heads, sizeof *f.heads);
    f.scales = calloc(cells, sizeof *f.scales);
    f.amax = calloc(cells, sizeof *f.amax);
    f.sqnr_db = calloc(cells, sizeof *f.sqnr_db);
    f.clip_rate = calloc(cells, sizeof *f.clip_rate);
    f.histogram = calloc(cells, KV8_OBSERVE_BINS * sizeof *f.histogram);
    f.zeros = calloc(cells, sizeof *f.zeros);
    f.nans = calloc(cells, sizeof *f.nans);
    f.infs = calloc(cells, sizeof *f.infs);
    if (f.num_qo_heads > 0) f.q_scales = calloc(layers * (size_t)f.num_qo_heads, sizeof(float));
    *fits_out = f;
    if (f.heads == NULL || f.scales == NULL || f.amax == NULL || f.sqnr_db == NULL ||
        f.clip_rate == NULL || f.histogram == NULL || f.zeros == NULL || f.nans == NULL ||
        f.infs == NULL || (f.num_qo_heads > 0 && f.q_scales == NULL))
        return cli_fail("no memory for the fits of %d layers", f.num_layers);
    for (int32_t layer = 0; status == KV8_OK && layer < f.num_layers; layer++)
        status = fit_layer(fits_out, observer, layer);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

void fits_free(fits *f) {
    free(f->heads);
    free(f->scales);
    free(f->amax);
    free(f->sqnr_db);
    free(f->clip_rate);
    free(f->histogram);
    free(f->zeros);
    free(f->nans);
    free(f->infs);
    free(f->q_scales);
    *f = (fits){0};
}

/* --- the table --- */

/* What a layer's heads span. */
typedef struct span {
    double least, most;
} span;

static void widen_span(span *s, double value) {
    if (value < s->least) s->least = value;
    if (value > s->most) s->most = value;
}

static void print_side(const fits *f, int32_t layer, int kv) {
    const size_t per_side = f->per_tensor ? 1 : (size_t)f->num_kv_heads;
    const size_t at = (size_t)layer * num_columns(f) + (size_t)kv * per_side;
    span amax = {HUGE_VAL, 0}, sqnr = {HUGE_VAL, -HUGE_VAL}, plain = sqnr, scale = amax;
    double clips = 0, flushed = 0;
    for (size_t i = 0; i < per_side; i++) {
        widen_span(&scale, (double)f->scales[at + i]);
        widen_span(&sqnr, f->sqnr_db[at + i]);
        clips = fmax(clips, f->clip_rate[at + i]);
    }
    for (int32_t head = 0; head < f->num_kv_heads; head++) {
        const kv8_fit *const fit = head_fit(f, layer, kv, head);
        widen_span(&amax, (double)fit->amax);
        widen_span(&plain, fit->sqnr_at_1_db);
        flushed = fmax(flushed, fit->flushed_rate);
    }
    printf("%5d %-2s %9.4g %9.4g %10.4g %10.4g %8.1f %8.1f %9.2g %9.2g\n", layer, sides[kv],
           amax.least, amax.most, scale.least, scale.most, sqnr.least, plain.least, clips, flushed);
}

static void print_warning(const fits *f, int32_t layer, int kv, int32_t head) {
    const kv8_fit *const fit = head_fit(f, layer, kv, head);
    for (uint32_t bit = 1; bit != 0 && bit <= fit->warnings; bit <<= 1) {
        if (!(fit->warnings & bit)) continue;
        printf("layer %d %s head %d: %s", layer, sides[kv], head, kv8_fit_warning_text(bit));
        const bool of_channel =
            bit == KV8_FIT_HAS_NAN || bit == KV8_FIT_HAS_INF || bit == KV8_FIT_OUTLIER;
        if (of_channel && fit->channel >= 0) printf(" (channel %d)", fit->channel);
        printf(", amax %.4g, scale %.4g\n", (double)fit->amax, (double)fit->scale);
    }
}

void fits_print(const fits *f) {
    printf("%5s %-2s %9s %9s %10s %10s %8s %8s %9s %9s\n", "layer", "", "amax from", "to",
           "scale from", "to", "SQNR dB", "at 1 dB", "clipped", "flushed");
    for (int32_t layer = 0; layer < f->num_layers; layer++) {
        for (int kv = 0; kv < 2; kv++) print_side(f, layer, kv);
    }
    for (int32_t layer = 0; layer < f->num_layers; layer++) {
        for (int kv = 0; kv < 2; kv++) {
            for (int32_t head = 0; head < f->num_kv_heads; head++)
                print_warning(f, layer, kv, head);
        }
    }
}

/* --- JSON --- */

static json_t *warnings_json(uint32_t warnings) {
    json_t *const list = json_array();
    for (uint32_t bit = 1; bit != 0 && bit <= warnings; bit <<= 1) {
        if (warnings & bit) json_array_append_new(list, json_string(kv8_fit_warning_text(bit)));
    }
    return list;
}

json_t *fits_json(const fits *f) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < f->num_layers * 2 * f->num_kv_heads; i++) {
        const kv8_fit *const fit = &f->heads[i];
        const int32_t layer = i / (2 * f->num_kv_heads), kv = i / f->num_kv_heads % 2;
        json_array_append_new(
            list,
            json_pack("{s:i, s:s, s:i, s:f, s:f, s:o, s:o, s:f, s:f, s:f, s:f, s:o, s:o, s:i}",
                      "layer", layer, "tensor", sides[kv], "head", i % f->num_kv_heads, "amax",
                      (double)fit->amax, "scale", (double)fit->scale, "sqnr_db",
                      cli_json_number(fit->sqnr_db), "sqnr_at_1_db",
                      cli_json_number(fit->sqnr_at_1_db), "clip_rate", fit->clip_rate,
                      "clip_rate_at_1", fit->clip_rate_at_1, "flushed_rate", fit->flushed_rate,
                      "flushed_rate_at_1", fit->flushed_rate_at_1, "headroom",
                      cli_json_number(fit->headroom), "warnings", warnings_json(fit->warnings),
                      "channel", fit->channel));
    }
    return list;
}

/* --- the file --- */

static kv8_scale_data data_of(const fits *f) {
    static const char *const methods[] = {"absmax", "percentile", "squared_error"};
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    data.dtype = f->options.dtype;
    data.num_layers = f->num_layers;
    data.num_kv_heads = f->num_kv_heads;
    data.per_tensor = f->per_tensor;
    data.scales = f->scales;
    data.amax = f->amax;
    data.sqnr_db = f->sqnr_db;
    data.clip_rate = f->clip_rate;
    data.num_qo_heads = f->num_qo_heads;
    data.q_scales = f->q_scales;
    data.method = methods[f->options.method];
    data.margin = f->options.margin;
    data.num_tokens = f->num_tokens;
    data.histogram = f->histogram;
    data.zeros = f->zeros;
    data.nans = f->nans;
    data.infs = f->infs;
    data.num_bins = KV8_OBSERVE_BINS;
    data.histogram_exponent = KV8_OBSERVE_MIN_EXPONENT;
    return data;
}

int fits_write(const fits *f, const cli_model *model, const kv8_dtype *mix, const char *path,
               kv8_scale_format format, int32_t num_ranks) {
    kv8_scale_data data = data_of(f);
    kv8_scale_file *file = NULL;
    data.architecture = model->info.architecture;
    data.model_hash = kv8_model_hash(model->model);
    data.kv_dtypes = mix;
    kv8_status status = kv8_scale_file_create(&file, &data);
    if (status == KV8_OK) status = kv8_scale_file_write(file, path, format, num_ranks);
    kv8_scale_file_close(file);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

/* --- another's file beside these --- */

/* Whether the scale leaves room for what was seen, and not far too much. */
static bool suits(float scale, float amax, double max) {
    const double share = (double)amax / ((double)scale * max);
    return amax == 0 || (share <= 1.05 && share >= 1.0 / 64);
}

static int check_head(const fits *f, const kv8_scale_file *file, double max, int32_t layer, int kv,
                      int32_t head) {
    const float *const own =
        kv == 0 ? kv8_scale_file_k(file, layer) : kv8_scale_file_v(file, layer);
    const float *const other =
        kv == 0 ? kv8_scale_file_v(file, layer) : kv8_scale_file_k(file, layer);
    const float amax = head_fit(f, layer, kv, head)->amax;
    if (suits(own[head], amax, max)) return CLI_OK;
    const float other_amax = head_fit(f, layer, 1 - kv, head)->amax;
    const bool swapped = suits(other[head], amax, max) && suits(own[head], other_amax, max);
    printf("layer %d %s head %d: amax %.4g, the file's range is %.4g%s\n", layer, sides[kv], head,
           (double)amax, (double)own[head] * max,
           swapped ? "; K's and V's scales look swapped" : "");
    return CLI_FAILED;
}

int fits_check(const fits *f, const kv8_scale_file *file, const char *path) {
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    const kv8_status status = kv8_scale_file_get(file, &data);
    if (status != KV8_OK) return cli_fail_status(status);
    int32_t bad = 0;
    for (int32_t i = 0; i < f->num_layers * 2 * f->num_kv_heads; i++)
        bad += check_head(f, file, (double)kv8_dtype_max(data.dtype), i / (2 * f->num_kv_heads),
                          i / f->num_kv_heads % 2, i % f->num_kv_heads) != CLI_OK;
    if (bad > 0)
        return cli_fail("%s: %d of %d scales do not suit this model on this text", path, bad,
                        f->num_layers * 2 * f->num_kv_heads);
    printf("%s: all %d scales suit this model on this text\n", path,
           f->num_layers * 2 * f->num_kv_heads);
    return CLI_OK;
}

/* --- the heat maps --- */

typedef double (*cell_value)(const kv8_fit *fit);
static double cell_amax(const kv8_fit *fit) {
    return fit->amax > 0 ? log2((double)fit->amax) : (double)NAN;
}
static double cell_sqnr(const kv8_fit *fit) {
    return fit->sqnr_db;
}
static double cell_plain(const kv8_fit *fit) {
    return fit->sqnr_at_1_db;
}

static void write_map(const fits *f, const char *title, cell_value value, FILE *script) {
    fprintf(script, "set title '%s'\n$map << EOD\n", title);
    for (int32_t layer = 0; layer < f->num_layers; layer++) {
        for (int32_t i = 0; i < 2 * f->num_kv_heads; i++) {
            const double cell = value(head_fit(f, layer, i / f->num_kv_heads, i % f->num_kv_heads));
            if (isfinite(cell))
                fprintf(script, "%.6g ", cell);
            else
                fprintf(script, "NaN ");
        }
        fputc('\n', script);
    }
    fprintf(script, "EOD\nplot $map matrix using 1:2:3 with image notitle\n");
}

typedef struct drawing {
    const fits *fits;
    const char *title;
} drawing;

static void write_maps(const void *cookie, FILE *script) {
    const drawing *const self = cookie;
    const fits *const f = self->fits;
    const double edge = f->num_kv_heads - 0.5;
    fprintf(script,
            "set terminal svg size 1180,%d noenhanced font 'Helvetica,13' background '#ffffff'\n"
            "set encoding utf8\nset multiplot layout 1,3 title ",
            180 + 22 * f->num_layers);
    cli_plot_quoted(self->title, script);
    fprintf(script,
            "\nset yrange [%g:-0.5]\nset xrange [-0.5:%g]\nset ylabel 'layer'\n"
            "set xlabel 'K heads | V heads'\nset tics out nomirror\nset xtics 1\n"
            "set palette defined (0 '#b2432f', 0.5 '#f2efe8', 1 '#2b6ca3')\n"
            "set arrow from %g,-0.5 to %g,%g nohead front linewidth 2 linecolor rgb '#333333'\n",
            f->num_layers - 0.5, 2 * f->num_kv_heads - 0.5, edge, edge, f->num_layers - 0.5);
    write_map(f, "largest value, log2", cell_amax, script);
    fprintf(script, "set cbrange [0:35]\n");
    write_map(f, "SQNR at scale 1, dB", cell_plain, script);
    write_map(f, "SQNR as fitted, dB", cell_sqnr, script);
    fprintf(script, "unset multiplot\n");
}

int fits_draw(const fits *f, const char *title, FILE *file) {
    const drawing self = {f, title};
    return cli_plot_run(write_maps, &self, title, file);
}
