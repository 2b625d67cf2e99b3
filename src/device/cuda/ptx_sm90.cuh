// ptx_sm90.cuh - instructions of sm_90 and later, one function each: barriers in shared memory,
// bulk copies, clusters, dependent launches; and of sm_90a alone: registers shared out anew, matrix
// descriptors, wgmma.
//
// Knows nothing of attention.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm80.cuh"

namespace kv8 {

// --- barriers ---

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// One look, without waiting.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}
// This thread's ordinary stores to shared memory come before what the tensor cores read next.
__device__ __forceinline__ void fence_stores_before_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Multiples of 16 bytes into the L2.
__device__ __forceinline__ void prefetch_bulk(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// --- bulk copies ---

// `bytes` at once, a multiple of 16; the barrier counts them as they come.
__device__ inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                 uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// A tile of a matrix of kv8_tensor_map_make, by its first column and row.
__device__ __forceinline__ void copy_tile(uint32_t to, const void *map, int32_t column, int32_t row,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The same of what is read once, by leave_first_policy().
__device__ __forceinline__ void copy_tile_once(uint32_t to, const void *map, int32_t column,
                                               int32_t row, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}
// The one arrival of a phase, which ends once `bytes` have come too.
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// One lane of a warp, whichever: what it alone does the compiler gives the uniform datapath.
__device__ __forceinline__ bool elected() {
    uint32_t is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(is));
    return is != 0;
}

// --- clusters ---

__device__ inline uint32_t cluster_rank() {
    uint32_t r;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ inline uint32_t cluster_size() {
    uint32_t r;
    asm("mov.u32 %0, %cluster_nctarank;" : "=r"(r));
    return r;
}
// All threads of all blocks. The first orders nothing, its fence alone would cost as much as the
// whole exchange; after it, that all blocks run is known. Between the second and the wait: what
// came before the one comes before what follows the other.
__device__ inline void cluster_arrive_first() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address in block `rank` of what lies at `at` here.
__device__ inline uint32_t cluster_address(uint32_t at, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// 16 bytes of another block's shared memory.
__device__ __forceinline__ float4 load_cluster(uint32_t at) {
    float4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
                 : "r"(at)
                 : "memory");
    return r;
}
// Stores to another block's shared memory; its barrier counts the bytes as they come.
__device__ inline void store_cluster(uint32_t to, uint32_t barrier, const float4 &x) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, "
        "[%1];" ::"r"(to),
        "r"(barrier), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
        : "memory");
}
__device__ inline void wait_for_bytes(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// --- dependent launches ---

// The next kernel in the stream may be made ready.
__device__ inline void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;");
}
// The kernel ahead in the stream has ended, and what it wrote is seen.
__device__ inline void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// --- wgmma ---

// Descriptor of a matrix in shared memory in rows of 128 bytes under the 128-byte swizzle (16-byte
// chunk c of row r stands at chunk c ^ (r % 8)), eight rows 1024 bytes apart from the next eight.
// group_bytes: distance of column groups of 64 where columns are the M or N index; else unused.
// This is its lower half, which moves with the address (below 256 KiB) by bytes / 16. The value is
// made uniform for the warp here, once, or the compiler does it for each use.
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address, uint32_t group_bytes) {
    return __shfl_sync(~0u, address >> 4 | (group_bytes >> 4) << 16, 0);
}
__device__ __forceinline__ uint64_t descriptor_at(uint32_t lower, uint32_t bytes) {
    const uint32_t upper = (1024 >> 4) | 1u << 30;
    return uint64_t(upper) << 32 | (lower + (bytes >> 4));
}
// The same for rows of ROW_BYTES: 128, or 64 under the 64-byte swizzle (chunk c of row r stands at
// c ^ (r / 2 % 4)), eight rows 512 bytes apart from the next.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t row_descriptor_at(uint32_t lower, uint32_t bytes) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "swizzles");
    const uint32_t upper = (8 * ROW_BYTES >> 4) | (ROW_BYTES == 128 ? 1u : 2u) << 30;
    return uint64_t(upper) << 32 | (lower + (bytes >> 4));
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may not move uses of these registers across this point.
template <int N>
__device__ __forceinline__ void registers_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
template <int N>
__device__ __forceinline__ void registers_pin(uint32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i]));
}

