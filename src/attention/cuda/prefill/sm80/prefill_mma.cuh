// prefill_mma.cuh - attention of many query rows over pages, on mma.sync: every GPU since sm_80,
// and every pair of formats and head_dim that the wgmma kernels do not take.
//
// Grid: as many blocks as the GPU holds at once, each taking items from the queue until it is
// empty. Block: WARPS warps of ROW_TILES x 16 packed query rows each. Shared memory: Q, one tile of
// KEYS keys of K and of V in 16 bits, the next tile (as codes where both formats are not of 16 bits
// already), a record per row. Bound by the tensor cores and, beside them, by ldmatrix: a warp reads
// every K and V of a tile for its own rows, 32 where registers allow.
//
// The softmax is the wgmma kernels': no maximum per tile. What rows keep and how they end:
// prefill_mma_row_state.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill_mma_row_state.cuh"

namespace kv8 {

template <class SHAPE>
struct MmaBlock : MmaRowState<SHAPE> {
    using rows = MmaRowState<SHAPE>;
    using rows::a, rows::shared, rows::loader, rows::warp, rows::lane, rows::small;
    using rows::D, rows::ROW_TILES, rows::KEY_TILES, rows::DIM_TILES;
    using rows::factor, rows::max_, rows::o, rows::sum, rows::scales_at;
    using rows::load_top, rows::set_top, rows::scale_output, rows::cleared_at, rows::small_at;
    using rows::row_address, rows::row_of, rows::row_factor, rows::first_key, rows::end_key;
    static constexpr bool IS_BF16 = SHAPE::IS_BF16;
    uint32_t q_lane, k_lane, v_lane;  // this lane's addresses of its fragments
    int full_from, full_to;           // keys that every row of the warp may see
    int warp_from, warp_to;           // keys that some row may
    bool fresh;                       // some row of the warp has no maximum yet
    bool odd;                         // S is never ready as it comes

    __device__ MmaBlock(const kv8_kernel_args &args, uint32_t base) : rows(args, base) {
        odd = a.soft_cap > 0 || a.k_dtype == INT8;
        q_lane = base + SHAPE::Q_AT + SHAPE::at(warp * SHAPE::WARP_ROWS + lane % 16, lane / 16);
        k_lane = base + SHAPE::K_AT + SHAPE::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v_lane = base + SHAPE::V_AT + SHAPE::at(lane % 16, lane / 16);
    }

    // --- the start of an item ---

    // Q into shared memory. bf16 meets f16 tiles as f16 times a power of two of the row, which
    // takes its largest value to [2^13, 2^14): exact but for values 2^27 below the row's largest. A
    // negative or zero factor goes into Q, so that maxima stay maxima.
    __device__ __forceinline__ void load_q(const ItemView &v) {
        constexpr int LANES = SHAPE::THREADS / SHAPE::ROWS;  // that share a row
        constexpr int CHUNKS = SHAPE::CHUNKS / LANES;
        static_assert(LANES * SHAPE::ROWS == SHAPE::THREADS && CHUNKS * LANES == SHAPE::CHUNKS,
                      "every lane a part of one row");
        const int row = threadIdx.x / LANES, part = threadIdx.x % LANES;
        const int packed = v.row_begin + min(row, v.num_rows - 1);
        const int query = query_of(a, packed);
        const int head = v.kv_head * a.group_size + packed - query * a.group_size;
        const uint16_t *const q = (const uint16_t *)a.q +
                                  (int64_t)(v.q_begin + query) * a.q_stride_row +
                                  head * a.q_stride_head + part * (8 * CHUNKS);
        const bool from_bf16 = a.q_dtype == BF16;
        const float scale = a.score_scale * k_scale_of(a, v);
        const float sign = scale < 0 ? -1.0f : scale == 0 ? 0.0f : 1.0f;
        uint32_t w[CHUNKS][4];
        uint32_t largest = 0;  // of the magnitudes' bits, which sort as the values do
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (8 * (CHUNKS * part + i) < a.head_dim) {
                if (a.prefill.q_aligned)
                    raw = *(const uint4 *)(q + 8 * i);
                else
                    raw = make_uint4(
                        q[8 * i] | q[8 * i + 1] << 16, q[8 * i + 2] | q[8 * i + 3] << 16,
                        q[8 * i + 4] | q[8 * i + 5] << 16, q[8 * i + 6] | q[8 * i + 7] << 16);
            }
            w[i][0] = raw.x, w[i][1] = raw.y, w[i][2] = raw.z, w[i][3] = raw.w;
#pragma unroll
            for (int j = 0; j < 4; j++)
                largest = max(largest, max(w[i][j] & 0x7FFF, w[i][j] >> 16 & 0x7FFF));
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2)
            largest = max(largest, __shfl_xor_sync(~0u, largest, step));
        float power = 1.0f;
        if (from_bf16 && !IS_BF16) {
            const int exponent = (int)(largest >> 7) - 127;
            if (exponent == 128) power = 0x1p-100f;  // beside an infinity nothing else counts
            if (exponent < 128 && exponent > -127)
                power = __int_as_float((127 + max(min(13 - exponent, 100), -100)) << 23);
        }
        if (part == 0) {
            const float f = !isfinite(scale) ? NAN : sign == 0 ? 1.0f : fabsf(scale) / power;
            store_chunk(row_address(row), __float_as_uint(f), __float_as_uint(-INFINITY),
                        row_begin(a, v, query), row_end(a, v, query));
        }
        power *= sign;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 both = make_float2(__uint_as_float(w[i][j] << 16),
                                          __uint_as_float(w[i][j] & 0xFFFF0000));
                if (!from_bf16) both = __half22float2(*(const __half2 *)&w[i][j]);
                w[i][j] = pack<IS_BF16>(both.x * power, both.y * power);
            }
            store_chunk(shared + SHAPE::Q_AT + SHAPE::at(row, CHUNKS * part + i), w[i][0], w[i][1],
                        w[i][2], w[i][3]);
        }
    }
    __device__ __forceinline__ void start_item(const ItemView &v) {
        load_q(v);
        __syncthreads();
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                // the cap leaves log2 units
                factor[t][slot] = a.soft_cap > 0 ? 1.0f : row_factor(row_of(t, slot));
                max_[t][slot] = NO_MAXIMUM;
                sum[t][slot] = 0;
            }
