/* fit.c - from a histogram to a scale, and what storing with a scale costs.
 *
 * A cost is an integral over the histogram: each bin is walked at STEPS points, stored and read
 * back as the cache would. A bin is no wider than the distance of two e4m3 codes, so spreading its
 * values evenly is a fair guess; the guess is the same on every machine.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats_impl.h"

#include <kv8/calibrate.h>

enum { STEPS = 16, MAX_HEAD_DIM = 576 };
/* Least squares looks at scales from absmax's down by eight octaves, in eighths of one. */
enum { NUM_CANDIDATES = 8 * KV8_OBSERVE_BINS_PER_OCTAVE + 1 };
static const float outlier_factor = 16;
static const double fades_db = 3;

/* One head, or the heads of a layer together. */
typedef struct sample {
    uint64_t histogram[KV8_OBSERVE_BINS];
    uint64_t num_rows, num_finite, zeros, nans, infs;
    float absmax;
} sample;

typedef struct cost {
    double signal, noise; /* sums of squares */
    double clips, flushed;
} cost;

const char *kv8_fit_warning_text(uint32_t warning) {
    switch (warning) {
        case KV8_FIT_NO_ROWS: return "no rows";
        case KV8_FIT_ALL_ZERO: return "all zero";
        case KV8_FIT_HAS_NAN: return "NaN";
        case KV8_FIT_HAS_INF: return "infinite";
        case KV8_FIT_CLIPS_AT_1: return "clips at scale 1";
        case KV8_FIT_FADES_AT_1: return "fades at scale 1";
        case KV8_FIT_OUTLIER: return "outlier channel";
        default: return NULL;
    }
}

/* --- gathering --- */

static void gather_head(sample *s, const kv8_observed_head *head) {
    for (int32_t i = 0; i < KV8_OBSERVE_BINS; i++) s->histogram[i] += head->histogram[i];
    s->num_rows += head->num_rows;
    s->num_finite += head->num_values - head->nans - head->infs;
    s->zeros += head->zeros;
    s->nans += head->nans;
    s->infs += head->infs;
    if (head->absmax > s->absmax) s->absmax = head->absmax;
}

/* `head` -1: all of them. */
static kv8_status gather(sample *s, const kv8_observer *observer, kv8_observed_tensor tensor,
                         int32_t layer, int32_t head) {
    kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
    if (head >= 0) {
        KV8_TRY(kv8_observer_get(observer, tensor, layer, head, &seen));
        gather_head(s, &seen);
        return KV8_OK;
    }
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    KV8_TRY(kv8_observer_get_options(observer, &options));
    const int32_t num_heads =
        tensor == KV8_OBSERVED_Q ? options.num_qo_heads : options.num_kv_heads;
    if (num_heads == 0) return kv8_fail(KV8_ERR_INVALID, "fit: Q was not observed");
    for (int32_t i = 0; i < num_heads; i++) {
        KV8_TRY(kv8_observer_get(observer, tensor, layer, i, &seen));
        gather_head(s, &seen);
    }
    s->num_rows /= (uint64_t)num_heads; /* tokens, not heads of tokens */
    return KV8_OK;
}

/* --- what a scale costs --- */

static void add_bin(cost *c, int32_t bin, double num, float absmax, kv8_dtype dtype, float scale) {
    const float low = bin == 0 ? 0 : kv8_observe_bin_edge(bin);
    const float edge = kv8_observe_bin_edge(bin + 1);
    const float high = bin == KV8_OBSERVE_BINS - 1 || absmax < edge ? absmax : edge;
    float values[STEPS], back[STEPS];
    uint8_t codes[STEPS];
    for (int32_t i = 0; i < STEPS; i++)
        values[i] = low + (high - low) * (((float)i + 0.5f) / STEPS);
    kv8_narrow_counts counts = {0};
    KV8_MUST(kv8_narrow(KV8_ISA_SCALAR, dtype, values, STEPS, scale, codes, &counts));
    KV8_MUST(kv8_widen(KV8_ISA_SCALAR, dtype, codes, STEPS, back));
    const double weight = num / STEPS;
    c->clips += weight * (double)counts.clips;
    for (int32_t i = 0; i < STEPS; i++) {
        const double x = (double)values[i], error = (double)back[i] * (double)scale - x;
        c->signal += weight * x * x;
        c->noise += weight * error * error;
        if (back[i] == 0) c->flushed += weight;
    }
}

