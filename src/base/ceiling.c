/* ceiling.c - measures what no kernel on this machine can beat: reading memory and multiplying.
 *
 * The best of several passes counts: other work on the machine only ever makes a pass slower.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling.h"

#include "base_impl.h"
#include "simd/scalar.h"

#define KV8_CEILING(name) name##__scalar
#include "cpu/ceiling_tmpl.h"

enum {
    READ_CHUNK = 1 << 20, /* bytes drawn by a thread at a time */
    READ_BYTES = 1 << 30, /* several times any last-level cache a thread can fill in a pass */
    READ_PASSES = 7,
    RATE_PASSES = 7,
    RATE_ROUNDS = 1 << 20,
    CHAINS = 12 /* of the rate loops */
};

typedef struct loops {
    float (*read)(const float *data, size_t n);
    float (*fma)(size_t rounds);
    float (*bf16)(size_t rounds); /* NULL: the rung has no bf16 dots */
    int lanes, bf16_products;     /* products of one instruction */
} loops;

static loops loops_of(kv8_isa isa) {
    switch (isa) {
#if defined(__x86_64__)
        case KV8_ISA_AVX2:
            return (loops){kv8_ceiling_read__avx2, kv8_ceiling_fma__avx2, NULL, 8, 0};
        case KV8_ISA_AVX512:
            return (loops){kv8_ceiling_read__avx512, kv8_ceiling_fma__avx512, NULL, 16, 0};
        case KV8_ISA_AVX512_BF16:
            return (loops){kv8_ceiling_read__avx512, kv8_ceiling_fma__avx512,
                           kv8_ceiling_bf16__avx512_bf16, 16, 32};
        case KV8_ISA_AMX:
            return (loops){kv8_ceiling_read__avx512, kv8_ceiling_fma__avx512, kv8_ceiling_bf16__amx,
                           16, 8192};
#elif defined(__aarch64__)
        case KV8_ISA_NEON:
            return (loops){kv8_ceiling_read__neon, kv8_ceiling_fma__neon, NULL, 4, 0};
        case KV8_ISA_NEON_BF16:
            return (loops){kv8_ceiling_read__neon, kv8_ceiling_fma__neon,
                           kv8_ceiling_bf16__neon_bf16, 4, 8};
#endif
        default: return (loops){kv8_ceiling_read__scalar, kv8_ceiling_fma__scalar, NULL, 1, 0};
    }
}

typedef struct measurement {
    const float *data;
    float (*read)(const float *data, size_t n);
    float (*rate)(size_t rounds);
    _Atomic float sink; /* results end here, so that no loop is dead */
} measurement;

static void read_chunk(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    measurement *const m = cookie;
    const size_t n = READ_CHUNK / sizeof(float);
    m->sink = m->read(m->data + index * n, n);
}

static void run_rate(void *cookie, size_t index, int32_t thread_idx) {
    (void)index;
    (void)thread_idx;
    measurement *const m = cookie;
    m->sink = m->rate(RATE_ROUNDS);
}

/* Shortest of `passes` runs of count tasks, in ns. */
static double best_ns(kv8_threads *threads, int passes, size_t count, kv8_task task,
                      measurement *m) {
    double best = 0;
    for (int pass = 0; pass < passes; pass++) {
        const uint64_t begin = kv8_time_ns();
        kv8_threads_run(threads, count, task, m);
        const double ns = (double)(kv8_time_ns() - begin);
        if (pass == 0 || ns < best) best = ns;
    }
    return best > 0 ? best : 1;
}

/* Products per ns = 1e9 products per second. */
static double rate(kv8_threads *threads, measurement *m, float (*loop)(size_t), int products) {
    const int32_t count = kv8_threads_count(threads);
    m->rate = loop;
    const double ns = best_ns(threads, RATE_PASSES, (size_t)count, run_rate, m);
    return (double)count * RATE_ROUNDS * CHAINS * products / ns;
}

kv8_status kv8_machine_measure_ceilings(kv8_threads *threads, kv8_isa isa,
                                        kv8_ceilings *ceilings_out) {
    KV8_REQUIRE(ceilings_out);
    KV8_TRY(kv8_machine_resolve_isa(isa, &isa));
    const loops l = loops_of(isa);
    void *data = NULL;
    KV8_TRY(kv8_alloc(NULL, READ_BYTES, 1, "ceiling buffer", &data));
    /* Fresh zero pages may all be one physical page: write each once. */
    float *const values = data;
    for (size_t i = 0; i < READ_BYTES / sizeof(float); i += 16) values[i] = (float)(i & 1023);
    measurement m = {.data = data, .read = l.read};
    const double ns = best_ns(threads, READ_PASSES, READ_BYTES / READ_CHUNK, read_chunk, &m);
    *ceilings_out = (kv8_ceilings){
        .read_gb_s = READ_BYTES / ns,
        .f32_gmac_s = rate(threads, &m, l.fma, l.lanes),
        .bf16_gmac_s = l.bf16 == NULL ? 0 : rate(threads, &m, l.bf16, l.bf16_products),
    };
    kv8_release(NULL, data, READ_BYTES, 1);
    return KV8_OK;
}