#pragma unroll
            for (int i = 0; i < DIM_TILES; i++)
                o[t][i][0] = o[t][i][1] = o[t][i][2] = o[t][i][3] = 0;
        }
        const int first = warp * SHAPE::WARP_ROWS, last = first + SHAPE::WARP_ROWS - 1;
        warp_from = first_key(first), full_to = end_key(first);
        full_from = first_key(last), warp_to = end_key(last);
        if (a.key_begin != nullptr) this->find_ranges(warp_from, warp_to, full_from, full_to);
        if (loader.keys.mask != nullptr) full_to = min(full_to, loader.shared_to());
        if (loader.is_missing()) full_to = 0;
        fresh = true;
        small = false;
    }

    // --- a tile ---

    __device__ __forceinline__ void scores(float (&s)[ROW_TILES][KEY_TILES][4], uint32_t k) const {
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
            for (int i = 0; i < KEY_TILES; i++)
                s[t][i][0] = s[t][i][1] = s[t][i][2] = s[t][i][3] = 0;
        uint32_t q[2][ROW_TILES][4];
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) load_matrices(q[0][t], q_lane + t * 16 * SHAPE::PITCH);
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            uint32_t both[KEY_TILES / 2][4];
#pragma unroll
            for (int i = 0; i < KEY_TILES / 2; i++)
                load_matrices(both[i], SHAPE::at_step(k, step) + i * 16 * SHAPE::PITCH);
            if (step + 1 < D / 16)
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++)
                    load_matrices(q[(step + 1) % 2][t],
                                  SHAPE::at_step(q_lane, step + 1) + t * 16 * SHAPE::PITCH);
