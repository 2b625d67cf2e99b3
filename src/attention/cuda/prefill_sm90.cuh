/* prefill_sm90.cuh - attention of many query rows over pages, on wgmma.
 *
 * Grid: one block per multiprocessor, each taking items from the queue until it is empty.
 * Block: NUM_MATH warpgroups of 64 packed query rows each, and one warpgroup of producers.
 * Shared memory: Q, NUM_STAGES tiles of K and of V (128 keys, 16 bits a value), barriers.
 * Bound by the tensor cores and, at head_dim 64, as much by exp2 (16 a cycle): per 64 rows and
 * tile both take 512 cycles, so one warpgroup's softmax must cover another's products.
 *
 * A math warpgroup starts S(t+1) = Q K^T and O += P(t) V together, computes the softmax of
 * S(t+1) while O still runs, and packs P when O is done: S, P and O are all the registers it has.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFILL_SM90_CUH
#define KV8_PREFILL_SM90_CUH

#include "prefill_widen.cuh"

#include <cuda_bf16.h>

enum {
    TILE_KEYS = KV8_PREFILL_TILE_KEYS,
    TILE_BYTES = TILE_KEYS * 128, /* of 64 columns */
    Q_BYTES = 64 * 128            /* one warpgroup's rows of 64 columns */
};

/* One row of prefill_kernels.inc. */
template <int CODE_, int HEAD_DIM_, int NUM_MATH_, int NUM_STAGES_, int NUM_AHEAD_,
          int MATH_REGISTERS_, int PRODUCER_REGISTERS_>
struct prefill_shape {
    static const int CODE = CODE_, HEAD_DIM = HEAD_DIM_, NUM_MATH = NUM_MATH_;
    static const int NUM_STAGES = NUM_STAGES_;
    static const int NUM_AHEAD = NUM_AHEAD_; /* tiles whose codes are under way */
    static const int MATH_REGISTERS = MATH_REGISTERS_, PRODUCER_REGISTERS = PRODUCER_REGISTERS_;
    static const int LOADS =
        PRODUCER_REGISTERS < 64 ? 2 : 4; /* 16 bytes of codes that a thread holds while widening */
    /* Of a warp at K's barriers: with int8 every lane hands over, its key's scale or its reads. */
    static const int K_ARRIVALS = CODE == CODE_INT8 ? 32 : 1;
    static const int COLUMNS = HEAD_DIM / 64; /* tiles of 64 columns in a row */
    static const int THREADS = 128 * (NUM_MATH + 1);
    static const int Q_AT = 0;
    static const int K_AT = Q_AT + NUM_MATH * COLUMNS * Q_BYTES;
    static const int V_AT = K_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    /* Codes as they lie in pages: per producer warp, NUM_AHEAD + 1 tiles of K then V. */
    static const int RAW_AT = V_AT + NUM_STAGES * COLUMNS * TILE_BYTES;
    static const int RAW_TILE_BYTES = code_traits<CODE>::wide ? 0 : 2 * COLUMNS * RAW_PIECE_BYTES;
    /* int8: K's scales of a stage's keys, f16. */
    static const int K_SCALES_AT = RAW_AT + 4 * (NUM_AHEAD + 1) * RAW_TILE_BYTES;
    static const int BARRIERS_AT =
        K_SCALES_AT + (CODE == CODE_INT8 ? NUM_STAGES * TILE_KEYS * 2 : 0);
    /* Barriers: K full, K empty, V full, V empty per stage; item full, empty. */
    static const int ITEMS_AT = BARRIERS_AT + 8 * (4 * NUM_STAGES + 2 * KV8_PREFILL_ITEM_SLOTS);
    static const int ROWS_AT = ITEMS_AT + KV8_PREFILL_ITEM_SLOTS * (int)sizeof(kv8_prefill_item);
    static const int SHARED_BYTES = ROWS_AT + NUM_MATH * 64 * 16;
    static_assert(SHARED_BYTES == KV8_PREFILL_SM90_SHARED(code_traits<CODE>::bytes,
                                                          CODE == CODE_INT8, HEAD_DIM, NUM_MATH,
                                                          NUM_STAGES, NUM_AHEAD),
                  "what the host asks for");
};

/* A ring's place after n steps: stage and the parity of its round. */
template <int N>
struct ring {
    static_assert((N & (N - 1)) == 0, "a power of two");
    uint32_t steps;
    __device__ ring() : steps(0) {}
    __device__ __forceinline__ uint32_t stage() const { return steps % N; }
    __device__ __forceinline__ uint32_t parity() const { return steps / N % 2; }
    __device__ __forceinline__ void next() { steps++; }
};

