/* quantize_q_case.h - Q of a ragged batch, with every kind of value, and the definition of its
 * e4m3: what kv8_quantize_q must give on the host and on a GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_QUANTIZE_Q_CASE_H
#define KV8_QUANTIZE_Q_CASE_H

#include <float.h>

#include <kv8/attention.h>

#include "testing.h"

enum { QQ_BATCH = 6, QQ_ROWS = 150, QQ_SPARE = 7 }; /* rows behind the last request's */
/* A request of one row, one of none, requests that share a block and one that has several. */
static const int32_t qq_indptr[QQ_BATCH + 1] = {0, 1, 20, 20, 33, 149, QQ_ROWS};

typedef struct qq_case {
    kv8_dtype source;
    int32_t num_qo_heads, num_kv_heads, head_dim, gap; /* gap: elements between rows */
    bool given, wild;
} qq_case;

typedef struct qq_inputs {
    void *q; /* as the source dtype has it */
    size_t q_bytes, codes_bytes;
    float *values; /* the same widened */
    int64_t stride_row;
    float head_scale[64];
} qq_inputs;

static inline float qq_value(test_rng *rng, bool wild) {
    const float x = rng_normal(rng);
    if (!wild) return x;
    switch (rng_range(rng, 0, 50)) {
        case 0: return (float)NAN;
        case 1: return -INFINITY;
        case 2: return 3e38f * rng_normal(rng);
        case 3: return -0.0f;
        default: return x * exp2f((float)rng_range(rng, -30, 4));
    }
}

/* Request 1 is all zero, or far below the smallest normal number; the heads differ in size. */
static inline qq_inputs qq_make(const qq_case *c, uint64_t seed) {
    test_rng rng = {seed};
    qq_inputs in = {.stride_row = (int64_t)c->num_qo_heads * c->head_dim + c->gap};
    const size_t num = (size_t)((QQ_ROWS + QQ_SPARE) * in.stride_row);
    in.codes_bytes = num;
    in.q_bytes = num * kv8_dtype_size(c->source);
    in.q = malloc(in.q_bytes);
    in.values = malloc(num * sizeof(float));
    for (size_t i = 0; i < num; i++) {
        const int64_t row = (int64_t)i / in.stride_row;
        const int32_t head = (int32_t)((int64_t)i % in.stride_row / c->head_dim);
        float x = ldexpf(qq_value(&rng, c->wild), head % 5);
        if (row >= qq_indptr[1] && row < qq_indptr[2]) x = seed % 2 == 0 ? 0 : x * 1e-37f;
        in.values[i] = x;
    }
    assert_ok(kv8_narrow(KV8_ISA_SCALAR, c->source, in.values, num, 1, in.q, NULL));
    for (size_t i = 3; c->wild && c->source != KV8_F32 && i < num;
         i += 41) /* narrowing makes none */
        ((uint16_t *)in.q)[i] = c->source == KV8_BF16 ? 0x7f80 : 0x7c00;
    assert_ok(kv8_widen(KV8_ISA_SCALAR, c->source, in.q, num, in.values));
    for (int i = 0; i < 64; i++) in.head_scale[i] = 0.01f * (float)(i + 1);
    return in;
}

static inline void qq_free(qq_inputs *in) {
    free(in->q);
    free(in->values);
}

static inline kv8_quantize_q_args qq_args(const qq_case *c, const qq_inputs *in) {
    kv8_quantize_q_args args = KV8_QUANTIZE_Q_ARGS_INIT;
    args.batch = QQ_BATCH;
    args.max_rows = QQ_ROWS + QQ_SPARE;
    args.num_qo_heads = c->num_qo_heads;
    args.num_kv_heads = c->num_kv_heads;
    args.head_dim = c->head_dim;
    args.src_dtype = c->source;
    args.q_stride_row = args.codes_stride_row = in->stride_row;
    args.q_stride_head = args.codes_stride_head = c->head_dim;
    return args;
}

static inline float qq_scale(const qq_case *c, const qq_inputs *in, int32_t request,
                             int32_t kv_head) {
    const int32_t group = c->num_qo_heads / c->num_kv_heads;
    float most = 0;
    for (int64_t row = qq_indptr[request]; row < qq_indptr[request + 1]; row++) {
        for (int64_t i = 0; i < (int64_t)group * c->head_dim; i++) {
            const float x =
                fabsf(in->values[row * in->stride_row + kv_head * group * c->head_dim + i]);
            if (isfinite(x) && x > most) most = x;
        }
    }
    return most / 448 >= FLT_MIN ? most / 448 : 1;
}

/* Codes and scales against the definition; what lies between and behind rows is still 0xab. */
static inline void qq_check(const qq_case *c, const qq_inputs *in, const uint8_t *codes,
                            const float *q_scale) {
    const int32_t group = c->num_qo_heads / c->num_kv_heads;
    for (int32_t cell = 0; !c->given && cell < QQ_BATCH * c->num_kv_heads; cell++) {
        const float want = qq_scale(c, in, cell / c->num_kv_heads, cell % c->num_kv_heads);
        if (q_scale[cell] != want)
            fail_msg("scale %d is %g, must be %g", cell, (double)q_scale[cell], (double)want);
    }
    int32_t request = 0;
    for (int64_t i = 0; i < (int64_t)in->codes_bytes; i++) {
        const int64_t row = i / in->stride_row, in_row = i % in->stride_row;
        uint8_t want = 0xab;
        if (row < QQ_ROWS && in_row < (int64_t)c->num_qo_heads * c->head_dim) {
            while (qq_indptr[request + 1] <= row) request++;
            const int32_t head = (int32_t)(in_row / c->head_dim);
            const float scale =
                c->given ? in->head_scale[head] : q_scale[request * c->num_kv_heads + head / group];
            assert_ok(kv8_narrow(KV8_ISA_SCALAR, KV8_E4M3, &in->values[i], 1, scale, &want, NULL));
        }
        if (codes[i] != want)
            fail_msg("row %lld, element %lld: code 0x%02x, must be 0x%02x", (long long)row,
                     (long long)in_row, codes[i], want);
    }
}

/* Calls `check` for cases of every kind; returns how many. */
static inline int qq_walk(void (*check)(const qq_case *c, uint64_t seed, void *cookie),
                          void *cookie) {
    static const int32_t shapes[][3] = {{64, 8, 64}, {8, 8, 128}, {12, 3, 40},
                                        {5, 1, 45},  {2, 2, 576}, {3, 3, 1}};
    int count = 0;
    for (int source = KV8_F32; source <= KV8_F16; source++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            for (int kind = 0; kind < 2; kind++, count++) {
                const qq_case c = {.source = (kv8_dtype)source,
                                   .num_qo_heads = shapes[s][0],
                                   .num_kv_heads = shapes[s][1],
                                   .head_dim = shapes[s][2],
                                   .gap = count % 3 == 0   ? 3
                                          : count % 3 == 1 ? 16
                                                           : 0,
                                   .given = kind == 0 && s % 3 == 0,
                                   .wild = kind == 1};
                check(&c, (uint64_t)count + 1, cookie);
            }
        }
    }
    return count;
}

#endif