#pragma unroll
            for (int i = 0; i < KEY_TILES / 2; i++) {
                const uint32_t b[2][2] = {{both[i][0], both[i][1]}, {both[i][2], both[i][3]}};
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    mma<IS_BF16>(s[t][2 * i], q[step % 2][t], b[0]);
                    mma<IS_BF16>(s[t][2 * i + 1], q[step % 2][t], b[1]);
                }
            }
        }
    }
    __device__ __forceinline__ void add_output(const uint32_t (&p)[ROW_TILES][KEY_TILES / 2][4],
                                               uint32_t v) {
#pragma unroll
        for (int step = 0; step < KEY_TILES / 2; step++) {
#pragma unroll
            for (int i = 0; i < DIM_TILES; i += 2) {
                uint32_t both[4];
                load_matrices_transposed(both, SHAPE::at_step(v, i / 2) + step * 16 * SHAPE::PITCH);
                const uint32_t b[2][2] = {{both[0], both[1]}, {both[2], both[3]}};
#pragma unroll
                for (int t = 0; t < ROW_TILES; t++) {
                    mma<IS_BF16>(o[t][i], p[t][step], b[0]);
                    mma<IS_BF16>(o[t][i + 1], p[t][step], b[1]);
                }
            }
        }
    }

    // int8: a key's scale is its column's.
    __device__ __forceinline__ void scale_scores(float (&s)[ROW_TILES][KEY_TILES][4]) const {
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++) {
            uint32_t pair;
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(pair)
                         : "r"(scales_at + 16 * i + lane % 4 * 4));
            const float2 scale = __half22float2(*(const __half2 *)&pair);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) {
                s[t][i][0] *= scale.x, s[t][i][1] *= scale.y;
                s[t][i][2] *= scale.x, s[t][i][3] *= scale.y;
            }
        }
    }
    static __device__ __forceinline__ float row_maximum(const float (&s)[KEY_TILES][4], int slot) {
        float top = s[0][2 * slot];
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++)
            top = max_nan(top, max_nan(s[i][2 * slot], s[i][2 * slot + 1]));
        top = quad_max_nan(top);
        return top == INFINITY ? NAN : top;  // as its row will be
    }
    // What S is not ready for the exponentials without, if anything: all of it behind one branch.
    // Maxima of the rows that have none, whose O and sums are still 0.
    __device__ __forceinline__ void prepare(float (&s)[ROW_TILES][KEY_TILES][4], int tile) {
        const bool edge = (tile + 1) * SHAPE::KEYS > full_to || tile * SHAPE::KEYS < full_from;
        if (!(edge || fresh || odd)) return;
        if (a.k_dtype == INT8) scale_scores(s);
        const bool by_bits = edge && (loader.keys.mask != nullptr || loader.is_missing());
        bool open = false;
#pragma unroll
        for (int t = 0; t < ROW_TILES; t++) {
            if (a.soft_cap > 0) this->cap_scores(s[t], t);
            if (edge) this->hide_by_range(s[t], t, tile);
            if (by_bits) this->hide_by_bits(s[t], t, tile);
            if (!fresh) continue;
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float before = load_top(t, slot), found = row_maximum(s[t], slot);
                const float top = before == -INFINITY ? found : before;
                set_top(t, slot, top);
                open = open || top == -INFINITY;
            }
        }
        if (fresh) fresh = __any_sync(~0u, open);
    }
    // The rows' maxima over this tile too; O and the sums follow.
    __device__ __forceinline__ void raise_maxima(const float (&s)[KEY_TILES][4], int t) {
        float keep[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const float before = load_top(t, slot), top = max_nan(row_maximum(s, slot), before);
            keep[slot] = rescaling(before, top, factor[t][slot]);
            set_top(t, slot, top);
            sum[t][slot] *= keep[slot];
        }
#pragma unroll
        for (int i = 0; i < DIM_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[t][i][j] *= keep[j / 2];
    }
    // P in 16 bits, relative to `to`; a lane's sums of it.
    __device__ __forceinline__ void exponentials(const float (&s)[KEY_TILES][4],
                                                 uint32_t (&p)[KEY_TILES / 2][4], int t,
                                                 const Reference (&to)[2], float (&add)[2]) const {
        float part[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++) {
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float low = weight_of(s[i][2 * slot], factor[t][slot], to[slot]);
                const float high = weight_of(s[i][2 * slot + 1], factor[t][slot], to[slot]);
                part[slot][0] += low;
                part[slot][1] += high;
                p[i / 2][i % 2 * 2 + slot] = pack<IS_BF16>(low, high);
            }
        }
        add[0] = part[0][0] + part[0][1];
        add[1] = part[1][0] + part[1][1];
    }
    // S to P. A row's maximum is found in the first tile it sees and then only where a lane's sum
    // of a tile reaches 2^15, near f16's end: P may be as large, the final division takes it back.
    // NaN, whose row is NaN, is no reason to find it anew.
    __device__ __forceinline__ void softmax(const float (&s)[KEY_TILES][4],
                                            uint32_t (&p)[KEY_TILES / 2][4], int t) {
        const Reference as_is[2] = {{max_[t][0], 0.0f}, {max_[t][1], 0.0f}};
        float add[2];
        exponentials(s, p, t, as_is, add);
        if (__any_sync(~0u, add[0] >= 32768.0f || add[1] >= 32768.0f)) {
            raise_maxima(s, t);
            const Reference to[2] = {reference_of(load_top(t, 0), factor[t][0]),
                                     reference_of(load_top(t, 1), factor[t][1])};
            exponentials(s, p, t, to, add);
        }
        sum[t][0] += add[0];
        sum[t][1] += add[1];
    }
    // int8: V of a warp's keys whose scales are large is 2^-7 as large as it is, and O from the
    // first such keys of an item on. P of all other keys follows.
    __device__ __forceinline__ void shrink_weights(uint32_t (&p)[ROW_TILES][KEY_TILES / 2][4]) {
        const uint32_t small_keys = load_shared<4>(small_at()).w[0];
        if (small_keys == 0 && !small) return;
        if (!small) {
            small = true;
            scale_output(0x1p-7f);
        }
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++) {
            if (small_keys >> (8 * (8 * i / SHAPE::WARP_KEYS)) & 1) continue;
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++)
#pragma unroll
                for (int slot = 0; slot < 2; slot++)
                    p[t][i / 2][i % 2 * 2 + slot] =
                        multiply_f16(p[t][i / 2][i % 2 * 2 + slot], 0x20002000u);
        }
    }
    // A tile; the next one's copies (where next >= 0) begin when S has left its registers.
    __device__ __forceinline__ void compute(int tile, int buffer, int next, int next_buffer) {
        const bool seen = tile * SHAPE::KEYS < warp_to && (tile + 1) * SHAPE::KEYS > warp_from;
        const uint32_t distance = buffer * 2 * SHAPE::TILE_BYTES;
        uint32_t p[ROW_TILES][KEY_TILES / 2][4];
        if (seen) {
            float s[ROW_TILES][KEY_TILES][4];
            scores(s, k_lane + distance);
            prepare(s, tile);
#pragma unroll
            for (int t = 0; t < ROW_TILES; t++) softmax(s[t], p[t], t);
            if (!IS_BF16 && a.v_dtype == INT8) shrink_weights(p);
        }
        if (next >= 0) loader.copy(next, next_buffer);
        if (seen) add_output(p, v_lane + distance);
    }

    // Tiles while the next one's bytes are on their way.
    __device__ __forceinline__ void run(const kv8_prefill_item &item) {
        constexpr int RATIO = KV8_PREFILL_TILE_KEYS / SHAPE::KEYS;
        const ItemView v = view_item(a, item);
        int tile = max(item.tile_begin * RATIO, item.seen_from / SHAPE::KEYS);
        const int end = min(item.tile_end * RATIO, (item.seen_to + SHAPE::KEYS - 1) / SHAPE::KEYS);
        const bool in_place = loader.in_place;
        loader.open(item, v);
        if (a.num_pages != KV8_ANY_PAGES) loader.find_missing(item);
        loader.look_up(tile);
        if (tile < end) loader.copy(tile, 0);
        start_item(v);
        for (int buffer = 0; tile < end; tile++, buffer ^= in_place) {
            const uint32_t v_at = shared + SHAPE::V_AT + buffer * 2 * SHAPE::TILE_BYTES;
            copy_wait<0>();
            if (in_place) loader.clear_values(tile, v_at, cleared_at());
            __syncthreads();  // all copies are here, and the other buffer has been read
            if (!in_place) {
                loader.widen(scales_at, small_at());
                loader.clear_values(tile, v_at, cleared_at());
                __syncthreads();
            }
            compute(tile, buffer, tile + 1 < end ? tile + 1 : -1, buffer ^ in_place);
        }
        this->finish(item, v);
    }
};

