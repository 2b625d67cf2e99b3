// linear_pairs.cu - a dense product for many tokens on sm_90a: blocks that stay, two and two, whose
// copies run on from tile to tile and whose results leave while the next tile is multiplied.
//
// A block multiplies 128 tokens by ROWS rows of w, a stage 64 columns of both, a warpgroup 64
// tokens by all rows. A tile of a pair is ROWS rows by both blocks' tokens; the tiles that would
// keep only some of the pairs busy in the end are cut in two, each pair taking 128 tokens, each of
// its blocks half the rows: half a tile's time. What both blocks read - the rows of w of a whole
// tile, the tokens of a cut one - each fetches half of for both.
//
// Tokens are A, rows of w the columns of wgmma, so that a thread holds neighbouring rows of y and
// both elements of each pair that a rotation turns. Results go by boxes of 64 tokens by 128 bytes:
// rounded or as f32 to shared memory, from there by the copy engine, which adds where y accumulates
// and leaves out what lies past the ends. An element of y is one sum over the columns in their
// order, whoever computes it, and is added once.
//
// Grid: the pairs that the GPU holds. Block: two warpgroups, and one that copies. Shared memory:
// the ring, and two boxes a warpgroup. Bytes: w once a tile of tokens, x once a tile of rows, from
// the L2 two thirds of that. Bound by: products; by memory where tiles are tall.
//
// SPDX-License-Identifier: Apache-2.0
#include "codec.cuh"
#include "linear_store.cuh"
#include "ptx_matrices_sm90.cuh"
#include "ptx_pairs_sm90.cuh"
#include "ptx_sm90.cuh"
#include "take_turn.cuh"

