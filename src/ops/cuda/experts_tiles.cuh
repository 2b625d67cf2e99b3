// experts_tiles.cuh - strips of experts times many rows each, on wgmma.
//
// A work is 16 strips of an expert (256 weight rows) times up to 96 of the rows that chose it. The
// block takes every gridDim-th work: the blocks at work together share rows and weights in L2. Two
// warpgroups of consumers have eight strips each, as two products of 64 weight rows. A consumer
// warp has the codes of its two strips copied into a ring of its own, chunks of tiles ahead and
// into the next work, and widens them in registers, scaled: the A operand, never stored. A
// warpgroup of producers gathers the rows into tiles of 64 inputs under the 128-byte swizzle: the B
// operand.
//
// Scaled weights are f16: exact for scales down to 2^-24 of the row's largest; what is smaller
// rounds to a multiple of 2^-24 of the largest scale, as f32 sums would.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_gate.cuh"
#include "experts_items.cuh"
#include "mxfp4_strip.cuh"
#include "take_turn.cuh"
#include "wgmma_rows.cuh"

namespace kv8 {

constexpr int WORK_STRIPS = KV8_EXPERTS_WORK_STRIPS, WORK_ROWS = KV8_EXPERTS_WORK_ROWS;
constexpr int X_STAGES = KV8_EXPERTS_X_STAGES, X_STAGE_BYTES = WORK_ROWS * KV8_TILE_COLS * 2;
constexpr int X_AHEAD = 3;  // stages that a producer has in flight
constexpr int W_STAGES = KV8_EXPERTS_W_STAGES, W_STAGE_BYTES = KV8_EXPERTS_W_STAGE_BYTES;
constexpr int W_STRIP_BYTES = KV8_EXPERTS_W_STRIP_BYTES, CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int ROUND_ROWS = 16, CONSUMERS = 256;

struct Work {
    Item item;
    int strips;  // the first of 16
};

struct WorkList {
    ItemList list;
    uint64_t full[X_STAGES], empty[X_STAGES];
    uint64_t copied[CONSUMERS / 32 * W_STAGES];  // of every warp
};

__device__ __forceinline__ int works_an_item(const kv8_experts_matmul_args &a) {
    return (a.w.num_strips + WORK_STRIPS - 1) / WORK_STRIPS;
}
__device__ __forceinline__ int works_of_all(const kv8_experts_matmul_args &a,
                                            const ItemList &list) {
    return list.first_item[a.num_experts] * works_an_item(a);
}
__device__ __forceinline__ Work work_of(const kv8_experts_matmul_args &a, const ItemList &list,
                                        int work) {
    const int each = works_an_item(a);
    return {item_of<WORK_ROWS, ROUND_ROWS>(a, list, work / each), work % each * WORK_STRIPS};
}

// --- the producers: rows into swizzled tiles ---

template <bool DOWN>
__device__ __forceinline__ void produce(const kv8_experts_matmul_args &a, WorkList &works,
                                        uint32_t stages) {
    const int num_works = works_of_all(a, works.list);
    const int thread = threadIdx.x % 128, piece = thread % 8;
    constexpr int ROWS = WORK_ROWS / 16;  // of a thread: thread / 8, then every 16th
    const uint32_t to = thread / 8 * 128 + ((piece ^ (thread / 8 % 8)) << 4);
    if (DOWN) take_turn();
    int issued = 0;
    const auto publish = [&](int stage) {
        fence_stores_before_wgmma();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(smem_address(&works.full[stage % X_STAGES]));
    };
    for (int w = blockIdx.x; w < num_works; w += gridDim.x) {
        const Item item = work_of(a, works.list, w).item;
        uint32_t from[ROWS];  // in 16 bytes
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = thread / 8 + 16 * i, place = item.first + min(row, item.count - 1);
            const int x_row = DOWN ? place : a.routing.sorted[place] / a.top_k;
            from[i] = static_cast<uint32_t>(x_row) * (a.w.cols / 8) + piece;
        }
        for (int tile = 0; tile < a.w.num_tiles; tile++) {
            const int stage = issued % X_STAGES;
            barrier_wait(smem_address(&works.empty[stage]), (issued / X_STAGES & 1) ^ 1);
            const bool inside = tile * KV8_TILE_COLS + piece * 8 < a.w.cols;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (16 * i < item.count)
                    copy16_or_zero(stages + stage * X_STAGE_BYTES + i * (16 * 128) + to,
                                   a.x + static_cast<int64_t>(inside ? from[i] : 0) * 8, inside);
                from[i] += KV8_TILE_COLS / 8;
            }
            copy_commit();
            if (issued >= X_AHEAD) {
                copy_wait<X_AHEAD>();
                publish(issued - X_AHEAD);
            }
            issued++;
        }
    }
    copy_wait<0>();
    for (int stage = max(0, issued - X_AHEAD); stage < issued; stage++) publish(stage);
}

