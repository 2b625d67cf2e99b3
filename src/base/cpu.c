/* cpu.c - which rungs of the instruction-set ladder this machine and this build have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* syscall */
#include <cpuinfo.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base_impl.h"

static const char *const isa_names[KV8_ISA_COUNT] = {
    [KV8_ISA_BEST] = "best",     [KV8_ISA_SCALAR] = "scalar",           [KV8_ISA_AVX2] = "avx2",
    [KV8_ISA_AVX512] = "avx512", [KV8_ISA_AVX512_BF16] = "avx512_bf16", [KV8_ISA_AMX] = "amx",
    [KV8_ISA_NEON] = "neon",     [KV8_ISA_NEON_BF16] = "neon_bf16",
};

const char *kv8_isa_name(kv8_isa isa) {
    if ((int)isa < 0 || isa >= KV8_ISA_COUNT) return "unknown";
    return isa_names[isa];
}

#if defined(__x86_64__)
/* CPUID leaf 7, EDX (Intel SDM volume 2A): 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8. Tiles are large
 * state, which Linux gives a process only when it asks (arch_prctl, Linux 5.16); asking again is
 * harmless. */
static bool has_amx(void) {
    enum {
        AMX_BITS = 1 << 22 | 1 << 24 | 1 << 25,
        ARCH_REQ_XCOMP_PERM = 0x1023,
        XFEATURE_XTILEDATA = 18
    };
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & AMX_BITS) != AMX_BITS) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

/* Asks the processor, and for AMX the system: slow under a hypervisor. */
static bool detect(kv8_isa isa) {
    if (isa == KV8_ISA_SCALAR) return true;
    const bool known = cpuinfo_initialize(); /* idempotent and thread safe */
    switch (isa) {
#if defined(__x86_64__)
        case KV8_ISA_AVX2:
            return known && cpuinfo_has_x86_avx2() && cpuinfo_has_x86_fma3() &&
                   cpuinfo_has_x86_f16c();
        case KV8_ISA_AVX512:
            return detect(KV8_ISA_AVX2) && cpuinfo_has_x86_avx512f() &&
                   cpuinfo_has_x86_avx512bw() && cpuinfo_has_x86_avx512dq() &&
                   cpuinfo_has_x86_avx512vl();
        case KV8_ISA_AVX512_BF16:
            return detect(KV8_ISA_AVX512) && cpuinfo_has_x86_avx512vbmi() &&
                   cpuinfo_has_x86_gfni() && cpuinfo_has_x86_avx512bf16();
        case KV8_ISA_AMX: return detect(KV8_ISA_AVX512_BF16) && has_amx();
#elif defined(__aarch64__)
        case KV8_ISA_NEON: return true; /* part of the architecture */
        case KV8_ISA_NEON_BF16: return known && cpuinfo_has_arm_bf16();
#endif
        default: (void)known; return false;
    }
}

/* Callers on hot paths resolve a rung per call, so the answers are kept: bit i for rung i. Threads
 * that meet here first find the same bits. */
int kv8_machine_has_isa(kv8_isa isa) {
    enum { ASKED = 1u << KV8_ISA_COUNT };
    static _Atomic unsigned int rungs;
    unsigned int mask = atomic_load_explicit(&rungs, memory_order_relaxed);
    if (mask == 0) {
        mask = ASKED;
        for (int i = KV8_ISA_SCALAR; i < KV8_ISA_COUNT; i++) {
            if (detect((kv8_isa)i)) mask |= 1u << i;
        }
        atomic_store_explicit(&rungs, mask, memory_order_relaxed);
    }
    return isa > KV8_ISA_BEST && isa < KV8_ISA_COUNT && (mask >> isa & 1) != 0;
}

bool kv8_machine_bf16_dots_pay(void) {
#if defined(__x86_64__)
    /* vdpbf16ps at 512 bits: one a cycle on Zen 4, so twice the products of vfmadd; on Intel a
     * third of one a cycle where vfmadd does two (Sapphire Rapids, one core: 44 against 108
     * GMAC/s). */
    return !cpuinfo_initialize() || cpuinfo_get_core(0)->vendor != cpuinfo_vendor_intel;
#else
    return true;
#endif
}

static kv8_isa best_isa(void) {
    for (int isa = KV8_ISA_COUNT - 1; isa > KV8_ISA_SCALAR; isa--) {
        if (kv8_machine_has_isa((kv8_isa)isa)) return (kv8_isa)isa;
    }
    return KV8_ISA_SCALAR;
}

kv8_status kv8_machine_isa(kv8_isa *isa_out) {
    const char *const wanted = getenv("KV8_ISA");
    if (wanted == NULL || wanted[0] == '\0') {
        *isa_out = best_isa();
        return KV8_OK;
    }
    for (int isa = KV8_ISA_SCALAR; isa < KV8_ISA_COUNT; isa++) {
        if (strcmp(wanted, isa_names[isa]) != 0) continue;
        if (!kv8_machine_has_isa((kv8_isa)isa))
            return kv8_fail(KV8_ERR_UNSUPPORTED, "KV8_ISA is %s; the best here is %s", wanted,
                            isa_names[best_isa()]);
        *isa_out = (kv8_isa)isa;
        return KV8_OK;
    }
    return kv8_fail(KV8_ERR_INVALID,
                    "KV8_ISA is \"%s\", must be scalar, avx2, avx512, avx512_bf16, amx, "
                    "neon or neon_bf16",
                    wanted);
}

kv8_status kv8_machine_resolve_isa(kv8_isa wanted, kv8_isa *isa_out) {
    if (wanted == KV8_ISA_BEST) return kv8_machine_isa(isa_out);
    if ((int)wanted < 0 || wanted >= KV8_ISA_COUNT)
        return kv8_fail(KV8_ERR_INVALID, "isa is %d, must be 0 to %d", (int)wanted,
                        (int)KV8_ISA_COUNT - 1);
    if (!kv8_machine_has_isa(wanted))
        return kv8_fail(KV8_ERR_UNSUPPORTED, "this machine has no %s; the best here is %s",
                        kv8_isa_name(wanted), isa_names[best_isa()]);
    *isa_out = wanted;
    return KV8_OK;
}