static_assert(sizeof(kv8_prefill_item) == KV8_PREFILL_ITEM_BYTES, "64 bytes");
/* The slots that items pass through. */
template <class SHAPE>
__device__ __forceinline__ const kv8_prefill_item *item_slot(int slot) {
    extern __shared__ __align__(1024) uint8_t memory[];
    return (const kv8_prefill_item *)(memory + SHAPE::ITEMS_AT) + slot;
}

/* --- producers --- */

template <class SHAPE>
struct producer {
    enum {
        WIDE = code_traits<SHAPE::CODE>::wide,
        NUM_AHEAD = SHAPE::NUM_AHEAD,
        LOADS = SHAPE::LOADS /* of 16 bytes at a time */
    };
    const kv8_prefill_args &a;
    uint32_t shared;
    int warp, lane;
    /* The tile to fetch next, and the page of this lane's key there. */
    int tile, tile_end, kv_head, page;
    const int32_t *pages;
    int seen_from, seen_to; /* keys that some row of the item may see */
    ring<SHAPE::NUM_STAGES> stored;
    __half2 scales[NUM_AHEAD + 1]; /* int8: K's and V's scale of this lane's key, oldest first */

    __device__ producer(const kv8_prefill_args &args, uint32_t base)
        : a(args),
          shared(base),
          warp(__shfl_sync(~0u, threadIdx.x % 128 / 32, 0)), /* uniform */
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void open_item(const kv8_prefill_item &item) {
        seen_from = item.seen_from;
        seen_to = item.seen_to;
        pages = (a.page_indptr != 0 ? a.page_indices : a.block_table) + item.pages_at;
        kv_head = item.kv_head;
        tile = item.tile_begin;
        tile_end = item.tile_end;
        page = page_of(tile);
    }
    __device__ __forceinline__ uint32_t barrier(int kind, int stage) const {
        return shared + SHAPE::BARRIERS_AT + 8 * (kind * SHAPE::NUM_STAGES + stage);
    }
    /* The page of this lane's key of the tile; -1 where nobody looks. */
    __device__ __forceinline__ int page_of(int of_tile) const {
        const int key = of_tile * TILE_KEYS + 32 * warp + lane;
        if (of_tile >= tile_end || key < seen_from || key >= seen_to) return -1;
        return pages[divide(key, a.page_magic, a.page_shift)];
    }
    __device__ __forceinline__ __half scale_of(const kv8_prefill_pages &p, int slot) const {
        if (page < 0) return __ushort_as_half(0);
        return __ushort_as_half(
            p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                        kv_head * p.scale_stride_head]);
    }
    __device__ __forceinline__ uint32_t tile_address(int at, int stage, int column) const {
        return shared + at + (stage * SHAPE::COLUMNS + column) * TILE_BYTES + warp * 32 * 128;
    }
    __device__ __forceinline__ void publish(uint32_t full) const {
        fence_stores_before_wgmma();
        __syncwarp();
        if (lane == 0) barrier_arrive(full);
    }
    /* K, with what int8's lanes stored for the math's lanes to read. */
    __device__ __forceinline__ void publish_k(uint32_t full) const {
        if (SHAPE::K_ARRIVALS == 1) {
            publish(full);
        } else {
            fence_stores_before_wgmma();
            barrier_arrive(full);
        }
    }
    __device__ __forceinline__ uint32_t raw_address(uint32_t n, int piece) const {
        return shared + SHAPE::RAW_AT + (n % (NUM_AHEAD + 1) * 4 + warp) * SHAPE::RAW_TILE_BYTES +
               piece * RAW_PIECE_BYTES;
    }

    /* Where this lane's key lies; somewhere readable when nobody may see it. */
    __device__ __forceinline__ const uint8_t *key_of(const kv8_prefill_pages &p, int slot) const {
        const uint64_t offset = (uint64_t)(uint32_t)max(page, 0) * p.stride_page +
                                (uint64_t)(uint32_t)slot * p.stride_slot +
                                (uint64_t)(uint32_t)kv_head * p.stride_head;
        return p.data + 16 * offset;
    }
    __device__ __forceinline__ int slot_of(int of_tile) const {
        const int key = of_tile * TILE_KEYS + 32 * warp + lane;
        return key - (int)divide(key, a.page_magic, a.page_shift) * a.page_size;
    }
    /* Copies of K or V; of V too, at the same distances from its pool as K, when `together`. */
    __device__ __forceinline__ void fetch_half(uint32_t raw, const uint8_t *mine, uint32_t seen,
                                               bool together) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = 8 * i + lane / 4;
            const uint8_t *const from = pointer_of(mine, key) + 16 * (lane % 4);
            const uint32_t size = (seen >> key & 1) * 16;
