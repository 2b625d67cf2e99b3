// decode_mainloop.cuh - the computing side of a warp: scores, softmax, values of one granule after
// another.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_loader.cuh"

namespace kv8 {

// What a warp keeps of its rows: o for every dim, reference maximum and sum (of this lane's tokens)
// for columns 2c and 2c + 1 of every n-tile.
template <class C>
struct State {
    float o[C::DIM / 16][C::NT][4];
    float max[C::NT][2], sum[C::NT][2];

    __device__ void clear() {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
#pragma unroll
            for (int col = 0; col < 2; col++) max[nt][col] = NO_KEY, sum[nt][col] = 0;
#pragma unroll
            for (int t = 0; t < C::DIM / 16; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[t][nt][i] = 0;
        }
    }
};

constexpr float LAZY_LIMIT = 0x1p14f;  // weights stay below it, or twice it, in f16
constexpr float LAZY_TARGET = 6.0f;    // a new maximum gets 2^6: small ones keep their bits longer
// In place of a reference where no key was seen yet: any score makes the weight infinite, and the
// row is looked at.
constexpr float NO_SCORE = -0x1.fffffep127f;

// Eight elements a lane of a row of Q that LANES lanes have, as WarpAttention::narrow_row().
template <int LANES = 8>
__device__ inline float narrow_eight(uint32_t (&row)[2][2]) {
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t x = row[j / 2][j % 2];
        const uint32_t low = x & 0x7f80u, high = x >> 16 & 0x7f80u;
        if (low < 0x7f80u) top = max(top, low);
        if (high < 0x7f80u) top = max(top, high);
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) top = max(top, __shfl_xor_sync(~0u, top, lanes));
    const int shift = min(max(14 - (int(top >> 7) - 127), -126), 126);
    const float up = __int_as_float((shift + 127) << 23);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t &x = row[j / 2][j % 2];
        x = pack_f16(__uint_as_float(x << 16) * up, __uint_as_float(x & 0xffff0000u) * up);
    }
    return __int_as_float((127 - shift) << 23);
}

