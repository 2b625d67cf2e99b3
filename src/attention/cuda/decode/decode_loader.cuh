// decode_loader.cuh - the copying side of a warp: which granule comes next, and where it lies.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode.cuh"

namespace kv8 {

// Where 32 granules lie, one per lane; or the tokens of one. Page UNSEEN: nobody sees it. Of a
// granule that is seen in part, the slot is ~slot.
struct PageSlot {
    int page, slot;
};

// LaneCopies is what one lane copies of a granule's rows R of K or of V, in passes of a warp: its
// first address in page 0, and how much further each pass goes. HEAD_BYTES of a row are one head's.
template <class R, int HEAD_BYTES, bool GRANULE_PAGES>
class LaneCopies {
   public:
    __device__ LaneCopies(const kv8_kernel_pages &p, int head) {
        first = p.data + head * p.stride_head;
        if constexpr (REGULAR) {
            first += lane() % CHUNKS / OWN_CHUNKS * p.stride_head + lane() % OWN_CHUNKS * 16;
            if constexpr (GRANULE_PAGES) first += lane() / CHUNKS * uint32_t(p.stride_slot);
        } else {
#pragma unroll
            for (int n = 0; n < PASSES; n++) {
                const int index = n * 32 + lane();
                more[n] = index % CHUNKS / OWN_CHUNKS * uint32_t(p.stride_head) +
                          index % CHUNKS % OWN_CHUNKS * 16;
                if constexpr (GRANULE_PAGES) more[n] += index / CHUNKS * uint32_t(p.stride_slot);
            }
        }
    }
    __device__ void hold() {
        first = keep(first);
    }
    __device__ void copy_rows(const kv8_kernel_pages &p, const PageSlot &from,
                              uint32_t stage) const {
        const uint8_t *const at = row_at(p, from);
#pragma unroll
        for (int n = 0; n < PASSES; n++) {
            const int index = n * 32 + lane(), row = index / CHUNKS;
            if (CHUNKS * TOKENS % 32 == 0 || row < TOKENS)
                copy16_once<WIDE>(stage + R::at(row, index % CHUNKS), at + further(p, n));
        }
    }
    // Zeros for tokens outside [begin, end), and for all of them without a page.
    __device__ void copy_visible_rows(const kv8_kernel_pages &p, const PageSlot &from,
                                      bool has_page, int token, KeyRange seen,
                                      uint32_t stage) const {
        const uint8_t *const at = has_page ? row_at(p, from) : p.data;
#pragma unroll
        for (int n = 0; n < PASSES; n++) {
            const int index = n * 32 + lane(), row = index / CHUNKS;
            const bool inside = has_page && token + row >= seen.begin && token + row < seen.end;
            if (CHUNKS * TOKENS % 32 == 0 || row < TOKENS)
                copy16_once_or_zero<WIDE>(stage + R::at(row, index % CHUNKS),
                                          inside ? at + further(p, n) : p.data, inside);
        }
    }
    // The n-th pass over tokens that have pages of their own. Zeros without one: then nothing is
    // read, whatever the address.
    __device__ void copy_token(const kv8_kernel_pages &p, const PageSlot &from, bool has_page,
                               int n, uint32_t stage) const {
        static_assert(REGULAR, "a token begins a row of lanes");
        const int index = n * 32 + lane();
        const uint32_t to = stage + R::at(index / CHUNKS, index % CHUNKS);
        copy16_once_or_zero<WIDE>(to, row_at(p, from), has_page);
    }

   private:
    static constexpr int OWN_CHUNKS = HEAD_BYTES / 16;  // of a head
    static constexpr int CHUNKS = R::CHUNKS, PASSES = (CHUNKS * TOKENS + 31) / 32;
    static constexpr bool REGULAR = 32 % CHUNKS == 0;  // each pass takes whole rows
    static constexpr bool WIDE = R::HALF_LINE;         // rows of whole lines lose 4 % by it
    const uint8_t *first;
    uint32_t more[REGULAR ? 1 : PASSES];