#pragma unroll
            for (int c = 0; c < SHAPE::COLUMNS; c++) {
                copy_async(raw + c * RAW_PIECE_BYTES + 512 * i, from + 64 * c, size);
                if (together)
                    copy_async(raw + (SHAPE::COLUMNS + c) * RAW_PIECE_BYTES + 512 * i,
                               from + (a.v.data - a.k.data) + 64 * c, size);
            }
        }
    }
    /* Starts the copies of the next tile's codes, the block's n-th. */
    __device__ __forceinline__ void fetch_tile(uint32_t n) {
        const int slot = slot_of(tile);
        const uint32_t seen = __ballot_sync(~0u, page >= 0);
        const uint32_t raw = raw_address(n, 0) + 16 * lane;
        const bool together = LOADS == 4 && a.k.stride_page == a.v.stride_page &&
                              a.k.stride_slot == a.v.stride_slot &&
                              a.k.stride_head == a.v.stride_head;
        fetch_half(raw, key_of(a.k, slot), seen, together);
        if (!together)
            fetch_half(raw + SHAPE::COLUMNS * RAW_PIECE_BYTES, key_of(a.v, slot), seen, false);
        if (SHAPE::CODE == CODE_INT8)
            scales[NUM_AHEAD] = __halves2half2(scale_of(a.k, slot), scale_of(a.v, slot));
        page = page_of(++tile);
    }
    /* Widens K or V of the oldest tile; published when the next codes are on their way into
     * registers, so that nobody waits for the stores. */
    template <bool IS_V>
    __device__ __forceinline__ void widen_half(piece<LOADS> p) {
        const int stage = stored.stage();
        const __half2 scale = IS_V ? __high2half2(scales[0]) : __low2half2(scales[0]);
        const int at = IS_V ? SHAPE::V_AT : SHAPE::K_AT;
        barrier_wait(barrier(2 * IS_V + 1, stage), stored.parity() ^ 1);
        if (SHAPE::CODE == CODE_INT8 && !IS_V)
            asm volatile(
                "st.shared.u16 [%0], %1;" ::"r"(shared + SHAPE::K_SCALES_AT +
                                                (stage * TILE_KEYS + 32 * warp + lane) * 2),
                "h"(__half_as_ushort(__low2half(scale)))
                : "memory");
#pragma unroll
        for (int i = 0; i < SHAPE::COLUMNS * 4; i += LOADS) {
            if (i > 0)
                piece_load(p, raw_address(stored.steps, IS_V * SHAPE::COLUMNS + i / 4), i % 4,
                           lane);
            piece_widen<SHAPE::CODE, IS_V>(p, tile_address(at, stage, i / 4), i % 4, scale, lane);
        }
    }
    /* 8-bit codes: while one tile is widened, the next NUM_AHEAD are under way. An item's tiles are
     * all stored before the next item is asked for: the math that frees its slot waits for them. */
    __device__ __forceinline__ void narrow_item() {
        const uint32_t begin = stored.steps, end = begin + (tile_end - tile);
        if (begin == end) return;
#pragma unroll
        for (int i = 0; i < NUM_AHEAD; i++) {
            if (tile < tile_end) fetch_tile(begin + i);
            copies_commit();
            shift_scales();
        }
        do {
            copies_wait<SHAPE::NUM_AHEAD - 1>();
            piece<LOADS> p;
            piece_load(p, raw_address(stored.steps, 0), 0, lane);
            if (stored.steps != begin) publish(barrier(2, last_stage()));
            widen_half<false>(p);
            if (tile < tile_end) fetch_tile(stored.steps + NUM_AHEAD);
            copies_commit();
            piece_load(p, raw_address(stored.steps, SHAPE::COLUMNS), 0, lane);
            publish_k(barrier(0, stored.stage()));
            widen_half<true>(p);
            stored.next();
            shift_scales();
        } while (stored.steps != end);
        publish(barrier(2, last_stage()));
    }
    __device__ __forceinline__ int last_stage() const {
        return (stored.steps - 1) % SHAPE::NUM_STAGES;
    }
    __device__ __forceinline__ void shift_scales() {
        if constexpr (SHAPE::CODE == CODE_INT8) {
#pragma unroll
            for (int j = 0; j < NUM_AHEAD; j++) scales[j] = scales[j + 1];
        }
    }

    /* 16-bit values land where wgmma reads them; a tile's K or V is published once the next two are
     * under way. */
    template <bool IS_V>
    __device__ __forceinline__ void copy_half(const uint8_t *mine) {
        const int stage = stored.stage();
        const uint32_t seen = __ballot_sync(~0u, page >= 0);
        barrier_wait(barrier(2 * IS_V + 1, stage), stored.parity() ^ 1);
        const uint32_t to = tile_address(IS_V ? SHAPE::V_AT : SHAPE::K_AT, stage, 0);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int key = 4 * i + lane / 8, chunk = lane % 8;
            const uint8_t *const from = pointer_of(mine, key) + 16 * chunk;
#pragma unroll
            for (int c = 0; c < SHAPE::COLUMNS; c++)
                copy_async(to + c * TILE_BYTES + 128 * key + ((chunk ^ (key % 8)) * 16),
                           from + 128 * c, (seen >> key & 1) * 16);
        }
        copies_commit();
        if (landing[0] != 0) {
            copies_wait<2>();
            publish(landing[0]);
        }
        landing[0] = landing[1];
        landing[1] = barrier(2 * IS_V, stage);
    }
    uint32_t landing[2] = {0, 0}; /* barriers of what is under way, oldest first */
    __device__ __forceinline__ void wide_item() {
        while (tile < tile_end) {
            const int slot = slot_of(tile);
            const int next_page = page_of(tile + 1);
            const uint8_t *const my_v = key_of(a.v, slot);
            copy_half<false>(key_of(a.k, slot));
            copy_half<true>(my_v);
            stored.next();
            page = next_page;
            tile++;
        }
        copies_wait<0>();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (landing[i] != 0) publish(landing[i]);
            landing[i] = 0;
        }
    }

    __device__ __forceinline__ void run() {
        if constexpr (WIDE)
            wide_item();
        else
            narrow_item();
    }
};

