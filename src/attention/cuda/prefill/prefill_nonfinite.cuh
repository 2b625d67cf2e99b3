// prefill_nonfinite.cuh - values of V that are not finite, beside the products.
//
// 0 times NaN is NaN: P V would bring what V holds at one key to rows that do not see it. So a
// loader clears such values of keys that only some rows of an item see, and says that it did. And
// where P is 0 only because its format ends, an infinity must still come out. What is right at a
// row and a dimension needs no weights: it is the sum of the visible values that are not finite.
// It is written over the results when the item's rows are finished: the block's warps search V
// together, a share of the keys each, and then every warp looks closer, for its own rows, at the
// few keys that were found.
//
// Scores need nothing of this: hidden ones are set aside before their exponentials, and NaN in a
// visible one makes the row's maximum, sum and results NaN.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_item.cuh"

namespace kv8 {

__device__ __forceinline__ float quad_max_nan(float x) {
    x = max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return max_nan(x, __shfl_xor_sync(~0u, x, 2));
}

// Whether a format has codes that are infinite.
__host__ __device__ constexpr bool has_infinities(int dtype) {
    return dtype == F16 || dtype == BF16 || dtype == E5M2;
}

// How to tell the values of a word that are not finite: exponents of ones (e4m3: and mantissas)
// carry into the sign bits. NaN of e4m3fnuz is the code of -0: the complement of e4m3's, negative.
// Codes of int8 are numbers, whatever their scale is.
struct NonfiniteTest {
    uint32_t flip, exponent, carry, sign, positive;
};
__host__ __device__ constexpr NonfiniteTest nonfinite_test(int dtype) {
    return dtype == F16        ? NonfiniteTest{0, 0x7c007c00u, 0x04000400u, 0x80008000u, ~0u}
           : dtype == BF16     ? NonfiniteTest{0, 0x7f807f80u, 0x00800080u, 0x80008000u, ~0u}
           : dtype == E4M3     ? NonfiniteTest{0, 0x7f7f7f7fu, 0x01010101u, 0x80808080u, ~0u}
           : dtype == E4M3FNUZ ? NonfiniteTest{~0u, 0x7f7f7f7fu, 0x01010101u, 0x80808080u, 0}
           : dtype == E5M2     ? NonfiniteTest{0, 0x7c7c7c7cu, 0x04040404u, 0x80808080u, ~0u}
                               : NonfiniteTest{0, 0, 0, 0, 0};
}
// The sign bits of a word's values that are not finite.
__device__ __forceinline__ uint32_t nonfinite_signs(const NonfiniteTest &t, uint32_t w) {
    return (((w ^ t.flip) & t.exponent) + t.carry) & t.sign & (w | t.positive);
}
// A word without its values at these sign bits.
template <int FORMAT>
__device__ __forceinline__ uint32_t without(uint32_t w, uint32_t signs) {
    return w & ~(size_of((Format)FORMAT) == 2 ? (signs >> 15) * 0xffffu : (signs >> 7) * 0xffu);
}

// By a warp, in shared memory: clears what is not finite of those of 32 rows that `rows` has bits
// for, CHUNKS times 16 bytes each, `pitch` bytes apart. Whether there was anything.
template <int FORMAT, int CHUNKS>
__device__ __forceinline__ bool clear_nonfinite(uint32_t at, uint32_t pitch, uint32_t rows) {
    bool any = false;
#pragma unroll 2
    for (int i = threadIdx.x % 32; i < 32 * CHUNKS; i += 32) {
        const int row = i / CHUNKS;
        if (!(rows >> row & 1)) continue;
        const uint32_t chunk = at + row * pitch + i % CHUNKS * 16;
        uint32_t w[4], signs[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(chunk)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) signs[j] = nonfinite_signs(nonfinite_test(FORMAT), w[j]);
        if ((signs[0] | signs[1] | signs[2] | signs[3]) == 0) continue;
        any = true;
#pragma unroll
        for (int j = 0; j < 4; j++) store_shared(chunk + 4 * j, without<FORMAT>(w[j], signs[j]));
    }
    return any;
}

// --- the walk over V ---

// Of a row, a bit a dimension: where visible values are +infinity or NaN, and -infinity or NaN.
template <int WORDS>
struct NonfiniteDims {
    uint32_t plus[WORDS], minus[WORDS];
};

// Of a key: its rows of K and V, and V's scale.
struct KeyPlace {
    const uint8_t *k, *v;
    float v_scale;
};

// The warps that search an item's V together, and where they leave what they find: in shared
// memory, a word with a bit a key.
template <int NUM_WARPS_, int BARRIER>
struct NonfiniteSearch {
    enum { NUM_WARPS = NUM_WARPS_, WORDS = 512, BYTES = 4 * WORDS };
    uint32_t words_at;
    int warp;

