// token_attention.cuh - one token's attention, two ways. Of many keys a block takes a range, a warp
// one KV head of them and its eight query heads; then every block combines the ranges for some
// heads. Of few keys, as windows leave, a block takes a KV head, and its warps share the keys: they
// combine in shared memory, and the blocks meet once less.
//
// Rotation, rounding and softmax as the library's kernels have them (rowwise.cu, append_rope.cu,
// decode_mainloop.cuh). The block whose range ends with the token itself stores its K and V.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/softmax.cuh"
#include "token_dense.cuh"
#include "token_keys.cuh"

namespace kv8 {

// --- a computing warp: a KV head over a range of keys ---

struct HeadState {
    float o[HEAD_DIM / 16][4];
    float max[2], sum[2];  // of columns 2c and 2c + 1

    __device__ HeadState() : o{}, max{NO_KEY, NO_KEY}, sum{} {}
};

// A warp's query heads, rotated.
struct QueryRows {
    alignas(16) float rows[GROUP][HEAD_DIM];

    // Dims 4 n to 4 n + 3 of a row: lanes that read one n of eight rows find them in other banks.
    __device__ float4 &piece(int row, int n) {
        return reinterpret_cast<float4 *>(rows[row])[n ^ row];
    }
    // Each row once, in whole lines: all blocks with many keys read all of Q.
    template <class ASKED>
    __device__ void load(const float *qkv, const float *cos_sin, int head, uint32_t turn,
                         ASKED &&asked) {
        constexpr int HALF = HEAD_DIM / 2, LANES = HALF / 4, PIECES = GROUP * LANES / 32;
        const int lane = threadIdx.x % 32, n = lane % LANES, pair = 4 * n;
        Handed<4> x[2 * PIECES];
        const auto row = [&](int i) { return i * (32 / LANES) + lane / LANES; };
        const auto at = [&](int i) {
            return qkv + (head * GROUP + row(i / 2)) * HEAD_DIM + pair + i % 2 * HALF;
        };
        ask(x, turn, at);
        asked();
        get(x, turn, at);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            float low[4], high[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float first = x[2 * i].value(k), second = x[2 * i + 1].value(k);
                const float cosine = cos_sin[pair + k], sine = cos_sin[HALF + pair + k];
                low[k] = rotated(first, second, cosine, sine, true);
                high[k] = rotated(second, first, cosine, sine, false);
            }
            piece(row(i), n) = make_float4(low[0], low[1], low[2], low[3]);
            piece(row(i), n + LANES) = make_float4(high[0], high[1], high[2], high[3]);
        }
        __syncwarp();
    }
};

// The B fragment of the first MMA; and the factor of a score of columns 2c and 2c + 1, and what its
// sum starts with.
template <Format F>
__device__ __forceinline__ void load_queries(QueryRows &queries, float scale,
                                             uint32_t (&q)[1][1][HEAD_DIM / 16][2],
                                             float (&factor)[2], float (&start)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    constexpr int PER = 64 / size_of(F) / 16;
    float x[HEAD_DIM / 16][4];
#pragma unroll
    for (int s = 0; s < HEAD_DIM / 16; s++) {
        const float4 from = queries.piece(g, Keys<F, 1>::K::dim(s / PER, c, s % PER * 4) / 4);
        x[s][0] = from.x, x[s][1] = from.y, x[s][2] = from.z, x[s][3] = from.w;
    }
    if constexpr (F == BF16) {
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) q[0][0][s][i] = pack_bf16(x[s][2 * i], x[s][2 * i + 1]);
    } else {
        // A row is scaled by a power of two into f16's range.
        float top = 0;
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (fabsf(x[s][i]) < INFINITY) top = fmaxf(top, fabsf(x[s][i]));
        top = quad_max(top);
        const int shift =
            min(max(14 - (static_cast<int>(__float_as_uint(top) >> 23) - 127), -126), 126);
        const float up = __int_as_float((shift + 127) << 23);
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                q[0][0][s][i] = pack_f16(x[s][2 * i] * up, x[s][2 * i + 1] * up);
        scale *= __int_as_float((127 - shift) << 23);
    }
    start[0] = start[1] = 0;
    if constexpr (F == INT8) {
        // K is multiplied as 2^-24 * (code + 128): -128 * 2^-24 * (the sum of a row of Q).
        constexpr uint32_t MINUS = 0x80808080u;
        float d[4] = {};
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; s++)
            mma<false>(d, {MINUS, MINUS, MINUS, MINUS}, q[0][0][s]);
        start[0] = d[0], start[1] = d[1];
        scale *= 0x1p24f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) factor[i] = __shfl_sync(~0u, scale, (2 * c + i) * 4);
}

