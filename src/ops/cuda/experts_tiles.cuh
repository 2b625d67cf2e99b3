// experts_tiles.cuh - strips of experts times many rows each, on wgmma.
//
// A work is some strips of an expert times some of the rows that chose it: 24 strips (384 weight
// rows) and up to 48 rows, 16 and 96, or 12 and 192. Two blocks of a cluster take works of the same
// rows and neighbouring strips, and each has the copy engine bring half of the rows to both: what
// L2 gives to the multiprocessors would bound them otherwise. Pairs take pairs of works by turns,
// those of experts with large works first: those at work together share rows and weights in L2.
// Each warp of two or three warpgroups of consumers has two strips, or one of the largest works.
// Two threads of one more (experts_works.cuh) have the copy engine bring the packed rows
// (experts_pack.cu), tiles of 64 inputs under the 128-byte swizzle, the B operand; and the codes,
// chunks of tiles ahead and into the next work. A warp fetches what ends strips to L2. A consumer
// warp widens the codes of its strips in registers, scaled: the A operand, never stored. It does so
// 16 or 32 inputs at a time between products: while one operand is widened, those before it are
// multiplied, or those of other warpgroups.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_gate.cuh"
#include "experts_scaled.cuh"
#include "experts_works.cuh"
#include "take_turn.cuh"
#include "wgmma_rows.cuh"

namespace kv8 {

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
            const uint8_t *const end = strip_end(a, work.item.expert, strip);
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

// A strip's gated outputs, packed: a strip is a chunk of a row's tile. Lane (g, c) has output g of
// rows 2c and 2c + 1 of every eight, and stores outputs 2c and 2c + 1 of row g. Rows that fill an
// item up are stored too: without a question for each, eight rows do not wait for those before.
template <int N>
__device__ __forceinline__ void store_gated(const kv8_experts_matmul_args &a, const Work &work,
                                            unsigned strip, const float (&d)[N / 2],
                                            const float (&factor)[2], const float (&bias)[2]) {
    const unsigned lane = threadIdx.x % 32, g = lane / 4;
    const int tiles = (a.w.num_strips + 7) / 8, rows = work.packed_rows();
    const int64_t row = static_cast<int64_t>(work.item.packed) * tiles + strip / 8 * rows + g;
    uint8_t *const to =
        static_cast<uint8_t *>(a.y) + row * ROW_BYTES + (strip ^ g) % 8 * 16 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {  // rows 8j to 8j + 7
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            y[i] = gate_soon(d[4 * j + i] * factor[0] + bias[0],
                             d[4 * j + 2 + i] * factor[1] + bias[1], a.alpha, a.limit);
        const __half2 both = __floats2half2_rn(y[0], y[1]);
        const uint32_t outputs = transpose_matrix(*reinterpret_cast<const uint32_t *>(&both));
        if (8 * j < rows) *reinterpret_cast<uint32_t *>(to + 8 * j * ROW_BYTES) = outputs;
    }
}

// What the end of a work needs from global memory, asked for at its beginning where registers are
// left for it: factors and biases, and of down where the rows go, lane + 32 * i of them in
// places[i].
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

// Down's outputs of a warp's strips, each by its place.
template <int N, class SHAPE>
__device__ __forceinline__ void store_places(const kv8_experts_matmul_args &a, const Work &work,
                                             int first, const TileSums<SHAPE::STRIPS, N> &sums,
                                             const WorkEnds<SHAPE> &ends) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const auto &strips = ends.strips;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {  // columns 8j to 8j + 7
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int place = __shfl_sync(~0u, ends.places[j / 4], j % 4 * 8 + 2 * c + i);
            float *const to = static_cast<float *>(a.y) +
                              static_cast<int64_t>(place) * (a.w.num_strips * 16) + first * 16 + g;
            const bool counts = 8 * j + 2 * c + i < work.item.count;
#pragma unroll
            for (int h = 0; h < SHAPE::STRIPS; h++) {
                if (!counts || first + h >= work.end) continue;
                const float *const d = &sums.d[h][4 * j + i];
                to[h * 16] = d[0] * strips.factor[h][0] + strips.bias[h][0];
                to[h * 16 + 8] = d[2] * strips.factor[h][1] + strips.bias[h][1];
            }
        }
    }
}

template <int N, class SHAPE>
__device__ __forceinline__ void store_sums(const kv8_experts_matmul_args &a, const Work &work,
                                           const TileSums<SHAPE::STRIPS, N> &sums,
                                           const WorkEnds<SHAPE> &ends) {
    const int first = work.strips + warp_strip<SHAPE>();
    if constexpr (SHAPE::DOWN) {
        store_places<N, SHAPE>(a, work, first, sums, ends);
    } else {
#pragma unroll
        for (int h = 0; h < SHAPE::STRIPS; h++)
            if (first + h < work.end)
                store_gated<N>(a, work, first + h, sums.d[h], ends.strips.factor[h],
                               ends.strips.bias[h]);
    }
}

