// token_keys.cuh - the keys that one token sees: how the blocks share them, and K and V on their
// way through the ring.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "token_own_row.cuh"
#include "token_ring.cuh"

namespace kv8 {

constexpr int FEW_GRANULES = KV8_TOKEN_FEW_GRANULES;

// Granules of keys that a layer sees, and how the blocks share them.
struct KeySplits {
    int begin, end;       // keys
    int first, granules;  // the first granule, and how many
    int splits;

    __device__ KeySplits(int window_left, int position, int blocks) {
        end = position + 1;
        begin = window_left < 0 ? 0 : max(position - window_left, 0);
        first = begin / TOKENS;
        granules = (end + TOKENS - 1) / TOKENS - first;
        splits = min(granules, blocks);
    }
    __device__ bool are_few() const { return granules <= FEW_GRANULES; }
    __device__ Share of(int split) const {
        Share s(granules, split, splits);
        s.begin += first, s.end += first;
        return s;
    }
};

// A granule's tiles of one head in the ring.
struct Tiles {
    uint32_t k, v, k_scales, v_scales;
};
// K and V in the ring: of 8 bits in one stage, of 16 in one each. A row has HEADS of a token.
template <Format F, int HEADS>
struct Keys {
    static constexpr Format FORMAT = F;
    static constexpr int HEAD = HEAD_DIM * size_of(F);  // bytes
    static constexpr int STAGES = size_of(F);
    using Row = PlainRow<HEADS * HEAD>;
    using K = KeyTile<F, HEAD_DIM, Row>;
    using V = ValueTile<F, HEAD_DIM, Row>;
    // Granules at once.
    static constexpr int GRANULES = HEADS == 1 ? FEW_GRANULES : 1;
    static constexpr int VALUES = GRANULES * Row::TILE_BYTES;  // where V begins, of 8 bits
    // Where scales of int8's rows begin, K's and V's: of a granule all heads'.
    static constexpr int SCALES = 2 * VALUES;
    static constexpr int SCALE_BYTES = F == INT8 ? TOKENS * KV_HEADS * 2 : 0;
    static constexpr int V_SCALES = SCALES + GRANULES * SCALE_BYTES;
    static_assert(V_SCALES + GRANULES * SCALE_BYTES <= STAGES * KV8_TOKEN_STAGE_BYTES, "stages");

    // Where V is, when K is in the next stage; both have come.
    __device__ static uint32_t wait(const RingReader &ring, uint32_t &keys) {
        keys = ring.wait();
        if constexpr (STAGES == 1) return keys + VALUES;
        RingReader next = ring;
        next.n++;
        return next.wait();
    }
    // Those of granule i, a head's bytes from `at` on in its rows.
    __device__ static Tiles tiles(uint32_t k_stage, uint32_t v_stage, int i, int at, int head) {
        const uint32_t tile = i * Row::TILE_BYTES + at, scales = i * SCALE_BYTES + head * 2;
        return {k_stage + tile, v_stage + tile, k_stage + SCALES + scales,
                k_stage + V_SCALES + scales};
    }
    __device__ static void release(RingReader &ring) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) ring.release();
    }
};

// --- the copying warp ---

