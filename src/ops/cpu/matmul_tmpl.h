/* matmul_tmpl.h - weights times activations on one rung, straight from BF16, F32 or packed MXFP4.
 * Included by ops_<rung>.c after base/simd/<rung>.h, formats_simd.h and these words:
 *
 *   W_ROWS                                              weight rows per dot tile, <= 8
 *   void w_widen_mxfp4(block, scale, v_f32 out[32/V_LANES])   one block, exact
 *   W_OWN_ORDER                                         1: its lanes are not in column order, and
 *   v_f32 w_to_own_order(v_f32), w_from_own_order(v_f32)      order the lanes of a vector alike
 *   void w_reduce(const v_f32 acc[W_ROWS], float *sums)       sums[r] = the lanes of acc[r]
 *
 * One kernel, the dot tile: W_ROWS weight rows times 1..3 activation rows, vectors along the
 * columns, one vector accumulator per output, nothing but loads and FMAs between. Outputs never
 * depend on their neighbours: column c always joins lane c % V_LANES of its chunk's accumulator,
 * in ascending order, and chunks are added in order. So decode, prefill, any cut into tiles and
 * any number of threads give the same bits.
 *
 * Few activation rows stream the weights, widening them on the way (bound by the weight bytes).
 * Many rows widen a panel [W_ROWS, chunk] to f32 once and run every row over it from the
 * first-level cache (bound by FMAs); so does a last group of fewer than W_ROWS rows.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "../../base/simd/unroll.h"

/* Bytes of `cols` columns of one weight row. */
static inline int64_t weight_bytes(kv8_weight_kind kind, int64_t cols) {
    switch (kind) {
        case KV8_WEIGHT_BF16: return cols * 2;
        case KV8_WEIGHT_F32: return cols * 4;
        default: return cols / 2;
    }
}

/* W_ROWS rows at a fixed stride, from a pointer to every third: a processor adds once or twice the
 * stride for nothing, while eight pointers would not fit x86's registers. */
typedef struct row_cursor {
    const uint8_t *at[3];
    int64_t stride;
} row_cursor;
static inline row_cursor cursor_at(const void *first, int64_t stride) {
    const uint8_t *const row = first;
    return (row_cursor){{row, row + 3 * stride, row + 6 * stride}, stride};
}
V_INLINE const uint8_t *cursor_row(const row_cursor *cursor, int r) {
    return cursor->at[r / 3] + r % 3 * cursor->stride;
}
V_INLINE void cursor_advance(row_cursor *cursor, int64_t bytes) {
    for (int k = 0; k < 3; k++) cursor->at[k] += bytes;
}

/* What one dot tile reads, from the chunk's first column on. */
typedef struct dot_operands {
    const uint8_t *w;      /* W_ROWS rows */
    int64_t w_stride;      /* bytes from row to row */
    const uint8_t *scales; /* MXFP4 */
    int64_t scale_stride;
    const float *x[KV8_MATMUL_X];
    int64_t cols;
    int64_t ahead; /* streaming: bytes from a weight to the one that its row's place holds next */
    const uint8_t *next; /* streaming MXFP4: what is read a group of rows later */
} dot_operands;

V_INLINE v_f32 load_plain(kv8_weight_kind kind, const uint8_t *w) {
    return kind == KV8_WEIGHT_BF16 ? v_widen_bf16(w) : v_widen_f32(w);
}
V_INLINE v_f32 load_plain_n(kv8_weight_kind kind, const uint8_t *w, int n) {
    return kind == KV8_WEIGHT_BF16 ? v_widen_bf16_n(w, n) : v_widen_f32_n(w, n);
}

V_INLINE void dot_plain(kv8_weight_kind kind, int num_x, bool stream, const dot_operands *t,
                        v_f32 acc[KV8_MATMUL_X][W_ROWS]) {
    const int64_t whole = t->cols / V_LANES * V_LANES;
    const float *x_at[KV8_MATMUL_X];
    v_f32 x[KV8_MATMUL_X];
    V_UNROLL for (int i = 0; i < num_x; i++) x_at[i] = t->x[i];
    row_cursor w_at = cursor_at(t->w, t->w_stride);
    row_cursor next_at = cursor_at(t->w + t->ahead, t->w_stride);
    for (int64_t c = 0; c < whole; c += V_LANES) {
        V_UNROLL for (int i = 0; i < num_x; i++) x[i] = v_load(x_at[i] + c);
        V_UNROLL for (int r = 0; r < W_ROWS; r++) {
            v_f32 w = load_plain(kind, cursor_row(&w_at, r));
            if (num_x > 1) V_KEEP(w);
            if (stream) V_PREFETCH(cursor_row(&next_at, r));
            V_UNROLL for (int i = 0; i < num_x; i++) acc[i][r] = v_fma(w, x[i], acc[i][r]);
        }
        cursor_advance(&w_at, weight_bytes(kind, V_LANES));
        cursor_advance(&next_at, weight_bytes(kind, V_LANES));
    }
    const int tail = (int)(t->cols - whole);
    if (tail == 0) return;
    V_UNROLL for (int i = 0; i < num_x; i++) x[i] = v_load_n(x_at[i] + whole, tail);
    V_UNROLL for (int r = 0; r < W_ROWS; r++) {
        const v_f32 w = load_plain_n(kind, cursor_row(&w_at, r), tail);
        V_UNROLL for (int i = 0; i < num_x; i++) acc[i][r] = v_fma(w, x[i], acc[i][r]);
    }
}