// int8: scales of tokens g and g + 8 of a granule, of K or of V.
struct RowScales {
    float of[2];
};
__device__ inline float scale_of_bits(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
// factor_of() is what joins a weight on its way to V of format F. A row of zeros, whose scale is 0,
// has a weight of 0 however far its score lies above the reference, and joins the sum all the same.
// No reference makes an infinite scale's product finite: it counts as the largest.
template <Format F>
__device__ inline float factor_of(const RowScales &v_rows, int half) {
    constexpr float LEAST = 0x1p-24f, MOST = 65504;
    return F == INT8 ? fminf(fmaxf(v_rows.of[half], LEAST), MOST) : 1.0f;
}
// factor_in_score() is what joins a score where a reference is looked for.
template <Format F>
__device__ inline float factor_in_score(const RowScales &v_rows, int half) {
    return F == INT8 ? __log2f(factor_of<F>(v_rows, half)) : 0.0f;
}

// Of four codes of e4m3 those that are NaN: the upper bit of their bytes.
__device__ inline uint32_t nan_signs(uint32_t codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// Four consecutive elements of Q, at multiples of 8 bytes, at others, and anywhere.
__device__ inline bool is_aligned(const uint16_t *from) {
    return reinterpret_cast<uintptr_t>(from) % 8 == 0;
}
__device__ inline void load_aligned_four(const uint16_t *from, uint32_t (&to)[2]) {
    const uint2 both = __ldg(reinterpret_cast<const uint2 *>(from));
    to[0] = both.x, to[1] = both.y;
}
__device__ inline void load_unaligned_four(const uint16_t *from, uint32_t (&to)[2]) {
    to[0] = __ldg(from) | uint32_t(__ldg(from + 1)) << 16;
    to[1] = __ldg(from + 2) | uint32_t(__ldg(from + 3)) << 16;
}
__device__ inline void load_four(const uint16_t *from, uint32_t (&to)[2]) {
    if (is_aligned(from))
        load_aligned_four(from, to);
    else
        load_unaligned_four(from, to);
}

template <class C>
class WarpAttention {
   public:
    // Of the head `head` and, where a warp has more, those after it.
    __device__ WarpAttention(const kv8_kernel_args &args, const Split &split_in, int head_in)
        : a(args), split(split_in), head(head_in), g(threadIdx.x % 32 / 4), c(threadIdx.x % 4) {}

    // Of a cluster: the addresses of its rows of Q, before load_queries() may read there.
    __device__ void find_queries() {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) q_row[nt] = keep(query_row(0, nt));
    }
    // Starts the loads of Q.
    __device__ void load_queries() {
#pragma unroll
        for (int h = 0; h < C::HEADS; h++) {
            load_q(h);
            if constexpr (C::GRANULE_PAGES) {
                if (C::FK == INT8) scale_half[h][0] = which_half(a.k, h);
                if (C::FV == INT8) scale_half[h][1] = which_half(a.v, h);
            }
        }
    }
    // Q in the format of the MMA, once all other loads have been started.
    __device__ void convert_queries() {
#pragma unroll
        for (int h = 0; h < C::HEADS; h++) narrow_q(h);
    }
    // The granule whose keys begin at `first_key`, in shared memory at `stage`.
    __device__ void compute(int first_key, uint32_t stage, State<C> (&state)[C::HEADS]) {
        // Every row sees every token?
        const bool masked = first_key < split.all.begin || first_key + TOKENS > split.all.end;
        const uint32_t values = stage + C::RK::TILE_BYTES;
        float s[C::HEADS][C::NT][4];
#pragma unroll
        for (int h = 0; h < C::HEADS; h++) {
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                for (int x = 0; x < 4; x++) s[h][nt][x] = bias[h][nt][C::FK == INT8 ? x % 2 : 0];
            C::K::template multiply<C::NT, 1, C::IS_CLUSTER>(stage, h * C::K::BYTES, g, c, q[h],
                                                             s[h]);
        }
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
            scale_scores(h, row_scales<C::FK, false>(stage, h), s[h]);
        if (!C::IS_CLUSTER && a.soft_cap > 0) cap_scores(s);
        if (masked) mask_scores(first_key, s);
        uint32_t p[C::HEADS][C::P_PARTS][C::NT][2];
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
            weigh(row_scales<C::FV, true>(stage, h), masked, s[h], p[h], state[h]);
        if (masked && has_non_finite(values))
            add_one_by_one(first_key, values, p, state);
        else
            add_values(values, p, state);
    }

   private:
    const kv8_kernel_args &a;
    const Split &split;
    const int head, g, c;
    uint32_t q[C::HEADS][1][C::NT][C::DIM / 16][2];
    const uint16_t *q_row[C::NT];  // of find_queries()
    float k_scale[C::HEADS];
    float factor[C::HEADS][C::NT][2];  // of columns 2c, 2c + 1: score in base 2 = sum * factor
    // int8: K is multiplied as 2^-24 * (code + 128), which f16 has as code + 128 without a
    // conversion; what the sums of those columns start with.
    float bias[C::HEADS][C::NT][C::FK == INT8 ? 2 : 1];
    // int8: 2 where the scales of tokens g lie in the upper half of a word.
    uint32_t scale_half[C::HEADS][2];

    // Pages hold whole granules and an even number of scales: a token's place in the granule says
    // it.
    __device__ uint32_t which_half(const kv8_kernel_pages &p, int h) const {
        return reinterpret_cast<uintptr_t>(p.row_scale + (head + h) * p.scale_stride_head +
                                           g * p.scale_stride_slot) &
               2;
    }
    template <Format F, bool OF_V>
    __device__ RowScales row_scales(uint32_t stage, int h) const {
        RowScales r = {{1, 1}};
        if constexpr (F == INT8)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t at = stage + C::SCALES + h * C::HEAD_SCALES +
                                    (OF_V * TOKENS + half * 8 + g) * C::SCALE_PITCH;
                uint32_t bits;
                if constexpr (C::GRANULE_PAGES) {
                    bits = load_shared<2>(at + scale_half[h][OF_V]).w[0];
                } else {
                    const auto word = load_shared<8>(at);
                    bits = word.w[0] >> word.w[1];
                }
                r.of[half] = scale_of_bits(bits);
            }
        return r;
    }

    // Q as the B fragment of the first MMA, still in its own format.
    __device__ void load_q(int h) {
        k_scale[h] = 1;
        if (a.k_scale != nullptr)
            k_scale[h] = __ldg(a.k_scale + split.request.index * a.k_scale_stride_batch +
                               (head + h) * a.k_scale_stride_head);
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
            const uint16_t *const row = C::IS_CLUSTER ? q_row[nt] : query_row(h, nt);
            const bool is_there = nt * 8 + g < split.num_rows, aligned = is_aligned(row);
#pragma unroll
            for (int s = 0; s < C::DIM / 16; s++) {
                q[h][0][nt][s][0] = q[h][0][nt][s][1] = 0;
                if (is_there && aligned) load_aligned_four(row + dim_of_step(s), q[h][0][nt][s]);
            }
            if (!is_there || aligned) continue;
#pragma unroll
            for (int s = 0; s < C::DIM / 16; s++)
                load_unaligned_four(row + dim_of_step(s), q[h][0][nt][s]);
        }
    }
    __device__ int dim_of_step(int s) const {
        constexpr int PER = 64 / size_of(C::FK) / 16;  // steps of a segment
        return C::K::dim(s / PER, c, s % PER * 4);
    }
    // The lane's row of Q; the first in place of one that is not there.
    __device__ const uint16_t *query_row(int h, int nt) const {
        const int n = nt * 8 + g, row = split.row_begin + n, token = divide(row, a.by_group);
        const uint16_t *const first = static_cast<const uint16_t *>(a.q);
        if (n >= split.num_rows) return first;
        return first + (split.request.qo_begin + token) * a.q_stride_row +
               ((head + h) * a.group_size + row - token * a.group_size) * a.q_stride_head;
    }
    // Q into the format of the MMA: a row of bf16 is scaled by a power of two into f16's range.
    // Then every column's factor.
    __device__ void narrow_q(int h) {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
            float x = a.score_scale * k_scale[h];
            if (C::FK != BF16 && a.q_dtype == BF16) x *= narrow_row(q[h][0][nt]);
            if (C::FK == INT8) x *= 0x1p24f;
#pragma unroll
            for (int i = 0; i < 2; i++) factor[h][nt][i] = __shfl_sync(~0u, x, (2 * c + i) * 4);
            bias[h][nt][0] = 0;
            if constexpr (C::FK == INT8) start_sums(q[h][0][nt], bias[h][nt]);
        }
    }
    // -128 * 2^-24 * (sum of a row of Q), by the unit that forms the scores.
    __device__ static void start_sums(const uint32_t (&row)[C::DIM / 16][2], float (&sums)[2]) {
        constexpr uint32_t MINUS = 0x80808080u;  // f16 -128 * 2^-24, twice
        const uint32_t all[4] = {MINUS, MINUS, MINUS, MINUS};
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int s = 0; s < C::DIM / 16; s++) mma<false>(d, all, row[s]);
        sums[0] = d[0], sums[1] = d[1];
    }
    // bf16 pairs of one row (spread over the four lanes of c) to f16, times 2^e; returns 2^-e.
    __device__ static float narrow_row(uint32_t (&row)[C::DIM / 16][2]) {
        uint32_t top = 0;  // largest exponent, where bf16 keeps it
#pragma unroll
        for (int s = 0; s < C::DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t low = row[s][i] & 0x7f80u, high = row[s][i] >> 16 & 0x7f80u;
                if (low < 0x7f80u) top = max(top, low);
                if (high < 0x7f80u) top = max(top, high);
            }
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));
        // The largest magnitude lands in [2^14, 2^15); both factors stay normal numbers.
        const int shift = min(max(14 - (int(top >> 7) - 127), -126), 126);
        const float up = __int_as_float((shift + 127) << 23);
