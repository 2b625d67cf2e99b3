// experts_tiles.cuh - strips of experts times many rows each, on wgmma.
//
// A work is 16 strips of an expert (256 weight rows) times up to 96 of the rows that chose it, or
// 12 strips times up to 192. Two blocks of a cluster take works of the same rows and neighbouring
// strips, and each has the copy engine bring half of the rows to both: what L2 gives to the
// multiprocessors would bound them otherwise. Pairs take pairs of works by turns, those of experts
// with large works first: those at work together share rows and weights in L2. Two warpgroups of
// consumers have eight strips each, as two products of 64 weight rows, or three have four. Two
// threads of one more have the copy engine bring the packed rows (experts_pack.cu), tiles of 64
// inputs under the 128-byte swizzle, the B operand; and the codes of all strips, chunks of tiles
// ahead and into the next work. A consumer warp widens the codes of its strips in registers,
// scaled: the A operand, never stored. It does so 16 inputs at a time between products: while one
// operand is widened, those before it are multiplied, or those of other warpgroups.
//
// Scaled weights are f16: exact for scales down to 2^-24 of the row's largest; what is smaller
// rounds to a multiple of 2^-24 of the largest scale, as f32 sums would.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_gate.cuh"
#include "experts_items.cuh"
#include "mxfp4_strip.cuh"
#include "ptx_pairs_sm90.cuh"
#include "take_turn.cuh"
#include "wgmma_rows.cuh"

namespace kv8 {

constexpr int ROW_BYTES = KV8_TILE_COLS * 2;  // of a row in a tile
constexpr int MAX_X_STAGES = KV8_EXPERTS_X_BYTES(48) / (48 * ROW_BYTES);
constexpr int W_STAGES = KV8_EXPERTS_W_STAGES;
constexpr int W_CODE_BYTES = KV8_EXPERTS_W_CODE_BYTES, W_SCALE_BYTES = KV8_EXPERTS_W_SCALE_BYTES;
constexpr int CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int ROUND_ROWS = 16;  // of packed rows
constexpr int BLOCKS = KV8_EXPERTS_TILES_BLOCKS;
static_assert(BLOCKS == 2, "as copy_rows() has it");

// Works of up to ROWS rows: more rows share a widened weight, fewer leave less undone where experts
// have few. STRIPS of a consumer warp: up to 96 rows two, which share what they read of rows.
template <bool DOWN_, int ROWS_>
struct WorkShape {
    static constexpr bool DOWN = DOWN_;
    static constexpr int ROWS = ROWS_, X_STAGE_BYTES = ROWS * ROW_BYTES;
    static constexpr int X_STAGES = KV8_EXPERTS_X_BYTES(ROWS) / X_STAGE_BYTES;
    static constexpr int CONSUMERS = 32 * KV8_EXPERTS_TILES_WARPS(ROWS);
    static constexpr int WORK_STRIPS = KV8_EXPERTS_WORK_STRIPS(ROWS);
    static constexpr int STRIPS = WORK_STRIPS * 32 / CONSUMERS;
    // Few sizes: the compiler gives the operands of each registers of its own.
    static constexpr int STEP = KV8_EXPERTS_WORK_STEP(ROWS);
    static constexpr int LEAST = ROWS == 48 ? 16 : ROWS == 96 ? 64 : 32;
    static constexpr int W_STAGE_BYTES = KV8_EXPERTS_W_STAGE_BYTES(ROWS);
    // Products of n columns that a warpgroup has in flight: before the next, its operand is widened
    // into the registers that the oldest has read. With one, products of the other two warpgroups
    // fill the gap.
    __device__ static constexpr int in_flight(int n) { return STRIPS == 2 ? 4 : n >= 160 ? 2 : 1; }
    static_assert(CHUNK == 3, "as multiply() has it");
    static_assert(X_STAGES <= MAX_X_STAGES);
};

struct Work {
    Item item;
    int strips, end;  // the first, and that behind the last

