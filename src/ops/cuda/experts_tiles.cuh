// experts_tiles.cuh - strips of experts times many rows each, on wgmma.
//
// A work is 16 strips of an expert (256 weight rows) times up to 96 of the rows that chose it. The
// block takes every gridDim-th work: the blocks at work together share rows and weights in L2. Two
// warpgroups of consumers have eight strips each, as two products of 64 weight rows. A warpgroup of
// producers gathers the rows into tiles of 64 inputs under the 128-byte swizzle, the B operand, and
// one of its threads has the copy engine bring the codes of all 16 strips, chunks of tiles ahead
// and into the next work. A consumer warp widens the codes of its two strips in registers, scaled:
// the A operand, never stored. It does so 16 inputs at a time between products: while one operand
// is widened, those before it are multiplied.
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

constexpr int WORK_STRIPS = KV8_EXPERTS_WORK_STRIPS;
constexpr int MAX_X_STAGES = KV8_EXPERTS_X_BYTES / (48 * KV8_TILE_COLS * 2);
constexpr int X_AHEAD = 3;  // stages that a producer has in flight
constexpr int W_STAGES = KV8_EXPERTS_W_STAGES, W_STAGE_BYTES = KV8_EXPERTS_W_STAGE_BYTES;
constexpr int W_CODE_BYTES = KV8_EXPERTS_W_CODE_BYTES, W_SCALE_BYTES = KV8_EXPERTS_W_SCALE_BYTES;
constexpr int CHUNK = KV8_EXPERTS_CHUNK_TILES;
constexpr int ROUND_ROWS = 16, CONSUMERS = 256;

// Works of up to ROWS rows, 48 or 96: more rows share a widened weight, fewer leave less undone
// where experts have few.
template <bool DOWN_, int ROWS_>
struct WorkShape {
    static constexpr bool DOWN = DOWN_;
    static constexpr int ROWS = ROWS_, X_STAGE_BYTES = ROWS * KV8_TILE_COLS * 2;
    static constexpr int X_STAGES = KV8_EXPERTS_X_BYTES / X_STAGE_BYTES;
};

struct Work {
    Item item;
    int strips;  // the first of 16
};

struct WorkList {
    ItemList list;
    uint64_t full[MAX_X_STAGES], empty[MAX_X_STAGES];
    uint64_t copied[W_STAGES], read[W_STAGES];  // of chunks of weights
};

__device__ __forceinline__ int works_an_item(const kv8_experts_matmul_args &a) {
    return (a.w.num_strips + WORK_STRIPS - 1) / WORK_STRIPS;
}
__device__ __forceinline__ int works_of_all(const kv8_experts_matmul_args &a,
                                            const ItemList &list) {
    return list.first_item[a.num_experts] * works_an_item(a);
}
template <int ROWS>
__device__ __forceinline__ Work work_of(const kv8_experts_matmul_args &a, const ItemList &list,
                                        int work) {
    const int each = works_an_item(a);
    return {item_of<ROWS, ROUND_ROWS>(a, list, work / each), work % each * WORK_STRIPS};
}

// --- the producers: rows into swizzled tiles, and weights ---

// Chunks of the works' 16 strips, one after another and work after work. Of one thread.
template <int ROWS>
struct WeightStream {
    const kv8_experts_tiles_args &a;
    WorkList &works;
    uint32_t ring;
    int num_works, work, tile, stage, phase;
    int row;  // of the maps: the work's first strip

    __device__ __forceinline__ void enter() {
        tile = 0;
        if (work >= num_works) return;
        const Work next = work_of<ROWS>(a.product, works.list, work);
        row = next.item.expert * a.product.w.num_strips + next.strips;
    }
    __device__ __forceinline__ void copy_next() {
        if (work >= num_works) return;
        barrier_wait(smem_address(&works.read[stage]), phase ^ 1);
        const uint32_t copied = smem_address(&works.copied[stage]);
        const uint32_t to = ring + stage * W_STAGE_BYTES;
        expect_bytes(copied, W_STAGE_BYTES);
        copy_tile_once(to, a.codes_map, tile * (KV8_TILE_CODE_BYTES / 8), row, copied,
                       leave_first_policy());
        copy_tile_once(to + WORK_STRIPS * W_CODE_BYTES, a.scales_map,
                       tile * (KV8_TILE_SCALE_BYTES / 8), row, copied, leave_first_policy());
        if (++stage == W_STAGES) {
            stage = 0;
            phase ^= 1;
        }
        tile += CHUNK;
        if (tile >= a.product.w.num_tiles) {
            work += gridDim.x;
            enter();
        }
    }
};