/* --- math --- */

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
template <bool BF16>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t pair;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
/* 1 - 2 / (1 + e^2x): absolute error of a few 1e-7, where tanh.approx has 5e-4. */
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * 2.885390082f));
}

template <class SHAPE>
struct math_warpgroup {
    enum { D = SHAPE::HEAD_DIM, NUM_O = D / 2 };
    static const bool BF16 = code_traits<SHAPE::CODE>::bf16;
    const kv8_prefill_args &a;
    uint32_t shared;
    int index, thread, lane;
    ring<SHAPE::NUM_STAGES> tiles; /* of K; V's are one behind while S(t + 1) is computed */
    int full_from, full_to;        /* keys that every row of the warpgroup may see */
    /* Per lane: rows lane/4 (slot 0) and lane/4 + 8 (slot 1) of the warp's sixteen. */
    float factor[2];       /* from S to log2 units */
    float max_[2], sum[2]; /* max_ in log2 units; P and sum are relative to it */
    float o[NUM_O];

    __device__ math_warpgroup(const kv8_prefill_args &args, uint32_t base)
        : a(args),
          shared(base),
          index(threadIdx.x / 128),
          thread(threadIdx.x % 128),
          lane(threadIdx.x % 32) {}

    __device__ __forceinline__ uint32_t barrier(int kind, int stage) const {
        return shared + SHAPE::BARRIERS_AT + 8 * (kind * SHAPE::NUM_STAGES + stage);
    }
    __device__ __forceinline__ uint32_t q_address() const {
        return shared + SHAPE::Q_AT + index * SHAPE::COLUMNS * Q_BYTES;
    }
    __device__ __forceinline__ int row_of(int slot) const {
        return thread / 32 * 16 + lane / 4 + 8 * slot; /* of the warpgroup's 64 */
    }
    /* Of a row: factor, a word of join(), first key, end of keys. */
    __device__ __forceinline__ uint32_t row_address(int row) const {
        return shared + SHAPE::ROWS_AT + 16 * (64 * index + row);
    }

