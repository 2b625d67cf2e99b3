// prefill_mma_tile.cuh - tiles of K and V for mma.sync: pages in, 16-bit tiles out, in shared
// memory, and the fragments read from there.
//
// Every warp brings its share of a tile's keys. A lane owns one key's address and hands it round by
// shuffles, so that any page size and stride is the same code. 16-bit pages land where ldmatrix
// reads them. 8-bit codes land in a place of the lane that asked for them, which widens them once
// for all rows of the block: what the formats are is known at run time alone, so that a kernel
// takes any pair of them. Keys that no row of the item may see are zeros, whatever their slots
// hold.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_nonfinite.cuh"

namespace kv8 {

// One row of prefill_mma_kernels.inc.
template <int HEAD_DIM_, bool IS_BF16_, int ROW_TILES_, int KEYS_, int WARPS_>
struct MmaShape {
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr bool IS_BF16 = IS_BF16_;     // arithmetic of the products
    static constexpr int ROW_TILES = ROW_TILES_;  // of 16 rows in a warp
    static constexpr int KEYS = KEYS_;            // of a tile
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS;
    static constexpr int WARP_ROWS = 16 * ROW_TILES, ROWS = WARPS * WARP_ROWS;
    static constexpr int WARP_KEYS = KEYS / WARPS;  // that a warp brings
    // Rows of 16-byte chunks: of a power of two under a swizzle, else an odd number of them.
    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr bool SWIZZLED = CHUNKS % 8 == 0;
    static constexpr int PITCH = KV8_PREFILL_MMA_PITCH(HEAD_DIM);
    static constexpr int TILE_BYTES = KEYS * PITCH;
    static constexpr int Q_AT = 0;
    static constexpr int K_AT = ROWS * PITCH, V_AT = K_AT + TILE_BYTES;
    // The next tile: 16 bits as K and V, 8 as codes.
    static constexpr int NEXT_AT = V_AT + TILE_BYTES;
    // Behind what the host adds for the next tile.
    static constexpr int SCALE_BYTES = KEYS * 2;
    static_assert(KEYS % 16 == 0 && KV8_PREFILL_TILE_KEYS % KEYS == 0, "whole steps");
    static_assert(WARP_KEYS <= 32 && WARP_KEYS * WARPS == KEYS, "a lane owns a key");