// Accumulators as asm operands, and the text that names them.
#define KV8_D4(d, i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KV8_D16(d, i) KV8_D4(d, i), KV8_D4(d, i + 4), KV8_D4(d, i + 8), KV8_D4(d, i + 12)
#define KV8_D32       KV8_D16(d, 0), KV8_D16(d, 16)
#define KV8_D64       KV8_D32, KV8_D16(d, 32), KV8_D16(d, 48)
#define KV8_D128      KV8_D64, KV8_D16(d, 64), KV8_D16(d, 80), KV8_D16(d, 96), KV8_D16(d, 112)
#define KV8_D36       KV8_D32, KV8_D4(e, 0)
#define KV8_D68       KV8_D64, KV8_D4(e, 0)
#define KV8_NAMES_16  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define KV8_NAMES_32                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV8_NAMES_64                                                                              \
    KV8_NAMES_32                                                                                  \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49," \
    " %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KV8_NAMES_128                                                                             \
    KV8_NAMES_64                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81," \
    " %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99,"  \
    " %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114,"  \
    " %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// D = A * B, or D += A * B where the predicate's operand is not 0: 64 rows, one macro a number N of
// columns, whose D is d and e. TYPES: k and the types. AB, IF: the numbers of A, B and the
// predicate's operand, behind D's. SIGNS: 1s, and which 16-bit operands run across k.
#define KV8_WGMMA(TYPES, NAMES, D, AB, IF, SIGNS, ...)                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " IF                                     \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64" TYPES " {" NAMES "}, " AB ", p, " SIGNS \
                 ";\n}\n"                                                                   \
                 : D                                                                        \
                 : __VA_ARGS__)
#define KV8_WGMMA_N32(TYPES, ...) KV8_WGMMA("n32" TYPES, KV8_NAMES_16, KV8_D16(d, 0), __VA_ARGS__)
#define KV8_WGMMA_N64(TYPES, ...) KV8_WGMMA("n64" TYPES, KV8_NAMES_32, KV8_D32, __VA_ARGS__)
#define KV8_WGMMA_N72(TYPES, ...) \
    KV8_WGMMA("n72" TYPES, KV8_NAMES_32 ", %32, %33, %34, %35", KV8_D36, __VA_ARGS__)
#define KV8_WGMMA_N128(TYPES, ...) KV8_WGMMA("n128" TYPES, KV8_NAMES_64, KV8_D64, __VA_ARGS__)
#define KV8_WGMMA_N256(TYPES, ...) KV8_WGMMA("n256" TYPES, KV8_NAMES_128, KV8_D128, __VA_ARGS__)
#define KV8_WGMMA_N136(TYPES, ...) \
    KV8_WGMMA("n136" TYPES, KV8_NAMES_64 ", %64, %65, %66, %67", KV8_D68, __VA_ARGS__)
#define KV8_A_SHARED    "l"(a), "l"(b), "r"(accumulate)
#define KV8_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)

// d (64 x N) = or += A (64 x 16, shared) * B (16 x N, shared, rows are columns of d), N = 32, 64,
// 128 or 256.
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_shared(float (&d)[16], uint64_t a, uint64_t b,
                                             int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N32("k16.f32.bf16.bf16", "%16, %17", "%18", "1, 1, 0, 0", KV8_A_SHARED);
    else
        KV8_WGMMA_N32("k16.f32.f16.f16", "%16, %17", "%18", "1, 1, 0, 0", KV8_A_SHARED);
}
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b,
                                             int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N64("k16.f32.bf16.bf16", "%32, %33", "%34", "1, 1, 0, 0", KV8_A_SHARED);
    else
        KV8_WGMMA_N64("k16.f32.f16.f16", "%32, %33", "%34", "1, 1, 0, 0", KV8_A_SHARED);
}
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_shared(float (&d)[64], uint64_t a, uint64_t b,
                                             int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N128("k16.f32.bf16.bf16", "%64, %65", "%66", "1, 1, 0, 0", KV8_A_SHARED);
    else
        KV8_WGMMA_N128("k16.f32.f16.f16", "%64, %65", "%66", "1, 1, 0, 0", KV8_A_SHARED);
}