    /* Q into shared memory, two threads a row. bf16 meets f16 codes as f16 times a power of two of
     * the row, which takes its largest value to [2^13, 2^14): exact but for values 2^27 below the
     * row's largest. A negative or zero factor goes into Q, so that maxima stay maxima. */
    __device__ __forceinline__ void load_q(const item_view &v) {
        const int row = thread / 2, half = thread % 2;
        const int packed = v.row_begin + min(64 * index + row, v.num_rows - 1);
        const int query = query_of(a, packed);
        const int head = v.kv_head * a.group_size + packed - query * a.group_size;
        const uint16_t *const q = (const uint16_t *)a.q +
                                  (int64_t)(v.q_begin + query) * a.q_stride_row +
                                  head * a.q_stride_head + half * (D / 2);
        const bool q_bf16 = a.q_dtype == KV8_PREFILL_BF16;
        float scale = a.score_scale;
        if (a.k_scale != 0)
            scale *=
                a.k_scale[v.request * a.k_scale_stride_batch + v.kv_head * a.k_scale_stride_head];
        float sign = scale < 0 ? -1.0f : scale == 0 ? 0.0f : 1.0f;
        uint4 raw[D / 16];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            if (a.q_aligned)
                raw[i] = *(const uint4 *)(q + 8 * i);
            else
                raw[i] = make_uint4(
                    q[8 * i] | q[8 * i + 1] << 16, q[8 * i + 2] | q[8 * i + 3] << 16,
                    q[8 * i + 4] | q[8 * i + 5] << 16, q[8 * i + 6] | q[8 * i + 7] << 16);
        }
        float power = 1.0f;
        if (q_bf16 && !BF16) {
            uint32_t largest = 0; /* of the magnitudes' bits, which sort as the values do */
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                const uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    largest = max(largest, max(w[j] & 0x7FFF, (w[j] >> 16) & 0x7FFF));
            }
            largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
            const int exponent = (int)(largest >> 7) - 127;
            if (exponent < 128 && exponent > -127)
                power = __int_as_float((127 + max(min(13 - exponent, 100), -100)) << 23);
        }
        if (half == 0) {
            const float f = sign == 0 ? 1.0f : fabsf(scale) / power;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(row_address(row)), "f"(f) : "memory");
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(row_address(row) + 8),
                         "r"(row_begin(a, v, query)), "r"(row_end(a, v, query))
                         : "memory");
        }
        power *= sign;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t w[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float low, high;
                if (q_bf16) {
                    low = __uint_as_float(w[j] << 16);
                    high = __uint_as_float(w[j] & 0xFFFF0000);
                } else {
                    const float2 both = __half22float2(*(const __half2 *)&w[j]);
                    low = both.x;
                    high = both.y;
                }
                w[j] = pack<BF16>(low * power, high * power);
            }
            const int column = half * (D / 2) + 8 * i;
            store_shared(q_address() + column / 64 * Q_BYTES + 128 * row +
                             (((column % 64) / 8) ^ (row % 8)) * 16,
                         w[0], w[1], w[2], w[3]);
        }
        fence_stores_before_wgmma();
        named_barrier_sync(1 + index, 128);
    }

    __device__ __forceinline__ void start_item(const item_view &v) {
        load_q(v);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(factor[slot])
                         : "r"(row_address(row_of(slot))));
            if (a.soft_cap > 0) factor[slot] = 1.0f; /* the cap leaves log2 units */
            max_[slot] = -INFINITY;
            sum[slot] = 0;
        }
        full_to = row_end(a, v, query_of(a, v.row_begin + min(64 * index, v.num_rows - 1)));
        full_from =
            row_begin(a, v, query_of(a, v.row_begin + min(64 * index + 63, v.num_rows - 1)));
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
    }

    __device__ __forceinline__ void start_scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            wgmma_shared_n128<BF16>(s, descriptor_at(q, i / 4 * Q_BYTES + i % 4 * 32),
                                    descriptor_at(k, i / 4 * TILE_BYTES + i % 4 * 32), i != 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_output(const uint32_t (&p)[32], uint32_t v) {
#pragma unroll
        for (int i = 0; i < 8; i++) wgmma_registers<BF16>(o, p + 4 * i, descriptor_at(v, i * 2048));
        wgmma_commit();
    }
    __device__ __forceinline__ uint32_t k_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::K_AT + stage * (SHAPE::COLUMNS * TILE_BYTES), 16);
    }
    __device__ __forceinline__ uint32_t v_descriptor(uint32_t stage) const {
        return matrix_descriptor(shared + SHAPE::V_AT + stage * (SHAPE::COLUMNS * TILE_BYTES),
                                 TILE_BYTES);
    }
    __device__ __forceinline__ void release_k(uint32_t stage) {
        if (SHAPE::K_ARRIVALS == 32 || lane == 0) barrier_arrive(barrier(1, stage));
    }
    __device__ __forceinline__ void release_v(uint32_t stage) {
        if (lane == 0) barrier_arrive(barrier(3, stage));
    }

    /* int8: a key's scale is its column's. */
    __device__ __forceinline__ void scale_scores(float (&s)[64], uint32_t stage) const {
        const uint32_t at = shared + SHAPE::K_SCALES_AT + stage * TILE_KEYS * 2 + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint32_t pair;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at + 16 * i) : "memory");
            const float2 scale = __half22float2(*(const __half2 *)&pair);
            s[4 * i] *= scale.x;
            s[4 * i + 1] *= scale.y;
            s[4 * i + 2] *= scale.x;
            s[4 * i + 3] *= scale.y;
        }
    }
    __device__ __forceinline__ void cap_scores(float (&s)[64]) const {
        const float inverse = __frcp_rn(a.soft_cap);
        float cap_factor[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(cap_factor[slot])
                         : "r"(row_address(row_of(slot))));
            cap_factor[slot] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < 64; i++) s[i] = a.soft_cap * tanh_exact(s[i] * cap_factor[i / 2 % 2]);
    }
    __device__ __forceinline__ void mask_scores(float (&s)[64], int tile) const {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int begin, end;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(begin), "=r"(end)
                         : "r"(row_address(row_of(slot)) + 8));
            begin -= tile * TILE_KEYS + lane % 4 * 2;
            end -= tile * TILE_KEYS + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = i / 2 * 8 + i % 2, at = i / 2 * 4 + 2 * slot + i % 2;
                if (key < begin || key >= end) s[at] = -INFINITY;
            }
        }
    }
    /* The rows' maxima over this tile too; O and the sums follow. */
    __device__ __forceinline__ void raise_maxima(const float (&s)[64]) {
        float top[2] = {s[0], s[2]}, alpha[2];
#pragma unroll
        for (int i = 0; i < 64; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            top[slot] = fmaxf(quad_max(top[slot]) * factor[slot], max_[slot]);
            alpha[slot] = max_[slot] == -INFINITY ? 0.0f : exp2_approx(max_[slot] - top[slot]);
            max_[slot] = top[slot];
            sum[slot] *= alpha[slot];
        }
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] *= alpha[i / 2 % 2];
    }
    /* S to P in 16 bits. A row's maximum is found in the first tile it sees and then only where a
     * lane's sum of a tile reaches 2^15, near f16's end: P may be as large, the final division
     * takes it back, and the tiles between cost no comparisons, shuffles or rescaling. */
    template <bool FIRST>
    __device__ __forceinline__ void softmax(float (&s)[64], uint32_t (&p)[32], int tile) {
        if (a.soft_cap > 0) cap_scores(s);
        if ((tile + 1) * TILE_KEYS > full_to || tile * TILE_KEYS < full_from) mask_scores(s, tile);
        if (FIRST) raise_maxima(s);
        for (bool raised = FIRST;; raised = true) {
            float part[2][2] = {{0, 0}, {0, 0}};
            const float offset[2] = {max_[0] == -INFINITY ? 0.0f : max_[0],
                                     max_[1] == -INFINITY ? 0.0f : max_[1]};
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int slot = i % 2;
                const float x = fmaf(s[2 * i], factor[slot], -offset[slot]);
                const float y = fmaf(s[2 * i + 1], factor[slot], -offset[slot]);
                const float low = exp2_approx(x);
                const float high = exp2_approx(y);
                part[slot][0] += low;
                part[slot][1] += high;
                p[i] = pack<BF16>(low, high);
            }
            const float add[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
            const bool fits = add[0] < 32768.0f && add[1] < 32768.0f && max_[0] != -INFINITY &&
                              max_[1] != -INFINITY;
            if (raised || __all_sync(~0u, fits)) {
                sum[0] += add[0];
                sum[1] += add[1];
                break;
            }
            raise_maxima(s);
        }
    }

    /* The tensor cores go from warpgroup to warpgroup; without turns all would compute products at
     * one time and softmax at another. */
    __device__ __forceinline__ void wait_turn() const {
        named_barrier_sync(8 + index, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        named_barrier_arrive(8 + (index + 1) % SHAPE::NUM_MATH, 256);
    }

    __device__ __forceinline__ void run(const kv8_prefill_item &item) {
        int tile, tile_end;
        {
            start_item(view_item(a, item));
            tile = item.tile_begin;
            tile_end = item.tile_end;
        }
        if (tile < tile_end) {
            float s[64];
            uint32_t p[32];
            bool v_here = false, k_here = false; /* asked before the softmax, needed after */
            const uint32_t q = matrix_descriptor(q_address(), 16);
            uint32_t k = k_descriptor(tiles.stage());
            barrier_wait(barrier(0, tiles.stage()), tiles.parity());
            wait_turn();
            registers_pin(s);
            wgmma_fence();
            start_scores(s, q, k);
            pass_turn();
            wgmma_wait<0>();
            registers_pin(s);
            if (SHAPE::CODE == CODE_INT8) scale_scores(s, tiles.stage());
            release_k(tiles.stage());
            softmax<true>(s, p, tile);
            for (;;) {
                const ring<SHAPE::NUM_STAGES> v_tiles = tiles;
                const uint32_t v = v_descriptor(v_tiles.stage());
                tiles.next();
                if (++tile == tile_end) {
                    barrier_wait(barrier(2, v_tiles.stage()), v_tiles.parity());
                    wait_turn();
                    registers_pin(o);
                    registers_pin(p);
                    wgmma_fence();
                    start_output(p, v);
                    pass_turn();
                    wgmma_wait<0>();
                    registers_pin(o);
                    release_v(v_tiles.stage());
                    break;
                }
                k = k_descriptor(tiles.stage());
                if (!v_here) barrier_wait(barrier(2, v_tiles.stage()), v_tiles.parity());
                if (!k_here) barrier_wait(barrier(0, tiles.stage()), tiles.parity());
                wait_turn();
                registers_pin(s);
                registers_pin(o);
                registers_pin(p);
                wgmma_fence();
                start_output(p, v);
                start_scores(s, q, k);
                pass_turn();
                wgmma_wait<1>();
                registers_pin(o);
                release_v(v_tiles.stage());
                wgmma_wait<0>();
                registers_pin(s);
                registers_pin(p);
                if (SHAPE::CODE == CODE_INT8) scale_scores(s, tiles.stage());
                release_k(tiles.stage());
                v_here = barrier_test(barrier(2, tiles.stage()), tiles.parity());
                ring<SHAPE::NUM_STAGES> next_tiles = tiles;
                next_tiles.next();
                k_here = barrier_test(barrier(0, next_tiles.stage()), next_tiles.parity());
                softmax<false>(s, p, tile);
            }
        }
        finish(item, view_item(a, item));
    }

    /* Leaves this piece and returns whether it was the last; then the state is all pieces'. */
    __device__ __forceinline__ bool join(const kv8_prefill_item &item) {
        const int64_t group = SHAPE::NUM_MATH * (int64_t)item.slot + index;
        const int64_t place = group + (int64_t)item.split * SHAPE::NUM_MATH;
        float *const mine = a.partials + place * (64 * D) + thread;
        float2 *const my_sums = (float2 *)a.partial_sums + place * 256 + thread;
#pragma unroll
        for (int i = 0; i < NUM_O; i++) mine[128 * i] = o[i];
#pragma unroll
        for (int slot = 0; slot < 2; slot++)
            my_sums[128 * slot] = make_float2(max_[slot], sum[slot]);
        __threadfence();
        named_barrier_sync(1 + index, 128);
        const uint32_t flag = row_address(0) + 4;
        if (thread == 0) {
            uint32_t *const arrivals = a.arrivals + group;
            const uint32_t before = atomicAdd(arrivals, 1);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
        }
        named_barrier_sync(1 + index, 128);
        uint32_t before;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
        if (before + 1 != (uint32_t)item.num_splits) return false;
        __threadfence();
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
        max_[0] = max_[1] = -INFINITY;
        sum[0] = sum[1] = 0;
        for (int split = 0; split < item.num_splits; split++) {
            const int64_t at = group + (int64_t)split * SHAPE::NUM_MATH;
            float keep[2], add[2];
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float2 other =
                    __ldcg((const float2 *)a.partial_sums + at * 256 + thread + 128 * slot);
                const float top = fmaxf(max_[slot], other.x);
                const float base = top == -INFINITY ? 0.0f : top;
                keep[slot] = exp2_approx(max_[slot] - base);
                add[slot] = exp2_approx(other.x - base);
                max_[slot] = top;
                sum[slot] = sum[slot] * keep[slot] + other.y * add[slot];
            }
#pragma unroll
            for (int i = 0; i < NUM_O; i++)
                o[i] = o[i] * keep[i / 2 % 2] +
                       __ldcg(a.partials + at * (64 * D) + thread + 128 * i) * add[i / 2 % 2];
        }
        return true;
    }

    __device__ __forceinline__ void finish(const kv8_prefill_item &item, const item_view &v) {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            sum[slot] = quad_sum(sum[slot]);
        }
        if (item.slot >= 0 && !join(item)) return;
        float v_scale = 1.0f;
        if (a.v_scale != 0)
            v_scale =
                a.v_scale[v.request * a.v_scale_stride_batch + v.kv_head * a.v_scale_stride_head];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = 64 * index + row_of(slot);
            if (row >= v.num_rows) continue;
            const int query = query_of(a, v.row_begin + row);
            const int head = v.kv_head * a.group_size + v.row_begin + row - query * a.group_size;
            const bool empty = max_[slot] == -INFINITY;
            float total = sum[slot];
            if (a.sink_logit != 0)
                total += exp2_approx(a.sink_logit[head] * 1.4426950408889634f - max_[slot]);
            const float weight = empty ? 0.0f : v_scale / total;
            store_row(slot, (int64_t)(v.q_begin + query) * a.o_stride_row + head * a.o_stride_head,
                      weight);
            if (a.lse != 0 && lane % 4 == 0)
                a.lse[(int64_t)(v.q_begin + query) * a.num_qo_heads + head] =
                    empty ? -INFINITY : (max_[slot] + __log2f(sum[slot])) * 0.6931471805599453f;
        }
    }
    __device__ __forceinline__ void store_row(int slot, int64_t at, float weight) const {
        at += lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float x = o[4 * i + 2 * slot] * weight, y = o[4 * i + 2 * slot + 1] * weight;
            if (a.o_dtype == KV8_PREFILL_F32) {
                float *const to = (float *)a.o + at + 8 * i;
                if (a.o_aligned) {
                    *(float2 *)to = make_float2(x, y);
                } else {
                    to[0] = x;
                    to[1] = y;
                }
            } else {
                uint16_t *const to = (uint16_t *)a.o + at + 8 * i;
                const uint32_t pair =
                    a.o_dtype == KV8_PREFILL_BF16 ? pack<true>(x, y) : pack<false>(x, y);
                if (a.o_aligned) {
                    *(uint32_t *)to = pair;
                } else {
                    to[0] = (uint16_t)pair;
                    to[1] = (uint16_t)(pair >> 16);
                }
            }
        }
    }
};