namespace kv8 {

constexpr int STAGES = KV8_LINEAR_PAIRS_STAGES;
constexpr int TOKENS = KV8_LINEAR_PAIRS_TOKENS, BOX = KV8_LINEAR_PAIRS_BOX, GROUPS = 2;
constexpr int BOX_BYTES = BOX * 128, CONSUMERS = GROUPS * 128;
constexpr uint16_t BOTH = 3;
static_assert(TOKENS == GROUPS * BOX, "a warpgroup's tokens are a box");
static_assert(KV8_LINEAR_PAIRS_THREADS == CONSUMERS + 128, "and those of a thread that copies");

// The stages that have passed through the ring are counted on from tile to tile.
template <int ROWS>
struct PairsRing {
    static constexpr int W_BYTES = ROWS * 128, STAGE_BYTES = W_BYTES + TOKENS * 128;
    uint32_t at, barriers;
    __device__ __forceinline__ uint32_t stage(uint32_t i) const {
        return at + i % STAGES * STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t full(uint32_t i) const {
        return barriers + 8 * (i % STAGES);
    }
    __device__ __forceinline__ uint32_t empty(uint32_t i) const {
        return barriers + 8 * (STAGES + i % STAGES);
    }
};

// A pair's tile: ROWS rows of w by both blocks' tokens; half of that, when it is cut; or two times
// ROWS rows by tokens that both blocks share.
enum Form { WHOLE, HALF, TALL };
template <Form FORM>
struct IsForm {
    static constexpr Form value = FORM;
};
// Of a block.
template <int ROWS, Form FORM>
constexpr int OWN_ROWS = FORM == HALF ? ROWS / 2 : ROWS;

// Where this block's tile i lies.
template <int ROWS, Form FORM>
static __device__ __forceinline__ Tile place(const kv8_linear_pairs_args &a, int32_t i) {
    const int32_t rank = cluster_rank();
    if (FORM == TALL) return {(2 * i + rank) * ROWS, 0};
    Tile tile = find_tile(a.product, ROWS, 2 * TOKENS, FORM == WHOLE ? i : a.num_whole + i / 2);
    tile.first_token += (FORM == WHOLE ? rank : i % 2) * TOKENS;
    if (FORM == HALF) tile.first_row += rank * (ROWS / 2);
    return tile;
}

// This block's tiles in their order, to use(i, IsForm).
template <bool IS_TALL, class USE>
static __device__ __forceinline__ void for_tiles(const kv8_linear_pairs_args &a, USE &&use) {
    const int32_t pair = blockIdx.x / 2, num_pairs = gridDim.x / 2;
    if constexpr (IS_TALL) {
        for (int32_t i = pair; i < a.num_tiles; i += num_pairs) use(i, IsForm<TALL>());
    } else {
        for (int32_t i = pair; i < a.num_whole; i += num_pairs) use(i, IsForm<WHOLE>());
        for (int32_t i = pair; i < 2 * (a.num_tiles - a.num_whole); i += num_pairs)
            use(i, IsForm<HALF>());
    }
}

// --- into shared memory ---

// Of a tall tile nobody else reads the rows of w.
template <int ROWS, Form FORM>
static __device__ __forceinline__ void copy_weights(const kv8_linear_pairs_args &a,
                                                    const Tile &tile, uint32_t to, uint32_t full,
                                                    int32_t column) {
    constexpr int BOX_ROWS = ROWS / 2, W_BOX_BYTES = BOX_ROWS * 128;
    const int32_t rank = cluster_rank();
    expect_bytes(full, (OWN_ROWS<ROWS, FORM> + TOKENS) * 128);
    if constexpr (FORM == WHOLE) {
        copy_tile_to(to + rank * W_BOX_BYTES, a.w_map, column, tile.first_row + rank * BOX_ROWS,
                     full, BOTH);
    } else {
        const uint64_t policy = leave_first_policy();
        for (int box = 0; box < OWN_ROWS<ROWS, FORM> / BOX_ROWS; box++) {
            const int32_t row = tile.first_row + box * BOX_ROWS;
            if (FORM == TALL)
                copy_tile_once(to + box * W_BOX_BYTES, a.w_map, column, row, full, policy);
            else
                copy_tile(to + box * W_BOX_BYTES, a.w_map, column, row, full);
        }
    }
}
template <int ROWS, Form FORM>
static __device__ __forceinline__ void copy_tokens(const kv8_linear_pairs_args &a, const Tile &tile,
                                                   uint32_t to, uint32_t full, int32_t column) {
    const int32_t rank = cluster_rank();
    const uint32_t x = to + PairsRing<ROWS>::W_BYTES;
    if constexpr (FORM == WHOLE) {
        copy_tile(x, a.x_map, column, tile.first_token, full);
        copy_tile(x + BOX_BYTES, a.x_map, column, tile.first_token + BOX, full);
    } else {
        copy_tile_to(x + rank * BOX_BYTES, a.x_map, column, tile.first_token + rank * BOX, full,
                     BOTH);
    }
}

// Weights of the first stages before the kernel's turn: no kernel writes them.
template <int ROWS, bool IS_TALL>
static __device__ __forceinline__ void produce(const kv8_linear_pairs_args &a,
                                               const PairsRing<ROWS> &ring, int32_t num_stages) {
    const uint32_t ahead = min(num_stages, int32_t{STAGES});
    uint32_t passed = 0;
    const auto await_empty = [&] {
        if (passed >= STAGES) wait_for_bytes(ring.empty(passed), (passed / STAGES - 1) & 1);
    };
    for_tiles<IS_TALL>(a, [&](int32_t idx, auto form) {
        constexpr Form FORM = decltype(form)::value;
        const Tile tile = place<ROWS, FORM>(a, idx);
        const auto weights = [&](uint32_t stage, uint32_t i) {
            copy_weights<ROWS, FORM>(a, tile, ring.stage(stage), ring.full(stage), 64 * i);
        };
        if (passed == 0) {
            for (uint32_t i = 0; i < ahead; i++) weights(i, i);
            await_turn();
        }
        for (int32_t i = 0; i < num_stages; i++, passed++) {
            await_empty();
            if (passed >= ahead) weights(passed, i);
            copy_tokens<ROWS, FORM>(a, tile, ring.stage(passed), ring.full(passed), 64 * i);
        }
    });
    // Nothing of the other block is on its way when this one's shared memory goes.
    for (int i = 0; i < STAGES; i++, passed++) await_empty();
}

// --- products ---

// This warpgroup has read stage i, which both blocks' copies fill.
template <class RING>
static __device__ __forceinline__ void release(const RING &ring, uint32_t i) {
    if (threadIdx.x % 128 < 2) barrier_arrive_at(ring.empty(i), threadIdx.x % 128);
}

// sums[4 j + k] of a thread: token lane / 4 + k / 2 * 8 of its warp's 16, row 8 j + lane % 4 * 2 +
// k % 2 of the tile. Begins stage i's product, of a tile's first stage without what sums held.
template <bool IS_FIRST, int NUM, class RING>
static __device__ __forceinline__ void multiply(float (&sums)[NUM], const RING &ring, uint32_t i) {
    const uint32_t at = ring.stage(i), group = threadIdx.x / 128;
    const uint32_t x = matrix_descriptor(at + RING::W_BYTES + group * BOX_BYTES, 0);
    const uint32_t w = matrix_descriptor(at, 0);
    barrier_wait(ring.full(i), i / STAGES & 1);
    registers_pin(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_f16(sums, descriptor_at(x, 32 * k), descriptor_at(w, 32 * k), !IS_FIRST || k > 0);
    wgmma_commit();
    registers_pin(sums);
}

// All stages of a tile from `first` on; meanwhile() runs while the first is multiplied.
template <int NUM, class RING, class MEANWHILE>
static __device__ __forceinline__ void consume(float (&sums)[NUM], const RING &ring, uint32_t first,
                                               int32_t num_stages, MEANWHILE &&meanwhile) {
    const uint32_t end = first + num_stages;
    multiply<true>(sums, ring, first);
    meanwhile();
    for (uint32_t i = first + 1; i < end; i++) {
        multiply<false>(sums, ring, i);
        wgmma_wait<1>();
        release(ring, i - 1);
    }
    wgmma_wait<0>();
    registers_pin(sums);
    release(ring, end - 1);
}

// --- out ---

// A warpgroup's two boxes, which take turns.
struct Outlet {
    uint32_t at;
    int group;
    bool leads;  // this thread hands boxes to the copy engine
    int num_sent;

    // write(box) fills 64 tokens by 128 bytes, which go to column and token of the map's matrix.
    template <class WRITE>
    __device__ __forceinline__ void send(const void *map, int32_t column, int32_t token, bool adds,
                                         WRITE &&write) {
        const uint32_t box = at + num_sent++ % 2 * BOX_BYTES;
        if (leads) bulk_wait_read<1>();
        named_barrier_sync(1 + group, 128);
        write(box);
        fence_stores_before_wgmma();
        named_barrier_sync(1 + group, 128);
        if (!leads) return;
        if (adds)
            add_tile(map, column, token, box);
        else
            store_tile(map, column, token, box);
        bulk_commit();
    }
};

// A head's 64 rows, of a thread: sums[0] to sums[31].
template <uint32_t PACK(float, float)>
static __device__ __forceinline__ void write_words(uint32_t box, const float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint32_t row = box + (16 * warp + lane % 16) * 128;
    const uint32_t chunk = (lane % 8 ^ lane / 16) * 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        store_matrices(row + (chunk ^ 16 * j), PACK(sums[4 * j], sums[4 * j + 1]),
                       PACK(sums[4 * j + 2], sums[4 * j + 3]),
                       PACK(sums[4 * j + 4], sums[4 * j + 5]),
                       PACK(sums[4 * j + 6], sums[4 * j + 7]));
}
// Half a head's: sums[0] to sums[15]. Every second token's lanes are two eights ahead, or they
// would meet the others' banks.
static __device__ __forceinline__ void write_f32(uint32_t box, const float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane / 4, c = lane % 4;
    const bool ahead = g % 2 == 1;
    const uint32_t row = box + (16 * warp + g) * 128 + c % 2 * 8;
    const uint32_t chunk = (g ^ c / 2 ^ (ahead ? 4 : 0)) * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = ahead ? sums[4 * (j ^ 2) + k] : sums[4 * j + k];
        store_pair(row + (chunk ^ 32 * j), x[0], x[1]);
        store_pair(row + 8 * 128 + (chunk ^ 32 * j), x[2], x[3]);
    }
}

// The bias of a thread's rows, two of each eight: on its way while the tile is multiplied.
template <int ROWS>
static __device__ __forceinline__ void load_bias(uint32_t (&two)[ROWS / 8],
                                                 const kv8_linear_args &a, int32_t first_row) {
    const auto *const bias = reinterpret_cast<const uint32_t *>(
        static_cast<const uint16_t *>(a.bias) + first_row + threadIdx.x % 4 * 2);
    const int32_t eights = a.bias == nullptr ? 0 : (a.rows - first_row) / 8;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) two[j] = j < eights ? __ldg(bias + 4 * j) : 0;
    registers_pin(two);
}
// Of 8 * EIGHTS rows.
template <int EIGHTS>
static __device__ __forceinline__ void add_bias(float *sums, const uint32_t *two) {
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            sums[4 * j + k] += __uint_as_float(k % 2 == 0 ? two[j] << 16 : two[j] & 0xffff0000u);
    }
}