template <bool IS_BF16>
__device__ __forceinline__ void wgmma_shared(float (&d)[128], uint64_t a, uint64_t b,
                                             int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N256("k16.f32.bf16.bf16", "%128, %129", "%130", "1, 1, 0, 0", KV8_A_SHARED);
    else
        KV8_WGMMA_N256("k16.f32.f16.f16", "%128, %129", "%130", "1, 1, 0, 0", KV8_A_SHARED);
}

// d (64 x 64 or 64 x 128) = or += A (64 x 16, registers) * B (16 x N, shared, rows are k).
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t *a, uint64_t b,
                                                int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N64("k16.f32.bf16.bf16", "{%32, %33, %34, %35}, %36", "%37", "1, 1, 1",
                      KV8_A_REGISTERS);
    else
        KV8_WGMMA_N64("k16.f32.f16.f16", "{%32, %33, %34, %35}, %36", "%37", "1, 1, 1",
                      KV8_A_REGISTERS);
}
template <bool IS_BF16>
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const uint32_t *a, uint64_t b,
                                                int accumulate) {
    if (IS_BF16)
        KV8_WGMMA_N128("k16.f32.bf16.bf16", "{%64, %65, %66, %67}, %68", "%69", "1, 1, 1",
                       KV8_A_REGISTERS);
    else
        KV8_WGMMA_N128("k16.f32.f16.f16", "{%64, %65, %66, %67}, %68", "%69", "1, 1, 1",
                       KV8_A_REGISTERS);
}

// Of f16: d (64 x 32) = or += A (64 x 16, registers) * B (16 x 32, shared, rows are columns of d).
__device__ __forceinline__ void wgmma_registers_along_k(float (&d)[16], const uint32_t *a,
                                                        uint64_t b, int accumulate) {
    KV8_WGMMA_N32("k16.f32.f16.f16", "{%16, %17, %18, %19}, %20", "%21", "1, 1, 0",
                  KV8_A_REGISTERS);
}

// --- wgmma of e4m3 by e4m3 or e5m2; both operands' rows run along k ---

// d (64 x 64) = or += A (64 x 32, shared) * B (32 x 64, shared).
template <bool IS_E5M2>
__device__ __forceinline__ void wgmma8_shared(float (&d)[32], uint64_t a, uint64_t b,
                                              int accumulate) {
    if (IS_E5M2)
        KV8_WGMMA_N64("k32.f32.e4m3.e5m2", "%32, %33", "%34", "1, 1", KV8_A_SHARED);
    else
        KV8_WGMMA_N64("k32.f32.e4m3.e4m3", "%32, %33", "%34", "1, 1", KV8_A_SHARED);
}

// d, e (64 x 64 and 64 x 8, or 64 x 128 and 64 x 8) = or += A (64 x 32, registers) * B (32 x N,
// shared), N = 72 or 136.
template <bool IS_E5M2>
__device__ __forceinline__ void wgmma8_registers(float (&d)[32], float (&e)[4], const uint32_t *a,
                                                 uint64_t b, int accumulate) {
    if (IS_E5M2)
        KV8_WGMMA_N72("k32.f32.e4m3.e5m2", "{%36, %37, %38, %39}, %40", "%41", "1, 1",
                      KV8_A_REGISTERS);
    else
        KV8_WGMMA_N72("k32.f32.e4m3.e4m3", "{%36, %37, %38, %39}, %40", "%41", "1, 1",
                      KV8_A_REGISTERS);
}
template <bool IS_E5M2>
__device__ __forceinline__ void wgmma8_registers(float (&d)[64], float (&e)[4], const uint32_t *a,
                                                 uint64_t b, int accumulate) {
    if (IS_E5M2)
        KV8_WGMMA_N136("k32.f32.e4m3.e5m2", "{%68, %69, %70, %71}, %72", "%73", "1, 1",
                       KV8_A_REGISTERS);
    else
        KV8_WGMMA_N136("k32.f32.e4m3.e4m3", "{%68, %69, %70, %71}, %72", "%73", "1, 1",
                       KV8_A_REGISTERS);
}

}  // namespace kv8