enum { MXFP4_VECTORS = KV8_MXFP4_BLOCK / V_LANES, CACHE_LINE = 64 };

/* What comes next is fetched in the order of memory, line after line over all rows of the group:
 * eight rows side by side are streams too short for the hardware to run ahead of. */
V_INLINE void dot_mxfp4(int num_x, const dot_operands *t, v_f32 acc[KV8_MATMUL_X][W_ROWS]) {
    row_cursor w_at = cursor_at(t->w, t->w_stride);
    row_cursor scale_at = cursor_at(t->scales, t->scale_stride);
    const uint8_t *next = t->next;
    for (int64_t c = 0; c < t->cols; c += KV8_MXFP4_BLOCK) {
        v_f32 x[KV8_MATMUL_X][MXFP4_VECTORS];
        V_UNROLL for (int j = 0; W_OWN_ORDER && j < MXFP4_VECTORS; j++) {
            V_UNROLL for (int i = 0; i < num_x; i++) x[i][j] =
                w_to_own_order(v_load(t->x[i] + c + j * V_LANES));
        }
        V_UNROLL for (int i = 0; i < W_ROWS * KV8_MXFP4_BLOCK_BYTES; i += CACHE_LINE)
            V_PREFETCH(next + i);
        next += W_ROWS * KV8_MXFP4_BLOCK_BYTES;
        V_UNROLL for (int r = 0; r < W_ROWS; r++) {
            v_f32 w[MXFP4_VECTORS];
            w_widen_mxfp4(cursor_row(&w_at, r), *cursor_row(&scale_at, r), w);
            V_UNROLL for (int j = 0; j < MXFP4_VECTORS; j++) {
                V_UNROLL for (int i = 0; i < num_x; i++) acc[i][r] = v_fma(
                    w[j], W_OWN_ORDER ? x[i][j] : v_load(t->x[i] + c + j * V_LANES), acc[i][r]);
            }
        }
        cursor_advance(&w_at, KV8_MXFP4_BLOCK_BYTES);
        cursor_advance(&scale_at, 1);
    }
    V_UNROLL for (int i = 0; W_OWN_ORDER && i < num_x; i++) {
        V_UNROLL for (int r = 0; r < W_ROWS; r++) acc[i][r] = w_from_own_order(acc[i][r]);
    }
}

/* sums[i*W_ROWS + r] = w[r] . x[i], i < num_x; kind, num_x and stream are constants. */
V_INLINE void dot_tile(kv8_weight_kind kind, int num_x, bool stream, const dot_operands *t,
                       float *sums) {
    v_f32 acc[KV8_MATMUL_X][W_ROWS];
    V_UNROLL for (int i = 0; i < num_x; i++) {
        V_UNROLL for (int r = 0; r < W_ROWS; r++) acc[i][r] = v_set1(0.0f);
    }
    if (kind == KV8_WEIGHT_MXFP4) {
        dot_mxfp4(num_x, t, acc);
    } else {
        dot_plain(kind, num_x, stream, t, acc);
    }
    V_UNROLL for (int i = 0; i < num_x; i++) w_reduce(acc[i], sums + i * W_ROWS);
}

typedef void (*dot_kernel)(const dot_operands *t, float *sums);
#define DOT(name, kind, num_x, stream)                           \
    static void dot_##name(const dot_operands *t, float *sums) { \
        dot_tile(kind, num_x, stream, t, sums);                  \
    }