// Rotation of a thread's two tokens, the same for all heads: cosines and sines of rows 8 j + lane %
// 4 * 2 and the next of a head, j from 0 to 3. Loaded while the tile is multiplied.
struct Rotation {
    float cos_sin[2][16];  // [token], eight cosines first
    __device__ __forceinline__ void load(const kv8_linear_args &a, int32_t first_token) {
        constexpr int PAIRS = KV8_LINEAR_HEAD / 2;
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int32_t token =
                min(first_token + 16 * warp + lane / 4 + 8 * half, a.n - 1);  // past it: unseen
            const auto *const from = reinterpret_cast<const float2 *>(
                a.cos_sin + int64_t{token} * KV8_LINEAR_HEAD + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 two = __ldg(from + i / 4 * (PAIRS / 2) + 4 * (i % 4));
                cos_sin[half][2 * i] = two.x;
                cos_sin[half][2 * i + 1] = two.y;
            }
        }
    }
    __device__ __forceinline__ void pin() {
        registers_pin(cos_sin[0]);
        registers_pin(cos_sin[1]);
    }
};
// Row r of the head with row r + 32.
static __device__ __forceinline__ void rotate(float *sums, const Rotation &by) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float *const low = sums + i / 2 * 4 + 2 * half + i % 2;
            turn(low[0], low[16], by.cos_sin[half][i], by.cos_sin[half][8 + i]);
        }
    }
}