#pragma unroll
        for (int s = 0; s < C::DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                row[s][i] = pack_f16(__uint_as_float(row[s][i] << 16) * up,
                                     __uint_as_float(row[s][i] & 0xffff0000u) * up);
        return __int_as_float((127 - shift) << 23);
    }

    // Sums of products -> scores in base 2.
    __device__ void scale_scores(int h, const RowScales &rows, float (&s)[C::NT][4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                for (int col = 0; col < 2; col++) {
                    float &x = s[nt][half * 2 + col];
                    x *= C::FK == INT8 ? factor[h][nt][col] * rows.of[half] : factor[h][nt][col];
                }
    }
    __device__ void cap_scores(float (&s)[C::HEADS][C::NT][4]) const {
        keep_here();
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[h][nt][i] = cap(s[h][nt][i]);
    }
    // cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + e^2y).
    __device__ float cap(float x) const {
        constexpr float TWO_LOG2E = 2.885390081777927f;
        const float e = exp2_fast(x * (TWO_LOG2E / a.soft_cap));
        return a.soft_cap * (1.0f - __fdividef(2.0f, 1.0f + e));
    }
    // What follows is rare: nothing of it may be computed ahead and cached in registers.
    __device__ static void keep_here() {
        asm volatile("" ::: "memory");
    }
    __device__ bool shows(int q_token, int key) const {
        return C::IS_CLUSTER || mask_bit(a, split.request, q_token, key);
    }
    // Whether the page of a key is not there; of whole granules that of all their keys.
    __device__ bool is_missing(int key) const {
        return __builtin_expect(split.has_gaps, 0) &&
               !page_exists(a, split.pages[divide(key, a.by_page)]);
    }
    // -inf where a row may not see a key; those of a granule begin at `first_key`.
    __device__ void mask_scores(int first_key, float (&s)[C::HEADS][C::NT][4]) const {
        keep_here();
        const bool low = is_missing(first_key + g);
        const bool missing[2] = {low, C::GRANULE_PAGES ? low : is_missing(first_key + 8 + g)};
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const int q_token = divide(split.row_begin + n, a.by_group);
                KeyRange seen = visible_keys(a, split.request, q_token);
                if (n >= split.num_rows) seen.end = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = first_key + half * 8 + g;
                    if (key >= seen.begin && key < seen.end && !missing[half] &&
                        shows(q_token, key))
                        continue;
#pragma unroll
                    for (int h = 0; h < C::HEADS; h++) s[h][nt][half * 2 + col] = -INFINITY;
                }
            }
    }

    // Scores of one granule -> probabilities as the second MMA's B fragment, and the sums.
    __device__ void weigh(const RowScales &v_rows, bool masked, const float (&s)[C::NT][4],
                          uint32_t (&p)[C::P_PARTS][C::NT][2], State<C> &state) const {
        float x[C::NT][4], w[C::NT][4];
        weights(v_rows, s, state, x, w);
        float top = 0;
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
            top = fmaxf(top, fmaxf(fmaxf(x[nt][0], x[nt][1]) * factor_of<C::FV>(v_rows, 0),
                                   fmaxf(x[nt][2], x[nt][3]) * factor_of<C::FV>(v_rows, 1)));
        if (__any_sync(~0u, top > LAZY_LIMIT)) {
            raise_max(v_rows, s, x, state);
            weights(v_rows, s, state, x, w);
        }
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.sum[nt][i % 2] += x[nt][i];
            if (C::FV == INT8 && masked) {
                // What a row may not see has weight 0, whatever its scale.
                keep_here();
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (s[nt][i] == -INFINITY) w[nt][i] = 0;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float left = w[nt][2 * half], right = w[nt][2 * half + 1];
                if constexpr (C::FV == BF16) {
                    const uint32_t high = pack_bf16(left, right);
                    p[0][nt][half] = transpose8x8(high);
                    p[1][nt][half] =
                        transpose8x8(pack_bf16(left - __uint_as_float(high << 16),
                                               right - __uint_as_float(high & 0xffff0000u)));
                } else {
                    p[0][nt][half] = transpose8x8(pack_f16(left, right));
                }
            }
        }
    }
    // x: what joins the sum; w: what V is multiplied by.
    __device__ static void weights(const RowScales &v_rows, const float (&s)[C::NT][4],
                                   const State<C> &state, float (&x)[C::NT][4],
                                   float (&w)[C::NT][4]) {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[nt][i] = exp2_fast(s[nt][i] - state.max[nt][i % 2]);
                w[nt][i] = C::FV == INT8 ? x[nt][i] * v_rows.of[i / 2] : x[nt][i];
            }
    }
    // A new reference for each row whose own weights ask for it, whatever the others' do: the
    // largest becomes 2^LAZY_TARGET.
    __device__ static void raise_max(const RowScales &v_rows, const float (&s)[C::NT][4],
                                     const float (&x)[C::NT][4], State<C> &state) {
        keep_here();
        const float more[2] = {factor_in_score<C::FV>(v_rows, 0),
                               factor_in_score<C::FV>(v_rows, 1)};
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                float m = fmaxf(s[nt][col] + more[0], s[nt][2 + col] + more[1]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
                const float own = fmaxf(x[nt][col] * factor_of<C::FV>(v_rows, 0),
                                        x[nt][2 + col] * factor_of<C::FV>(v_rows, 1));
                const uint32_t over = __ballot_sync(~0u, own > LAZY_LIMIT);
                const bool raises = (over & 0x11111111u << threadIdx.x % 4) != 0;
                m = raises ? fmaxf(state.max[nt][col], m - LAZY_TARGET) : state.max[nt][col];
                const float keep = exp2_fast(state.max[nt][col] - m);
                state.max[nt][col] = m;
                state.sum[nt][col] *= keep;
#pragma unroll
                for (int d = 0; d < C::DIM / 16; d++)
                    state.o[d][nt][col] *= keep, state.o[d][nt][col + 2] *= keep;
            }
    }

    __device__ void add_values(uint32_t tile, const uint32_t (&p)[C::HEADS][C::P_PARTS][C::NT][2],
                               State<C> (&state)[C::HEADS]) const {
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
            C::V::each(tile, h * C::V::BYTES, g, c, [&](int d, const uint32_t(&v)[4]) {
#pragma unroll
                for (int part = 0; part < C::P_PARTS; part++)
#pragma unroll
                    for (int nt = 0; nt < C::NT; nt++)
                        mma<C::FV == BF16>(state[h].o[d][nt], v, p[h][part][nt]);
            });
    }
    __device__ bool has_non_finite(uint32_t tile) const {
        const uint32_t exponent = C::FV == BF16 ? 0x7f80u : 0x7c00u;
        bool found = false;
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
            C::V::each(tile, h * C::V::BYTES, g, c, [&](int, const uint32_t(&v)[4]) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    found |= (v[i] & exponent) == exponent || (v[i] >> 16 & exponent) == exponent;
            });
        return __any_sync(~0u, found);
    }
    // A probability of 0 does not hide a NaN: each query token's rows take only values they may
    // see, to the same sums as by add_values().
    __device__ void add_one_by_one(int key, uint32_t tile,
                                   const uint32_t (&p)[C::HEADS][C::P_PARTS][C::NT][2],
                                   State<C> (&state)[C::HEADS]) const {
        keep_here();
        if (C::GRANULE_PAGES && is_missing(key)) return;
        const int begin = divide(split.row_begin, a.by_group);
        const int end = divide(split.row_begin + split.num_rows - 1, a.by_group);
#pragma unroll 1
        for (int q_token = begin; q_token <= end; q_token++) {
            const KeyRange keys = visible_keys(a, split.request, q_token);
            uint32_t keep[2];  // of tokens 2c, 2c + 1 and 2c + 8, 2c + 9
#pragma unroll
            for (int i = 0; i < 2; i++) {
                keep[i] = 0;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int k = key + 2 * c + i * 8 + n;
                    if (k >= keys.begin && k < keys.end && shows(q_token, k) &&
                        (C::GRANULE_PAGES || !is_missing(k)))
                        keep[i] |= 0xffffu << (16 * n);
                }
            }
#pragma unroll
            for (int h = 0; h < C::HEADS; h++)
                C::V::each(tile, h * C::V::BYTES, g, c, [&](int d, const uint32_t(&v)[4]) {
                    const uint32_t seen[4] = {v[0] & keep[0], v[1] & keep[0], v[2] & keep[1],
                                              v[3] & keep[1]};
#pragma unroll
                    for (int nt = 0; nt < C::NT; nt++) {
                        float sum[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) sum[i] = state[h].o[d][nt][i];
#pragma unroll
                        for (int part = 0; part < C::P_PARTS; part++)
                            mma<C::FV == BF16>(sum, seen, p[h][part][nt]);
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (divide(split.row_begin + nt * 8 + 2 * c + i % 2, a.by_group) ==
                                q_token)
                                state[h].o[d][nt][i] = sum[i];
                    }
                });
        }
    }
};