static cost cost_of(const sample *s, kv8_dtype dtype, float scale) {
    cost c = {0};
    for (int32_t bin = 0; bin < KV8_OBSERVE_BINS; bin++) {
        if (s->histogram[bin] > 0)
            add_bin(&c, bin, (double)s->histogram[bin], s->absmax, dtype, scale);
    }
    return c;
}

static double sqnr_db(const cost *c) {
    return c->signal > 0 ? 10 * log10(c->signal / c->noise) : (double)NAN;
}

/* --- choosing --- */

/* The least |x| that no more than 1 - percentile of the finite values exceed, up to its bin's upper
 * edge. */
static float percentile_range(const sample *s, double percentile) {
    uint64_t above = 0;
    const double allowed = (1 - percentile / 100) * (double)s->num_finite;
    int32_t bin = KV8_OBSERVE_BINS - 1;
    while (bin > 0 && (double)(above + s->histogram[bin]) <= allowed) above += s->histogram[bin--];
    const float edge = kv8_observe_bin_edge(bin + 1);
    return bin == KV8_OBSERVE_BINS - 1 || s->absmax < edge ? s->absmax : edge;
}

static float least_squares_range(const sample *s, kv8_dtype dtype) {
    double best_noise = (double)INFINITY;
    float best = s->absmax;
    for (int32_t i = 0; i < NUM_CANDIDATES; i++) {
        const float range = s->absmax * exp2f(-(float)i / KV8_OBSERVE_BINS_PER_OCTAVE);
        const float scale = range / kv8_dtype_max(dtype);
        if (!(scale > 0)) break;
        const cost c = cost_of(s, dtype, scale);
        if (c.noise < best_noise) {
            best_noise = c.noise;
            best = range;
        }
    }
    return best;
}

static float fitted_range(const sample *s, const kv8_fit_options *options, kv8_dtype dtype) {
    switch (options->method) {
        case KV8_FIT_PERCENTILE: return percentile_range(s, options->percentile);
        case KV8_FIT_SQUARED_ERROR: return least_squares_range(s, dtype);
        case KV8_FIT_ABSMAX: break;
    }
    return s->absmax;
}

/* range / max, at which range itself does not clip, whichever way the division rounded. */
static float scale_for(float range, double margin, bool power_of_two, kv8_dtype dtype) {
    const double wanted = (double)range * margin / (double)kv8_dtype_max(dtype);
    if (power_of_two) {
        int exponent = 0;
        const double fraction = frexp(wanted, &exponent);
        return (float)ldexp(1, fraction == 0.5 ? exponent - 1 : exponent);
    }
    float scale = (float)wanted;
    while (range / scale > kv8_dtype_max(dtype)) scale = nextafterf(scale, INFINITY);
    return scale;
}

static kv8_status check_fit(const kv8_fit_options *options, kv8_dtype dtype) {
    if (!kv8_is_float8(dtype))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "fit: dtype is %s, must be a float of 8 bits",
                        kv8_dtype_name(dtype));
    if (options->method < KV8_FIT_ABSMAX || options->method > KV8_FIT_SQUARED_ERROR)
        return kv8_fail(KV8_ERR_INVALID, "fit: no method %d", (int)options->method);
    if (options->method == KV8_FIT_PERCENTILE &&
        !(options->percentile > 0 && options->percentile <= 100))
        return kv8_fail(KV8_ERR_INVALID, "fit: percentile is %g, must be above 0 and at most 100",
                        options->percentile);
    if (options->margin != 0 && !(options->margin >= 1 && options->margin <= 1024))
        return kv8_fail(KV8_ERR_INVALID, "fit: margin is %g, must be 1 to 1024", options->margin);
    return KV8_OK;
}

/* --- warnings --- */

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* The channel that is farthest beyond the median one, or -1. */
static int32_t outlier_channel(const kv8_observed_head *head) {
    float sorted[MAX_HEAD_DIM];
    memcpy(sorted, head->channel_absmax, (size_t)head->head_dim * sizeof *sorted);
    qsort(sorted, (size_t)head->head_dim, sizeof *sorted, by_value);
    const float median = sorted[head->head_dim / 2];
    if (median == 0 || !(head->absmax > outlier_factor * median)) return -1;
    int32_t channel = 0;
    while (head->channel_absmax[channel] < head->absmax) channel++;
    return channel;
}