template <class SHAPE>
__device__ __forceinline__ void prefill_mma(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t base = smem_address(memory);
    MmaBlock<SHAPE> block(a, base);
    int next = 0;
    kv8_prefill_queue *const queue = a.prefill.queue;
    if (threadIdx.x == 0) next = first_item(a);
    for (;;) {
        __syncthreads();  // the last item has been left
        if (threadIdx.x == 0) {
            const int left = next - queue->num_items;
            const bool more = left < 0;
            // Every block asks once in vain; the last of them leaves the queue as it was.
            if (left == (int)gridDim.x - 1) queue->next = queue->own[gridDim.x];
#pragma unroll
            for (int i = 0; i < KV8_PREFILL_ITEM_BYTES / 16; i++) {
                uint4 words = make_uint4(~0u, 0, 0, 0);  // request -1: no more
                if (more) words = ((const uint4 *)(a.prefill.items + next))[i];
                store_chunk(block.loader.item_at + 16 * i, words.x, words.y, words.z, words.w);
            }
            store_shared(block.cleared_at(), 0);
            store_shared(block.loader.missing_at(), 0);
        }
        __syncthreads();
        const kv8_prefill_item &item =
            *(const kv8_prefill_item *)(memory + (block.loader.item_at - base));
        if (item.request < 0) break;
        if (threadIdx.x == 0) next = item_behind(a, next);
        block.run(item);
    }
}

}  // namespace kv8
