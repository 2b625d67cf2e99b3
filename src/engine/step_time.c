/* step_time.c - the time of a step by its tokens and keys, fitted to measurements.
 *
 * The unknowns are the times at the sizes of steps that were measured, and a key's two times. A
 * measurement is a sum of them, each so often: a step between two sizes counts as a part of each.
 * Least squares of relative errors; what comes out negative is 0, the most negative first.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "step_time.h"

#include <math.h>

#include "base_impl.h"

enum { SIZES = KV8_STEP_SIZES, DECODE_KEY = SIZES, PREFILL_KEY, TERMS };

double kv8_prefill_keys(double first, double num_tokens) {
    return num_tokens * first + num_tokens * (num_tokens + 1) / 2;
}

/* A step of num_tokens is `part` of sizes[i + 1] and the rest of sizes[i]. */
typedef struct between {
    int32_t i;
    double part;
} between;

static between place_of(const int32_t *sizes, int32_t num_sizes, int32_t num_tokens) {
    int32_t i = 0;
    while (i + 2 < num_sizes && sizes[i + 1] <= num_tokens) i++;
    if (num_sizes < 2 || num_tokens <= sizes[0]) return (between){0, 0};
    return (between){i, (double)(num_tokens - sizes[i]) / (sizes[i + 1] - sizes[i])};
}

double kv8_step_time_of(const kv8_step_time *time, int32_t num_tokens) {
    const between at = place_of(time->sizes, time->num_sizes, num_tokens);
    const double here = time->ns[at.i];
    return at.part == 0 ? here : here + at.part * (time->ns[at.i + 1] - here);
}

/* --- what a measurement counts --- */

static int32_t seqs_of(const kv8_speed_row *row) {
    return row->num_seqs == 0 ? 1 : row->num_seqs;
}
/* Tokens of its steps; those of the last one of a prompt may be fewer. */
static int32_t size_of(const kv8_speed_row *row) {
    if (row->num_gen > 0) return seqs_of(row);
    return row->num_prompt < row->chunk ? row->num_prompt : row->chunk;
}

static void count_steps(const kv8_step_time *t, int32_t size, double num, double out[TERMS]) {
    const between at = place_of(t->sizes, t->num_sizes, size);
    out[at.i] += num * (1 - at.part);
    if (at.part > 0) out[at.i + 1] += num * at.part;
}

/* How often a measurement pays each term. */
static void count_terms(const kv8_step_time *t, const kv8_speed_row *row, double out[TERMS]) {
    const int32_t size = size_of(row), seqs = seqs_of(row);
    if (row->num_gen > 0) {
        count_steps(t, size, row->num_gen, out);
        out[DECODE_KEY] = seqs * kv8_prefill_keys(row->depth, row->num_gen);
        return;
    }
    count_steps(t, size, row->num_prompt / size, out);
    if (row->num_prompt % size > 0) count_steps(t, row->num_prompt % size, 1, out);
    out[PREFILL_KEY] = kv8_prefill_keys(row->depth, row->num_prompt);
}

/* --- least squares --- */

/* Sums over rows of count * count and count * 1, each divided by the measured time: a row weighs by
 * its relative error. */
typedef struct squares {
    double a[TERMS][TERMS], b[TERMS];
    double scale[TERMS]; /* of the unknowns, so that a's diagonal is 1 */
    bool used[TERMS];
} squares;

static void add_row(squares *s, const kv8_step_time *t, const kv8_speed_row *row) {
    double counts[TERMS] = {0};
    count_terms(t, row, counts);
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) s->a[i][k] += counts[i] * counts[k] / (row->ns * row->ns);
        s->b[i] += counts[i] / row->ns;
    }
}

static void normalise(squares *s) {
    for (int i = 0; i < TERMS; i++) s->scale[i] = s->a[i][i] > 0 ? 1 / sqrt(s->a[i][i]) : 0;
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) s->a[i][k] *= s->scale[i] * s->scale[k];
        s->b[i] *= s->scale[i];
    }
}