    __device__ static int lane() {
        return threadIdx.x % 32;
    }
    __device__ const uint8_t *row_at(const kv8_kernel_pages &p, const PageSlot &from) const {
        return first + uint64_t(uint32_t(from.page)) * uint32_t(p.stride_page) +
               uint32_t(from.slot) * uint64_t(uint32_t(p.stride_slot));
    }
    // How much further than `first` pass n goes.
    __device__ uint32_t further(const kv8_kernel_pages &p, int n) const {
        if constexpr (!REGULAR)
            return more[n];
        else
            return GRANULE_PAGES ? n * (32 / CHUNKS) * uint32_t(p.stride_slot) : 0;
    }
};

// Marks the split where pages of a warp's granules first, first + step, .. are not there, `count`
// of them, whose keys then have scores of -inf. For runs alone that say how many pages there are;
// by all lanes.
template <class C>
__device__ __forceinline__ void find_gaps(const kv8_kernel_args &a, Split &split, int first,
                                          int step, int count) {
    if (__builtin_expect(a.num_pages == KV8_ANY_PAGES, 1)) return;
    constexpr int SPAN = C::GRANULE_PAGES ? TOKENS : 1, ENTRIES = TOKENS / SPAN;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int n = lane; n - lane < count * ENTRIES; n += 32) {
        const int token = (first + n / ENTRIES * step) * TOKENS + n % ENTRIES * SPAN;
        bool missing = n < count * ENTRIES && token < split.any.end &&
                       token + SPAN > split.any.begin &&
                       !page_exists(a, __ldg(split.pages + divide(token, a.by_page)));
        if (!C::IS_CLUSTER && missing && may_hide(a, split, token, SPAN))
            missing = mask_shows(a, split, token, SPAN);
        const uint32_t lanes = __ballot_sync(~0u, missing);
        if (lanes != 0) mark_gaps(a, split, lanes);
    }
}

// The word that holds a scale.
__device__ inline const void *word_of(const uint16_t *at) {
    return reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t(3));
}

// Loader copies a warp's granules of a split one after another, each into the next stage of its
// ring.
template <class C>
class Loader {
   public:
    // The granules first, first + step, ..: `count` of them.
    __device__ Loader(const kv8_kernel_args &args, Split &split_in, uint32_t ring_in, int head,
                      int first_in, int step_in, int count_in)
        : a(args),
          split(split_in),
          ring(ring_in),
          first(first_in),
          step(step_in),
          count(count_in),
          k(args.k, head),
          v(args.v, head) {
        if constexpr (C::SCALE_BYTES > 0) {
            const kv8_kernel_pages &from = lane() < TOKENS ? a.k : a.v;
            scale_lane = from.row_scale + head * from.scale_stride_head;
            if constexpr (C::GRANULE_PAGES) scale_lane += lane() % TOKENS * from.scale_stride_slot;
        }
    }

    // Looks up where the first granules lie.
    __device__ void look_up_first() {
        look_up(0, now);
        if constexpr (!C::GRANULE_PAGES) look_up(1, next);
    }
    // Of a cluster, in place of look_up_first(): all of it that reads nothing; then, once the page
    // table holds, the page ids that lie where it has entries; then, once the lengths are known to
    // hold, the others.
    __device__ void find_first() {
        first_entry = entry_of(0, now.slot);
        const int64_t at = split.pages - a.table + first_entry;
        const bool is_there = first_entry >= 0 && uint64_t(at) < uint64_t(a.table_entries);
        first_at = keep(is_there ? a.table + at : nullptr);
        now.slot = int(keep(uint32_t(now.slot)));
        k.hold(), v.hold();
        if constexpr (C::SCALE_BYTES > 0) scale_lane = keep(scale_lane);
    }
    __device__ void load_first() { now.page = first_at != nullptr ? load_fresh(first_at) : UNSEEN; }
    __device__ void load_others() {
        if (first_entry >= 0 && first_at == nullptr) now.page = __ldg(split.pages + first_entry);
    }

    // Starts the copies of the next granule, if there is one. One group of copies, always: a
    // granule is here once STAGES - 2 groups have followed its own.
    __device__ void issue() {
        if (i < count) {
            if (C::GRANULE_PAGES && i > 0 && i % 32 == 0) look_up(i / 32, now);
            if (!C::GRANULE_PAGES && i > 0) now = next, look_up(i + 1, next);
            fetch();
            i++;
            to = to + 1 == C::STAGES ? 0 : to + 1;
        }
        copy_commit();
    }
    __device__ void find_gaps() const { kv8::find_gaps<C>(a, split, first, step, count); }
    // As many as the ring takes.
    __device__ void fill() {
#pragma unroll 1
        for (int i = 0; i < C::STAGES - 1; i++) issue();
    }

   private:
    const kv8_kernel_args &a;
    Split &split;
    const uint32_t ring;
    const int first, step, count;
    int i = 0;           // the next granule
    int to = 0;          // its stage
    PageSlot now, next;  // tokens are looked up one granule ahead
    int first_entry;     // of find_first(): of the lane's first granule
    const int32_t *first_at;
    LaneCopies<typename C::RK, C::K::BYTES, C::GRANULE_PAGES> k;
    LaneCopies<typename C::RV, C::V::BYTES, C::GRANULE_PAGES> v;
    const uint16_t *scale_lane;  // int8: lane t has K's token t, lane 16 + t V's

    __device__ static int lane() {
        return threadIdx.x % 32;
    }
    __device__ int token_of(int granule) const {
        return (first + granule * step) * TOKENS;
    }