// --- the consumers ---

// Codes and scales of a warp's two strips, tile after tile and work after work.
struct StripStream {
    const uint8_t *strip;  // the first; the other is four strips further
    int strips_inside;     // of the two, that the expert has
    int work, tile;

    __device__ __forceinline__ void enter(const kv8_experts_matmul_args &a, const ItemList &list,
                                          int num_works) {
        tile = 0;
        if (work >= num_works) return;
        const Work next = work_of(a, list, work);
        const int first = next.strips + warp_strip();
        strips_inside = (first < a.w.num_strips) + (first + 4 < a.w.num_strips);
        strip = a.w.data + next.item.expert * a.w.expert_bytes +
                static_cast<int64_t>(first) * a.w.strip_bytes;
    }
    // The first of the warp's strips within a work.
    static __device__ __forceinline__ int warp_strip() {
        return threadIdx.x / 128 * 8 + threadIdx.x / 32 % 4;
    }
};

// The f16 exponents, in bits 10 to 14 of both halves of a word, that bring the codes of a tile's
// four blocks to twice their value over the row's factor; 0 for what is too small for an f16.
constexpr float TILE_FACTOR = 0.5f;
__device__ __forceinline__ void scale_exponents(uint32_t scales, uint32_t (&exponents)[4]) {
    constexpr uint32_t TOPS = 0x80808080u, LOWEST = (KV8_TOP_SCALE - 30) * 0x01010101u;
    const uint32_t above = (scales | TOPS) - LOWEST;  // a byte's top bit: not below the lowest
    const uint32_t tops = above & TOPS;
    const uint32_t shifted = (above & (tops - (tops >> 7))) << 2;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        exponents[i] = __byte_perm(shifted, 0, 0x0404 | i << 4 | i << 12);
}

// A tile of a strip, scaled: four A operands of 16 inputs.
__device__ __forceinline__ void widen_tile(uint32_t (&wide)[4][4], uint32_t codes_at,
                                           uint32_t scales_at) {
    const Words<16> codes = load_shared<16>(codes_at);
    uint32_t exponents[4];
    scale_exponents(load_shared<4>(scales_at).w[0], exponents);
#pragma unroll
    for (int i = 0; i < 4; i++) {  // rows g and g + 8, blocks 0 and 1
        uint32_t pairs[4];
        widen_codes(codes.w[i], pairs);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const __half2 scaled = __hmul2(*reinterpret_cast<const __half2 *>(&pairs[p]),
                                           *reinterpret_cast<const __half2 *>(&exponents[i]));
            wide[i % 2 * 2 + p / 2][p % 2 * 2 + i / 2] =
                *reinterpret_cast<const uint32_t *>(&scaled);
        }
    }
}

// Sums of two strips by up to 96 rows.
struct TileSums {
    float d[2][WORK_ROWS / 2];
};