/* --- the block --- */

typedef ring<KV8_PREFILL_ITEM_SLOTS> item_ring;
/* Items pass from the first producer warp to everybody through a few slots, so that producers may
 * be an item ahead of the math; returns the slot's address, 0 when there is no more. */
template <class SHAPE>
__device__ __forceinline__ uint32_t item_barrier(uint32_t shared, int kind) {
    return shared + SHAPE::BARRIERS_AT +
           8 * (4 * SHAPE::NUM_STAGES + KV8_PREFILL_ITEM_SLOTS * kind);
}
template <class SHAPE>
__device__ __forceinline__ void fetch_item(const kv8_prefill_args &a, uint32_t shared,
                                           const item_ring &r) {
    barrier_wait(item_barrier<SHAPE>(shared, 1) + 8 * r.stage(), r.parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
        const int n = atomicAdd(&a.queue->next, 1);
        const bool more = n < a.queue->num_items;
        const uint32_t at = shared + SHAPE::ITEMS_AT + KV8_PREFILL_ITEM_BYTES * r.stage();
#pragma unroll
        for (int i = 0; i < KV8_PREFILL_ITEM_BYTES / 16; i++) {
            uint4 words = make_uint4(~0u, 0, 0, 0); /* request -1: no more */
            if (more) words = ((const uint4 *)(a.items + n))[i];
            store_shared(at + 16 * i, words.x, words.y, words.z, words.w);
        }
        barrier_arrive(item_barrier<SHAPE>(shared, 0) + 8 * r.stage());
    }
    __syncwarp();
}
template <class SHAPE>
__device__ __forceinline__ const kv8_prefill_item *take_item(uint32_t shared, const item_ring &r) {
    barrier_wait(item_barrier<SHAPE>(shared, 0) + 8 * r.stage(), r.parity());
    const kv8_prefill_item *const item = item_slot<SHAPE>(r.stage());
    return item->request < 0 ? 0 : item;
}
template <class SHAPE>
__device__ __forceinline__ void leave_item(uint32_t shared, item_ring &r) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(item_barrier<SHAPE>(shared, 1) + 8 * r.stage());
    r.next();
}