    // The last pair of an item's works may have strips for one block alone.
    __device__ __forceinline__ bool is_empty() const { return strips >= end; }
    // Of an item whose rows are packed, the last 16 filled up.
    __device__ __forceinline__ int packed_rows() const {
        return (item.count + ROUND_ROWS - 1) / ROUND_ROWS * ROUND_ROWS;
    }
};

struct WorkList {
    ItemList list;                    // of the experts by rank
    int ranked[KV8_EXPERTS_MAX + 1];  // experts, those with the largest items first
    uint64_t full[MAX_X_STAGES], empty[MAX_X_STAGES];
    uint64_t copied[W_STAGES], read[W_STAGES];  // of chunks of weights
};

// Works are counted by the pair.
template <class SHAPE>
__device__ __forceinline__ int works_an_item(const kv8_experts_matmul_args &a) {
    constexpr int EACH = BLOCKS * SHAPE::WORK_STRIPS;
    return (a.w.num_strips + EACH - 1) / EACH;
}
// By the whole block. Works that are large come first, so that all pairs end at about one time.
template <class SHAPE>
__device__ __forceinline__ void count_works(const kv8_experts_matmul_args &a, WorkList &works) {
    load_first_rows(a, works.list);
    int *const sizes = works.list.first_item;  // of the first item of each expert
    for (int e = threadIdx.x; e < a.num_experts; e += blockDim.x) {
        const int items = items_of(works.list, e, SHAPE::ROWS);
        sizes[e] = items == 0 ? 0 : cut_item<SHAPE::STEP>(works.list, e, 0, items).count;
    }
    __syncthreads();
    for (int e = threadIdx.x / 32; e < a.num_experts; e += blockDim.x / 32) {
        int larger = 0;
        for (int other = threadIdx.x % 32; other < a.num_experts; other += 32)
            larger += sizes[other] > sizes[e] || (sizes[other] == sizes[e] && other < e);
        works.ranked[__reduce_add_sync(~0u, larger)] = e;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        sum_before(works.list.first_item, a.num_experts,
                   [&](int i) { return items_of(works.list, works.ranked[i], SHAPE::ROWS); });
    __syncthreads();
}

// This block's of each of its pair's, to use(work): pairs take them in serpentine order.
template <class SHAPE, class USE>
__device__ __forceinline__ void for_works(const kv8_experts_matmul_args &a, const WorkList &works,
                                          USE &&use) {
    const ItemList &list = works.list;
    const int each = works_an_item<SHAPE>(a), num_works = list.first_item[a.num_experts] * each;
    const int pairs = gridDim.x / BLOCKS;
    int pair = blockIdx.x / BLOCKS;
    for (int first = 0; first < num_works; first += pairs, pair = pairs - 1 - pair) {
        const int w = first + pair;
        if (w >= num_works) continue;
        const int rank = find_item(list, a.num_experts, w / each), expert = works.ranked[rank];
        const Item item = cut_item<SHAPE::STEP>(list, expert, w / each - list.first_item[rank],
                                                list.first_item[rank + 1] - list.first_item[rank]);
        // What is left for an item's last pair is cut among both in strips of a warpgroup.
        constexpr int PAIR = BLOCKS * SHAPE::WORK_STRIPS, GROUP = 4 * SHAPE::STRIPS;
        const int strips = w % each * PAIR, left = min(PAIR, a.w.num_strips - strips);
        const int half = (left + BLOCKS * GROUP - 1) / (BLOCKS * GROUP) * GROUP;
        const int rank_strips = static_cast<int>(blockIdx.x) % BLOCKS * half;
        use(Work{item, strips + rank_strips, strips + min(left, rank_strips + half)});
    }
}

// --- the producers: a thread for the weights, one for the rows ---

// Chunks of the works' strips, one after another and work after work.
template <class SHAPE>
__device__ __forceinline__ void copy_weights(const kv8_experts_tiles_args &args, WorkList &works,
                                             uint32_t ring) {
    const kv8_experts_matmul_args &a = args.product;
    int stage = 0, phase = 0;
    for_works<SHAPE>(a, works, [&](const Work &work) {
        if (work.is_empty()) return;
        const int row = work.item.expert * a.w.num_strips + work.strips;  // of the maps
        for (int tile = 0; tile < a.w.num_tiles; tile += CHUNK) {
            const uint32_t copied = smem_address(&works.copied[stage]);
            const uint32_t to = ring + stage * SHAPE::W_STAGE_BYTES;
            barrier_wait(smem_address(&works.read[stage]), phase ^ 1);
            expect_bytes(copied, SHAPE::W_STAGE_BYTES);
            copy_tile_once(to, args.codes_map, tile * (KV8_TILE_CODE_BYTES / 8), row, copied,
                           leave_first_policy());
            copy_tile_once(to + SHAPE::WORK_STRIPS * W_CODE_BYTES, args.scales_map,
                           tile * (KV8_TILE_SCALE_BYTES / 8), row, copied, leave_first_policy());
            if (++stage == W_STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    });
}

// Tiles of the works' rows. Each block of the pair copies half of a tile to both, once both have
// read what was there.
template <class SHAPE>
__device__ __forceinline__ void copy_rows(const kv8_experts_matmul_args &a, WorkList &works,
                                          uint32_t stages) {
    constexpr int STAGES = SHAPE::X_STAGES;
    const int rank = cluster_rank();
    uint32_t issued = 0;
    const auto await_empty = [&] {
        if (issued >= STAGES)
            wait_for_bytes(smem_address(&works.empty[issued % STAGES]), (issued / STAGES - 1) & 1);
    };
    for_works<SHAPE>(a, works, [&](const Work &work) {
        const uint32_t tile_bytes = work.packed_rows() * ROW_BYTES, half = tile_bytes / BLOCKS;
        const uint8_t *from = reinterpret_cast<const uint8_t *>(a.x) +
                              static_cast<int64_t>(work.item.packed) * a.w.num_tiles * ROW_BYTES +
                              rank * half;
        for (int tile = 0; tile < a.w.num_tiles; tile++, issued++, from += tile_bytes) {
            const uint32_t stage = issued % STAGES, full = smem_address(&works.full[stage]);
            await_empty();
            expect_bytes(full, tile_bytes);
            copy_bulk_to(stages + stage * SHAPE::X_STAGE_BYTES + rank * half, from, half, full,
                         (1 << BLOCKS) - 1);
        }
    });
    // Nothing of the other block is on its way when this one's shared memory goes.
    for (int i = 0; i < STAGES; i++, issued++) await_empty();
}

// --- the consumers ---

// One arrival, without a branch, around which the compiler would wait for all products.
__device__ __forceinline__ void barrier_arrive_if(uint32_t barrier, bool arrives) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(barrier),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// barrier_arrive_at() likewise.
__device__ __forceinline__ void barrier_arrive_at_if(uint32_t barrier, uint32_t rank,
                                                     bool arrives) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        ".reg .b32 there;\n"
        "setp.ne.u32 arrives, %2, 0;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "@arrives mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier),
        "r"(rank), "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// The warp's first strip within a work.
template <class SHAPE>
__device__ __forceinline__ int warp_strip() {
    return threadIdx.x / 32 * SHAPE::STRIPS;
}

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

// A lane's part of a tile of a strip.
struct TileCodes {
    Words<16> codes;
    uint32_t exponents[4];

    __device__ __forceinline__ void load(uint32_t codes_at, uint32_t scales_at) {
        codes = load_shared<16>(codes_at);
        scale_exponents(load_shared<4>(scales_at).w[0], exponents);
    }
    // 16 inputs of the tile, scaled: an A operand.
    template <int OPERAND>
    __device__ __forceinline__ void widen(uint32_t (&wide)[4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {  // rows g and g + 8
            const int word = half * 2 + OPERAND / 2;
            uint32_t pairs[4];
            widen_codes(codes.w[word], pairs);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const __half2 scaled =
                    __hmul2(*reinterpret_cast<const __half2 *>(&pairs[OPERAND % 2 * 2 + p]),
                            *reinterpret_cast<const __half2 *>(&exponents[word]));
                wide[p * 2 + half] = *reinterpret_cast<const uint32_t *>(&scaled);
            }
        }
    }
};

// Sums of a warp's strips by N rows.
template <int STRIPS, int N>
struct TileSums {
    float d[STRIPS][N / 2];
};

// Factors and biases of the warp's strips, for rows g and g + 8.
template <int STRIPS>
struct StripEnds {
    float factor[STRIPS][2], bias[STRIPS][2];

    __device__ __forceinline__ void load(const kv8_experts_matmul_args &a, const Work &work,
                                         int first) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < STRIPS; h++) {
            const int strip = min(first + h, a.w.num_strips - 1);
            const uint8_t *const end = a.w.data + work.item.expert * a.w.expert_bytes +
                                       static_cast<int64_t>(strip + 1) * a.w.strip_bytes -
                                       KV8_STRIP_END_BYTES;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                factor[h][r] =
                    __ldg(reinterpret_cast<const float *>(end) + g + 8 * r) * TILE_FACTOR;
                bias[h][r] = __uint_as_float(
                    __ldg(reinterpret_cast<const uint16_t *>(end + 64) + g + 8 * r) << 16);
            }
        }
    }
};