    // sync() waits twice: across one such barrier racecheck reports hazards among the words.
    static __device__ __forceinline__ void sync() {
        named_barrier_sync(BARRIER, 32 * NUM_WARPS);
        __threadfence_block();
        named_barrier_sync(BARRIER, 32 * NUM_WARPS);
    }
    __device__ __forceinline__ uint32_t word(int i) const {
        uint32_t x;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(words_at + 4 * i) : "memory");
        return x;
    }
    __device__ __forceinline__ void set_word(int i, uint32_t x) const {
        store_shared(words_at + 4 * i, x);
    }
};

// One warp and up to 32 packed rows of an item, of which lane i looks after the i-th. WORDS: of 32
// dimensions. k_format and v_format: as in args, constants where a kernel has them.
template <int WORDS>
struct NonfiniteWalk {
    const kv8_kernel_args &a;
    const kv8_prefill_item &item;
    const ItemView v;
    const RequestKeys keys;
    const int k_format, v_format, v_head_dim, first_row, lane;
    const uint32_t rows;  // that are looked after
    int query, begin,
        end;  // of this lane's row: the keys it sees, none where it is not looked after
    NonfiniteDims<WORDS> found;

    __device__ __forceinline__ NonfiniteWalk(const kv8_kernel_args &args,
                                             const kv8_prefill_item &of_item, int k_dtype,
                                             int v_dtype, int v_dims, int first, uint32_t row_bits)
        : a(args),
          item(of_item),
          v(view_item(args, of_item)),
          keys(args, of_item),
          k_format(k_dtype),
          v_format(v_dtype),
          v_head_dim(v_dims),
          first_row(first),
          lane(threadIdx.x % 32),
          rows(row_bits) {
        const bool mine = rows >> lane & 1;
        query = mine ? query_of(a, v.row_begin + first_row + lane) : 0;
        begin = mine ? row_begin(a, v, query) : 0;
        end = mine ? row_end(a, v, query) : 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) found.plus[i] = found.minus[i] = 0;
    }

    // Of `seen` keys from `base` on, those that the mask leaves to a query.
    __device__ __forceinline__ uint32_t unmasked(uint32_t seen, int of_query, int base) const {
        if (keys.mask == nullptr) return seen;
        for (uint32_t left = seen; left != 0; left &= left - 1) {
            const int i = __ffs(left) - 1;
            if (!keys.mask_has(of_query, base + i)) seen &= ~(1u << i);
        }
        return seen;
    }
    // Of the 32 keys from `base` on, those that this lane's row sees.
    __device__ __forceinline__ uint32_t seen_keys(int base) const {
        return unmasked(keys_within(base, begin, end), query, base);
    }
    // Those that some row of the item sees: others' pages may be none.
    __device__ __forceinline__ uint32_t item_keys(int base) const {
        if (keys.mask == nullptr && !item.has_gaps)
            return keys_within(base, item.seen_from, item.seen_to);
        uint32_t seen = 0;
        const int last = last_query(a, v);
        for (int of_row = first_query(a, v) + lane; of_row <= last; of_row += 32) {
            const uint32_t range =
                keys_within(base, row_begin(a, v, of_row), row_end(a, v, of_row));
            seen |= unmasked(range, of_row, base);
        }
        return __reduce_or_sync(~0u, seen);
    }
    // False where the key's page is not there.
    __device__ __forceinline__ bool has_page(int key) const {
        return page_exists(a, keys.pages[divide(key, a.by_page)]);
    }
    __device__ __forceinline__ KeyPlace find(int key) const {
        const int nth = divide(key, a.by_page);
        const int page = keys.pages[nth], slot = key - nth * a.page_size;
        const float scale =
            v_format == INT8 ? __half2float(key_scale(a.v, page, slot, v.kv_head)) : 1.0f;
        return {key_row(a.k, page, slot, v.kv_head), key_row(a.v, page, slot, v.kv_head), scale};
    }
    // Of the 32 keys, one a lane, those that `seen` has bits for and whose V is not finite.
    __device__ __forceinline__ uint32_t sick_keys_of(const KeyPlace &mine, uint32_t seen) const {
        if (v_format == INT8)
            return __ballot_sync(~0u, (seen >> lane & 1) && !isfinite(mine.v_scale));
        const int chunks = v_head_dim * size_of((Format)v_format) / 16;
        const NonfiniteTest test = nonfinite_test(v_format);
        uint32_t sick = 0;
#pragma unroll 4
        for (int i = 0; i < chunks; i++) {
            const int at = 32 * i + lane, key = at / chunks;
            const uint8_t *const row =
                (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.v, key);
            if (!(seen >> key & 1)) continue;
            const uint4 w = *(const uint4 *)(row + at % chunks * 16);
            if ((nonfinite_signs(test, w.x) | nonfinite_signs(test, w.y) |
                 nonfinite_signs(test, w.z) | nonfinite_signs(test, w.w)) != 0)
                sick |= 1u << key;
        }
        return __reduce_or_sync(~0u, sick);
    }
    // Rows whose score of a key is -infinity, for K holds infinities: its weight is 0, and 0 times
    // what V holds is NaN.
    __device__ __forceinline__ uint32_t weightless_rows(const uint8_t *k, uint32_t seers) const {
        if (a.soft_cap > 0 || !has_infinities(k_format)) return 0;
        bool sick = false;
#pragma unroll 1
        for (int d = lane; d < a.head_dim; d += 32) sick |= !isfinite(value_of(k_format, k, d));
        if (!__any_sync(~0u, sick)) return 0;
        uint32_t weightless = 0;
        for (; seers != 0; seers &= seers - 1) {
            const int row = __ffs(seers) - 1;
            const RowPlace place = place_of(a, v, first_row + row);
            const int64_t at =
                (int64_t)(v.q_begin + place.query) * a.q_stride_row + place.head * a.q_stride_head;
            const uint8_t *const q = (const uint8_t *)a.q + at * (a.q_dtype == E4M3 ? 1 : 2);
            float score = 0;
#pragma unroll 1
            for (int d = lane; d < a.head_dim; d += 32)
                score += value_of(a.q_dtype, q, d) * value_of(k_format, k, d);
#pragma unroll
            for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
            score *= a.score_scale * k_scale_of(a, v);
            if (a.q_dtype == E4M3) score *= q_scale_of(a, v, place.query, place.head);
            if (score == -INFINITY) weightless |= 1u << row;
        }
        return weightless;
    }
    // A key whose V is not finite, for the rows that see it.
    __device__ __forceinline__ void add_key(const KeyPlace &key, uint32_t seers) {
        const bool seen = seers >> lane & 1;
        const bool weightless = weightless_rows(key.k, seers) >> lane & 1;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int d = 32 * i + lane;
            const float x = d < v_head_dim ? value_of(v_format, key.v, d) * key.v_scale : 0.0f;
            const uint32_t plus = __ballot_sync(~0u, isnan(x) || x == INFINITY);
            const uint32_t minus = __ballot_sync(~0u, isnan(x) || x == -INFINITY);
            if (!seen) continue;
            found.plus[i] |= weightless ? plus | minus : plus;
            found.minus[i] |= weightless ? plus | minus : minus;
        }
    }
    // Whether every dimension of this lane's row is NaN already.
    __device__ __forceinline__ bool settled() const {
        bool all = true;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int left = v_head_dim - 32 * i;
            const uint32_t dims = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0u;
            all = all && (~(found.plus[i] & found.minus[i]) & dims) == 0;
        }
        return all;
    }
    // Of the 32 keys from `base` on, before `last`, those that the item sees, that are there, and
    // whose V is not finite.
    __device__ __forceinline__ uint32_t sick_keys(int base, int last) const {
        uint32_t seen = item_keys(base) & keys_within(base, base, last);
        seen &= __ballot_sync(~0u, (seen >> lane & 1) && has_page(base + lane));
        KeyPlace mine = {a.k.data, a.v.data, 1.0f};
        if (seen >> lane & 1) mine = find(base + lane);
        return sick_keys_of(mine, seen);
    }
    __device__ __forceinline__ void add_keys(int base, uint32_t sick) {
        const uint32_t seen = seen_keys(base);
        KeyPlace mine = {a.k.data, a.v.data, 1.0f};
        if (sick >> lane & 1) mine = find(base + lane);
        for (; sick != 0; sick &= sick - 1) {
            const int i = __ffs(sick) - 1;
            const uint32_t seers = __ballot_sync(~0u, seen >> i & 1);
            if (seers == 0) continue;
            const KeyPlace key = {(const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.k, i),
                                  (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.v, i),
                                  __shfl_sync(~0u, mine.v_scale, i)};
            add_key(key, seers);
        }
    }
    // Keys [base, last), as many as there are words: loads of a few times 32 are under way at once.
    template <class SEARCH>
    __device__ __forceinline__ void find_sick(const SEARCH &with, int base, int last) const {
        enum { AT_ONCE = 2 };
        for (int i = AT_ONCE * with.warp; i < with.WORDS && base + 32 * i < last;
             i += AT_ONCE * with.NUM_WARPS) {
            uint32_t sick[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) sick[j] = sick_keys(base + 32 * (i + j), last);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (lane == 0) with.set_word(i + j, sick[j]);
        }
    }
    template <class SEARCH>
    __device__ __forceinline__ void add_sick(const SEARCH &with, int base, int last) {
        for (int i = 0; i < with.WORDS && base + 32 * i < last; i += 32) {
            const uint32_t sick = base + 32 * (i + lane) < last ? with.word(i + lane) : 0;
            for (uint32_t some = __ballot_sync(~0u, sick != 0); some != 0; some &= some - 1) {
                if (__all_sync(~0u, begin >= end || settled())) return;
                const int j = __ffs(some) - 1;
                add_keys(base + 32 * (i + j), __shfl_sync(~0u, sick, j));
            }
        }
    }
    // Keys [first, last), by all warps of the search.
    template <class SEARCH>
    __device__ __forceinline__ void walk(const SEARCH &with, int first, int last) {
        for (int base = first; base < last; base += 32 * with.WORDS) {
            with.sync();  // all have read the words before
            find_sick(with, base, last);
            with.sync();
            add_sick(with, base, last);
        }
    }
    __device__ __forceinline__ void write() const {
        const float v_scale = v_scale_of(a, v);
        for (uint32_t left = rows; left != 0; left &= left - 1) {
            const int row = __ffs(left) - 1;
            const int64_t o = place_of(a, v, first_row + row).o;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const uint32_t plus = __shfl_sync(~0u, found.plus[i], row);
                const uint32_t minus = __shfl_sync(~0u, found.minus[i], row);
                if (!((plus | minus) >> lane & 1)) continue;
                const float x = (plus & minus) >> lane & 1 ? NAN
                                : plus >> lane & 1         ? INFINITY
                                                           : -INFINITY;
                store_one(a, o + 32 * i + lane, x * v_scale);
            }
        }
    }
};