    // The page table's entry of the lane's part of a batch, and its slot in that page. -1: no row
    // of the tile may see it, and its page is never read.
    __device__ int entry_of(int batch, int &slot) const {
        constexpr int SPAN = C::GRANULE_PAGES ? TOKENS : 1;  // tokens of an entry
        const int n = C::GRANULE_PAGES ? batch * 32 + lane() : batch;
        const int token = token_of(n) + (C::GRANULE_PAGES ? 0 : lane() % TOKENS);
        slot = 0;
        if (n >= count) return -1;
        if (token >= split.any.end || token + SPAN <= split.any.begin) return -1;
        if (!C::IS_CLUSTER && may_hide(a, split, token, SPAN) && !mask_shows(a, split, token, SPAN))
            return -1;
        const int index = divide(token, a.by_page);
        slot = token - index * a.page_size;
        if (token < split.any.begin || token + SPAN > split.any.end) slot = ~slot;
        return index;
    }
    __device__ void look_up(int batch, PageSlot &place) const {
        place = {UNSEEN, 0};
        int slot;
        const int entry = entry_of(batch, slot);
        if (entry >= 0) place = {__ldg(split.pages + entry), slot};
    }
    // Whether rows of the lane's operand, K or V, have scales.
    __device__ static bool has_scales() {
        return C::FK == C::FV || (lane() < TOKENS ? C::FK : C::FV) == INT8;
    }

    __device__ void fetch() const {
        const uint32_t stage = ring + to * C::STAGE_BYTES;
        if constexpr (C::GRANULE_PAGES)
            fetch_granule(stage);
        else
            fetch_tokens(stage);
    }
    __device__ void fetch_granule(uint32_t stage) const {
        const uint32_t values = stage + C::RK::TILE_BYTES;
        PageSlot from = {__shfl_sync(~0u, now.page, i % 32), __shfl_sync(~0u, now.slot, i % 32)};
        const bool has_page = page_exists(a, from.page);
        if (has_page && from.slot >= 0) {
            k.copy_rows(a.k, from, stage);
            v.copy_rows(a.v, from, values);
            if constexpr (C::SCALE_BYTES > 0) copy_granule_scales(from, true, stage + C::SCALES);
            return;
        }
        from.slot = from.slot < 0 ? ~from.slot : from.slot;
        const int token = token_of(i), t = token + lane() % TOKENS;
        k.copy_visible_rows(a.k, from, has_page, token, split.any, stage);
        v.copy_visible_rows(a.v, from, has_page, token, split.any, values);
        if constexpr (C::SCALE_BYTES > 0)
            copy_granule_scales(from, has_page && t >= split.any.begin && t < split.any.end,
                                stage + C::SCALES);
    }
    // A token's place is looked up by one lane and shared once, for K and V.
    __device__ void fetch_tokens(uint32_t stage) const {
        static_assert(C::RK::CHUNKS == C::RV::CHUNKS);
        constexpr int PASSES = C::RK::CHUNKS * TOKENS / 32;
#pragma unroll
        for (int n = 0; n < PASSES; n++) {
            const int row = (n * 32 + lane()) / C::RK::CHUNKS;
            const PageSlot from = {__shfl_sync(~0u, now.page, row),
                                   __shfl_sync(~0u, now.slot, row)};
            const bool has_page = page_exists(a, from.page);
            k.copy_token(a.k, from, has_page, n, stage);
            v.copy_token(a.v, from, has_page, n, stage + C::RK::TILE_BYTES);
        }
        if constexpr (C::SCALE_BYTES > 0) copy_token_scale(now, stage + C::SCALES);
    }

    // int8: lane t copies the word that holds the scale of K's token t, lane 16 + t of V's.
    __device__ void copy_granule_scales(const PageSlot &from, bool inside,
                                        uint32_t to_words) const {
        if (!has_scales()) return;
        const kv8_kernel_pages &p = lane() < TOKENS ? a.k : a.v;
        const uint16_t *const at = scale_lane +
                                   uint64_t(uint32_t(from.page)) * uint32_t(p.scale_stride_page) +
                                   uint32_t(from.slot) * uint32_t(p.scale_stride_slot);
#pragma unroll
        for (int h = 0; h < C::HEADS; h++)
            copy4_or_zero(to_words + h * C::HEAD_SCALES + lane() * 4,
                          word_of(inside ? at + h * p.scale_stride_head : p.row_scale), inside);
    }
    __device__ void copy_token_scale(const PageSlot &place, uint32_t to_words) const {
        if (!has_scales()) return;
        const kv8_kernel_pages &p = lane() < TOKENS ? a.k : a.v;
        const bool inside = page_exists(a, place.page);
        const uint16_t *const at = inside ? scale_lane + place.page * p.scale_stride_page +
                                                place.slot * p.scale_stride_slot
                                          : p.row_scale;
        static_assert(C::HEADS == 1);
        copy4_or_zero(to_words + lane() * 8, word_of(at), inside);
        store_shared(to_words + lane() * 8 + 4, uint32_t(reinterpret_cast<uintptr_t>(at) & 2) * 8);
    }
};

}  // namespace kv8
