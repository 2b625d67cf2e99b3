/* kv8/calibrate.h - what K, V and Q look like, and the scales that fit them.
 *
 * An observer counts the rows that a cache is about to store: K after rope, V, and Q after rope
 * when asked. Everything it keeps is a sum of whole numbers or a maximum, so that runs, requests
 * and ranks combine exactly, in any order, and its memory does not grow with the text. A fit turns
 * what was observed of one head, or of all heads of a layer, into a scale, and says what storing
 * with it costs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CALIBRATE_H
#define KV8_CALIBRATE_H

#include <kv8/formats.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- ranks --- */

/* The heads of one rank of a tensor-parallel run. Ranks and heads divide one another: a rank holds
 * num_heads / num_ranks heads, or num_ranks / num_heads ranks hold copies of one head, of which the
 * first owns it. */
typedef struct kv8_rank_heads {
    int32_t first, num;
    int32_t owns; /* 0 for the second and later copies */
} kv8_rank_heads;
/* KV8_ERR_INVALID when neither count divides the other, or rank is not below num_ranks. */
KV8_API KV8_NODISCARD kv8_status kv8_rank_heads_get(int32_t num_heads, int32_t num_ranks,
                                                    int32_t rank, kv8_rank_heads *heads_out);

/* --- observing --- */

typedef enum kv8_observed_tensor {
    KV8_OBSERVED_K = 0,
    KV8_OBSERVED_V,
    KV8_OBSERVED_Q,
    KV8_OBSERVED_COUNT
} kv8_observed_tensor;

/* The histogram of |x|: eight bins to each power of two from 2^-32 to 2^32, equal steps within one
 * (a bin's edges are f32 numbers of three mantissa bits). The first bin takes what is smaller, but
 * for zeros, the last what is larger, but for infinities. */
enum { KV8_OBSERVE_BINS = 512, KV8_OBSERVE_BINS_PER_OCTAVE = 8, KV8_OBSERVE_MIN_EXPONENT = -32 };
/* Lower edge of a bin; of KV8_OBSERVE_BINS: 2^32. */
KV8_API float kv8_observe_bin_edge(int32_t bin);

typedef struct kv8_observer kv8_observer;

typedef struct kv8_observer_options {
    size_t struct_size;
    const kv8_allocator *allocator;
    kv8_threads *threads; /* NULL = the calling thread. Borrowed. */
    kv8_isa isa;
    int32_t num_layers, num_kv_heads;
    int32_t num_qo_heads; /* 0 = Q is not observed */
    int32_t k_head_dim;   /* of Q too; 1..576 */
    int32_t v_head_dim;   /* 0 = k_head_dim */
    /* The observer of one rank counts only the heads that the rank owns; 0 ranks = all heads. */
    int32_t rank, num_ranks;
} kv8_observer_options;
#define KV8_OBSERVER_OPTIONS_INIT KV8_SIZED(kv8_observer_options)

/* A new observer is stopped. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_observer_create(kv8_observer **out,
                                                     const kv8_observer_options *options);
KV8_API void kv8_observer_destroy(kv8_observer *observer);
/* What is added while it is stopped is left out. What was counted stays. */
KV8_API void kv8_observer_start(kv8_observer *observer);
KV8_API void kv8_observer_stop(kv8_observer *observer);
KV8_API int kv8_observer_is_on(const kv8_observer *observer);

/* Rows of one layer, every head of them: element (row, head, d) is at row*stride_row +
 * head*stride_head + d. Rows that hold no token must not be among them. */
typedef struct kv8_observe_args {
    size_t struct_size;
    int64_t num_rows;
    kv8_dtype src_dtype; /* F32, BF16 or F16 */
    const void *k;       /* NULL = not in this call, as v and q */
    int64_t k_stride_row, k_stride_head;
    const void *v;
    int64_t v_stride_row, v_stride_head;
    const void *q; /* rotated; refused by an observer without Q */
    int64_t q_stride_row, q_stride_head;
    /* [num_rows, k_head_dim] by kv8_rope_angles: k is rotated first, as kv8_cache_append does, on
     * x86-64 with subnormal floats as 0; NULL = k comes rotated. */
    const float *cos_sin;
    const int32_t *rows_in_use; /* one: only the first so many of num_rows; NULL = all */
    int32_t interleaved; /* cos_sin rotates pairs (2i, 2i + 1), not (i, i + k_head_dim / 2) */
} kv8_observe_args;
#define KV8_OBSERVE_ARGS_INIT KV8_SIZED(kv8_observe_args)

KV8_API KV8_NODISCARD kv8_status kv8_observer_add(kv8_observer *observer, int32_t layer,
                                                  const kv8_observe_args *args);

/* Adds what `from` counted; both have the same layers, heads and dims. */
KV8_API KV8_NODISCARD kv8_status kv8_observer_merge(kv8_observer *observer,
                                                    const kv8_observer *from);
