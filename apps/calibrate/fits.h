/* fits.h - the fitted scales of a model: from an observer, as a table, JSON and a file's data.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef CALIBRATE_FITS_H
#define CALIBRATE_FITS_H

#include "cli.h"

typedef struct fits {
    int32_t num_layers, num_kv_heads, num_qo_heads;
    bool per_tensor;
    kv8_fit_options options;
    kv8_fit *heads;       /* [num_layers, 2, num_kv_heads]: every head for itself */
    float *scales, *amax; /* [num_layers, columns] as a scale file has them */
    double *sqnr_db, *clip_rate;
    float *q_scales;               /* [num_layers, num_qo_heads]; NULL = none */
    uint64_t *histogram;           /* [num_layers, columns, KV8_OBSERVE_BINS] */
    uint64_t *zeros, *nans, *infs; /* [num_layers, columns] */
    uint64_t num_tokens;
} fits;

int fits_make(fits *fits_out, const kv8_observer *observer, const kv8_fit_options *options,
              bool per_tensor);
void fits_free(fits *f);

/* A row per layer for K and for V, then a line per warning. */
void fits_print(const fits *f);
json_t *fits_json(const fits *f);
/* Writes them as a scale file of the model; mix: the best formats of every layer, or NULL. */
int fits_write(const fits *f, const cli_model *model, const kv8_dtype *mix, const char *path,
               kv8_scale_format format, int32_t num_ranks);

/* Holds the scales of a file against what was observed: each head whose largest value is beyond
 * its scale's range, or fills less than 1/64 of it, is named, and what could explain it. */
int fits_check(const fits *f, const kv8_scale_file *file, const char *path);

/* SVG: range and SQNR at scale 1 and as fitted, layers by heads. */
int fits_draw(const fits *f, const char *title, FILE *file);

#endif