// What a consumer warp carries from work to work.
template <class SHAPE>
struct Consumer {
    static constexpr int STRIPS = SHAPE::STRIPS;
    template <int N>
    struct Operands {
        uint32_t a[SHAPE::buffers(N)][SHAPE::GROUP][4];
    };
    const kv8_experts_matmul_args &a;
    Rings &rings;
    uint32_t x_stages, ring;
    int x_stage, x_phase;          // of tiles of rows
    int w_stage, w_phase;          // of the ring
    uint32_t codes_at, scales_at;  // of the chunk in w_stage, this lane's

    // The next chunk has come.
    __device__ __forceinline__ void enter_chunk() {
        barrier_wait(smem_address(&rings.copied[w_stage]), w_phase);
        const uint32_t chunk = ring + w_stage * SHAPE::W_STAGE_BYTES;
        const int lane = threadIdx.x % 32;
        codes_at = chunk + warp_strip<SHAPE>() * W_CODE_BYTES + lane * 16;
        scales_at = chunk + SHAPE::WORK_STRIPS * W_CODE_BYTES +
                    warp_strip<SHAPE>() * W_SCALE_BYTES + lane / 4 * 4;
    }
    // Nobody reads it any more.
    __device__ __forceinline__ void leave_chunk() {
        __syncwarp();
        barrier_arrive_if(smem_address(&rings.read[w_stage]), threadIdx.x % 32 == 0);
        w_stage++;
        w_phase ^= w_stage == W_STAGES;
        w_stage = w_stage == W_STAGES ? 0 : w_stage;
    }
    // A tile of the chunk, of all strips, into registers.
    __device__ __forceinline__ void load_tile(TileCodes (&codes)[STRIPS], int tile) {
#pragma unroll
        for (int h = 0; h < STRIPS; h++)
            codes[h].load(codes_at + h * W_CODE_BYTES + tile * KV8_TILE_CODE_BYTES,
                          scales_at + h * W_SCALE_BYTES + tile * KV8_TILE_SCALE_BYTES);
    }

    // Of a stage, -1 for none, in both blocks.
    __device__ __forceinline__ void release(int of_stage) {
        const int lane = threadIdx.x % 32;
        barrier_arrive_at_if(smem_address(&rings.empty[max(of_stage, 0)]), lane % BLOCKS,
                             of_stage >= 0 && lane < BLOCKS);
    }