// The largest of a head's rows of each of a thread's two tokens, whose rows four lanes share; NaN
// where one is NaN.
static __device__ __forceinline__ void store_maxima(const kv8_linear_args &a, int32_t row,
                                                    int32_t token, const float *sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = sums[2 * half];
#pragma unroll
        for (int i = 1; i < 16; i++) top = max_nan(top, sums[i / 2 * 4 + 2 * half + i % 2]);
        top = max_nan(top, __shfl_xor_sync(~0u, top, 1));
        top = max_nan(top, __shfl_xor_sync(~0u, top, 2));
        const int32_t to = token + 16 * warp + lane / 4 + 8 * half;
        if (lane % 4 == half && to < a.n)
            a.maxima[int64_t{to} * (a.rows / KV8_LINEAR_HEAD) + row / KV8_LINEAR_HEAD] = top;
    }
}

// A head's rows, or half a head's of f32. MAXIMA: kernels of their own leave them, since a tile's
// end comes from no cache where a block has one tile, and costs by its length.
template <int WIDTH, bool MAXIMA>
static __device__ __forceinline__ void send_rows(const kv8_linear_pairs_args &a, int32_t row,
                                                 int32_t token, Outlet &outlet, float *sums,
                                                 const uint32_t *bias, const Rotation &rotation) {
    if (row >= a.product.rows) return;
    add_bias<WIDTH / 8>(sums, bias);
    if (MAXIMA && WIDTH == 64) store_maxima(a.product, row, token, sums);
    if (WIDTH == 64 && row < a.product.rotated_rows) {
        rotate(sums, rotation);
        outlet.send(a.rotated_map, row, token, false, [&](uint32_t box) {
            if (a.product.rotated_is_f16)
                write_words<pack_f16>(box, sums);
            else
                write_words<pack_bf16>(box, sums);
        });
    } else if (WIDTH < 64 || a.product.is_f32) {
#pragma unroll
        for (int part = 0; part < WIDTH / 32; part++)
            outlet.send(a.y_map, row + 32 * part, token, a.product.accumulate,
                        [&](uint32_t box) { write_f32(box, sums + 16 * part); });
    } else {
        outlet.send(a.y_map, row, token, false,
                    [&](uint32_t box) { write_words<pack_bf16>(box, sums); });
    }
}
template <int ROWS, bool MAXIMA>
static __device__ __forceinline__ void send_sums(const kv8_linear_pairs_args &a, const Tile &tile,
                                                 Outlet &outlet, float (&sums)[ROWS / 2],
                                                 const uint32_t (&bias)[ROWS / 8],
                                                 const Rotation &rotation) {
    constexpr int HEADS = ROWS / 64;
    const int32_t token = tile.first_token + outlet.group * BOX;
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        send_rows<64, MAXIMA>(a, tile.first_row + 64 * i, token, outlet, sums + 32 * i,
                              bias + 8 * i, rotation);
    if (ROWS % 64 != 0)
        send_rows<32, MAXIMA>(a, tile.first_row + 64 * HEADS, token, outlet, sums + 32 * HEADS,
                              bias + 8 * HEADS, rotation);
}