/* All that an observer holds, for a reduction over ranks: the sum of every element of one array,
 * the maximum of every element of the other (none is NaN). Borrowed. */
KV8_API uint64_t *kv8_observer_sums(kv8_observer *observer, size_t *num_out);
KV8_API float *kv8_observer_maxima(kv8_observer *observer, size_t *num_out);

/* The options it was made with, their defaults filled in. */
KV8_API KV8_NODISCARD kv8_status kv8_observer_get_options(const kv8_observer *observer,
                                                          kv8_observer_options *options_out);

/* What was seen of one head. Finite values only, but for nans and infs. Borrowed pointers. */
typedef struct kv8_observed_head {
    size_t struct_size;
    uint64_t num_rows, num_values;
    uint64_t zeros, nans, infs;
    float absmax; /* 0 when nothing finite was seen */
    int32_t head_dim;
    const float *channel_absmax;       /* [head_dim] */
    const uint64_t *channel_nonfinite; /* [head_dim]: NaN and infinities */
    const uint64_t *histogram;         /* [KV8_OBSERVE_BINS] */
} kv8_observed_head;
#define KV8_OBSERVED_HEAD_INIT KV8_SIZED(kv8_observed_head)
KV8_API KV8_NODISCARD kv8_status kv8_observer_get(const kv8_observer *observer,
                                                  kv8_observed_tensor tensor, int32_t layer,
                                                  int32_t head, kv8_observed_head *head_out);
/* Adds what was seen of one head elsewhere, running or not. Where it has no channel arrays (NULL),
 * absmax stands for each channel. Counts that contradict one another are KV8_ERR_INVALID. */
KV8_API KV8_NODISCARD kv8_status kv8_observer_add_head(kv8_observer *observer,
                                                       kv8_observed_tensor tensor, int32_t layer,
                                                       int32_t head, const kv8_observed_head *seen);

/* --- fitting --- */

typedef enum kv8_fit_method {
    KV8_FIT_ABSMAX = 0,   /* nothing that was observed clips */
    KV8_FIT_PERCENTILE,   /* this share of the values does not clip */
    KV8_FIT_SQUARED_ERROR /* least expected squared error */
} kv8_fit_method;

typedef struct kv8_fit_options {
    size_t struct_size;
    kv8_dtype dtype; /* a float of 8 bits; NONE = E4M3 */
    kv8_fit_method method;
    double percentile; /* of KV8_FIT_PERCENTILE: above 0, at most 100 */
    double margin;     /* factor on the fitted range, 0 = 1; at least 1 */
    int power_of_two;  /* the scale is rounded up to one */
} kv8_fit_options;
#define KV8_FIT_OPTIONS_INIT KV8_SIZED(kv8_fit_options)

/* What a fit found worth a warning, as bits. */
enum {
    KV8_FIT_NO_ROWS = 1 << 0,    /* nothing was observed; the scale is 1 */
    KV8_FIT_ALL_ZERO = 1 << 1,   /* every finite value is 0; the scale is 1 */
    KV8_FIT_HAS_NAN = 1 << 2,    /* NaN among the values, which no scale mends */
    KV8_FIT_HAS_INF = 1 << 3,    /* infinities, which saturate */
    KV8_FIT_CLIPS_AT_1 = 1 << 4, /* the largest value is beyond the format's, at scale 1 */
    KV8_FIT_FADES_AT_1 = 1 << 5, /* at scale 1 more than 3 dB below what the fit gives */
    KV8_FIT_OUTLIER = 1 << 6     /* a channel 16 times beyond the median channel */
};
/* "clips at scale 1"; NULL for what is not one of the bits. */
KV8_API const char *kv8_fit_warning_text(uint32_t warning);

/* The figures are those of the observed values stored with `scale` (with 1 for those at_1), from
 * the histogram: values are taken to be spread evenly within their bin. */
typedef struct kv8_fit {
    size_t struct_size;
    float scale; /* value = code * scale, for the options' dtype */
    float amax;
    uint64_t num_rows;
    double sqnr_db, sqnr_at_1_db;           /* signal to rounding noise; NaN without values */
    double clip_rate, clip_rate_at_1;       /* share of finite values beyond the largest code */
    double flushed_rate, flushed_rate_at_1; /* share of values other than 0 that become 0 */
    double headroom;   /* largest value of the format, times scale, over amax; NaN at amax 0 */
    uint32_t warnings; /* KV8_FIT_* bits */
    int32_t channel;   /* that the warnings NAN, INF or OUTLIER are about; -1 = none */
} kv8_fit;
#define KV8_FIT_INIT KV8_SIZED(kv8_fit)

/* Fits head `head` of a layer, or all heads of it together (head = -1, per tensor). */
KV8_API KV8_NODISCARD kv8_status kv8_observer_fit(const kv8_observer *observer,
                                                  kv8_observed_tensor tensor, int32_t layer,
                                                  int32_t head, const kv8_fit_options *options,
                                                  kv8_fit *fit_out);

#ifdef __cplusplus
}
#endif
#endif