template <int N, bool DOWN>
__device__ __forceinline__ void store_sums(const kv8_experts_matmul_args &a, const Work &work,
                                           const TileSums &sums) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int strip = work.strips + StripStream::warp_strip() + h * 4;
        if (strip >= a.w.num_strips) continue;
        const uint8_t *const end = a.w.data + work.item.expert * a.w.expert_bytes +
                                   static_cast<int64_t>(strip + 1) * a.w.strip_bytes -
                                   KV8_STRIP_END_BYTES;
        const float factor[2] = {reinterpret_cast<const float *>(end)[g],
                                 reinterpret_cast<const float *>(end)[g + 8]};
        const uint16_t *const biases = reinterpret_cast<const uint16_t *>(end + 64);
        const float bias[2] = {__uint_as_float(biases[g] << 16),
                               __uint_as_float(biases[g + 8] << 16)};
#pragma unroll
        for (int i = 0; i < N / 4; i++) {  // columns 8j + 2c and the one after
            const int column = i / 2 * 8 + 2 * c + i % 2, place = work.item.first + column;
            if (column >= work.item.count) continue;
            const float low = sums.d[h][i / 2 * 4 + i % 2] * TILE_FACTOR * factor[0] + bias[0];
            const float high = sums.d[h][i / 2 * 4 + 2 + i % 2] * TILE_FACTOR * factor[1] + bias[1];
            if constexpr (DOWN) {
                float *const to =
                    static_cast<float *>(a.y) +
                    static_cast<int64_t>(a.routing.sorted[place]) * (a.w.num_strips * 16) +
                    strip * 16 + g;
                to[0] = low;
                to[8] = high;
            } else {
                __half *const to = static_cast<__half *>(a.y) +
                                   static_cast<int64_t>(place) * (a.w.num_strips * 8) + strip * 8 +
                                   g;
                *to = __float2half_rn(gate(low, high, a.alpha, a.limit));
            }
        }
    }
}

// What a consumer warp carries from work to work.
struct Consumer {
    const kv8_experts_matmul_args &a;
    WorkList &works;
    uint32_t x_stages, ring;
    int num_works;
    int x_stage, x_phase;  // of tiles of rows
    int w_stage, w_phase;  // of the ring
    int ahead_stage;
    StripStream ahead;

    // The next chunk of tiles of both strips, once no lane reads what lay there.
    __device__ __forceinline__ void copy_next() {
        if (ahead.work >= num_works) return;
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            const uint32_t tiles = min(CHUNK, a.w.num_tiles - ahead.tile);
            const uint32_t code_bytes = tiles * KV8_TILE_CODE_BYTES;
            const uint32_t scale_bytes = tiles * KV8_TILE_SCALE_BYTES;
            const uint32_t copied =
                smem_address(&works.copied[threadIdx.x / 32 * W_STAGES + ahead_stage]);
            uint32_t to = ring + ahead_stage * W_STAGE_BYTES;
            const uint8_t *strip = ahead.strip;
            expect_bytes(copied, ahead.strips_inside * (code_bytes + scale_bytes));
            for (int h = 0; h < ahead.strips_inside; h++) {
                copy_bulk(to, strip + ahead.tile * KV8_TILE_CODE_BYTES, code_bytes, copied,
                          leave_first_policy());
                copy_bulk(
                    to + CHUNK * KV8_TILE_CODE_BYTES,
                    strip + a.w.num_tiles * KV8_TILE_CODE_BYTES + ahead.tile * KV8_TILE_SCALE_BYTES,
                    scale_bytes, copied, leave_first_policy());
                to += W_STRIP_BYTES;
                strip += 4 * a.w.strip_bytes;
            }
        }
        ahead.tile += CHUNK;
        if (ahead.tile >= a.w.num_tiles) {
            ahead.work += gridDim.x;
            ahead.enter(a, works.list, num_works);
        }
        ahead_stage = ahead_stage + 1 == W_STAGES ? 0 : ahead_stage + 1;
    }

    __device__ __forceinline__ void release(int of_stage) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(smem_address(&works.empty[of_stage]));
    }

    // One work, of up to N rows.
    template <int N, bool DOWN>
    __device__ __forceinline__ void multiply(const Work &work) {
        TileSums sums = {};
        uint32_t wide[2][4][4];
        int before = -1;  // the stage that the products in flight read
        const int lane = threadIdx.x % 32;
        for (int tile = 0; tile < a.w.num_tiles; tile += CHUNK) {
            copy_next();
            barrier_wait(smem_address(&works.copied[threadIdx.x / 32 * W_STAGES + w_stage]),
                         w_phase);
            const uint32_t chunk = ring + w_stage * W_STAGE_BYTES;
            uint32_t codes = chunk + lane * 16;
            uint32_t scales = chunk + CHUNK * KV8_TILE_CODE_BYTES + lane / 4 * 4;
#pragma unroll 1
            for (int left = min(CHUNK, a.w.num_tiles - tile); left > 0; left--) {
                barrier_wait(smem_address(&works.full[x_stage]), x_phase);
                const uint32_t x = matrix_descriptor(x_stages + x_stage * X_STAGE_BYTES, 16);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    widen_tile(wide[h], codes + h * W_STRIP_BYTES, scales + h * W_STRIP_BYTES);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        wgmma_rows<N>(sums.d[h], wide[h][i], row_descriptor_at<128>(x, i * 32));
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (h == 0 && before >= 0) release(before);
                }
                before = x_stage;
                if (++x_stage == X_STAGES) {
                    x_stage = 0;
                    x_phase ^= 1;
                }
                codes += KV8_TILE_CODE_BYTES;
                scales += KV8_TILE_SCALE_BYTES;
            }
            if (++w_stage == W_STAGES) {
                w_stage = 0;
                w_phase ^= 1;
            }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums.d[i % 2][i / 2]));
        release(before);
        store_sums<N, DOWN>(a, work, sums);
    }
};