static int32_t nonfinite_channel(const kv8_observed_head *head) {
    int32_t channel = 0;
    while (channel + 1 < head->head_dim && head->channel_nonfinite[channel] == 0) channel++;
    return channel;
}

static uint32_t sample_warnings(const sample *s, const kv8_fit *fit, kv8_dtype dtype) {
    uint32_t warnings = 0;
    if (s->num_rows == 0) return KV8_FIT_NO_ROWS;
    if (s->absmax == 0) warnings |= KV8_FIT_ALL_ZERO;
    if (s->nans > 0) warnings |= KV8_FIT_HAS_NAN;
    if (s->infs > 0) warnings |= KV8_FIT_HAS_INF;
    if (s->absmax > kv8_dtype_max(dtype))
        warnings |= KV8_FIT_CLIPS_AT_1;
    else if (fit->sqnr_at_1_db < fit->sqnr_db - fades_db)
        warnings |= KV8_FIT_FADES_AT_1;
    return warnings;
}

static void name_channel(const kv8_observed_head *head, kv8_fit *fit) {
    if (fit->warnings & (KV8_FIT_HAS_NAN | KV8_FIT_HAS_INF)) {
        fit->channel = nonfinite_channel(head);
        return;
    }
    fit->channel = outlier_channel(head);
    if (fit->channel >= 0) fit->warnings |= KV8_FIT_OUTLIER;
}

/* --- the fit --- */

static void fill_costs(const sample *s, kv8_dtype dtype, kv8_fit *fit) {
    const cost fitted = cost_of(s, dtype, fit->scale), plain = cost_of(s, dtype, 1);
    const double finite = (double)s->num_finite, nonzero = finite - (double)s->zeros;
    fit->sqnr_db = sqnr_db(&fitted);
    fit->sqnr_at_1_db = sqnr_db(&plain);
    fit->clip_rate = finite > 0 ? fitted.clips / finite : 0;
    fit->clip_rate_at_1 = finite > 0 ? plain.clips / finite : 0;
    fit->flushed_rate = nonzero > 0 ? fitted.flushed / nonzero : 0;
    fit->flushed_rate_at_1 = nonzero > 0 ? plain.flushed / nonzero : 0;
    fit->headroom = s->absmax > 0
                        ? (double)kv8_dtype_max(dtype) * (double)fit->scale / (double)s->absmax
                        : (double)NAN;
}

kv8_status kv8_observer_fit(const kv8_observer *observer, kv8_observed_tensor tensor, int32_t layer,
                            int32_t head, const kv8_fit_options *options, kv8_fit *fit_out) {
    KV8_REQUIRE(observer, options, fit_out);
    KV8_TAKE_STRUCT(kv8_fit_options, options);
    const kv8_dtype dtype = options->dtype == KV8_DTYPE_NONE ? KV8_E4M3 : options->dtype;
    KV8_TRY(check_fit(options, dtype));
    sample s = {{0}};
    KV8_TRY(gather(&s, observer, tensor, layer, head));
    kv8_fit fit = KV8_FIT_INIT;
    fit.scale = 1;
    fit.amax = s.absmax;
    fit.num_rows = s.num_rows;
    fit.channel = -1;
    if (s.absmax > 0) {
        const double margin = options->margin == 0 ? 1 : options->margin;
        fit.scale =
            scale_for(fitted_range(&s, options, dtype), margin, options->power_of_two != 0, dtype);
        if (!(fit.scale > 0) || !isfinite(fit.scale))
            return kv8_fail(KV8_ERR_INVALID, "fit: no f32 scale for an absmax of %g",
                            (double)s.absmax);
    }
    fill_costs(&s, dtype, &fit);
    fit.warnings = sample_warnings(&s, &fit, dtype);
    if (head >= 0 && s.num_rows > 0) {
        kv8_observed_head seen = KV8_OBSERVED_HEAD_INIT;
        KV8_TRY(kv8_observer_get(observer, tensor, layer, head, &seen));
        name_channel(&seen, &fit);
    }
    KV8_WRITE_STRUCT(kv8_fit, fit_out, &fit);
    return KV8_OK;
}
