// prefill_mma_row_state.cuh - the packed query rows of a block on mma.sync, whatever its products
// are: their state, masks and caps, the join of split rows, and what is written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_reference.cuh"
#include "prefill_mma_tile.cuh"

namespace kv8 {

template <class SHAPE>
struct MmaRowState {
    enum {
        D = SHAPE::HEAD_DIM,
        ROW_TILES = SHAPE::ROW_TILES,
        KEY_TILES = SHAPE::KEYS / 8,
        DIM_TILES = D / 8,
        PIECES = SHAPE::ROWS / 64  // of a slot: the places of partial results
    };
    const kv8_kernel_args &a;
    const uint32_t shared;
    TileLoader<SHAPE> loader;
    const int warp, lane;
    // In shared memory, behind the tiles. flag_at: a word of join().
    uint32_t rows_at, scales_at, flag_at;
    bool small;  // int8: O is 2^-7 as large
    // Of rows lane / 4 (slot 0) and lane / 4 + 8 (slot 1) of each tile of 16.
    float factor[ROW_TILES][2];                   // from S to log2 units
    float max_[ROW_TILES][2], sum[ROW_TILES][2];  // max_ in log2 units, or NO_MAXIMUM; P and sum
                                                  // are relative to it
    float o[ROW_TILES][DIM_TILES][4];

    __device__ MmaRowState(const kv8_kernel_args &args, uint32_t base)
        : a(args), shared(base), loader(args, base), warp(loader.warp), lane(loader.lane) {
        rows_at = base + SHAPE::NEXT_AT +
                  KV8_PREFILL_MMA_NEXT(D, SHAPE::KEYS, is_wide(a.k_dtype), is_wide(a.v_dtype));
        scales_at = rows_at + SHAPE::ROWS * KV8_PREFILL_ROW_BYTES;
        loader.item_at = scales_at + SHAPE::SCALE_BYTES;
        flag_at = loader.item_at + KV8_PREFILL_ITEM_BYTES;
    }
    // Behind flag_at: whether values of V that are not finite were cleared; a byte a warp, of its
    // keys of V (TileLoader); TileLoader's missing_at().
    __device__ __forceinline__ uint32_t cleared_at() const { return flag_at + 4; }
    __device__ __forceinline__ uint32_t small_at() const { return flag_at + 8; }
    // A lane's row among the block's.
    __device__ __forceinline__ int row_of(int tile, int slot) const {
        return warp * SHAPE::WARP_ROWS + 16 * tile + 8 * slot + lane / 4;
    }
    // A field of a row's record: where it lies, what it holds.
    __device__ __forceinline__ uint32_t row_address(int row, uint32_t field = 0) const {
        return rows_at + KV8_PREFILL_ROW_BYTES * row + field;
    }
    __device__ __forceinline__ int row_field(int row, uint32_t field) const {
        int x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(row_address(row, field)));
        return x;
    }
    __device__ __forceinline__ float row_factor(int row) const {
        return __int_as_float(row_field(row, offsetof(RowRecord, factor)));
    }
    __device__ __forceinline__ int first_key(int row) const {
        return row_field(row, offsetof(RowRecord, begin));
    }
    __device__ __forceinline__ int end_key(int row) const {
        return row_field(row, offsetof(RowRecord, end));
    }

    // Of runs in which rows have ranges: keys that some row of the warp sees, and that all do.
    __device__ __forceinline__ void find_ranges(int &some_from, int &some_to, int &all_from,
                                                int &all_to) const {
        const int row = warp * SHAPE::WARP_ROWS + lane % SHAPE::WARP_ROWS;
        const int begin = first_key(row), end = end_key(row);
        some_from = __reduce_min_sync(~0u, begin < end ? begin : INT32_MAX);
        some_to = __reduce_max_sync(~0u, begin < end ? end : 0);
        all_from = __reduce_max_sync(~0u, begin);
        all_to = __reduce_min_sync(~0u, end);
    }

    // --- scores ---

