/* kv8/machine.h - what this machine can do (instruction-set rungs) and the threads kv8 runs on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MACHINE_H
#define KV8_MACHINE_H

#include <kv8/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The rungs of the instruction-set ladder. Every kernel exists at SCALAR; a rung needs all below
 * it on the same architecture. */
typedef enum kv8_isa {
    KV8_ISA_BEST = 0, /* in options: the highest rung of this machine */
    KV8_ISA_SCALAR,
    KV8_ISA_AVX2,        /* x86: AVX2, FMA, F16C */
    KV8_ISA_AVX512,      /* x86: AVX-512 F, BW, DQ, VL */
    KV8_ISA_AVX512_BF16, /* x86: + AVX512_VBMI, AVX512_BF16 */
    KV8_ISA_AMX,         /* x86: + AMX_TILE, _BF16, _INT8, with the system's leave to use them */
    KV8_ISA_NEON,        /* arm64: Advanced SIMD */
    KV8_ISA_NEON_BF16,   /* arm64: + BF16 */
    KV8_ISA_COUNT
} kv8_isa;

/* "scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"; "best" for KV8_ISA_BEST.
 */
KV8_API const char *kv8_isa_name(kv8_isa isa);

/* The highest rung of this machine, lowered by the environment variable KV8_ISA when that names a
 * rung. Fails with KV8_ERR_INVALID when KV8_ISA names no rung and KV8_ERR_UNSUPPORTED when it
 * names one this machine or build lacks. */
KV8_API KV8_NODISCARD kv8_status kv8_machine_isa(kv8_isa *isa_out);

/* 1 when both this machine and this build have the rung; 0 otherwise. */
KV8_API int kv8_machine_has_isa(kv8_isa isa);

/* Resolves an option: BEST becomes kv8_machine_isa(); any other rung must be present. */
KV8_API KV8_NODISCARD kv8_status kv8_machine_resolve_isa(kv8_isa wanted, kv8_isa *isa_out);

/* Number of processors this process may run on (its affinity mask), at least 1. */
KV8_API int32_t kv8_machine_num_cpus(void);

/* A pool of threads. Objects that compute borrow one; it must outlive them. Calls that use one
 * pool from several threads at once are serialised. Its threads take no signals but those of their
 * own faults (SIGBUS of a mapped file that was cut short, for instance). */
typedef struct kv8_threads kv8_threads;

/* num_threads >= 1 counts the calling thread; 0 means kv8_machine_num_cpus(). *out is NULL on
 * failure. */
KV8_API KV8_NODISCARD kv8_status kv8_threads_create(kv8_threads **out, int32_t num_threads);
KV8_API void kv8_threads_destroy(kv8_threads *threads);
KV8_API int32_t kv8_threads_count(const kv8_threads *threads);

/* What no kernel on this machine can beat, measured now on the given threads with the rung's own
 * instructions: best of several passes, about a second in all, over a 1 GiB buffer that is freed
 * again. 1 GMAC/s = 1e9 multiply-adds per second = 2 GFLOP/s. */
typedef struct kv8_ceilings {
    double read_gb_s;   /* streaming read of memory, 1e9 bytes per second */
    double f32_gmac_s;  /* fused multiply-adds in f32 */
    double bf16_gmac_s; /* bf16 products summed in f32; 0 when the rung has no such instruction */
} kv8_ceilings;
KV8_API KV8_NODISCARD kv8_status kv8_machine_measure_ceilings(kv8_threads *threads, kv8_isa isa,
                                                              kv8_ceilings *ceilings_out);

#ifdef __cplusplus
}
#endif
#endif