// The 8 x 8 matrix of 16-bit values whose rows g this warp's lanes hold, by its columns.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// gate() by approximations of one instruction each, which keep within f32's rounding of it: 2^x and
// 1 / x flush what is subnormal to 0. NaN stays.
__device__ __forceinline__ float gate_soon(float gate, float up, float alpha, float limit) {
    float g, l, power, share;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(g) : "f"(gate), "f"(limit));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(l) : "f"(up), "f"(limit));
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(l) : "f"(-limit));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(g * (-1.44269504f * alpha)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return g * share * (l + 1.0f);
}

// A strip's gated outputs of eight rows (of the work, from `first` on), packed: a strip is a chunk
// of a row's tile. Lane (g, c) has output g of rows 2c and 2c + 1, and stores outputs 2c and 2c + 1
// of row g.
__device__ __forceinline__ void store_gated(const kv8_experts_matmul_args &a, const Work &work,
                                            int strip, int first, const float *d,
                                            const float *factor, const float *bias) {
    const int lane = threadIdx.x % 32, row = first + lane / 4;
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        y[i] =
            gate_soon(d[i] * factor[0] + bias[0], d[2 + i] * factor[1] + bias[1], a.alpha, a.limit);
    const __half2 both = __floats2half2_rn(y[0], y[1]);
    const uint32_t outputs = transpose_matrix(*reinterpret_cast<const uint32_t *>(&both));
    const int tiles = (a.w.num_strips + 7) / 8, rows = work.packed_rows();
    const int64_t tile = static_cast<int64_t>(work.item.packed) * tiles + strip / 8 * rows;
    if (row < work.item.count)
        *reinterpret_cast<uint32_t *>(static_cast<uint8_t *>(a.y) + (tile + row) * ROW_BYTES +
                                      ((strip ^ row) % 8 * 16 + lane % 4 * 4)) = outputs;
}

