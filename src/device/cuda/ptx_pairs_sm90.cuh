// ptx_pairs_sm90.cuh - what kernels of blocks that stay, two and two, ask of sm_90: copies to
// several blocks of a cluster, arrivals at another block's barrier, and results that leave by the
// copy engine.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef KV8_PTX_PAIRS_SM90_CUH
#define KV8_PTX_PAIRS_SM90_CUH

#include "ptx_sm90.cuh"

namespace kv8 {

#define KV8_D48 KV8_D32, KV8_D16(d, 32)
#define KV8_D96 KV8_D64, KV8_D16(d, 64), KV8_D16(d, 80)
#define KV8_NAMES_48                                                                \
    KV8_NAMES_32                                                                    \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
    "%47"
#define KV8_NAMES_96                                                                              \
    KV8_NAMES_64                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81," \
    " %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

// copy_tile() to this place, and counted by this barrier, in each block of the cluster that
// `blocks` has a bit of.
__device__ __forceinline__ void copy_tile_to(uint32_t to, const void *map, int32_t column,
                                             int32_t row, uint32_t barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
        : "memory");
}
// copy_bulk() likewise.
__device__ __forceinline__ void copy_bulk_to(uint32_t to, const void *from, uint32_t bytes,
                                             uint32_t barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
        : "memory");
}
// Arrives at what stands at `barrier` here, of block `rank` of the cluster. Orders reads alone,
// as wgmma's are that have been waited for: to release stores, it would take a fence of the whole
// GPU.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A tile back to its matrix, or added to what is there (f32), each element once; what lies past the
// matrix' ends stays behind. Stores before it: fence_stores_before_wgmma(), then a barrier.
__device__ __forceinline__ void store_tile(const void *map, int32_t column, int32_t row,
                                           uint32_t from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
__device__ __forceinline__ void add_tile(const void *map, int32_t column, int32_t row,
                                         uint32_t from) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], "
        "[%3];" ::"l"(map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Shared memory has been read for all but the PENDING last groups of this thread.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_pair(uint32_t at, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
// wgmma_shared() of f16 for N = 96 and 192.
__device__ __forceinline__ void wgmma_f16(float (&d)[48], uint64_t a, uint64_t b, int accumulate) {
    KV8_WGMMA("n96k16.f32.f16.f16", KV8_NAMES_48, KV8_D48, "%48, %49", "%50", "1, 1, 0, 0",
              KV8_A_SHARED);
}
__device__ __forceinline__ void wgmma_f16(float (&d)[96], uint64_t a, uint64_t b, int accumulate) {
    KV8_WGMMA("n192k16.f32.f16.f16", KV8_NAMES_96, KV8_D96, "%96, %97", "%98", "1, 1, 0, 0",
              KV8_A_SHARED);
}
template <int N>
__device__ __forceinline__ void wgmma_f16(float (&d)[N], uint64_t a, uint64_t b, int accumulate) {
    wgmma_shared<false>(d, a, b, accumulate);
}

}  // namespace kv8

#endif