/* The terms in use, the others 0; false when the rows do not tell them apart. Elimination without a
 * choice of pivots: a is positive definite then. */
static bool solve(const squares *s, double x[TERMS]) {
    static const double tiny = 1e-10;
    double a[TERMS][TERMS + 1];
    for (int i = 0; i < TERMS; i++) {
        for (int k = 0; k < TERMS; k++) a[i][k] = s->used[i] && s->used[k] ? s->a[i][k] : i == k;
        a[i][TERMS] = s->used[i] ? s->b[i] : 0;
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

static bool solve_from_zero(squares *s, double x[TERMS]) {
    for (;;) {
        if (!solve(s, x)) return false;
        int least = 0;
        for (int i = 1; i < TERMS; i++)
            if (x[i] < x[least]) least = i;
        if (x[least] >= 0) return true;
        s->used[least] = false;
    }
}

/* --- the rows --- */

/* In order, each once; false when there is no room. */
static bool add_size(kv8_step_time *t, int32_t size) {
    int32_t at = 0;
    while (at < t->num_sizes && t->sizes[at] < size) at++;
    if (at < t->num_sizes && t->sizes[at] == size) return true;
    if (t->num_sizes == SIZES) return false;
    for (int32_t i = t->num_sizes++; i > at; i--) t->sizes[i] = t->sizes[i - 1];
    t->sizes[at] = size;
    return true;
}

static kv8_status read_row(const kv8_speed_row *rows, int32_t i, kv8_speed_row *out) {
    kv8_speed_row row;
    KV8_READ_STRUCT(kv8_speed_row, &row,
                    (const void *)((const char *)rows + (size_t)i * rows->struct_size));
    if (row.num_prompt < 0 || row.num_gen < 0 || (row.num_prompt == 0) == (row.num_gen == 0) ||
        row.depth < 0 || row.chunk < 1 || row.num_seqs < 0 ||
        (row.num_prompt > 0 && row.num_seqs > 1) || !(row.ns > 0) || !isfinite(row.ns))
        return kv8_fail(KV8_ERR_INVALID,
                        "row %d: %d tokens of prompt, %d generated, of %d sequences, depth %d, "
                        "chunks of %d, %g ns",
                        i, row.num_prompt, row.num_gen, row.num_seqs, row.depth, row.chunk, row.ns);
    *out = row;
    return KV8_OK;
}

kv8_status kv8_step_time_fit(const kv8_speed_row *rows, int32_t num_rows, kv8_step_time *time_out) {
    KV8_REQUIRE(rows, time_out);
    kv8_step_time t = {0};
    kv8_speed_row row;
    for (int32_t i = 0; i < num_rows; i++) {
        KV8_TRY(read_row(rows, i, &row));
        if (!add_size(&t, size_of(&row)))
            return kv8_fail(KV8_ERR_INVALID, "the rows have steps of more than %d sizes", SIZES);
    }
    squares s = {0};
    double x[TERMS];
    for (int32_t i = 0; i < num_rows; i++) {
        KV8_TRY(read_row(rows, i, &row));
        add_row(&s, &t, &row);
    }
    normalise(&s);
    for (int i = 0; i < TERMS; i++) s.used[i] = i >= SIZES || i < t.num_sizes;
    if (!solve_from_zero(&s, x))
        return kv8_fail(
            KV8_ERR_INVALID,
            "%d rows do not tell the terms of a step's time apart: it takes decode at two "
            "depths and prompts at two",
            num_rows);
    for (int32_t i = 0; i < t.num_sizes; i++) t.ns[i] = x[i] * s.scale[i];
    t.decode_key_ns = x[DECODE_KEY] * s.scale[DECODE_KEY];
    t.prefill_key_ns = x[PREFILL_KEY] * s.scale[PREFILL_KEY];
    KV8_WRITE_STRUCT(kv8_step_time, time_out, &t);
    return KV8_OK;
}