// What the end of a work needs from global memory, asked for at its beginning: factors and biases,
// and of down where the rows go, lane + 32 * i of them in places[i].
template <class SHAPE>
struct WorkEnds {
    static constexpr int PLACES = SHAPE::DOWN ? (SHAPE::ROWS + 31) / 32 : 1;
    StripEnds<SHAPE::STRIPS> strips;
    int places[PLACES];

    __device__ __forceinline__ void load(const kv8_experts_matmul_args &a, const Work &work) {
        strips.load(a, work, work.strips + warp_strip<SHAPE>());
        if constexpr (SHAPE::DOWN) {
            const int *const from = &a.routing.sorted[work.item.first];
#pragma unroll
            for (int i = 0; i < PLACES; i++)
                places[i] = __ldg(from + min(int(threadIdx.x % 32) + 32 * i, work.item.count - 1));
        }
    }
};

template <int N, class SHAPE>
__device__ __forceinline__ void store_sums(const kv8_experts_matmul_args &a, const Work &work,
                                           const TileSums<SHAPE::STRIPS, N> &sums,
                                           const WorkEnds<SHAPE> &ends) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int first = work.strips + warp_strip<SHAPE>();
    const auto &strips = ends.strips;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {  // columns 8j to 8j + 7
        if constexpr (SHAPE::DOWN) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int place = __shfl_sync(~0u, ends.places[j / 4], j % 4 * 8 + 2 * c + i);
                float *const to = static_cast<float *>(a.y) +
                                  static_cast<int64_t>(place) * (a.w.num_strips * 16) + first * 16 +
                                  g;
                const bool counts = 8 * j + 2 * c + i < work.item.count;
#pragma unroll
                for (int h = 0; h < SHAPE::STRIPS; h++) {
                    if (!counts || first + h >= work.end) continue;
                    const float *const d = &sums.d[h][4 * j + i];
                    to[h * 16] = d[0] * strips.factor[h][0] + strips.bias[h][0];
                    to[h * 16 + 8] = d[2] * strips.factor[h][1] + strips.bias[h][1];
                }
            }
        } else {
#pragma unroll
            for (int h = 0; h < SHAPE::STRIPS; h++)
                if (first + h < work.end)
                    store_gated(a, work, first + h, 8 * j, &sums.d[h][4 * j], strips.factor[h],
                                strips.bias[h]);
        }
    }
}

// What a consumer warp carries from work to work.
template <class SHAPE>
struct Consumer {
    static constexpr int STRIPS = SHAPE::STRIPS;
    const kv8_experts_matmul_args &a;
    WorkList &works;
    uint32_t x_stages, ring;
    int x_stage, x_phase;          // of tiles of rows
    int w_stage, w_phase;          // of the ring
    uint32_t codes_at, scales_at;  // of the chunk in w_stage, this lane's