template <bool DOWN>
__device__ __forceinline__ void consume(const kv8_experts_matmul_args &a, WorkList &works,
                                        uint32_t x_stages, uint32_t rings) {
    const int num_works = works_of_all(a, works.list);
    const int warp = threadIdx.x / 32;
    Consumer consumer = {a,         works, x_stages, rings + warp * (W_STAGES * W_STAGE_BYTES),
                         num_works, 0,     0,        0,
                         0,         0,     {}};
    consumer.ahead.work = blockIdx.x;
    consumer.ahead.enter(a, works.list, num_works);
    for (int i = 0; i < W_STAGES - 1; i++) consumer.copy_next();
    if (DOWN) take_turn();
    for (int w = blockIdx.x; w < num_works; w += gridDim.x) {
        const Work work = work_of(a, works.list, w);
        switch ((work.item.count + ROUND_ROWS - 1) / ROUND_ROWS) {
            case 6: consumer.template multiply<96, DOWN>(work); break;
            case 5: consumer.template multiply<80, DOWN>(work); break;
            case 4:
            case 3: consumer.template multiply<64, DOWN>(work); break;
            default: consumer.template multiply<32, DOWN>(work); break;
        }
    }
}

template <bool DOWN>
__device__ __forceinline__ void multiply_works(const kv8_experts_matmul_args &a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ WorkList works;
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; i++) {
            barrier_init(smem_address(&works.full[i]), 4);
            barrier_init(smem_address(&works.empty[i]), CONSUMERS / 32);
        }
        for (int i = 0; i < CONSUMERS / 32 * W_STAGES; i++)
            barrier_init(smem_address(&works.copied[i]), 1);
        barrier_init_fence();
    }
    if (!DOWN) take_turn();                 // down knows its weights earlier than its rows
    count_items<WORK_ROWS>(a, works.list);  // its barriers cover those above
    const uint32_t x_stages = (smem_address(shared) + 1023) & ~1023u;
    const uint32_t rings = x_stages + X_STAGES * X_STAGE_BYTES;
    if (threadIdx.x < CONSUMERS) {
        registers_take<232>();
        consume<DOWN>(a, works, x_stages, rings);
    } else {
        registers_give<40>();
        produce<DOWN>(a, works, x_stages);
    }
}

}  // namespace kv8
