// decode_wide_loader.cuh - the loading side of decode_wide.cuh: codes of K and V to registers, and
// widened to shared memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_mainloop.cuh"

namespace kv8 {

// The keys of a block: KEYS at a time, those of a warpgroup WARPGROUPS apart.
struct WideKeys {
    KeyRange any, all;  // that some row, that all rows see
    int base;           // the first key of step 0
    int step_begin, step_end;
};

// Mask bits of a block's keys, as far as the windows leave them, 32 keys a word: of each query
// token, and of those that some token and that all see.
template <class C, bool HAS_MASK = C::HAS_MASK>
struct WideMask {
    __device__ __forceinline__ void start(const kv8_kernel_args &) {}
    __device__ __forceinline__ void find(const kv8_kernel_args &, const Request &, WideKeys &) {}
    __device__ __forceinline__ bool shows(const WideKeys &, int) const { return true; }
};
template <class C>
struct WideMask<C, true> {
    static constexpr int MOST_WORDS = C::MAX_BLOCK_KEYS / 32, SEEN_WORDS = C::MASK_BYTES / 4;
    uint32_t any[MOST_WORDS], all[MOST_WORDS];
    uint32_t seen[SEEN_WORDS];  // [tokens][words]
    int64_t request_at;         // where the request's bits begin