    __device__ __forceinline__ void cap_scores(float (&s)[KEY_TILES][4], int t) const {
        const float inverse = __frcp_rn(a.soft_cap);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const float to_cap = row_factor(row_of(t, slot)) * inverse;
#pragma unroll
            for (int i = 0; i < KEY_TILES; i++) {
                s[i][2 * slot] =
                    a.soft_cap * tanh_of_exponent(2 * LOG2E * (s[i][2 * slot] * to_cap));
                s[i][2 * slot + 1] =
                    a.soft_cap * tanh_of_exponent(2 * LOG2E * (s[i][2 * slot + 1] * to_cap));
            }
        }
    }
    __device__ __forceinline__ void hide_by_range(float (&s)[KEY_TILES][4], int t, int tile) const {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int first = tile * SHAPE::KEYS + lane % 4 * 2, row = row_of(t, slot);
            const int begin = first_key(row) - first, end = end_key(row) - first;
#pragma unroll
            for (int i = 0; i < KEY_TILES; i++) {
                if (8 * i < begin || 8 * i >= end) s[i][2 * slot] = -INFINITY;
                if (8 * i + 1 < begin || 8 * i + 1 >= end) s[i][2 * slot + 1] = -INFINITY;
            }
        }
    }
    // Of 16 keys of each of four lanes: bits of those whose pages are there.
    __device__ __forceinline__ uint32_t keys_there(int tile) const {
        uint32_t mine = 0;
#pragma unroll
        for (int word = 0; word < SHAPE::KEYS / 32; word++) {
            const int key = min(tile * SHAPE::KEYS + 32 * word + lane, loader.keys.kv_len - 1);
            const uint32_t there =
                __ballot_sync(~0u, page_exists(a, loader.keys.pages[divide(key, a.by_page)]));
            if (lane % 4 / 2 == word) mine = there >> (lane % 2 * 16);
        }
        return mine;
    }
    // Keys that a mask hides, or whose pages are not there. The four lanes of a row read 16 keys'
    // bits each, no byte behind the row's last.
    __device__ __forceinline__ void hide_by_bits(float (&s)[KEY_TILES][4], int t, int tile) const {
        const uint32_t there = loader.is_missing() ? keys_there(tile) : ~0u;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = min(row_of(t, slot), loader.view.num_rows - 1);
            const int query = query_of(a, loader.view.row_begin + row);
            const int64_t row_bits = (int64_t)query * loader.keys.kv_len;
            const int64_t bit = row_bits + tile * SHAPE::KEYS + lane % 4 * 16;
            uint32_t mine = loader.keys.mask == nullptr ? ~0u : 0;
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (loader.keys.mask != nullptr &&
                    (bit / 8 + i) * 8 < row_bits + loader.keys.kv_len)
                    mine |= (uint32_t)loader.keys.mask[bit / 8 + i] << (8 * i);
            mine = mine >> bit % 8 & there;
#pragma unroll
            for (int i = 0; i < KEY_TILES; i += 2) {
                const uint32_t bits = __shfl_sync(~0u, mine, (lane & ~3) + i / 2) >> (lane % 4 * 2);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (!(bits >> (j / 2 * 8 + j % 2) & 1))
                        s[i + j / 2][2 * slot + j % 2] = -INFINITY;
            }
        }
    }
    __device__ __forceinline__ float load_top(int t, int slot) const {
        return __int_as_float(row_field(row_of(t, slot), offsetof(RowRecord, top)));
    }
    __device__ __forceinline__ void set_top(int t, int slot, float top) {
        __syncwarp();  // the row's other lanes have read the last one
        store_shared(row_address(row_of(t, slot), offsetof(RowRecord, top)), __float_as_uint(top));
        max_[t][slot] = maximum_of(top, factor[t][slot]);
    }
    __device__ __forceinline__ void scale_output(float by) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int i = 0; i < DIM_TILES; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[t][i][j] *= by;
    }

    // --- the end of an item ---

    // Leaves this split and returns whether it was the last; then the state is all splits', and
    // `cleared` says whether any of them has V without values that were not finite.
    __device__ __forceinline__ bool join(const kv8_prefill_item &item, bool &cleared) {
        constexpr int THREADS = SHAPE::THREADS;
        const int64_t place = (int64_t)item.slot + item.split;
        float *const mine = a.prefill.partials + place * (SHAPE::ROWS * D) + threadIdx.x;
        float2 *const my_sums =
            (float2 *)a.prefill.partial_sums + place * (PIECES * 256) + threadIdx.x;
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
            for (int i = 0; i < DIM_TILES; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mine[THREADS * ((t * DIM_TILES + i) * 4 + j)] = o[t][i][j];
#pragma unroll
            for (int slot = 0; slot < 2; slot++)
                my_sums[THREADS * (2 * t + slot)] = make_float2(max_[t][slot], sum[t][slot]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t *const arrivals = a.prefill.arrivals + (int64_t)item.slot * PIECES;
            const uint32_t before = atomicAdd(arrivals, cleared ? 0x10001 : 1);
            if ((before & 0xffff) + 1 == (uint32_t)item.num_splits) *arrivals = 0;
            store_shared(flag_at, before);
        }
        __syncthreads();
        const uint32_t before = load_shared<4>(flag_at).w[0];
        if ((before & 0xffff) + 1 != (uint32_t)item.num_splits) return false;
        cleared = cleared || before >> 16 != 0;
        __threadfence();
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
            for (int i = 0; i < DIM_TILES; i++)
                o[t][i][0] = o[t][i][1] = o[t][i][2] = o[t][i][3] = 0;
            max_[t][0] = max_[t][1] = -INFINITY;
            sum[t][0] = sum[t][1] = 0;
        }
        for (int split = 0; split < item.num_splits; split++) {
            const int64_t at = (int64_t)item.slot + split;
            const float *const from = a.prefill.partials + at * (SHAPE::ROWS * D) + threadIdx.x;
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                float keep[2], add[2];
#pragma unroll
                for (int slot = 0; slot < 2; slot++) {
                    const float2 other =
                        __ldcg((const float2 *)a.prefill.partial_sums + at * (PIECES * 256) +
                               threadIdx.x + THREADS * (2 * t + slot));
                    const float top = max_nan(max_[t][slot], other.x);
                    const float base = top == -INFINITY ? 0.0f : top;
                    keep[slot] = exp2_fast(max_[t][slot] - base);
                    add[slot] = exp2_fast(other.x - base);
                    max_[t][slot] = top;
                    sum[t][slot] = sum[t][slot] * keep[slot] + other.y * add[slot];
                }
#pragma unroll
                for (int i = 0; i < DIM_TILES; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        o[t][i][j] =
                            o[t][i][j] * keep[j / 2] +
                            __ldcg(from + THREADS * ((t * DIM_TILES + i) * 4 + j)) * add[j / 2];
            }
        }
        return true;
    }

    __device__ __forceinline__ void finish(const kv8_prefill_item &item, const ItemView &v) {
        constexpr int WORDS = (D + 31) / 32;
        if (small) scale_output(0x1p7f);
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                sum[t][slot] = quad_sum(sum[t][slot]);
                max_[t][slot] = load_top(t, slot) * factor[t][slot];
            }
        }
        bool cleared = load_shared<4>(cleared_at()).w[0] != 0;
        if (item.slot >= 0 && !join(item, cleared)) return;
        const bool may_break = has_infinities(a.v_dtype) || a.v_dtype == INT8;
        const float v_scale = v_scale_of(a, v);
        uint32_t finite = 0;  // bits of the warp's rows whose sums and V's weights are numbers
        bool broken = cleared;
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const int row = row_of(t, slot);
                bool here = row < v.num_rows;
                RowResult result;
                if (here) here = end_row(v, row, t, slot, v_scale, result);
                if (may_break && here) broken = broken || holds_nan(t, slot);
                if (row < v.num_rows) store_row(t, slot, result);
                const uint32_t lanes = __ballot_sync(~0u, here);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    finite |= (lanes >> (4 * i) & 1) << (16 * t + 8 * slot + i);
            }
        }
        broken = broken && finite != 0;
        if ((may_break || cleared) && __syncthreads_or(broken)) {  // nobody needs the tiles
            const NonfiniteSearch<SHAPE::WARPS, 0> search = {shared + SHAPE::K_AT, warp};
            write_nonfinite<WORDS, ANY, ANY>(a, item, search, warp * SHAPE::WARP_ROWS, finite);
        }
    }
    __device__ __forceinline__ bool holds_nan(int t, int slot) const {
        bool nan = false;
#pragma unroll
        for (int i = 0; i < DIM_TILES; i++)
            nan = nan || isnan(o[t][i][2 * slot]) || isnan(o[t][i][2 * slot + 1]);
        return nan;
    }

    // Of a row: what its O is multiplied by, and where that goes.
    struct RowResult {
        float weight;
        bool empty;  // 0 by definition, whatever V holds
        int64_t at;
    };
    // False where the results are 0 or NaN by definition.
    __device__ __forceinline__ bool end_row(const ItemView &v, int row, int t, int slot,
                                            float v_scale, RowResult &result) const {
        const RowPlace place = place_of(a, v, row);
        const bool none = (max_[t][slot] == -INFINITY && sum[t][slot] == 0) ||
                          row_begin(a, v, place.query) >= row_end(a, v, place.query);
        const float sink = a.sink_logit != nullptr ? a.sink_logit[place.head] * LOG2E : -INFINITY;
        float total = sum[t][slot];
        if (a.sink_logit != nullptr) total += exp2_fast(sink - max_[t][slot]);
        result.empty = none || sink == INFINITY;
        result.weight = v_scale / total;
        result.at = place.o + lane % 4 * 2;
        if (a.lse != nullptr && lane % 4 == 0)
            a.lse[place.lse] =
                none ? -INFINITY : (max_[t][slot] + __log2f(sum[t][slot])) * a.lse_scale;
        return !result.empty && !isnan(total);
    }
    __device__ __forceinline__ void store_row(int t, int slot, const RowResult &r) {
        if (r.empty) {
#pragma unroll
            for (int i = 0; i < DIM_TILES; i++) o[t][i][2 * slot] = o[t][i][2 * slot + 1] = 0;
        }
        store_pairs<true, DIM_TILES>(
            a, r.at, r.empty ? 0.0f : r.weight, a.v_head_dim / 8,
            [&](int i, int j) -> float & { return o[t][i][2 * slot + j]; });
    }
};

}  // namespace kv8
