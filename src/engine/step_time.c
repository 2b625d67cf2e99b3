/* step_time.c - the time of a step as a sum of four terms, fitted to measurements.
 *
 * Least squares with four unknowns of which none may be negative: every subset of them is solved as
 * if the others were 0, and the best that has no negative term is taken.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "step_time.h"

#include <math.h>

#include "base_impl.h"

enum { TERMS = 4, STEP = 0, TOKEN, DECODE_KEY, PREFILL_KEY };

double kv8_prefill_keys(double first, double num_tokens) {
    return num_tokens * first + num_tokens * (num_tokens + 1) / 2;
}

/* How often a measurement pays each term. */
static void count_terms(const kv8_speed_row *row, double out[TERMS]) {
    const double prompt = row->num_prompt, gen = row->num_gen, depth = row->depth;
    out[STEP] = ceil(prompt / row->chunk) + gen;
    out[TOKEN] = prompt + gen;
    out[DECODE_KEY] = kv8_prefill_keys(depth, gen);
    out[PREFILL_KEY] = kv8_prefill_keys(depth, prompt);
}

/* Sums over rows of count * count and count * 1, each divided by the measured time: a row weighs by
 * its relative error. */
typedef struct squares {
    double a[TERMS][TERMS], b[TERMS];
    double scale[TERMS]; /* of the unknowns, so that a's diagonal is 1 */
    double rows;
} squares;

static void add_row(squares *s, const kv8_speed_row *row) {
    double counts[TERMS];
    count_terms(row, counts);
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) s->a[i][k] += counts[i] * counts[k] / (row->ns * row->ns);
        s->b[i] += counts[i] / row->ns;
    }
    s->rows++;
}

static void normalise(squares *s) {
    for (int i = 0; i < TERMS; i++) s->scale[i] = s->a[i][i] > 0 ? 1 / sqrt(s->a[i][i]) : 0;
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) s->a[i][k] *= s->scale[i] * s->scale[k];
        s->b[i] *= s->scale[i];
    }
}

/* The terms of the subset, the others 0; false when the rows do not tell them apart. Elimination
 * without a choice of pivots: a is positive definite then. */
static bool solve(const squares *s, unsigned subset, double x[TERMS]) {
    static const double tiny = 1e-10;
    double a[TERMS][TERMS + 1];
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) {
            const bool both = (subset >> i & subset >> k & 1) != 0;
            a[i][k] = both ? s->a[i][k] : i == k;
        }
        a[i][TERMS] = (subset >> i & 1) != 0 ? s->b[i] : 0;
    }
    for (int p = 0; p < TERMS; p++) {
        if (!(a[p][p] > tiny)) return false;
        for (int i = p + 1; i < TERMS; i++) {
            const double factor = a[i][p] / a[p][p];
            for (int k = p; k <= TERMS; k++) a[i][k] -= factor * a[p][k];
        }
    }
    for (int p = TERMS - 1; p >= 0; p--) {
        x[p] = a[p][TERMS];
        for (int k = p + 1; k < TERMS; k++) x[p] -= a[p][k] * x[k];
        x[p] /= a[p][p];
    }
    return true;
}

/* The sum of squared relative errors, but for what all solutions have in common. */
static double error_of(const squares *s, const double x[TERMS]) {
    double error = s->rows;
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) error += x[i] * s->a[i][k] * x[k];
        error -= 2 * x[i] * s->b[i];
    }
    return error;
}

static kv8_status read_rows(const kv8_speed_row *rows, int32_t num_rows, squares *out) {
    for (int32_t i = 0; i < num_rows; i++) {
        kv8_speed_row row;
        KV8_READ_STRUCT(kv8_speed_row, &row,
                        (const void *)((const char *)rows + (size_t)i * rows->struct_size));
        if (row.num_prompt < 0 || row.num_gen < 0 || (row.num_prompt == 0) == (row.num_gen == 0) ||
            row.depth < 0 || row.chunk < 1 || !(row.ns > 0) || !isfinite(row.ns))
            return kv8_fail(
                KV8_ERR_INVALID,
                "row %d: %d tokens of prompt, %d generated, depth %d, chunks of %d, %g ns", i,
                row.num_prompt, row.num_gen, row.depth, row.chunk, row.ns);
        add_row(out, &row);
    }
    return KV8_OK;
}

kv8_status kv8_step_time_fit(const kv8_speed_row *rows, int32_t num_rows, kv8_step_time *time_out) {
    KV8_REQUIRE(rows, time_out);
    enum { ALL = (1 << TERMS) - 1 };
    squares s = {0};
    double best[TERMS] = {0}, x[TERMS];
    KV8_TRY(read_rows(rows, num_rows, &s));
    normalise(&s);
    if (!solve(&s, ALL, x))
        return kv8_fail(
            KV8_ERR_INVALID,
            "%d rows do not tell the terms of a step's time apart: it takes decode at two "
            "depths and prompts at two",
            num_rows);
    double least = HUGE_VAL;
    for (unsigned subset = 0; subset <= ALL; subset++) {
        if (!solve(&s, subset, x)) continue;
        const bool negative = x[0] < 0 || x[1] < 0 || x[2] < 0 || x[3] < 0;
        const double error = error_of(&s, x);
        if (negative || !(error < least)) continue;
        least = error;
        for (int i = 0; i < TERMS; i++) best[i] = x[i] * s.scale[i];
    }
    const kv8_step_time result = {.step_ns = best[STEP],
                                  .token_ns = best[TOKEN],
                                  .decode_key_ns = best[DECODE_KEY],
                                  .prefill_key_ns = best[PREFILL_KEY]};
    KV8_WRITE_STRUCT(kv8_step_time, time_out, &result);
    return KV8_OK;
}