    // The next chunk has come.
    __device__ __forceinline__ void enter_chunk() {
        barrier_wait(smem_address(&works.copied[w_stage]), w_phase);
        const uint32_t chunk = ring + w_stage * SHAPE::W_STAGE_BYTES;
        const int lane = threadIdx.x % 32;
        codes_at = chunk + warp_strip<SHAPE>() * W_CODE_BYTES + lane * 16;
        scales_at = chunk + SHAPE::WORK_STRIPS * W_CODE_BYTES +
                    warp_strip<SHAPE>() * W_SCALE_BYTES + lane / 4 * 4;
    }
    // Nobody reads it any more.
    __device__ __forceinline__ void leave_chunk() {
        __syncwarp();
        barrier_arrive_if(smem_address(&works.read[w_stage]), threadIdx.x % 32 == 0);
        w_stage++;
        w_phase ^= w_stage == W_STAGES;
        w_stage = w_stage == W_STAGES ? 0 : w_stage;
    }
    // Tile TILE of the chunk, of all strips, into registers.
    template <int TILE>
    __device__ __forceinline__ void load_tile(TileCodes (&codes)[STRIPS]) {
#pragma unroll
        for (int h = 0; h < STRIPS; h++)
            codes[h].load(codes_at + h * W_CODE_BYTES + TILE * KV8_TILE_CODE_BYTES,
                          scales_at + h * W_SCALE_BYTES + TILE * KV8_TILE_SCALE_BYTES);
    }

    // Of a stage, -1 for none, in both blocks.
    __device__ __forceinline__ void release(int of_stage) {
        const int lane = threadIdx.x % 32;
        barrier_arrive_at_if(smem_address(&works.empty[max(of_stage, 0)]), lane % BLOCKS,
                             of_stage >= 0 && lane < BLOCKS);
    }

    // Product STEP of a tile: 16 inputs of one strip.
    template <int N, int STEP, int IN_FLIGHT>
    __device__ __forceinline__ void multiply_step(TileSums<STRIPS, N> &sums,
                                                  uint32_t (&wide)[IN_FLIGHT][4],
                                                  TileCodes (&codes)[STRIPS], uint32_t x,
                                                  int before) {
        constexpr int BUFFER = STEP % IN_FLIGHT, STRIP = STEP % STRIPS, OPERAND = STEP / STRIPS;
        wgmma_wait<IN_FLIGHT - 1>();
        if (STEP == IN_FLIGHT - 1) release(before);
        codes[STRIP].template widen<OPERAND>(wide[BUFFER]);
        if (STEP == 0) barrier_wait(smem_address(&works.full[x_stage]), x_phase);
        wgmma_fence();
        wgmma_rows<N>(sums.d[STRIP], wide[BUFFER], row_descriptor_at<128>(x, OPERAND * 32));
        wgmma_commit();
    }

    // A tile, all strips.
    template <int N, int IN_FLIGHT>
    __device__ __forceinline__ void multiply_tile(TileSums<STRIPS, N> &sums,
                                                  uint32_t (&wide)[IN_FLIGHT][4],
                                                  TileCodes (&codes)[STRIPS], int &before) {
        const uint32_t x = matrix_descriptor(x_stages + x_stage * SHAPE::X_STAGE_BYTES, 16);
        multiply_step<N, 0>(sums, wide, codes, x, before);
        multiply_step<N, 1>(sums, wide, codes, x, before);
        multiply_step<N, 2>(sums, wide, codes, x, before);
        multiply_step<N, 3>(sums, wide, codes, x, before);
        if constexpr (STRIPS == 2) {
            multiply_step<N, 4>(sums, wide, codes, x, before);
            multiply_step<N, 5>(sums, wide, codes, x, before);
            multiply_step<N, 6>(sums, wide, codes, x, before);
            multiply_step<N, 7>(sums, wide, codes, x, before);
        }
        before = x_stage;
        if (++x_stage == SHAPE::X_STAGES) {
            x_stage = 0;
            x_phase ^= 1;
        }
    }

    // One work of which this warpgroup has no strip: the others' rows and weights go by.
    __device__ __forceinline__ void pass(const Work &work) {
        const bool has_weights = !work.is_empty();
        for (int tile = 0; tile < a.w.num_tiles; tile++) {
            if (has_weights && tile % CHUNK == 0)
                barrier_wait(smem_address(&works.copied[w_stage]), w_phase);
            barrier_wait(smem_address(&works.full[x_stage]), x_phase);
            release(x_stage);
            if (++x_stage == SHAPE::X_STAGES) {
                x_stage = 0;
                x_phase ^= 1;
            }
            if (has_weights && (tile % CHUNK == CHUNK - 1 || tile == a.w.num_tiles - 1))
                leave_chunk();
        }
    }