// Stores a warp's result to shared memory.
template <class C>
__device__ void store_result(uint8_t *to, State<C> &state) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float4 *const o = reinterpret_cast<float4 *>(to);
    float *const maxima = reinterpret_cast<float *>(to + C::FRAGMENTS * 512);
#pragma unroll
    for (int nt = 0; nt < C::NT; nt++) {
#pragma unroll
        for (int t = 0; t < C::DIM / 16; t++) {
            const float(&x)[4] = state.o[t][nt];
            o[(t * C::NT + nt) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int col = 0; col < 2; col++) {
            float sum = state.sum[nt][col];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (g != 0) continue;
            maxima[nt * 8 + 2 * c + col] = state.max[nt][col];
            maxima[C::ROWS + nt * 8 + 2 * c + col] = sum;
        }
    }
}

// A warp's granules of a split, the first of which are looked up; its result takes the place of its
// ring. `meanwhile` runs while the first copies are on their way.
template <class C, class MEANWHILE>
__device__ __forceinline__ void run_granules(WarpAttention<C> &attention, Loader<C> &loader,
                                             int first, int step, int count, uint32_t ring,
                                             uint8_t *ring_bytes, MEANWHILE &&meanwhile) {
    loader.fill();
    if constexpr (C::HEADS > 1) attention.load_queries();  // earlier it would not fit the registers
    loader.find_gaps();
    meanwhile();
    attention.convert_queries();
    State<C> state[C::HEADS];
#pragma unroll
    for (int h = 0; h < C::HEADS; h++) state[h].clear();
    int at = 0;  // stage of the ring
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        copy_wait<C::STAGES - 2>();
        __syncwarp();
        loader.issue();
        attention.compute((first + i * step) * TOKENS, ring + at * C::STAGE_BYTES, state);
        at = at + 1 == C::STAGES ? 0 : at + 1;
    }
    copy_wait_all();
    __syncwarp();
#pragma unroll
    for (int h = 0; h < C::HEADS; h++) store_result<C>(ring_bytes + h * C::RESULT_BYTES, state[h]);
}
template <class C, class MEANWHILE>
__device__ __forceinline__ void run_mainloop(const kv8_kernel_args &a, Split &split, int head,
                                             int first, int step, int count, uint8_t *ring_bytes,
                                             MEANWHILE &&meanwhile) {
    const uint32_t ring = keep(smem_address(ring_bytes));
    WarpAttention<C> attention(a, split, head);
    if constexpr (C::HEADS == 1) attention.load_queries();
    Loader<C> loader(a, split, ring, head, first, step, count);
    loader.look_up_first();
    run_granules<C>(attention, loader, first, step, count, ring, ring_bytes, meanwhile);
}

}  // namespace kv8