template <class SHAPE>
__device__ __forceinline__ void produce(const kv8_experts_tiles_args &args, WorkList &works,
                                        uint32_t stages, uint32_t ring) {
    const kv8_experts_matmul_args &a = args.product;
    const int num_works = works_of_all(a, works.list);
    const int thread = threadIdx.x % 128, piece = thread % 8;
    constexpr int ROWS = SHAPE::ROWS / 16,
                  X_STAGES = SHAPE::X_STAGES;  // of a thread: thread / 8, then every 16th
    const uint32_t to = thread / 8 * 128 + ((piece ^ (thread / 8 % 8)) << 4);
    WeightStream<SHAPE::ROWS> weights = {args, works, ring, num_works, static_cast<int>(blockIdx.x),
                                         0,    0,     0,    0};
    if (thread == 0) {
        weights.enter();
        weights.copy_next();
    }
    if (SHAPE::DOWN) take_turn();
    int issued = 0;
    const auto publish = [&](int stage) {
        fence_stores_before_wgmma();
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(smem_address(&works.full[stage % X_STAGES]));
    };
    for (int w = blockIdx.x; w < num_works; w += gridDim.x) {
        const Item item = work_of<SHAPE::ROWS>(a, works.list, w).item;
        uint32_t from[ROWS];  // in 16 bytes
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = thread / 8 + 16 * i, place = item.first + min(row, item.count - 1);
            const int x_row = SHAPE::DOWN ? place : a.routing.sorted[place] / a.top_k;
            from[i] = static_cast<uint32_t>(x_row) * (a.w.cols / 8) + piece;
        }
        for (int tile = 0; tile < a.w.num_tiles; tile++) {
            const int stage = issued % X_STAGES;
            barrier_wait(smem_address(&works.empty[stage]), (issued / X_STAGES & 1) ^ 1);
            const bool inside = tile * KV8_TILE_COLS + piece * 8 < a.w.cols;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (16 * i < item.count)
                    copy16_or_zero(stages + stage * SHAPE::X_STAGE_BYTES + i * (16 * 128) + to,
                                   a.x + static_cast<int64_t>(inside ? from[i] : 0) * 8, inside);
                from[i] += KV8_TILE_COLS / 8;
            }
            copy_commit();
            if (issued >= X_AHEAD) {
                copy_wait<X_AHEAD>();
                publish(issued - X_AHEAD);
            }
            // Behind the rows: of strips of one tile, the chunk that it waits for has these.
            if (thread == 0 && tile % CHUNK == 0) weights.copy_next();
            issued++;
        }
    }
    copy_wait<0>();
    for (int stage = max(0, issued - X_AHEAD); stage < issued; stage++) publish(stage);
}

// --- the consumers ---

// One arrival, without a branch.
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

// The first of the warp's two strips within a work.
__device__ __forceinline__ int warp_strip() {
    return threadIdx.x / 32 * 2;
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

// Sums of two strips by up to 96 rows.
struct TileSums {
    float d[2][48];
};

// Factors and biases of the warp's two strips, for rows g and g + 8.
struct StripEnds {
    float factor[2][2], bias[2][2];

    __device__ __forceinline__ void load(const kv8_experts_matmul_args &a, const Work &work,
                                         int first) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
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

// A strip's gated outputs of eight rows (places from `place` on, of which `count` count): lane (g,
// c) has output g of rows 2c and 2c + 1, and stores outputs 2c and 2c + 1 of row g.
__device__ __forceinline__ void store_gated(const kv8_experts_matmul_args &a, int strip, int place,
                                            int count, const float *d, const float *factor,
                                            const float *bias) {
    const int lane = threadIdx.x % 32;
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        y[i] =
            gate_soon(d[i] * factor[0] + bias[0], d[2 + i] * factor[1] + bias[1], a.alpha, a.limit);
    const __half2 both = __floats2half2_rn(y[0], y[1]);
    const uint32_t outputs = transpose_matrix(*reinterpret_cast<const uint32_t *>(&both));
    if (lane / 4 < count)
        *reinterpret_cast<uint32_t *>(static_cast<__half *>(a.y) +
                                      static_cast<int64_t>(place + lane / 4) *
                                          (a.w.num_strips * 8) +
                                      strip * 8 + lane % 4 * 2) = outputs;
}

// What the end of a work needs from global memory, asked for at its beginning: factors and biases,
// and of down where the rows go, lane + 32 * i of them in places[i].
template <class SHAPE>
struct WorkEnds {
    static constexpr int PLACES = SHAPE::DOWN ? (SHAPE::ROWS + 31) / 32 : 1;
    StripEnds strips;
    int places[PLACES];

    __device__ __forceinline__ void load(const kv8_experts_matmul_args &a, const Work &work) {
        strips.load(a, work, work.strips + warp_strip());
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
                                           const TileSums &sums, const WorkEnds<SHAPE> &ends) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int first = work.strips + warp_strip();
    const StripEnds &strips = ends.strips;
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
                for (int h = 0; h < 2; h++) {
                    if (!counts || first + h >= a.w.num_strips) continue;
                    const float *const d = &sums.d[h][4 * j + i];
                    to[h * 16] = d[0] * strips.factor[h][0] + strips.bias[h][0];
                    to[h * 16 + 8] = d[2] * strips.factor[h][1] + strips.bias[h][1];
                }
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (first + h < a.w.num_strips)
                    store_gated(a, first + h, work.item.first + 8 * j, work.item.count - 8 * j,
                                &sums.d[h][4 * j], strips.factor[h], strips.bias[h]);
        }
    }
}

