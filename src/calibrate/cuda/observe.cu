// observe.cu - counts rows of K, V and Q as observe.c does, and gives the same numbers.
//
// A block counts some rows of one head: a shared histogram, whose atomics take lanes with like
// values at once, and maxima in registers, since a thread keeps to its channels. At its end it adds
// what it has to the head's cell. Sums of whole numbers and maxima do not depend on who comes
// first.
//
// Grid: x = ceil(max_rows / rows_per_block), y = counted heads of K, V and Q. Block: 256 threads.
// Shared memory: 7 KB. Bytes: head_dim * source of every row and head. Bound by: shared atomics,
// one for each value. x8: eight elements a load; x1: any head_dim and alignment.
//
// SPDX-License-Identifier: Apache-2.0
#include "codec.cuh"
#include "observe_args.h"

namespace kv8 {

constexpr int32_t NUM_CLASSES = KV8_SUM_ROWS;  // bins, zeros, NaN, infinities
constexpr uint32_t INF_BITS = 0x7f800000u;

struct Counts {
    uint32_t values[NUM_CLASSES];
    uint32_t nonfinite[KV8_OBSERVE_MAX_HEAD_DIM];
    uint32_t maxima[KV8_OBSERVE_MAX_HEAD_DIM];
};

// Where a head lies.
struct Head {
    const kv8_observe_plane *plane;
    int32_t idx;
    bool rotates;
};
static __device__ __forceinline__ Head find_head(const kv8_observe_kernel_args &a) {
    int32_t idx = blockIdx.y;
    Head h = {&a.plane[KV8_OBSERVED_K], 0, a.cos_sin != nullptr};
    for (int tensor = 0; tensor < KV8_OBSERVED_COUNT; tensor++) {
        const kv8_observe_plane &p = a.plane[tensor];
        if (idx >= 0 && idx < p.num_heads)
            h = {&p, p.first + idx, tensor == KV8_OBSERVED_K && a.cos_sin != nullptr};
        idx -= p.num_heads;
    }
    return h;
}

// --- values ---

template <int WIDTH, typename SOURCE>
static __device__ __forceinline__ void load(const SOURCE *from, float out[WIDTH]) {
    if constexpr (WIDTH == 8)
        widen8(load8(from), out);
    else
        out[0] = widen(from[0]);
}

// As kv8_rope_rotate: two products and one sum, each rounded to f32. x is a pair's first element.
static __device__ __forceinline__ float first_of_pair(float x, float y, float cosine, float sine) {
    return __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
}
static __device__ __forceinline__ float second_of_pair(float x, float y, float cosine, float sine) {
    return __fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine));
}

// Elements d to d + WIDTH of a row, whose pairs lie half a row apart.
template <int WIDTH, typename SOURCE>
static __device__ __forceinline__ void rotate_halves(const float *angles, int32_t half, int32_t d,
                                                     const SOURCE *row, float x[WIDTH]) {
    const int32_t pair = d < half ? d : d - half;
    float partner[WIDTH], cosine[WIDTH], sine[WIDTH];
    load<WIDTH>(row + (d < half ? d + half : d - half), partner);
    load<WIDTH>(angles + pair, cosine);
    load<WIDTH>(angles + half + pair, sine);
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
        x[i] = d < half ? first_of_pair(x[i], partner[i], cosine[i], sine[i])
                        : second_of_pair(partner[i], x[i], cosine[i], sine[i]);
}
// The same of neighbours.
template <int WIDTH, typename SOURCE>
static __device__ __forceinline__ void rotate_pairs(const float *angles, int32_t half, int32_t d,
                                                    const SOURCE *row, float x[WIDTH]) {
    if constexpr (WIDTH == 1) {
        const float cosine = angles[d / 2], sine = angles[half + d / 2];
        x[0] = d % 2 == 0 ? first_of_pair(x[0], widen(row[d + 1]), cosine, sine)
                          : second_of_pair(widen(row[d - 1]), x[0], cosine, sine);
    } else {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 2) {
            const float cosine = __ldg(angles + (d + i) / 2);
            const float sine = __ldg(angles + half + (d + i) / 2);
            const float first = x[i], second = x[i + 1];
            x[i] = first_of_pair(first, second, cosine, sine);
            x[i + 1] = second_of_pair(first, second, cosine, sine);
        }
    }
}

// --- counting ---

static __device__ __forceinline__ int32_t class_of(uint32_t bits) {
    const int32_t bin = static_cast<int32_t>(bits >> KV8_OBSERVE_BIN_SHIFT) - KV8_OBSERVE_FIRST_BIN;
    if (bits == 0) return KV8_SUM_ZEROS;
    if (bits >= INF_BITS) return bits == INF_BITS ? KV8_SUM_INFS : KV8_SUM_NANS;
    return min(max(bin, 0), KV8_OBSERVE_BINS - 1);
}

static __device__ __forceinline__ void count_value(Counts &counts, float value, int32_t channel,
                                                   uint32_t &most) {
    const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
    atomicAdd(&counts.values[class_of(bits)], 1u);
    if (bits < INF_BITS)
        most = max(most, bits);
    else
        atomicAdd(&counts.nonfinite[channel], 1u);
}