DOT(stream_bf16_1, KV8_WEIGHT_BF16, 1, true)
DOT(stream_bf16_2, KV8_WEIGHT_BF16, 2, true)
DOT(stream_bf16_3, KV8_WEIGHT_BF16, 3, true)
DOT(stream_f32_1, KV8_WEIGHT_F32, 1, true)
DOT(stream_f32_2, KV8_WEIGHT_F32, 2, true)
DOT(stream_f32_3, KV8_WEIGHT_F32, 3, true)
DOT(stream_mxfp4_1, KV8_WEIGHT_MXFP4, 1, true)
DOT(stream_mxfp4_2, KV8_WEIGHT_MXFP4, 2, true)
DOT(stream_mxfp4_3, KV8_WEIGHT_MXFP4, 3, true)
DOT(panel_1, KV8_WEIGHT_F32, 1, false)
DOT(panel_2, KV8_WEIGHT_F32, 2, false)
DOT(panel_3, KV8_WEIGHT_F32, 3, false)
#undef DOT
static const dot_kernel stream_kernels[][KV8_MATMUL_X] = {
    [KV8_WEIGHT_BF16] = {dot_stream_bf16_1, dot_stream_bf16_2, dot_stream_bf16_3},
    [KV8_WEIGHT_F32] = {dot_stream_f32_1, dot_stream_f32_2, dot_stream_f32_3},
    [KV8_WEIGHT_MXFP4] = {dot_stream_mxfp4_1, dot_stream_mxfp4_2, dot_stream_mxfp4_3},
};
static const dot_kernel panel_kernels[KV8_MATMUL_X] = {dot_panel_1, dot_panel_2, dot_panel_3};

/* Columns per chunk: a function of cols alone, equal parts, whole MXFP4 blocks and vectors. */
static int64_t chunk_cols(int64_t cols) {
    const int64_t chunks = kv8_max_i64(1, kv8_ceil_div(cols, KV8_MATMUL_CHUNK));
    return kv8_ceil_div(kv8_ceil_div(cols, chunks), KV8_MXFP4_BLOCK) * KV8_MXFP4_BLOCK;
}

static const float *x_row(const kv8_matmul_job *job, int64_t i) {
    return job->x + (job->x_rows != NULL ? job->x_rows[i] : i) * job->x_stride;
}
/* out[r] = bias of weight row row + r; 0 without one, and beyond num_rows. */
static void load_bias(const kv8_matmul_job *job, int64_t row, int64_t num_rows, float *out) {
    for (int r = 0; r < W_ROWS; r++) {
        uint16_t code = 0;
        if (job->bias != NULL && r < num_rows)
            memcpy(&code, (const uint8_t *)job->bias + 2 * (row + r), sizeof code);
        const uint32_t bits = (uint32_t)code << 16;
        memcpy(&out[r], &bits, sizeof bits);
    }
}

/* Points t at the weight rows from `row` on, from column `from` on. */
static void point_at_weights(dot_operands *t, const kv8_weight *w, int64_t row, int64_t from) {
    t->w = (const uint8_t *)w->data + weight_bytes(w->kind, row * w->cols + from);
    t->w_stride = weight_bytes(w->kind, w->cols);
    t->ahead = 0;
    if (w->kind != KV8_WEIGHT_MXFP4) return;
    t->scales = (const uint8_t *)w->scales + (row * w->cols + from) / KV8_MXFP4_BLOCK;
    t->scale_stride = w->cols / KV8_MXFP4_BLOCK;
}

/* y[0..n) = start[0..n) + sums[0..n); a copy, so that the compiler sees no overlap. */
V_INLINE void add_row(int64_t n, const float *start, const float *sums, float *y) {
    float out[W_ROWS] = {0};
    memcpy(out, start, (size_t)n * sizeof(float));
    for (int r = 0; r < W_ROWS; r++) out[r] += sums[r];
    memcpy(y, out, (size_t)n * sizeof(float));
}

/* Adds the sums of num_rows weight rows and num_x activations from x_idx on to start: the bias, or
 * y itself (NULL) from the second chunk on. */
static void add_to_output(const kv8_matmul_job *job, int64_t row, int64_t num_rows, int64_t x_idx,
                          int64_t num_x, const float *start, const float *sums) {
    for (int64_t i = 0; i < num_x; i++, sums += W_ROWS) {
        float *const y = job->y + (x_idx + i) * job->y_stride + row;
        const float *const from = start != NULL ? start : y;
        if (num_rows == W_ROWS) {
            add_row(W_ROWS, from, sums, y); /* a constant length: two vector moves */
        } else {
            add_row(num_rows, from, sums, y);
        }
    }
}

/* 16 floats of stride more than a chunk, so that the rows of a panel do not fight for one set of
 * the cache. */
enum { PANEL_STRIDE = KV8_MATMUL_CHUNK + 16 };