// Products that a warpgroup has in flight: before the next, its operand is widened into the
// registers that the oldest has read.
constexpr int IN_FLIGHT = KV8_EXPERTS_IN_FLIGHT;
static_assert(8 % IN_FLIGHT == 0 && CHUNK == 3, "as multiply_step() and multiply() have them");

// What a consumer warp carries from work to work.
template <class SHAPE>
struct Consumer {
    const kv8_experts_matmul_args &a;
    WorkList &works;
    uint32_t x_stages, ring;
    int x_stage, x_phase;          // of tiles of rows
    int w_stage, w_phase;          // of the ring
    uint32_t codes_at, scales_at;  // of the chunk in w_stage, this lane's

    // The next chunk has come.
    __device__ __forceinline__ void enter_chunk() {
        barrier_wait(smem_address(&works.copied[w_stage]), w_phase);
        const uint32_t chunk = ring + w_stage * W_STAGE_BYTES;
        const int lane = threadIdx.x % 32;
        codes_at = chunk + warp_strip() * W_CODE_BYTES + lane * 16;
        scales_at =
            chunk + WORK_STRIPS * W_CODE_BYTES + warp_strip() * W_SCALE_BYTES + lane / 4 * 4;
    }
    // Nobody reads it any more.
    __device__ __forceinline__ void leave_chunk() {
        __syncwarp();
        barrier_arrive_if(smem_address(&works.read[w_stage]), threadIdx.x % 32 == 0);
        w_stage++;
        w_phase ^= w_stage == W_STAGES;
        w_stage = w_stage == W_STAGES ? 0 : w_stage;
    }
    // Tile TILE of the chunk, of both strips, into registers.
    template <int TILE>
    __device__ __forceinline__ void load_tile(TileCodes (&codes)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            codes[h].load(codes_at + h * W_CODE_BYTES + TILE * KV8_TILE_CODE_BYTES,
                          scales_at + h * W_SCALE_BYTES + TILE * KV8_TILE_SCALE_BYTES);
    }

    // Of a stage, -1 for none: without a branch, around which the compiler would wait for all
    // products.
    __device__ __forceinline__ void release(int of_stage) {
        barrier_arrive_if(smem_address(&works.empty[max(of_stage, 0)]),
                          of_stage >= 0 && threadIdx.x % 32 == 0);
    }

    // Product STEP of a tile: 16 inputs of one strip.
    template <int N, int STEP>
    __device__ __forceinline__ void multiply_step(TileSums &sums, uint32_t (&wide)[IN_FLIGHT][4],
                                                  TileCodes (&codes)[2], uint32_t x, int before) {
        constexpr int BUFFER = STEP % IN_FLIGHT;
        wgmma_wait<IN_FLIGHT - 1>();
        if (STEP == IN_FLIGHT - 1) release(before);
        codes[STEP % 2].template widen<STEP / 2>(wide[BUFFER]);
        if (STEP == 0) barrier_wait(smem_address(&works.full[x_stage]), x_phase);
        wgmma_fence();
        wgmma_rows<N>(sums.d[STEP % 2], wide[BUFFER], row_descriptor_at<128>(x, STEP / 2 * 32));
        wgmma_commit();
    }