    // Group I of a tile and those behind it: some products of 16 inputs of one strip. A group is
    // widened while those before are multiplied, into the registers of one that is done. Once the
    // last of the tile before is, nobody reads the stage `before`, where this tile `enters` one.
    template <int N, int I = 0>
    __device__ __forceinline__ void multiply_groups(TileSums<STRIPS, N> &sums, Operands<N> &wide,
                                                    const TileCodes (&codes)[STRIPS], uint32_t x,
                                                    bool enters, int before) {
        constexpr int GROUP = SHAPE::GROUP, BUFFERS = SHAPE::buffers(N), BUFFER = I % BUFFERS;
        constexpr int STRIP = I * GROUP / 4, FIRST = I * GROUP % 4;
        wgmma_wait<BUFFERS - 1>();
        if (I == BUFFERS - 1 && enters) release(before);
        codes[STRIP].template widen<FIRST>(wide.a[BUFFER][0]);
        if constexpr (GROUP == 2) codes[STRIP].template widen<FIRST + 1>(wide.a[BUFFER][1]);
#pragma unroll
        for (int i = 0; i < GROUP; i++) registers_pin(wide.a[BUFFER][i]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            wgmma_rows<N>(sums.d[STRIP], wide.a[BUFFER][i],
                          row_descriptor_at<128>(x, (FIRST + i) * 32));
        wgmma_commit();
        if constexpr ((I + 1) * GROUP < 4 * STRIPS)
            multiply_groups<N, I + 1>(sums, wide, codes, x, enters, before);
    }

    // The next stage of rows has come; its descriptor.
    __device__ __forceinline__ uint32_t enter_rows() {
        const uint32_t x = matrix_descriptor(x_stages + x_stage * SHAPE::X_STAGE_BYTES, 16);
        barrier_wait(smem_address(&rings.full[x_stage]), x_phase);
        return x;
    }
    __device__ __forceinline__ int leave_rows() {
        const int stage = x_stage;
        x_phase ^= stage == SHAPE::X_STAGES - 1;
        x_stage = stage == SHAPE::X_STAGES - 1 ? 0 : stage + 1;
        return stage;
    }

    // One work of which this warpgroup has no strip: the others' rows and weights go by.
    __device__ __forceinline__ void pass(const Work &work) {
        for (int chunk = 0; chunk < chunks_of(a); chunk++) {
            if (!work.is_empty()) {
                barrier_wait(smem_address(&rings.copied[w_stage]), w_phase);
                leave_chunk();
            }
            for (int tile = 0; tile < CHUNK; tile += SHAPE::X_TILES) {
                barrier_wait(smem_address(&rings.full[x_stage]), x_phase);
                release(leave_rows());
            }
        }
    }

    // One work, of up to N rows.
    template <int N>
    __device__ __forceinline__ void multiply(const Work &work) {
        TileSums<STRIPS, N> sums = {};
        Operands<N> wide;
        TileCodes codes[STRIPS];
        WorkEnds<SHAPE> ends;
        if (SHAPE::HOLDS_ENDS) ends.load(a, work);
        int before = -1;  // the stage that the products in flight read
        uint32_t x = 0;
#pragma unroll 1
        for (int left = chunks_of(a); left > 0; left--) {
            enter_chunk();
#pragma unroll
            for (int tile = 0; tile < CHUNK; tile++) {
                const int in_stage = tile % SHAPE::X_TILES;
                load_tile(codes, tile);
                if (tile == CHUNK - 1) leave_chunk();
                if (in_stage == 0) x = enter_rows();
                multiply_groups<N>(sums, wide, codes, x + in_stage * (SHAPE::X_TILE_BYTES >> 4),
                                   in_stage == 0, before);
                if (in_stage == SHAPE::X_TILES - 1) before = leave_rows();
            }
        }
        if (!SHAPE::HOLDS_ENDS) ends.load(a, work);
        wgmma_wait<0>();
#pragma unroll
        for (int h = 0; h < STRIPS; h++) registers_pin(sums.d[h]);
        release(before);
        store_sums<N, SHAPE>(a, work, sums, ends);
    }
};

// The columns of products: few sizes, since the compiler gives the operands of each registers of
// its own.
template <int ROWS>
struct Sizes;
template <>
struct Sizes<48> {
    static constexpr int COUNT = 3;
    static __device__ constexpr int at(int i) { return 16 + 16 * i; }
};
template <>
struct Sizes<96> {
    static constexpr int COUNT = 4;
    static __device__ constexpr int at(int i) { return 48 + 16 * i; }
};
template <>
struct Sizes<192> {
    static constexpr int COUNT = 6;
    static __device__ constexpr int at(int i) { return 32 + 32 * i; }
};
template <class SHAPE, int I = 0>
__device__ __forceinline__ void multiply_by(Consumer<SHAPE> &consumer, const Work &work) {
    using ALL = Sizes<SHAPE::ROWS>;
    if constexpr (I + 1 == ALL::COUNT)
        consumer.template multiply<ALL::at(I)>(work);
    else if (work.item.count <= ALL::at(I))
        consumer.template multiply<ALL::at(I)>(work);
    else
        multiply_by<SHAPE, I + 1>(consumer, work);
}

template <class SHAPE>
__device__ __forceinline__ void consume(const kv8_experts_matmul_args &a, const Works<SHAPE> &works,
                                        Rings &rings, uint32_t x_stages, uint32_t ring) {
    Consumer<SHAPE> consumer = {a, rings, x_stages, ring, 0, 0, 0, 0, 0, 0};
    take_turn();
    const int num_works = works.own_works(a);
    for (int w = 0; w < num_works; w++) {
        barrier_wait(smem_address(&rings.full[consumer.x_stage]), consumer.x_phase);
        const Work work = rings.works[w % (MAX_X_STAGES + 1)];
        if (work.strips + static_cast<int>(threadIdx.x) / 128 * SHAPE::GROUP_STRIPS >= work.end)
            consumer.pass(work);
        else
            multiply_by(consumer, work);
    }
}

template <class SHAPE>
__device__ __forceinline__ void multiply_works(const kv8_experts_tiles_args &args) {
    const kv8_experts_matmul_args &a = args.product;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ Works<SHAPE> works;
    __shared__ Rings rings;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::X_STAGES; i++) {
            barrier_init(smem_address(&rings.full[i]), 1);
            barrier_init(smem_address(&rings.empty[i]), BLOCKS * SHAPE::CONSUMERS / 32);
        }
        for (int i = 0; i < W_STAGES; i++) {
            barrier_init(smem_address(&rings.copied[i]), 1);
            barrier_init(smem_address(&rings.read[i]), SHAPE::CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_first();  // both blocks' barriers stand
    works.count(a);
    cluster_wait();
    const uint32_t x_stages = (smem_address(shared) + 1023) & ~1023u;
    const uint32_t ring = x_stages + SHAPE::X_STAGES * SHAPE::X_STAGE_BYTES;
    if (threadIdx.x < SHAPE::CONSUMERS) {
        registers_take<SHAPE::CONSUMERS == 256 ? 232 : 160>();
        consume<SHAPE>(a, works, rings, x_stages, ring);
    } else {
        registers_give<SHAPE::CONSUMERS == 256 ? 40 : 32>();
        // Which weights is known before the kernel ahead has ended, rows are not.
        const int warp = (static_cast<int>(threadIdx.x) - SHAPE::CONSUMERS) / 32;
        if (warp == 2) fetch_ends<SHAPE>(a, works);
        if (warp == 0 && elected()) copy_weights<SHAPE>(args, works, rings, ring);
        if (warp != 1 || !elected()) return;
        take_turn();
        copy_rows<SHAPE>(a, works, rings, x_stages);
    }
}

}  // namespace kv8
