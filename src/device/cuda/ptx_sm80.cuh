// ptx_sm80.cuh - instructions of sm_80 and later, one function each: asynchronous copies, loads and
// stores of shared memory, packing, mma.sync.
//
// Nothing here knows a page, a head or a format of codes. What came with sm_90: ptx_sm90.cuh.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <stdint.h>

namespace kv8 {

// A value that is computed here, not wherever it is used.
__device__ inline uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T>
__device__ inline T *keep(T *x) {
    asm volatile("" : "+l"(x));
    return x;
}
__device__ inline uint32_t smem_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// What is read once leaves L2 before what is read again.
__device__ inline uint64_t leave_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 16 bytes, and what lies beside them ahead of its use: without that hint DRAM serves 64 bytes of a
// line at the cost of all of it.
__device__ inline void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
}
// Zeros unless `inside`; then nothing is read.
__device__ inline void copy16_or_zero(uint32_t to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
// The same of what is read once. WIDE: 256 bytes ahead, for rows that tile them; else 128.
template <bool WIDE>
__device__ inline void copy16_once(uint32_t to, const void *from) {
    if constexpr (WIDE)
        asm volatile(
            "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
            "l"(from), "l"(leave_first_policy())
            : "memory");
    else
        asm volatile(
            "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
            "l"(from), "l"(leave_first_policy())
            : "memory");
}
template <bool WIDE>
__device__ inline void copy16_once_or_zero(uint32_t to, const void *from, bool inside) {
    const int bytes = inside ? 16 : 0;
    if constexpr (WIDE)
        asm volatile(
            "cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to),
            "l"(from), "r"(bytes), "l"(leave_first_policy())
            : "memory");
    else
        asm volatile(
            "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
            "l"(from), "r"(bytes), "l"(leave_first_policy())
            : "memory");
}
__device__ inline void copy4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void copy4_or_zero(uint32_t to, const void *from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 4 : 0)
                 : "memory");
}
__device__ inline void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// For every copy, of a group or not.
__device__ inline void copy_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// A word of global memory, with all that was written before it.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *word) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t *word, uint32_t x) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(x)
                 : "memory");
    return before;
}

// Named barrier of num_threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// The same, and whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_any(int id, int num_threads, bool mine) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\n"
        "bar.red.or.pred p, %2, %3, q;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(any)
        : "r"(uint32_t(mine)), "r"(id), "r"(num_threads)
        : "memory");
    return any != 0;
}

// WORDS consecutive 4-byte words of shared memory, one load.
template <int BYTES>
struct Words {
    uint32_t w[(BYTES + 3) / 4];
};
template <int BYTES>
__device__ inline Words<BYTES> load_shared(uint32_t at) {
    Words<BYTES> r;
    if constexpr (BYTES == 16) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3])
                     : "r"(at));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "r"(at));
    } else if constexpr (BYTES == 4) {
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r.w[0]) : "r"(at));
    } else {
        uint16_t half;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at));
        r.w[0] = half;
    }
    return r;
}

__device__ inline void store_shared(uint32_t at, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x));
}

__device__ inline uint32_t pack_f16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// Of sm_89 and later: finite values beyond the format's largest saturate.
__device__ inline uint32_t pack_e4m3(float low, float high) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline uint32_t pack_e5m2(float low, float high) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline uint32_t transpose8x8(uint32_t x) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}
// c += a (16 x 16) * b (16 x 8), of bf16 or f16.
template <bool IS_BF16>
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (IS_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace kv8