    // Byte offset of a chunk in a tile or in Q.
    __device__ static __forceinline__ int at(int row, int chunk) {
        return row * PITCH + (SWIZZLED ? chunk ^ (row & 7) : chunk) * 16;
    }
    // A lane's address of chunk c becomes that of chunk c + 2 * step, where c < 2.
    __device__ static __forceinline__ uint32_t at_step(uint32_t address, int step) {
        return SWIZZLED ? address ^ (step * 32) : address + step * 32;
    }
};

// --- fragments ---

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void store_chunk(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// --- widening ---

// Of f16, to the arithmetic of the products, times the key's scale.
template <bool IS_BF16, bool SCALED>
__device__ __forceinline__ uint32_t finish_pair(uint32_t pair, __half scale) {
    if constexpr (IS_BF16) {
        const float2 f = __half22float2(*(const __half2 *)&pair);
        const float times = SCALED ? __half2float(scale) : 1.0f;
        return pack_bf16(f.x * times, f.y * times);
    } else {
        if (!SCALED) return pair;
        const __half2 both = __half2half2(scale);
        return multiply_f16(pair, *(const uint32_t *)&both);
    }
}

// A warp's keys of a tile in 16-byte chunks of SIZE bytes a value, 32 chunks a pass. Under the
// swizzle eight lanes take four chunks of each of two rows: widened, they fill all banks.
template <class SHAPE, int SIZE>
struct ChunkWalk {
    static constexpr int IN_ROW = SHAPE::HEAD_DIM * SIZE / 16;
    static constexpr int COUNT = SHAPE::WARP_KEYS * IN_ROW, PASSES = (COUNT + 31) / 32;
    static constexpr bool PAIRED = SIZE == 1 && SHAPE::SWIZZLED;
    int nth, row, chunk;
    __device__ __forceinline__ ChunkWalk(int pass, int lane) {
        nth = 32 * pass + lane;
        const int four = nth / 4, in_two_rows = IN_ROW / 4 * 2;
        row = PAIRED ? four / in_two_rows * 2 + four % 2 : nth / IN_ROW;
        chunk = PAIRED ? four / 2 % (IN_ROW / 4) * 4 + nth % 4 : nth % IN_ROW;
    }
    __device__ __forceinline__ bool inside() const { return COUNT % 32 == 0 || nth < COUNT; }
    static_assert(SHAPE::WARPS * PASSES * 512 <=
                      (SHAPE::KEYS * SHAPE::HEAD_DIM * SIZE + 2047) / 2048 * 2048,
                  "room that the host asks for");
};

// --- a warp's share of the tiles ---

template <class SHAPE>
struct TileLoader {
    // Of one tensor's codes, where both are of 8 bits.
    static constexpr uint32_t RAW_BYTES = SHAPE::WARPS * ChunkWalk<SHAPE, 1>::PASSES * 512;
    const kv8_kernel_args &a;
    uint32_t shared;
    int warp, lane;
    RequestKeys keys;
    ItemView view;
    int plain_from, plain_to;  // tiles of which every row sees every key
    uint32_t item_at;          // in shared memory
    int page, slot;            // of this lane's key of the next tile; UNSEEN where nobody looks
    __half k_scale, v_scale;   // int8: of this lane's key of the tile under way
    bool in_place;             // both formats of 16 bits
    bool together;             // K and V alike but for where they begin
    bool scaled;               // int8 among them
    bool both_e4m3;

    __device__ TileLoader(const kv8_kernel_args &args, uint32_t base)
        : a(args),
          shared(base),
          warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),
          lane(threadIdx.x % 32) {
        const bool k_wide = is_wide(a.k_dtype), v_wide = is_wide(a.v_dtype);
        in_place = k_wide && v_wide;
        together = k_wide == v_wide && a.head_dim == SHAPE::HEAD_DIM &&
                   a.v_head_dim == SHAPE::HEAD_DIM && a.k.stride_page == a.v.stride_page &&
                   a.k.stride_slot == a.v.stride_slot && a.k.stride_head == a.v.stride_head;
        scaled = a.k_dtype == INT8 || a.v_dtype == INT8;
        both_e4m3 = a.k_dtype == E4M3 && a.v_dtype == E4M3;
    }

    __device__ __forceinline__ void open(const kv8_prefill_item &item, const ItemView &v) {
        keys = RequestKeys(a, item);
        view = v;
        plain_from = (item.shared_from + SHAPE::KEYS - 1) / SHAPE::KEYS;
        plain_to = item.shared_to / SHAPE::KEYS;
    }
    __device__ __forceinline__ bool is_plain(int tile) const {
        return tile >= plain_from && tile < plain_to;
    }
    // A range of keys that the item holds.
    __device__ __forceinline__ KeyRange item_keys(uint32_t offset) const {
        const Words<8> keys = load_shared<8>(item_at + offset);
        return {(int)keys.w[0], (int)keys.w[1]};
    }
    // Keys before it are seen by all rows or lie before those that are.
    __device__ __forceinline__ int shared_to() const {
        return item_keys(offsetof(kv8_prefill_item, shared_from)).end;
    }
    // Whether keys that no row sees, whose page may be any number, may lie between those that some
    // do.
    __device__ __forceinline__ bool has_gaps() const {
        short gaps;
        asm volatile("ld.shared.s8 %0, [%1];"
                     : "=h"(gaps)
                     : "r"(item_at + (uint32_t)offsetof(kv8_prefill_item, has_gaps)));
        return gaps != 0;
    }
    // Behind the item: whether pages of keys that it sees are not there.
    __device__ __forceinline__ uint32_t missing_at() const {
        return item_at + KV8_PREFILL_ITEM_BYTES + 12;
    }
    __device__ __forceinline__ bool is_missing() const {
        return a.num_pages != KV8_ANY_PAGES && load_shared<4>(missing_at()).w[0] != 0;
    }
    // Counts them, each warp a share.
    __device__ __forceinline__ void find_missing(const kv8_prefill_item &item) const {
        const int from = max(item.tile_begin * KV8_PREFILL_TILE_KEYS, item.seen_from);
        const int to = min(item.tile_end * KV8_PREFILL_TILE_KEYS, item.seen_to);
        const int count = keys.count_missing(a, view, has_gaps(), from, to, (int)threadIdx.x / 32,
                                             SHAPE::THREADS / 32);
        if (count == 0 || lane != 0) return;
        if (a.bad_pages != nullptr) atomicAdd(a.bad_pages, count);
        store_shared(missing_at(), 1);
    }
    __device__ __forceinline__ void look_up(int tile) {
        const int first = tile * SHAPE::KEYS + warp * SHAPE::WARP_KEYS;
        const int of_warp = lane % SHAPE::WARP_KEYS, key = first + of_warp;
        const int nth = divide(key, a.by_page);
        bool seen = true;
        if (!is_plain(tile)) {
            const KeyRange by_some = item_keys(offsetof(kv8_prefill_item, seen_from));
            uint32_t by_rows = ~0u;
            if (has_gaps()) by_rows = keys.seen_keys(a, view, first);
            seen = key >= by_some.begin && key < by_some.end && (by_rows >> of_warp & 1) != 0;
        }
        slot = key - nth * a.page_size;
        page = seen ? keys.pages[nth] : UNSEEN;
    }
    // Somewhere readable when nobody may see the key.
    __device__ __forceinline__ const uint8_t *row_of(const kv8_kernel_pages &p) const {
        return key_row(p, page_exists(a, page) ? page : 0, slot, view.kv_head);
    }
    __device__ __forceinline__ __half scale_of(const kv8_kernel_pages &p) const {
        if (p.row_scale == nullptr || !page_exists(a, page)) return __ushort_as_half(0);
        return key_scale(p, page, slot, view.kv_head);
    }

    // IN_PLACE: to where ldmatrix reads; else to each lane's own place. WHOLE: every key is seen
    // and V lies beside K, as far from it in the pool and in shared memory as said.
    template <int SIZE, bool IN_PLACE, bool WHOLE>
    __device__ __forceinline__ void copy_chunks(const uint8_t *mine, uint32_t to, uint32_t seen,
                                                int dim, int64_t from_k, uint32_t to_v) const {
        using walk = ChunkWalk<SHAPE, SIZE>;
#pragma unroll
        for (int pass = 0; pass < walk::PASSES; pass++) {
            const walk w(pass, lane);
            const uint8_t *const from =
                (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine, w.row) + 16 * w.chunk;
            const uint32_t at = IN_PLACE ? to + SHAPE::at(warp * SHAPE::WARP_KEYS + w.row, w.chunk)
                                         : to + ((warp * walk::PASSES + pass) * 32 + lane) * 16;
            if (!w.inside()) continue;
            if (WHOLE) {
                copy16(at, from);
                copy16(at + to_v, from + from_k);
            } else {
                copy16_or_zero(at, from, (seen >> w.row & 1) && w.chunk * 16 < dim * SIZE);
            }
        }
    }
    template <int SIZE, bool IN_PLACE>
    __device__ __forceinline__ void copy_rows(const kv8_kernel_pages &p, uint32_t seen, int dim,
                                              uint32_t to) const {
        copy_chunks<SIZE, IN_PLACE, false>(row_of(p), to, seen, dim, 0, 0);
    }
    __device__ __forceinline__ uint32_t raw() const {
        return shared + SHAPE::NEXT_AT;
    }
    __device__ __forceinline__ uint32_t raw_v() const {  // behind K's codes
        using narrow = ChunkWalk<SHAPE, 1>;
        using wide = ChunkWalk<SHAPE, 2>;
        const int k_passes = is_wide(a.k_dtype) ? wide::PASSES : narrow::PASSES;
        return raw() + SHAPE::WARPS * k_passes * 512;
    }
    // Keys that nobody sees among them, or K and V unlike each other.
    __device__ __forceinline__ void copy_part(uint32_t seen, uint32_t tiles) {
        k_scale = scale_of(a.k);
        v_scale = scale_of(a.v);
        if (in_place) {
            copy_rows<2, true>(a.k, seen, a.head_dim, tiles);
            copy_rows<2, true>(a.v, seen, a.v_head_dim, tiles + SHAPE::TILE_BYTES);
            return;
        }
        if (is_wide(a.k_dtype))
            copy_rows<2, false>(a.k, seen, a.head_dim, raw());
        else
            copy_rows<1, false>(a.k, seen, a.head_dim, raw());
        if (is_wide(a.v_dtype))
            copy_rows<2, false>(a.v, seen, a.v_head_dim, raw_v());
        else
            copy_rows<1, false>(a.v, seen, a.v_head_dim, raw_v());
    }
    // Starts the copies of a tile whose pages were looked up, and looks up the next one's. Both
    // formats of 16 bits: into buffer 0 or 1.
    __device__ __forceinline__ void copy(int tile, int buffer) {
        constexpr uint32_t ALL = (uint32_t)((UINT64_C(1) << SHAPE::WARP_KEYS) - 1);
        const uint32_t seen = __ballot_sync(~0u, page_exists(a, page));
        const uint32_t tiles = shared + SHAPE::K_AT + buffer * 2 * SHAPE::TILE_BYTES;
        if ((seen & ALL) != ALL || !together) {
            copy_part(seen, tiles);
        } else {
            const uint8_t *const k = row_of(a.k);
            const int64_t from_k = a.v.data - a.k.data;
            if (in_place)
                copy_chunks<2, true, true>(k, tiles, 0, 0, from_k, SHAPE::TILE_BYTES);
            else
                copy_chunks<1, false, true>(k, raw(), 0, 0, from_k, RAW_BYTES);
            if (scaled) {
                k_scale = scale_of(a.k);
                v_scale = scale_of(a.v);
            }
        }
        copy_commit();
        look_up(tile + 1);
    }

    template <int SIZE>
    __device__ __forceinline__ void read_raw(uint4 *codes, uint32_t raw) const {
        using walk = ChunkWalk<SHAPE, SIZE>;
#pragma unroll
        for (int pass = 0; pass < walk::PASSES; pass++) {
            const Words<16> w =
                load_shared<16>(raw + ((warp * walk::PASSES + pass) * 32 + lane) * 16);
            codes[pass] = make_uint4(w.w[0], w.w[1], w.w[2], w.w[3]);
        }
    }
    // SMALL: 2^-7 as large, for products of codes and scales that would leave f16.
    template <int FORMAT, bool SCALED, bool SMALL = false>
    __device__ __forceinline__ void widen_rows(uint32_t raw, uint32_t to, __half scale) const {
        using walk = ChunkWalk<SHAPE, 1>;
        uint4 codes[walk::PASSES];
        read_raw<1>(codes, raw);
#pragma unroll
        for (int pass = 0; pass < walk::PASSES; pass++) {
            const walk w(pass, lane);
            __half of_row = scale;
            if (SCALED) of_row = __shfl_sync(~0u, scale, w.row);
            const uint32_t words[4] = {codes[pass].x, codes[pass].y, codes[pass].z, codes[pass].w};
            uint32_t wide[8];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                widen_codes<FORMAT>(words[i], wide[2 * i], wide[2 * i + 1]);
                if (SMALL) {
                    wide[2 * i] = multiply_f16(wide[2 * i], 0x20002000u);
                    wide[2 * i + 1] = multiply_f16(wide[2 * i + 1], 0x20002000u);
                }
                wide[2 * i] = finish_pair<SHAPE::IS_BF16, SCALED>(wide[2 * i], of_row);
                wide[2 * i + 1] = finish_pair<SHAPE::IS_BF16, SCALED>(wide[2 * i + 1], of_row);
            }
            if (!w.inside()) continue;
            const int key = warp * SHAPE::WARP_KEYS + w.row;
            store_chunk(to + SHAPE::at(key, 2 * w.chunk), wide[0], wide[1], wide[2], wide[3]);
            store_chunk(to + SHAPE::at(key, 2 * w.chunk + 1), wide[4], wide[5], wide[6], wide[7]);
        }
    }
    // 16-bit rows beside 8-bit ones come the same way.
    __device__ __forceinline__ void move_rows(uint32_t raw, uint32_t to) const {
        using walk = ChunkWalk<SHAPE, 2>;
        uint4 codes[walk::PASSES];
        read_raw<2>(codes, raw);
#pragma unroll
        for (int pass = 0; pass < walk::PASSES; pass++) {
            const walk w(pass, lane);
            if (w.inside())
                store_chunk(to + SHAPE::at(warp * SHAPE::WARP_KEYS + w.row, w.chunk), codes[pass].x,
                            codes[pass].y, codes[pass].z, codes[pass].w);
        }
    }
    // Whether a product of a code and V's scale of one of the warp's keys would leave f16.
    __device__ __forceinline__ bool has_large_scale() const {
        constexpr unsigned short LARGE = 0x6000;  // 512
        return __any_sync(~0u, (__half_as_ushort(v_scale) & 0x7fff) >= LARGE);
    }
    template <bool IS_V>
    __device__ __forceinline__ void widen_as(int dtype, uint32_t raw, uint32_t to) const {
        const __half scale = IS_V ? v_scale : k_scale;
        switch (dtype) {
            case E4M3: widen_rows<E4M3, false>(raw, to, scale); break;
            case E4M3FNUZ: widen_rows<E4M3FNUZ, false>(raw, to, scale); break;
            case E5M2: widen_rows<E5M2, false>(raw, to, scale); break;
            case INT8:
                if (IS_V && !SHAPE::IS_BF16 && has_large_scale())
                    widen_rows<INT8, IS_V, true>(raw, to, scale);
                else
                    widen_rows<INT8, IS_V>(raw, to, scale);
                break;
            default: move_rows(raw, to); break;
        }
    }
    // The codes that this warp asked for, into the tile. K's scales wait for the f32 sums of the
    // products, where one that is not finite makes its key's NaN; V's are rounded into 16 bits with
    // the code. `small`: a byte a warp, whether its keys of V are 2^-7 as large.
    __device__ __forceinline__ void widen(uint32_t k_scales, uint32_t small) const {
        if (both_e4m3) {
            widen_rows<E4M3, false>(raw(), shared + SHAPE::K_AT, k_scale);
            widen_rows<E4M3, false>(raw() + RAW_BYTES, shared + SHAPE::V_AT, v_scale);
            return;
        }
        widen_as<false>(a.k_dtype, raw(), shared + SHAPE::K_AT);
        widen_as<true>(a.v_dtype, raw_v(), shared + SHAPE::V_AT);
        if (a.k_dtype == INT8 && lane < SHAPE::WARP_KEYS) {
            const unsigned short scale = __half_as_ushort(k_scale);
            asm volatile(
                "st.shared.u16 [%0], %1;" ::"r"(k_scales + (warp * SHAPE::WARP_KEYS + lane) * 2),
                "h"((scale & 0x7fff) == 0x7c00 ? (unsigned short)0x7fff : scale)
                : "memory");
        }
        if (a.v_dtype == INT8) {
            const uint32_t is_small = !SHAPE::IS_BF16 && has_large_scale();
            if (lane == 0)
                asm volatile("st.shared.u8 [%0], %1;" ::"r"(small + warp), "r"(is_small)
                             : "memory");
        }
    }
    // Clears what is not finite in the warp's rows of V, of keys that only some rows see; says so
    // at `cleared`.
    __device__ __forceinline__ void clear_values(int tile, uint32_t v, uint32_t cleared) const {
        constexpr uint32_t ALL = (uint32_t)((UINT64_C(1) << SHAPE::WARP_KEYS) - 1);
        if (is_plain(tile)) return;
        const KeyRange by_all = item_keys(offsetof(kv8_prefill_item, shared_from));
        const uint32_t rows = ALL & ~keys_within(tile * SHAPE::KEYS + warp * SHAPE::WARP_KEYS,
                                                 by_all.begin, by_all.end);
        if (rows == 0) return;
        __syncwarp();  // rows that other lanes stored
        if (clear_nonfinite < SHAPE::IS_BF16 ? BF16 : F16,
            SHAPE::CHUNKS > (v + warp * SHAPE::WARP_KEYS * SHAPE::PITCH, SHAPE::PITCH, rows))
            store_shared(cleared, 1);
    }
};

}  // namespace kv8
