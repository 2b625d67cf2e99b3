// prefill_broken.cuh - rows of which V may not be finite: noted as their items end, and resolved
// when the block has no more items. Not before: a search of V takes all consumer warps, and
// registers that products under way have none left of.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_nonfinite.cuh"
#include "prefill_queue.cuh"

namespace kv8 {

__device__ __forceinline__ uint32_t exchange_shared(uint32_t address, uint32_t x) {
    uint32_t before;
    asm volatile("atom.shared.exch.b32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(address), "r"(x)
                 : "memory");
    return before;
}

// By every consumer warp, of the item in a slot: bits of its rows. The first that has any puts the
// item into the block's list.
template <class SHAPE>
__device__ __forceinline__ void note_broken(const kv8_kernel_args &a, uint32_t shared, int slot,
                                            uint32_t rows) {
    static_assert(4 * SHAPE::NUM_CONSUMERS <= KV8_PREFILL_MAX_WARPS, "a place for every warp");
    if (!elected()) return;
    const uint32_t at = item_address<SHAPE>(shared, slot);
    const uint32_t n = load_word(at + offsetof(ItemSlot, number));
    kv8_prefill_broken *const entry = a.prefill.broken + n;
    entry->rows[threadIdx.x / 32] = (uint16_t)rows;
    if (rows == 0 || exchange_shared(at + offsetof(ItemSlot, listed), 1) != 0) return;
    entry->next = exchange_shared(shared + SHAPE::BROKEN_AT, n + 1);
}

// By all consumer warps, which have ended all items of the block: nobody needs the tiles.
template <class SHAPE>
__device__ __noinline__ void resolve_broken(const kv8_kernel_args &a, uint32_t shared) {
    const int warp = threadIdx.x / 32;
    const NonfiniteSearch<4 * SHAPE::NUM_CONSUMERS, CONSUMERS_BARRIER> search = {
        shared + SHAPE::K_AT, warp};
    search.sync();
    for (uint32_t n = load_word(shared + SHAPE::BROKEN_AT); n != 0;) {
        const kv8_prefill_broken *const entry = a.prefill.broken + (n - 1);
        write_nonfinite<SHAPE::HEAD_DIM / 32, SHAPE::FK, SHAPE::FV>(
            a, a.prefill.items[n - 1], search, 16 * warp, __ldcg(&entry->rows[warp]));
        n = __ldcg(&entry->next);
    }
}

}  // namespace kv8