template <class T>
__device__ void copy_keys(RingWriter &ring, const kv8_token_layer &layer, const int32_t *pages,
                          const Share &granules, int page_size) {
    const int per_page = page_size / TOKENS;
    int page = 0;
#pragma unroll 1
    for (int i = granules.begin; i < granules.end; i++) {
        const int n = (i - granules.begin) % 32;
        if (n == 0) {
            const int mine = min(i + static_cast<int>(threadIdx.x) % 32, granules.end - 1);
            page = __ldg(pages + mine / per_page);
        }
        const int64_t at = __shfl_sync(~0u, page, n);
        const int64_t slot = static_cast<int64_t>(i % per_page) * T::Row::TILE_BYTES;
        if (threadIdx.x % 32 == 0) {
            const uint8_t *const k = layer.k + at * layer.k_stride_page + slot;
            const uint8_t *const v = layer.v + at * layer.v_stride_page + slot;
            if constexpr (T::STAGES == 1) {
                const uint32_t to = ring.take(2 * (T::Row::TILE_BYTES + T::SCALE_BYTES));
                ring.copy(to, k, T::Row::TILE_BYTES);
                ring.copy(to + T::VALUES, v, T::Row::TILE_BYTES);
                if constexpr (T::SCALE_BYTES > 0) {
                    const int64_t granule = i % per_page * T::SCALE_BYTES;
                    ring.copy(to + T::SCALES, layer.k_rows + at * layer.k_stride_page + granule,
                              T::SCALE_BYTES);
                    ring.copy(to + T::V_SCALES, layer.v_rows + at * layer.v_stride_page + granule,
                              T::SCALE_BYTES);
                }
                ring.n++;
            } else {
                ring.put(k, T::Row::TILE_BYTES);
                ring.put(v, T::Row::TILE_BYTES);
            }
        }
        __syncwarp();
    }
}

// A granule's rows of one head, K or V, which are too short for bulk copies.
template <class T>
__device__ __forceinline__ void copy_head(const uint8_t *page, int slot, int head, uint32_t to) {
    constexpr int PIECES = T::HEAD / 16;
    const uint8_t *const from = page + (slot * KV_HEADS + head) * T::HEAD;
#pragma unroll
    for (int i = 0; i < TOKENS * PIECES / 32; i++) {
        const int piece = i * 32 + threadIdx.x % 32;
        copy16_once<true>(to + piece * 16,
                          from + piece / PIECES * KV_HEADS * T::HEAD + piece % PIECES * 16);
    }
}

// Scales of all granules' rows, of all heads; lane i has the page of the i-th granule.
template <class T>
__device__ __forceinline__ void copy_scales(const uint8_t *scales, int64_t stride, int page,
                                            const KeySplits &keys, int page_size, uint32_t to) {
    constexpr int PIECES = T::SCALE_BYTES / 16;
    static_assert(32 % PIECES == 0, "whole granules at once");
#pragma unroll 1
    for (int first = 0; first < keys.granules; first += 32 / PIECES) {
        const int lane = threadIdx.x % 32, i = first + lane / PIECES;
        const int64_t at = __shfl_sync(~0u, page, i) * stride;
        if (i < keys.granules)
            copy16_once<true>(to + i * T::SCALE_BYTES + lane % PIECES * 16,
                              scales + at + (keys.first + i) * TOKENS % page_size * KV_HEADS * 2 +
                                  lane % PIECES * 16);
    }
}

// All granules of one head.
template <class T>
__device__ void copy_few(RingWriter &ring, const kv8_token_layer &l, const int32_t *pages,
                         const KeySplits &keys, int head, int page_size) {
    const int mine = min(static_cast<int>(threadIdx.x) % 32, keys.granules - 1);
    const int page = __ldg(pages + (keys.first + mine) * TOKENS / page_size);
    const auto copy = [&](const uint8_t *rows, int64_t stride, uint32_t to) {
#pragma unroll 1
        for (int i = 0; i < keys.granules; i++)
            copy_head<T>(rows + __shfl_sync(~0u, page, i) * stride,
                         (keys.first + i) * TOKENS % page_size, head, to + i * T::Row::TILE_BYTES);
    };
    if constexpr (T::STAGES == 1) {
        ring.fill([&](uint32_t stage) {
            copy(l.k, l.k_stride_page, stage);
            copy(l.v, l.v_stride_page, stage + T::VALUES);
            if constexpr (T::SCALE_BYTES > 0) {
                copy_scales<T>(l.k_rows, l.k_stride_page, page, keys, page_size, stage + T::SCALES);
                copy_scales<T>(l.v_rows, l.v_stride_page, page, keys, page_size,
                               stage + T::V_SCALES);
            }
        });
    } else {
        ring.fill([&](uint32_t stage) { copy(l.k, l.k_stride_page, stage); });
        ring.fill([&](uint32_t stage) { copy(l.v, l.v_stride_page, stage); });
    }
}

}  // namespace kv8