constexpr float LAZY_LIMIT = 0x1p14f, LAZY_TARGET = 6.0f;  // as in decode_mainloop.cuh

// Scales of V's rows g and g + 8, 1 but of int8, join the weights on their way to V.
__device__ __forceinline__ void raise_max(const float (&s)[4], const float (&v_rows)[2],
                                          HeadState &state) {
    const float more[2] = {__log2f(fmaxf(v_rows[0], 0x1p-24f)),
                           __log2f(fmaxf(v_rows[1], 0x1p-24f))};
#pragma unroll
    for (int col = 0; col < 2; col++) {
        float m = fmaxf(s[col] + more[0], s[2 + col] + more[1]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
        m = fmaxf(state.max[col], m - LAZY_TARGET);
        const float keep = exp2_fast(state.max[col] - m);
        state.max[col] = m;
        state.sum[col] *= keep;
#pragma unroll
        for (int t = 0; t < HEAD_DIM / 16; t++)
            state.o[t][col] *= keep, state.o[t][col + 2] *= keep;
    }
}

template <class T>
__device__ __forceinline__ void load_scales(uint32_t from, int g, float (&to)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        to[i] = 1;
        if constexpr (T::FORMAT == INT8)
            to[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(
                load_shared<2>(from + (g + 8 * i) * KV_HEADS * 2).w[0])));
    }
}

// One granule, of keys from `key` on, those in [begin, end) seen.
template <class T>
__device__ __forceinline__ void add_granule(int key, int begin, int end, const Tiles &tiles,
                                            const uint32_t (&q)[1][1][HEAD_DIM / 16][2],
                                            const float (&factor)[2], const float (&start)[2],
                                            HeadState &state) {
    constexpr Format F = T::FORMAT;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float s[1][4] = {{start[0], start[1], start[0], start[1]}};
    T::K::template multiply<1, 1>(tiles.k, 0, g, c, q, s);
    float k_rows[2], v_rows[2], w[4];
    load_scales<T>(tiles.k_scales, g, k_rows), load_scales<T>(tiles.v_scales, g, v_rows);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = key + i / 2 * 8 + g;
        const bool seen = at >= begin && at < end;
        s[0][i] = seen ? s[0][i] * (factor[i % 2] * k_rows[i / 2]) : -INFINITY;
        if (F == INT8 && !seen) v_rows[i / 2] = 0;
    }
    float x[4];
    const auto weigh = [&] {
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = exp2_fast(s[0][i] - state.max[i % 2]), w[i] = x[i] * v_rows[i / 2];
    };
    weigh();
    // A row of zeros, whose scale is 0, has a weight of 0 however far its score lies above the
    // maximum, and joins the sum all the same.
    const float up = F == INT8 ? fmaxf(v_rows[0], 0x1p-24f) : 1.0f;
    const float low = F == INT8 ? fmaxf(v_rows[1], 0x1p-24f) : 1.0f;
    if (__any_sync(~0u, fmaxf(fmaxf(x[0], x[1]) * up, fmaxf(x[2], x[3]) * low) > LAZY_LIMIT)) {
        raise_max(s[0], v_rows, state);
        weigh();
    }
    constexpr int PARTS = F == BF16 ? 2 : 1;  // bf16 probabilities are kept to 16 bits
    uint32_t p[PARTS][2];
#pragma unroll
    for (int i = 0; i < 4; i++) state.sum[i % 2] += x[i];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float left = w[2 * half], right = w[2 * half + 1];
        if constexpr (F == BF16) {
            const uint32_t high = pack_bf16(left, right);
            p[0][half] = transpose8x8(high);
            p[1][half] = transpose8x8(pack_bf16(left - low_bf16(high), right - high_bf16(high)));
        } else {
            p[0][half] = transpose8x8(pack_f16(left, right));
        }
    }
    T::V::each(tiles.v, 0, g, c, [&](int t, const uint32_t(&v)[4]) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) mma<F == BF16>(state.o[t], v, p[part]);
    });
}

__device__ __forceinline__ uint8_t *generic(uint32_t at) {
    return static_cast<uint8_t *>(__cvta_shared_to_generic(at));
}