    __device__ static int first_key(const WideKeys &keys) {
        return keys.base + keys.step_begin * C::KEYS;
    }
    __device__ static int num_words(const WideKeys &keys) {
        return min((keys.step_end - keys.step_begin) * (C::KEYS / 32), MOST_WORDS);
    }
    // Before lengths are known, and a barrier: where the bits begin is on its way beside them.
    __device__ __forceinline__ void start(const kv8_kernel_args &a) {
        if (threadIdx.x == C::THREADS - 1) request_at = a.mask_indptr[0];
        if (threadIdx.x < MOST_WORDS) any[threadIdx.x] = 0, all[threadIdx.x] = ~0u;
    }
    // By the block: ends keys.all at the first that is hidden from a row. Lengths within the plan's
    // give a block no more than there is room for.
    __device__ __forceinline__ void find(const kv8_kernel_args &a, const Request &r,
                                         WideKeys &keys) {
        static_assert(MOST_WORDS <= C::THREADS);
        constexpr int AT_ONCE = 16;  // words of a token
        const int words = num_words(keys), lane = threadIdx.x % 32;
        const uint8_t *const bits = a.mask_bits + request_at;
#pragma unroll 1
        for (int token = threadIdx.x / AT_ONCE; token < r.qo_len; token += C::THREADS / AT_ONCE) {
            const KeyRange range = visible_keys(a, r, token);
#pragma unroll 1
            for (int i = threadIdx.x % AT_ONCE; i < words; i += AT_ONCE) {
                const int key = first_key(keys) + 32 * i, at = token * words + i;
                const uint32_t own = mask_word(bits, r.kv_len, token, key) &
                                     keys_within(key, range.begin, range.end);
                if (at < SEEN_WORDS) seen[at] = own;
                atomicOr(any + i, own);
                atomicAnd(all + i, own);
            }
        }
        __syncthreads();
        int hidden = keys.all.end;
#pragma unroll 1
        for (int i = lane; i < words; i += 32) {
            const int key = first_key(keys) + 32 * i;
            const uint32_t gone = ~all[i] & keys_within(key, keys.all.begin, hidden);
            if (gone != 0) hidden = min(hidden, key + __ffs(gone) - 1);
        }
        keys.all.end = __reduce_min_sync(~0u, hidden);
    }
    // Whether a token sees a key: a page that none sees is never read. Behind the block's keys
    // none.
    __device__ __forceinline__ bool shows(const WideKeys &keys, int key) const {
        const int at = key - first_key(keys);
        return at < 32 * num_words(keys) && (any[at / 32] >> at % 32 & 1) != 0;
    }
    // Of 32 keys of the block, from `key`, a multiple of 32, on, those that a token sees.
    __device__ __forceinline__ uint32_t seen_keys(const WideKeys &keys, int token, int key) const {
        return seen[token * num_words(keys) + (key - first_key(keys)) / 32];
    }
};

// 16 bytes that are read once, with what lies beside them ahead of its use; zeros unless they are
// there.
__device__ __forceinline__ uint4 load_codes(const uint8_t *from, bool is_there) {
    uint4 x;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "l"(from), "r"(uint32_t(is_there))
        : "memory");
    return x;
}
__device__ __forceinline__ void store_shared_16(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// WideLoader is one thread's part of a warpgroup's steps: 16 codes of K and of V of every 32nd key,
// looked up two steps and on their way one step before they are widened.
template <class C>
class WideLoader {
   public:
    __device__ WideLoader(const kv8_kernel_args &args, const WideKeys &of,
                          const WideMask<C> &of_mask, const int32_t *of_pages, int head,
                          int first_key)
        : a(args),
          keys(of),
          mask(of_mask),
          pages(of_pages),
          row(threadIdx.x % 128 / CHUNKS),
          chunk(threadIdx.x % CHUNKS),
          next_key(first_key + row) {
        k = a.k.data + head * a.k.stride_head + chunk * 16;
        v = a.v.data + head * a.v.stride_head + chunk * 16;
        look_up();
    }
    // Asks for the codes of the next step, and for the pages of the one after.
    __device__ __forceinline__ void fetch() {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bool is_there = page_exists(a, page[i]) && mask.shows(keys, next_key + 32 * i);
            k_codes[i] = load_codes(k + place(a.k, i), is_there);
            v_codes[i] = load_codes(v + place(a.v, i), is_there);
        }
        next_key += C::WARPGROUPS * C::KEYS;
        look_up();
    }
    // The codes that have come, into shared memory, in 16 bits.
    __device__ __forceinline__ void widen(uint32_t to) const {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            store_row(to + i * (32 * 2 * C::DIM), k_codes[i]);
            store_row(to + i * (32 * 2 * C::DIM) + C::STEP_BYTES, v_codes[i]);
        }
    }
    // Takes what is NaN out of V, and says where it was: true if anywhere.
    __device__ __forceinline__ bool clear_nan(uint16_t (*sick)[C::DIM / 16]) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const uint32_t bits = take_nan(v_codes[i].x) | take_nan(v_codes[i].y) << 4 |
                                  take_nan(v_codes[i].z) << 8 | take_nan(v_codes[i].w) << 12;
            sick[32 * i + row][chunk] = uint16_t(bits);
            any |= bits != 0;
        }
        return any;
    }

   private:
    static constexpr int CHUNKS = C::DIM / 16, ROWS = C::KEYS / 32;
    static_assert(CHUNKS * 16 == C::DIM && 128 / CHUNKS == 32);
    const kv8_kernel_args &a;
    const WideKeys &keys;
    const WideMask<C> &mask;
    const int32_t *const pages;
    const int row, chunk;
    const uint8_t *k, *v;
    int next_key, page[ROWS], slot[ROWS];
    uint4 k_codes[ROWS], v_codes[ROWS];

    __device__ __forceinline__ uint64_t place(const kv8_kernel_pages &p, int i) const {
        return uint64_t(uint32_t(page[i])) * uint32_t(p.stride_page) +
               uint64_t(uint32_t(slot[i])) * uint32_t(p.stride_slot);
    }
    __device__ __forceinline__ void look_up() {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int key = next_key + 32 * i, index = divide(key, a.by_page);
            page[i] = UNSEEN;
            slot[i] = key - index * a.page_size;
            if (key >= keys.any.begin && key < keys.any.end) page[i] = __ldg(pages + index);
        }
    }
    __device__ __forceinline__ void store_row(uint32_t to, const uint4 &codes) const {
        const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 2; i++) widen4_key<C::F>(w[2 * half + i], x[2 * i], x[2 * i + 1]);
            store_shared_16(to + row * 128 + ((2 * chunk + half) ^ row % 8) * 16, x);
        }
    }
    // Four codes of e4m3: those that are NaN become 0; a bit each.
    __device__ static __forceinline__ uint32_t take_nan(uint32_t &codes) {
        static_assert(C::F == E4M3);
        const uint32_t signs = nan_signs(codes);
        codes &= ~((signs >> 7) * 0xffu);
        return (signs >> 7) * 0x10204080u >> 28;
    }
};

}  // namespace kv8