template <class SHAPE>
__device__ __forceinline__ void prefill_block(const kv8_prefill_args &a) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < SHAPE::NUM_STAGES; i++)
            for (int kind = 0; kind < 4; kind++)
                barrier_init(
                    shared + SHAPE::BARRIERS_AT + 8 * (kind * SHAPE::NUM_STAGES + i),
                    (kind % 2 == 0 ? 4 : 4 * SHAPE::NUM_MATH) * (kind < 2 ? SHAPE::K_ARRIVALS : 1));
        for (int i = 0; i < KV8_PREFILL_ITEM_SLOTS; i++) {
            barrier_init(item_barrier<SHAPE>(shared, 0) + 8 * i, 1);
            barrier_init(item_barrier<SHAPE>(shared, 1) + 8 * i, 4 * (SHAPE::NUM_MATH + 1));
        }
        barrier_init_fence();
    }
    __syncthreads();
    item_ring items;
    if (threadIdx.x / 128 == SHAPE::NUM_MATH) {
        registers_give<SHAPE::PRODUCER_REGISTERS>();
        producer<SHAPE> p(a, shared);
        item_ring fetched;
        if (p.warp == 0) fetch_item<SHAPE>(a, shared, fetched);
        for (;;) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == 0) break;
            fetched.next();
            if (p.warp == 0) fetch_item<SHAPE>(a, shared, fetched);
            p.open_item(*item);
            leave_item<SHAPE>(shared, items);
            p.run();
        }
    } else {
        registers_take<SHAPE::MATH_REGISTERS>();
        math_warpgroup<SHAPE> m(a, shared);
        if (m.index == SHAPE::NUM_MATH - 1) m.pass_turn();
        for (;;) {
            const kv8_prefill_item *const item = take_item<SHAPE>(shared, items);
            if (item == 0) break;
            m.run(*item);
            leave_item<SHAPE>(shared, items);
        }
    }
}

#endif
