// decode_warpgroup_loader.cuh - the copying side of a warp whose team is a warpgroup: as
// decode_loader.cuh, of one head and whole granules, in a third of the instructions.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_loader.cuh"

namespace kv8 {

// WarpgroupLoader copies a warp's granules of a split one after another, each into the next stage
// of its ring.
template <class C>
class WarpgroupLoader {
   public:
    // The granules first, first + step, ..: `count` of them.
    __device__ WarpgroupLoader(const kv8_kernel_args &args, Split &of, uint32_t ring, int head,
                               int of_first, int of_step, int of_count)
        : a(args), split(of), first(of_first), step(of_step), count(of_count) {
        k = lane_of(a.k, head), v = lane_of(a.v, head);
        if constexpr (C::SCALE_BYTES > 0) {
            const kv8_kernel_pages &from = lane() < TOKENS ? a.k : a.v;
            scale_lane = from.row_scale + head * from.scale_stride_head +
                         lane() % TOKENS * from.scale_stride_slot;
            scale_to = ring + C::SCALES + lane() * C::SCALE_PITCH;
        }
        to = ring + C::RK::at(row(), chunk());
        look_up(0);
    }
    // Starts the copies of granule i into the stage at byte `stage`, but with KEYS_AHEAD of V of
    // the granule before into the stage at byte `stage_before`, if there are such; scales come with
    // K. One group of copies, always.
    __device__ __forceinline__ void issue(int i, uint32_t stage, uint32_t stage_before) {
        const Place before = now;
        if (i < count) {
            if (i > 0 && i % 32 == 0) look_up(i);
            now = {__shfl_sync(~0u, pages, i % 32), __shfl_sync(~0u, slots, i % 32)};
            copy_granule(a.k, k, now, i, stage);
            if constexpr (C::SCALE_BYTES > 0) copy_scales(now, i, stage);
            if (!C::KEYS_AHEAD) copy_granule(a.v, v, now, i, stage + C::RK::TILE_BYTES);
        }
        if (C::KEYS_AHEAD && i > 0 && i <= count)
            copy_granule(a.v, v, before, i - 1, stage_before + C::RK::TILE_BYTES);
        copy_commit();
    }
    __device__ void find_gaps() const { kv8::find_gaps<C>(a, split, first, step, count); }

   private:
    // A lane copies 16 bytes of every PASS-th token.
    static constexpr int CHUNKS = C::RK::CHUNKS, PASS = 32 / CHUNKS;
    static_assert(TOKENS % PASS == 0 && C::RK::CHUNKS == C::RV::CHUNKS);
    const kv8_kernel_args &a;
    Split &split;
    const int first, step, count;
    const uint8_t *k, *v;
    const uint16_t *scale_lane;  // int8: lane t has K's token t, lane 16 + t V's
    uint32_t to, scale_to;
    int pages, slots;  // of 32 granules, one a lane; ~slot where a granule is seen in part
    struct Place {
        int page, slot;
    };
    Place now = {UNSEEN, 0};  // of the last granule

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int row() { return lane() / CHUNKS; }
    __device__ static int chunk() { return lane() % CHUNKS; }
    __device__ int token_of(int n) const { return (first + n * step) * TOKENS; }
    __device__ static const uint8_t *lane_of(const kv8_kernel_pages &p, int head) {
        return p.data + head * p.stride_head + row() * p.stride_slot + chunk() * 16;
    }
    __device__ static uint64_t place(const kv8_kernel_pages &p, int page, int slot) {
        return uint64_t(uint32_t(page)) * uint32_t(p.stride_page) +
               uint64_t(uint32_t(slot)) * uint32_t(p.stride_slot);
    }
    // A page that no row of the tile may see is never read.
    __device__ void look_up(int from) {
        const int n = from + lane(), token = token_of(n);
        pages = UNSEEN, slots = ~0;
        if (n >= count || token >= split.any.end || token + TOKENS <= split.any.begin) return;
        if (C::HAS_MASK && may_hide(a, split, token, TOKENS) &&
            !mask_shows(a, split, token, TOKENS))
            return;
        const int index = divide(token, a.by_page);
        slots = token - index * a.page_size;
        if (token < split.any.begin || token + TOKENS > split.any.end) slots = ~slots;
        pages = __ldg(split.pages + index);
    }
    __device__ __forceinline__ void copy_granule(const kv8_kernel_pages &p, const uint8_t *lane_at,
                                                 const Place &at, int i, uint32_t stage) const {
        const bool is_there = page_exists(a, at.page);
        if (is_there && at.slot >= 0)
            copy(p, lane_at + place(p, at.page, at.slot), stage);
        else
            copy_visible(p, lane_at, is_there, at.page, ~at.slot, i, stage);
    }
    // int8: each lane the word that holds its scale.
    __device__ __forceinline__ void copy_scales(const Place &at, int i, uint32_t stage) const {
        if (C::FK != C::FV && (lane() < TOKENS ? C::FK : C::FV) != INT8) return;
        const kv8_kernel_pages &p = lane() < TOKENS ? a.k : a.v;
        const int key = token_of(i) + lane() % TOKENS;
        const bool inside = page_exists(a, at.page) &&
                            (at.slot >= 0 || (key >= split.any.begin && key < split.any.end));
        const int slot = at.slot >= 0 ? at.slot : ~at.slot;
        const uint16_t *const scale = scale_lane +
                                      uint64_t(uint32_t(at.page)) * uint32_t(p.scale_stride_page) +
                                      uint32_t(slot) * uint32_t(p.scale_stride_slot);
        copy4_or_zero(scale_to + stage, word_of(inside ? scale : p.row_scale), inside);
    }
    // Rows PASS apart lie as far apart as whole rows do, those of 128 bytes under two swizzles in
    // turn.
    __device__ static uint32_t turned(uint32_t at, int n) {
        return CHUNKS == 8 ? at ^ n % 2 * 64 : at;
    }
    __device__ __forceinline__ void copy(const kv8_kernel_pages &p, const uint8_t *at,
                                         uint32_t stage) const {
#pragma unroll
        for (int n = 0; n < TOKENS / PASS; n++)
            copy16_once<C::RK::HALF_LINE>(turned(to, n) + stage + n * PASS * C::RK::PITCH,
                                          at + n * PASS * uint32_t(p.stride_slot));
    }
    __device__ __forceinline__ void copy_visible(const kv8_kernel_pages &p, const uint8_t *lane,
                                                 bool is_there, int page, int slot, int i,
                                                 uint32_t stage) const {
#pragma unroll 1
        for (int n = 0; n < TOKENS / PASS; n++) {
            const int key = token_of(i) + n * PASS + row();
            const bool inside = is_there && key >= split.any.begin && key < split.any.end;
            copy16_once_or_zero<C::RK::HALF_LINE>(
                turned(to, n) + stage + n * PASS * C::RK::PITCH,
                inside ? lane + place(p, page, slot) + n * PASS * p.stride_slot : p.data, inside);
        }
    }
};

}  // namespace kv8