    // A tile, both strips.
    template <int N>
    __device__ __forceinline__ void multiply_tile(TileSums &sums, uint32_t (&wide)[IN_FLIGHT][4],
                                                  TileCodes (&codes)[2], int &before) {
        const uint32_t x = matrix_descriptor(x_stages + x_stage * SHAPE::X_STAGE_BYTES, 16);
        multiply_step<N, 0>(sums, wide, codes, x, before);
        multiply_step<N, 1>(sums, wide, codes, x, before);
        multiply_step<N, 2>(sums, wide, codes, x, before);
        multiply_step<N, 3>(sums, wide, codes, x, before);
        multiply_step<N, 4>(sums, wide, codes, x, before);
        multiply_step<N, 5>(sums, wide, codes, x, before);
        multiply_step<N, 6>(sums, wide, codes, x, before);
        multiply_step<N, 7>(sums, wide, codes, x, before);
        before = x_stage;
        if (++x_stage == SHAPE::X_STAGES) {
            x_stage = 0;
            x_phase ^= 1;
        }
    }

    // One work of which this warpgroup has no strip: the others' rows and weights go by.
    __device__ __forceinline__ void pass() {
        for (int tile = 0; tile < a.w.num_tiles; tile++) {
            if (tile % CHUNK == 0) barrier_wait(smem_address(&works.copied[w_stage]), w_phase);
            barrier_wait(smem_address(&works.full[x_stage]), x_phase);
            release(x_stage);
            if (++x_stage == SHAPE::X_STAGES) {
                x_stage = 0;
                x_phase ^= 1;
            }
            if (tile % CHUNK == CHUNK - 1 || tile == a.w.num_tiles - 1) leave_chunk();
        }
    }

    // One work, of up to N rows: a chunk of three tiles at a time.
    template <int N>
    __device__ __forceinline__ void multiply(const Work &work) {
        TileSums sums = {};
        uint32_t wide[IN_FLIGHT][4];
        TileCodes codes[2];
        WorkEnds<SHAPE> ends;
        ends.load(a, work);
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
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums.d[i % 2][i / 2]));
        release(before);
        store_sums<N>(a, work, sums, ends);
    }
};

template <class SHAPE>
__device__ __forceinline__ void consume(const kv8_experts_matmul_args &a, WorkList &works,
                                        uint32_t x_stages, uint32_t ring) {
    const int num_works = works_of_all(a, works.list);
    Consumer<SHAPE> consumer = {a, works, x_stages, ring, 0, 0, 0, 0, 0, 0};
    if (SHAPE::DOWN) take_turn();
    for (int w = blockIdx.x; w < num_works; w += gridDim.x) {
        const Work work = work_of<SHAPE::ROWS>(a, works.list, w);
        // Few sizes: the compiler gives each registers of its own.
        const int count = work.item.count;
        if (work.strips + static_cast<int>(threadIdx.x) / 128 * (WORK_STRIPS / 2) >=
            a.w.num_strips) {
            consumer.pass();
            continue;
        }
        if constexpr (SHAPE::ROWS == 48) {
            if (count <= 16)
                consumer.template multiply<16>(work);
            else if (count <= 32)
                consumer.template multiply<32>(work);
            else
                consumer.template multiply<48>(work);
        } else {
            if (count <= 64)
                consumer.template multiply<64>(work);
            else if (count <= 80)
                consumer.template multiply<80>(work);
            else
                consumer.template multiply<96>(work);
        }
    }
}

template <class SHAPE>
__device__ __forceinline__ void multiply_works(const kv8_experts_tiles_args &args) {
    const kv8_experts_matmul_args &a = args.product;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ WorkList works;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::X_STAGES; i++) {
            barrier_init(smem_address(&works.full[i]), 4);
            barrier_init(smem_address(&works.empty[i]), CONSUMERS / 32);
        }
        for (int i = 0; i < W_STAGES; i++) {
            barrier_init(smem_address(&works.copied[i]), 1);
            barrier_init(smem_address(&works.read[i]), CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    if (!SHAPE::DOWN) take_turn();            // down knows its weights earlier than its rows
    count_items<SHAPE::ROWS>(a, works.list);  // its barriers cover those above
    const uint32_t x_stages = (smem_address(shared) + 1023) & ~1023u;
    const uint32_t ring = x_stages + KV8_EXPERTS_X_BYTES;
    if (threadIdx.x < CONSUMERS) {
        registers_take<232>();
        consume<SHAPE>(a, works, x_stages, ring);
    } else {
        registers_give<40>();
        produce<SHAPE>(args, works, x_stages, ring);
    }
}

}  // namespace kv8