// By all warps of the search, over the results of an item: each warp's of rows first_row + i of
// which `rows` has bit i, those whose sums are finite, and whose results are not 0 by definition.
// K_FORMAT and V_FORMAT: of a kernel that takes one, where V has 32 * WORDS dimensions; ANY: as in
// args.
constexpr int ANY = 0;
template <int WORDS, int K_FORMAT, int V_FORMAT, class SEARCH>
__device__ __noinline__ void write_nonfinite(const kv8_kernel_args &a, const kv8_prefill_item &item,
                                             const SEARCH &with, int first_row, uint32_t rows) {
    const int k_format = K_FORMAT == ANY ? a.k_dtype : K_FORMAT;
    const int v_format = V_FORMAT == ANY ? a.v_dtype : V_FORMAT;
    const int v_head_dim = V_FORMAT == ANY ? a.v_head_dim : 32 * WORDS;
    NonfiniteWalk<WORDS> walk(a, item, k_format, v_format, v_head_dim, first_row, rows);
    // NaN alone: what all rows see is in their results.
    const bool all = has_infinities(v_format) || v_format == INT8 || walk.keys.mask != nullptr;
    const int until = all ? item.seen_to : min(item.shared_from, item.seen_to);
    const int from = max(until, max(item.seen_from, max(item.shared_from, item.shared_to)));
#pragma unroll 1
    for (int part = 0; part < 2; part++)
        walk.walk(with, part == 0 ? item.seen_from : from, part == 0 ? until : item.seen_to);
    walk.write();
}

}  // namespace kv8