static void widen_row_plain(kv8_weight_kind kind, const uint8_t *w, int64_t ahead, int64_t cols,
                            float *out) {
    int64_t c = 0;
    for (; c + V_LANES <= cols; c += V_LANES, w += weight_bytes(kind, V_LANES)) {
        V_PREFETCH(w + ahead);
        v_store(out + c, load_plain(kind, w));
    }
    const int tail = (int)(cols - c);
    if (tail > 0) v_store_n(out + c, load_plain_n(kind, w, tail), tail);
}

static void widen_row_mxfp4(const uint8_t *w, const uint8_t *scales, int64_t ahead, int64_t cols,
                            float *out) {
    for (int64_t c = 0; c < cols; c += KV8_MXFP4_BLOCK, w += KV8_MXFP4_BLOCK_BYTES) {
        v_f32 values[MXFP4_VECTORS];
        V_PREFETCH(w + ahead);
        w_widen_mxfp4(w, scales[c / KV8_MXFP4_BLOCK], values);
        V_UNROLL for (int j = 0; j < MXFP4_VECTORS; j++)
            v_store(out + c + j * V_LANES, W_OWN_ORDER ? w_from_own_order(values[j]) : values[j]);
    }
}

/* Widens num_rows of the weight rows that t points at into the panel, zeros below them, and points
 * t there. */
static void widen_panel(kv8_weight_kind kind, int64_t num_rows, dot_operands *t, float *panel) {
    for (int64_t r = 0; r < W_ROWS; r++) {
        const uint8_t *const w = t->w + r * t->w_stride;
        float *const out = panel + r * PANEL_STRIDE;
        if (r >= num_rows) {
            memset(out, 0, (size_t)t->cols * sizeof(float));
        } else if (kind == KV8_WEIGHT_MXFP4) {
            widen_row_mxfp4(w, t->scales + r * t->scale_stride, t->ahead, t->cols, out);
        } else if (kind == KV8_WEIGHT_BF16) {
            widen_row_plain(KV8_WEIGHT_BF16, w, t->ahead, t->cols, out);
        } else {
            widen_row_plain(KV8_WEIGHT_F32, w, t->ahead, t->cols, out);
        }
    }
    t->w = (const uint8_t *)panel;
    t->w_stride = PANEL_STRIDE * (int64_t)sizeof(float);
}

/* Up to this many activations, widening every weight again for each three of them costs less than
 * the panel, whose widening does not overlap with the FMAs; measured at 2880 columns. */
static int64_t max_streamed(kv8_weight_kind kind) {
    return kind == KV8_WEIGHT_MXFP4 ? 6 : 12;
}

/* One group of at most W_ROWS weight rows times the tile's activations, chunk after chunk. */
static void matmul_group(const kv8_matmul_job *job, const kv8_matmul_tile *tile, int64_t row,
                         float *panel) {
    const kv8_weight_kind kind = job->w.kind;
    const int64_t cols = job->w.cols, chunk = chunk_cols(cols);
    const int64_t num_rows = kv8_min_i64(W_ROWS, tile->row_end - row);
    const bool stream = num_rows == W_ROWS && tile->x_end - tile->x_begin <= max_streamed(kind);
    const dot_kernel *const kernels = stream ? stream_kernels[kind] : panel_kernels;
    float bias[W_ROWS], sums[KV8_MATMUL_X * W_ROWS];
    dot_operands t;
    load_bias(job, row, num_rows, bias);
    int64_t from = 0;
    do {
        t.cols = kv8_min_i64(chunk, cols - from);
        point_at_weights(&t, &job->w, row, from);
        /* The next chunk of the same row, or the first of the row W_ROWS further. */
        t.ahead = from + chunk < cols ? weight_bytes(kind, chunk)
                                      : weight_bytes(kind, W_ROWS * cols - from);
        t.next = (const uint8_t *)job->w.data +
                 weight_bytes(kind, (row + W_ROWS) * cols + W_ROWS * from);
        if (!stream) widen_panel(kind, num_rows, &t, panel);
        for (int64_t i = tile->x_begin; i < tile->x_end; i += KV8_MATMUL_X) {
            const int64_t num_x = kv8_min_i64(KV8_MATMUL_X, tile->x_end - i);
            for (int64_t k = 0; k < num_x; k++) t.x[k] = x_row(job, i + k) + from;
            kernels[num_x - 1](&t, sums);
            add_to_output(job, row, num_rows, i, num_x, from == 0 ? bias : NULL, sums);
        }
        from += chunk;
    } while (from < cols);
}

static void matmul_tile(const kv8_matmul_job *job, const kv8_matmul_tile *tile) {
    _Alignas(64) float panel[W_ROWS * PANEL_STRIDE];
    for (int64_t row = tile->row_begin; row < tile->row_end; row += W_ROWS)
        matmul_group(job, tile, row, panel);
}