// V of a granule's keys that nobody sees becomes 0: a probability of 0 does not hide a NaN.
template <class T>
__device__ __forceinline__ void clear_unseen(const KeySplits &keys, int key, uint32_t v_tile) {
    constexpr int WORDS = T::HEAD / 4;
#pragma unroll
    for (int i = 0; i < TOKENS * WORDS / 32; i++) {
        const int word = i * 32 + threadIdx.x % 32, row = word / WORDS;
        if (key + row < keys.begin || key + row >= keys.end)
            store_shared(v_tile + row * T::Row::BYTES + word % WORDS * 4, 0);
    }
}
__device__ __forceinline__ bool is_edge(const KeySplits &keys, int key) {
    return key < keys.begin || key + TOKENS > keys.end - 1;
}

// Of each warp: its query heads, then what its keys leave of them, to be shared or to be written in
// whole lines.
struct HeadScratch {
    alignas(16) float o[KV8_TOKEN_WARPS][GROUP][HEAD_DIM];
    float max[KV8_TOKEN_WARPS][GROUP], sum[KV8_TOKEN_WARPS][GROUP];

    __device__ QueryRows &queries(int warp) { return *reinterpret_cast<QueryRows *>(o[warp]); }
};
static_assert(sizeof(QueryRows) <= GROUP * HEAD_DIM * sizeof(float), "a warp's place");

// What a warp has of its head before the first key.
template <class T>
struct WarpHead {
    OwnRow<T::FORMAT> own;
    int64_t page = 0;  // of the own row
    uint32_t q[1][1][HEAD_DIM / 16][2];
    float factor[2], start[2];
    HeadState state;

    // What does not depend on the meeting is loaded before.
    template <class ROW>
    __device__ WarpHead(const ROW &a, const kv8_token_layer &l, const KeySplits &keys,
                        const Meeting &before, uint32_t turn, const float *cos_sin, int head,
                        bool has_own, QueryRows &queries)
        : own{} {
        const float k_scale = l.k_scale == nullptr ? 1.0f : __ldg(l.k_scale + head);
        const float v_scale = l.v_scale == nullptr ? 1.0f : __ldg(l.v_scale + head);
        if (has_own) page = __ldg(a.pages_of(l) + (keys.end - 1) / a.page_size);
        before.hear();
        Handed<1> row[4];
        const auto at = [&](int i) { return OwnRow<T::FORMAT>::at(a.qkv, head, i); };
        queries.load(a.qkv, cos_sin, head, turn, [&] {
            if (has_own) ask(row, turn, at);
        });
        load_queries<T::FORMAT>(queries, LOG2E / 8 * k_scale, q, factor, start);
        if (!has_own) return;
        get(row, turn, at);
        own.encode(l, {row[0].value(0), row[1].value(0), row[2].value(0), row[3].value(0)}, cos_sin,
                   head, k_scale, v_scale);
    }
    template <class ROW>
    __device__ void add(const ROW &a, const kv8_token_layer &l, const KeySplits &keys, int key,
                        int head, const Tiles &tiles) {
        if (is_edge(keys, key)) {
            if (key + TOKENS >= keys.end) store_own(l, keys.end - 1, key, a.page_size, head, tiles);
            clear_unseen<T>(keys, key, tiles.v);
            fence_stores_before_wgmma();  // and before the stage's next copy
            __syncwarp();
        }
        add_granule<T>(key, keys.begin, keys.end, tiles, q, factor, start, state);
    }
    __device__ void store_own(const kv8_token_layer &l, int position, int key, int page_size,
                              int head, const Tiles &tiles) const {
        const int row = position - key, at = position % page_size * KV_HEADS + head;
        const auto places = [&](uint8_t *pages, uint8_t *scales, int64_t stride, uint32_t tile,
                                uint32_t tile_scales) {
            return RowPlaces{pages + page * stride + at * T::HEAD,
                             generic(tile + row * T::Row::BYTES), scales + page * stride + 2 * at,
                             generic(tile_scales + row * KV_HEADS * 2)};
        };
        own.store(own.k, places(l.k, l.k_rows, l.k_stride_page, tiles.k, tiles.k_scales));
        own.store(own.v, places(l.v, l.v_rows, l.v_stride_page, tiles.v, tiles.v_scales));
    }
    // what(row, dim, o, o of dim + 1) and end(row, maximum, sum) of its eight query heads.
    template <class WHAT, class END>
    __device__ void each(WHAT &&what, END &&end) const {
        const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
        for (int col = 0; col < 2; col++) {
            float sum = state.sum[col];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (g == 0) end(2 * c + col, state.max[col], sum);
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 16; t++)
                what(2 * c + col, T::V::dim(t, g), state.o[t][col], state.o[t][col + 2]);
        }
    }
};