    // One work, of up to N rows: a chunk of three tiles at a time.
    template <int N>
    __device__ __forceinline__ void multiply(const Work &work) {
        TileSums<STRIPS, N> sums = {};
        uint32_t wide[SHAPE::in_flight(N)][4];
        TileCodes codes[STRIPS];
        WorkEnds<SHAPE> ends;
        if (STRIPS == 2) ends.load(a, work);
        int before = -1;  // the stage that the products in flight read
        int left = a.w.num_tiles;
        enter_chunk();
        load_tile<0>(codes);
#pragma unroll 1
        for (;;) {
            multiply_tile<N>(sums, wide, codes, before);
            if (--left == 0) {
                leave_chunk();
                break;
            }
            load_tile<1>(codes);
            multiply_tile<N>(sums, wide, codes, before);
            if (--left == 0) {
                leave_chunk();
                break;
            }
            load_tile<2>(codes);
            leave_chunk();
            multiply_tile<N>(sums, wide, codes, before);
            if (--left == 0) break;
            enter_chunk();
            load_tile<0>(codes);
        }
        if (STRIPS == 1) ends.load(a, work);
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < STRIPS; h++) registers_pin(sums.d[h]);
        release(before);
        store_sums<N, SHAPE>(a, work, sums, ends);
    }
};

// As many columns as the rows want, N or more.
template <class SHAPE, int N>
__device__ __forceinline__ void multiply_by(Consumer<SHAPE> &consumer, const Work &work) {
    if constexpr (N >= SHAPE::ROWS)
        consumer.template multiply<SHAPE::ROWS>(work);
    else if (work.item.count <= N)
        consumer.template multiply<N>(work);
    else
        multiply_by<SHAPE, N + SHAPE::STEP>(consumer, work);
}

template <class SHAPE>
__device__ __forceinline__ void consume(const kv8_experts_matmul_args &a, WorkList &works,
                                        uint32_t x_stages, uint32_t ring) {
    constexpr int GROUP_STRIPS = 4 * SHAPE::STRIPS;  // of a warpgroup
    Consumer<SHAPE> consumer = {a, works, x_stages, ring, 0, 0, 0, 0, 0, 0};
    take_turn();
    // Inlined, since a consumer that is passed by address lies in memory.
    for_works<SHAPE>(
        a, works, [&](const Work &work) __attribute__((always_inline)) {
            if (work.strips + static_cast<int>(threadIdx.x) / 128 * GROUP_STRIPS >= work.end)
                consumer.pass(work);
            else
                multiply_by<SHAPE, SHAPE::LEAST>(consumer, work);
        });
}

template <class SHAPE>
__device__ __forceinline__ void multiply_works(const kv8_experts_tiles_args &args) {
    const kv8_experts_matmul_args &a = args.product;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ WorkList works;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::X_STAGES; i++) {
            barrier_init(smem_address(&works.full[i]), 1);
            barrier_init(smem_address(&works.empty[i]), BLOCKS * SHAPE::CONSUMERS / 32);
        }
        for (int i = 0; i < W_STAGES; i++) {
            barrier_init(smem_address(&works.copied[i]), 1);
            barrier_init(smem_address(&works.read[i]), SHAPE::CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_first();  // both blocks' barriers stand
    count_works<SHAPE>(a, works);
    cluster_wait();
    const uint32_t x_stages = (smem_address(shared) + 1023) & ~1023u;
    const uint32_t ring = x_stages + SHAPE::X_STAGES * SHAPE::X_STAGE_BYTES;
    if (threadIdx.x < SHAPE::CONSUMERS) {
        registers_take<SHAPE::CONSUMERS == 256 ? 232 : 160>();
        consume<SHAPE>(a, works, x_stages, ring);
    } else {
        registers_give<SHAPE::CONSUMERS == 256 ? 40 : 32>();
        // Which weights is known before the kernel ahead has ended, rows are not.
        if (threadIdx.x == SHAPE::CONSUMERS) copy_weights<SHAPE>(args, works, ring);
        if (threadIdx.x != SHAPE::CONSUMERS + 32) return;
        take_turn();
        copy_rows<SHAPE>(a, works, x_stages);
    }
}

}  // namespace kv8