template <int ROWS, bool IS_TALL, bool MAXIMA>
static __device__ __forceinline__ void multiply_all(const kv8_linear_pairs_args &a,
                                                    const PairsRing<ROWS> &ring, uint32_t boxes,
                                                    int32_t num_stages) {
    const int group = threadIdx.x / 128;
    Outlet outlet = {boxes + group * 2 * BOX_BYTES, group, threadIdx.x % 128 == 0, 0};
    uint32_t passed = 0;
    for_tiles<IS_TALL>(a, [&](int32_t idx, auto form) {
        constexpr Form FORM = decltype(form)::value;
        constexpr int OWN = OWN_ROWS<ROWS, FORM>;
        float sums[OWN / 2];
        uint32_t bias[OWN / 8];
        Tile tile;
        Rotation rotation;
        consume(sums, ring, passed, num_stages, [&] {
            tile = place<ROWS, FORM>(a, idx);
            const bool is_rotated = tile.first_row < a.product.rotated_rows;
            if (is_rotated) rotation.load(a.product, tile.first_token + group * BOX);
            load_bias<OWN>(bias, a.product, tile.first_row);
            if (is_rotated) rotation.pin();
        });
        passed += num_stages;
        send_sums<OWN, MAXIMA>(a, tile, outlet, sums, bias, rotation);
    });
    if (outlet.leads) bulk_wait_read<0>();
}

template <int ROWS, bool IS_TALL, bool MAXIMA>
static __device__ __forceinline__ void multiply_in_pairs(const kv8_linear_pairs_args &a) {
    extern __shared__ uint8_t unaligned[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    const uint32_t aligned = (smem_address(unaligned) + 1023) & ~1023u;
    const PairsRing<ROWS> ring = {aligned, smem_address(barriers)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), 2 * GROUPS);
        }
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_first();  // both blocks' barriers stand
    cluster_wait();
    const int32_t num_stages = (a.product.cols + 63) / 64;
    if (threadIdx.x < CONSUMERS) {
        registers_take<232>();
        take_turn();
        multiply_all<ROWS, IS_TALL, MAXIMA>(a, ring, aligned + STAGES * ring.STAGE_BYTES,
                                            num_stages);
    } else {
        registers_give<40>();
        if (threadIdx.x == CONSUMERS) produce<ROWS, IS_TALL>(a, ring, num_stages);
    }
}

}  // namespace kv8

#define KV8_LINEAR_PAIRS(NAME, ROWS, IS_TALL, MAXIMA)                         \
    extern "C" __global__ void __launch_bounds__(KV8_LINEAR_PAIRS_THREADS, 1) \
        NAME(const __grid_constant__ kv8_linear_pairs_args a) {               \
        kv8::multiply_in_pairs<ROWS, IS_TALL, MAXIMA>(a);                     \
    }
#include "linear_pairs_kernels.inc"