// --- many keys: the block's range, a warp a KV head ---

template <class T, class ROW>
__device__ void attend(RingReader &ring, const ROW &a, const kv8_token_layer &l,
                       const KeySplits &keys, int split, const Meeting &before, uint32_t turn,
                       const float *cos_sin, HeadScratch &scratch) {
    const int head = threadIdx.x / 32;
    const Share granules = keys.of(split);
    WarpHead<T> warp(a, l, keys, before, turn, cos_sin, head, split == keys.splits - 1,
                     scratch.queries(head));
#pragma unroll 1
    for (int i = granules.begin; i < granules.end; i++) {
        uint32_t k_stage = 0;
        const uint32_t v_stage = T::wait(ring, k_stage);
        warp.add(a, l, keys, i * TOKENS, head, T::tiles(k_stage, v_stage, 0, head * T::HEAD, head));
        T::release(ring);
    }
    const int64_t first = int64_t{split} * QO_HEADS + head * GROUP;
    float(&rows)[GROUP][HEAD_DIM] = scratch.o[head];  // on the way to whole lines
    warp.each([&](int row, int dim, float x,
                  float y) { *reinterpret_cast<float2 *>(&rows[row][dim]) = make_float2(x, y); },
              [&](int row, float max, float sum) {
                  reinterpret_cast<float2 *>(a.partial_sums)[first + row] = make_float2(max, sum);
              });
    __syncwarp();
    auto *const to = reinterpret_cast<float4 *>(a.partials + first * HEAD_DIM);
#pragma unroll
    for (int i = threadIdx.x % 32; i < GROUP * HEAD_DIM / 4; i += 32)
        to[i] = reinterpret_cast<const float4 *>(rows)[i];
}

// A row as the functions of this file take it (ROW): the token's own where it has the grid to
// itself.
struct TokenRow {
    const float *qkv;
    float *partials, *partial_sums;  // [splits, qo heads, head dim], [splits, qo heads, 2]
    float *attended;
    int page_size;

    __device__ const int32_t *pages_of(const kv8_token_layer &l) const {
        return l.page_indices + __ldg(l.page_indptr);
    }
    // Two neighbours, from dim `at` on.
    __device__ void hand_attended(int at, float x, float y, uint32_t turn) const {
        hand(attended + at, x, turn), hand(attended + at + 1, y, turn);
    }
};

// What the end of a query head's row needs beside its sums.
struct HeadEnd {
    float sink, v_scale;

    __device__ HeadEnd(const kv8_token_layer &l, int head)
        : sink(l.sinks == nullptr ? -INFINITY : __ldg(l.sinks + head) * LOG2E),
          v_scale(l.v_scale == nullptr ? 1.0f : __ldg(l.v_scale + head / GROUP)) {}
};

// The end of a row: the sink joins the denominator.
struct RowSums {
    float max, sum, value;

    __device__ float finish(const HeadEnd &end) const {
        const float top = fmaxf(max, end.sink), weight = exp2_fast(max - top);
        const float all = fmaf(sum, weight, exp2_fast(end.sink - top));
        return sum == 0 || end.sink == INFINITY ? 0 : __fdividef(value * weight, all) * end.v_scale;
    }
};

// Combine: an item is half the dims of a query head.

enum { COMBINE_DIMS = 32, COMBINE_ITEMS = QO_HEADS * HEAD_DIM / COMBINE_DIMS };

// What some warps have of an item each.
struct CombineScratch {
    float o[KV8_TOKEN_WARPS][COMBINE_DIMS], max[KV8_TOKEN_WARPS], sum[KV8_TOKEN_WARPS];

    __device__ void put(const RowSums &part) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        o[warp][lane] = part.value;
        if (lane == 0) max[warp] = part.max, sum[warp] = part.sum;
    }
    // That of `count` warps from `first` on.
    __device__ RowSums join(int first, int count) const {
        RowSums row = {NO_KEY, 0, 0};
        for (int i = first; i < first + count; i++) row.max = fmaxf(row.max, max[i]);
        for (int i = first; i < first + count; i++) {
            const float weight = exp2_fast(max[i] - row.max);
            row.sum = fmaf(sum[i], weight, row.sum);
            row.value = fmaf(o[i][threadIdx.x % 32], weight, row.value);
        }
        return row;
    }
};