// This thread's channels d to d + WIDTH of rows `row`, `row` + step, ...
template <int WIDTH, typename SOURCE>
static __device__ __forceinline__ void count_channels(const kv8_observe_kernel_args &a,
                                                      const Head &h, Counts &counts, int32_t d,
                                                      int32_t row, int32_t end, int32_t step) {
    const int32_t head_dim = h.plane->head_dim;
    const SOURCE *const source =
        static_cast<const SOURCE *>(h.plane->source) + h.idx * h.plane->stride_head;
    uint32_t most[WIDTH] = {};
#pragma unroll 2
    for (; row < end; row += step) {
        const SOURCE *const at = source + row * h.plane->stride_row;
        float x[WIDTH];
        load<WIDTH>(at + d, x);
        if (h.rotates) {
            const float *const angles = a.cos_sin + int64_t{row} * head_dim;
            if (a.interleaved)
                rotate_pairs<WIDTH>(angles, head_dim / 2, d, at, x);
            else
                rotate_halves<WIDTH>(angles, head_dim / 2, d, at, x);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) count_value(counts, x[i], d + i, most[i]);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) atomicMax(&counts.maxima[d + i], most[i]);
}

// --- the block ---

static __device__ __forceinline__ void clear(Counts &counts) {
    uint32_t *const words = reinterpret_cast<uint32_t *>(&counts);
    for (int32_t i = threadIdx.x; i < static_cast<int32_t>(sizeof(Counts) / 4);
         i += KV8_OBSERVE_THREADS)
        words[i] = 0;
    __syncthreads();
}

static __device__ __forceinline__ void add(uint64_t *sum, uint32_t count) {
    if (count > 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(sum),
                  static_cast<unsigned long long>(count));
}

static __device__ __forceinline__ void add_to_cell(const Head &h, const Counts &counts,
                                                   int32_t num_rows) {
    const int32_t head_dim = h.plane->head_dim;
    uint64_t *const sums = h.plane->sums + int64_t{h.idx} * (KV8_NUM_FIXED_SUMS + head_dim);
    uint32_t *const maxima = h.plane->maxima + int64_t{h.idx} * head_dim;
    __syncthreads();
    for (int32_t i = threadIdx.x; i < NUM_CLASSES; i += KV8_OBSERVE_THREADS)
        add(&sums[i], counts.values[i]);
    for (int32_t d = threadIdx.x; d < head_dim; d += KV8_OBSERVE_THREADS) {
        add(&sums[KV8_NUM_FIXED_SUMS + d], counts.nonfinite[d]);
        if (counts.maxima[d] > 0) atomicMax(&maxima[d], counts.maxima[d]);
    }
    if (threadIdx.x == 0) add(&sums[KV8_SUM_ROWS], num_rows);
}

template <int WIDTH, typename SOURCE>
static __device__ __forceinline__ void observe(const kv8_observe_kernel_args &a) {
    __shared__ Counts counts;
    if (*a.is_on == 0) return;
    const int32_t num_rows =
        a.rows_in_use == nullptr ? a.max_rows : min(a.max_rows, *a.rows_in_use);
    const int32_t first = blockIdx.x * a.rows_per_block;
    const int32_t end = min(num_rows, first + a.rows_per_block);
    if (first >= end) return;
    const Head h = find_head(a);
    clear(counts);
    // Neighbouring threads take a row's channels, as many rows at once as there are threads for.
    const int32_t lanes = min(h.plane->head_dim / WIDTH, KV8_OBSERVE_THREADS);
    const int32_t step = KV8_OBSERVE_THREADS / lanes;
    const int32_t row = static_cast<int32_t>(threadIdx.x) / lanes;
    const int32_t lane = static_cast<int32_t>(threadIdx.x) - row * lanes;
    if (row < step) {
        for (int32_t d = lane * WIDTH; d < h.plane->head_dim; d += lanes * WIDTH)
            count_channels<WIDTH, SOURCE>(a, h, counts, d, first + row, end, step);
    }
    add_to_cell(h, counts, end - first);
}

}  // namespace kv8

#define KV8_OBSERVE_KERNEL(name, SOURCE, WIDTH)                                         \
    extern "C" __global__ void __launch_bounds__(KV8_OBSERVE_THREADS)                   \
        kv8_observe_##name##__sm80(const __grid_constant__ kv8_observe_kernel_args a) { \
        kv8::observe<WIDTH, SOURCE>(a);                                                 \
    }
KV8_OBSERVE_KERNEL(f32_x8, float, 8)
KV8_OBSERVE_KERNEL(f32_x1, float, 1)
KV8_OBSERVE_KERNEL(bf16_x8, kv8_bf16, 8)
KV8_OBSERVE_KERNEL(bf16_x1, kv8_bf16, 1)
KV8_OBSERVE_KERNEL(f16_x8, kv8_f16, 8)
KV8_OBSERVE_KERNEL(f16_x1, kv8_f16, 1)
