/* cpu.c - which rungs of the instruction-set ladder this machine and this build have.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE /* syscall */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
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
/* Registers of CPUID (Intel SDM volume 2A), and XCR0: which vector registers the system saves. */
typedef struct x86_bits {
    unsigned int leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1_eax, saved;
} x86_bits;

/* What a rung needs beside the one below it. */
static const x86_bits rung_needs[KV8_ISA_COUNT] = {
    [KV8_ISA_AVX2] = {.leaf1_ecx = 1u << 12 | 1u << 29,                         /* FMA, F16C */
                      .leaf7_ebx = 1u << 5,                                     /* AVX2 */
                      .saved = 0x6},                                            /* XMM, YMM */
    [KV8_ISA_AVX512] = {.leaf7_ebx = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, /* F, DQ, BW, VL */
                        .saved = 0xe0},                      /* masks, halves of ZMM, ZMM16 to 31 */
    [KV8_ISA_AVX512_BF16] = {.leaf7_ecx = 1u << 1 | 1u << 8, /* VBMI, GFNI */
                             .leaf7_1_eax = 1u << 5},        /* AVX512_BF16 */
    [KV8_ISA_AMX] = {.leaf7_edx = 1u << 22 | 1u << 24 | 1u << 25}, /* AMX_BF16, _TILE, _INT8 */
};

static x86_bits ask_processor(void) {
    x86_bits has = {0};
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &has.leaf1_ecx, &edx)) return has;
    if ((has.leaf1_ecx & 1u << 27) !=
        0) /* OSXSAVE: else xgetbv is no instruction, hence volatile */
        __asm__ volatile("xgetbv" : "=a"(has.saved), "=d"(edx) : "c"(0));
    if (__get_cpuid_count(7, 0, &eax, &has.leaf7_ebx, &has.leaf7_ecx, &has.leaf7_edx) && eax >= 1)
        __get_cpuid_count(7, 1, &has.leaf7_1_eax, &ebx, &ecx, &edx);
    return has;
}

static bool has_bits(const x86_bits *has, const x86_bits *needs) {
    return (needs->leaf1_ecx & ~has->leaf1_ecx) == 0 && (needs->leaf7_ebx & ~has->leaf7_ebx) == 0 &&
           (needs->leaf7_ecx & ~has->leaf7_ecx) == 0 && (needs->leaf7_edx & ~has->leaf7_edx) == 0 &&
           (needs->leaf7_1_eax & ~has->leaf7_1_eax) == 0 && (needs->saved & ~has->saved) == 0;
}

/* Tiles are large state, which Linux gives a process only when it asks (arch_prctl, Linux 5.16);
 * asking again is harmless. */
static bool may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Asks the processor, and for AMX the system: slow under a hypervisor. */
static bool detect(kv8_isa isa) {
    const x86_bits has = ask_processor();
    for (int rung = KV8_ISA_SCALAR; rung <= (int)isa; rung++) {
        if (rung > KV8_ISA_AMX || !has_bits(&has, &rung_needs[rung])) return false;
    }
    return isa != KV8_ISA_AMX || may_use_tiles();
}
#elif defined(__aarch64__)
static bool detect(kv8_isa isa) {
    enum { HWCAP2_BF16_BIT = 1 << 14 };                    /* arm64 ELF hwcaps */
    return isa == KV8_ISA_SCALAR || isa == KV8_ISA_NEON || /* part of the architecture */
           (isa == KV8_ISA_NEON_BF16 && (getauxval(AT_HWCAP2) & HWCAP2_BF16_BIT) != 0);
}
#else
static bool detect(kv8_isa isa) {
    return isa == KV8_ISA_SCALAR;
}
#endif

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
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    return !__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_INTEL_ebx;
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
    KV8_REQUIRE(isa_out);
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
    KV8_REQUIRE(isa_out);
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