// A lane's dim of an item over the splits from `from` on, one in `step`.
template <class ROW>
__device__ __forceinline__ RowSums add_splits(const ROW &a, int item, int from, int splits,
                                              int step) {
    const int head = item / 2, dim = item % 2 * COMBINE_DIMS + threadIdx.x % 32;
    const float2 *const sums = reinterpret_cast<const float2 *>(a.partial_sums) + head;
    const float *const partials = a.partials + head * HEAD_DIM + dim;
    float max = NO_KEY, sum = 0, o = 0;
    constexpr int AT_ONCE = (KV8_TOKEN_MAX_BLOCKS + KV8_TOKEN_WARPS - 1) / KV8_TOKEN_WARPS;
#pragma unroll 1
    for (int first = from; first < splits; first += AT_ONCE * step) {
        float2 s[AT_ONCE];
        float x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int split = first + i * step;
            s[i] = make_float2(NO_KEY, 0), x[i] = 0;
            if (split < splits) {
                s[i] = __ldcg(sums + split * QO_HEADS);
                x[i] = __ldcg(partials + int64_t{split} * QO_HEADS * HEAD_DIM);
            }
        }
        float top = max;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) top = fmaxf(top, s[i].x);
        const float keep = exp2_fast(max - top);
        sum *= keep, o *= keep, max = top;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float weight = exp2_fast(s[i].x - top);
            sum = fmaf(s[i].y, weight, sum), o = fmaf(x[i], weight, o);
        }
    }
    return {max, sum, o};
}

__device__ __forceinline__ void combine_item(const TokenRow &a, const HeadEnd &end, int item,
                                             int splits, uint32_t turn, CombineScratch &scratch) {
    scratch.put(add_splits(a, item, threadIdx.x / 32, splits, KV8_TOKEN_WARPS));
    meet_warps();
    if (threadIdx.x / 32 != 0) return;
    hand(a.attended + item * COMBINE_DIMS + threadIdx.x,
         scratch.join(0, KV8_TOKEN_WARPS).finish(end), turn);
}

// --- few keys: the block has a KV head, its warps share the granules ---

template <class T, class ROW>
__device__ void attend_few(RingReader &ring, const ROW &a, const kv8_token_layer &l,
                           const KeySplits &keys, int head, const Meeting &before, uint32_t turn,
                           const float *cos_sin, HeadScratch &scratch) {
    const int idx = threadIdx.x / 32;
    const int qo_head = head * GROUP + idx;
    const HeadEnd end(l, qo_head);
    WarpHead<T> warp(a, l, keys, before, turn, cos_sin, head,
                     idx == (keys.granules - 1) % KV8_TOKEN_WARPS, scratch.queries(idx));
    uint32_t k_stage = 0;
    const uint32_t v_stage = T::wait(ring, k_stage);
#pragma unroll 1
    for (int i = idx; i < keys.granules; i += KV8_TOKEN_WARPS)
        warp.add(a, l, keys, (keys.first + i) * TOKENS, head,
                 T::tiles(k_stage, v_stage, i, 0, head));
    fence_stores_before_wgmma();  // and before the stage's next copy
    T::release(ring);
    warp.each(
        [&](int row, int dim, float x, float y) {
            *reinterpret_cast<float2 *>(&scratch.o[idx][row][dim]) = make_float2(x, y);
        },
        [&](int row, float max, float sum) {
            scratch.max[idx][row] = max, scratch.sum[idx][row] = sum;
        });
    meet_warps();
    // A warp a query head, two dims a lane.
    const int lane = threadIdx.x % 32;
    RowSums low = {NO_KEY, 0, 0};
    float high = 0;
    for (int i = 0; i < KV8_TOKEN_WARPS; i++) low.max = fmaxf(low.max, scratch.max[i][idx]);
    for (int i = 0; i < KV8_TOKEN_WARPS; i++) {
        const float weight = exp2_fast(scratch.max[i][idx] - low.max);
        const float2 o = reinterpret_cast<const float2 *>(scratch.o[i][idx])[lane];
        low.sum = fmaf(scratch.sum[i][idx], weight, low.sum);
        low.value = fmaf(o.x, weight, low.value), high = fmaf(o.y, weight, high);
    }
    const RowSums second = {low.max, low.sum, high};
    a.hand_attended(qo_head * HEAD_DIM + 2 * lane, low.finish(end), second.finish(end), turn);
}

}  // namespace kv8
