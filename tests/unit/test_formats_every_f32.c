/* test_formats_every_f32.c - kv8_narrow of every one of the 2^32 f32 bit patterns, for every
 * narrow format, on every vector rung of this machine (on the scalar one where there is no other).
 *
 * The reference never rounds. From the codes' values in double come the midpoints between
 * neighbours, each an f32 itself; with ties to even they cut the ascending f32 magnitudes into one
 * interval per code, and everything in an interval must encode to its code.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "base_impl.h"
#include "formats_fields.h"
#include "testing.h"

#include <kv8/formats.h>

typedef struct format {
    kv8_dtype dtype;
    int exponent_bits, mantissa_bits, bias;
    uint32_t max_code; /* largest finite: everything above saturates */
    uint32_t nan;      /* the code of NaN, sign aside; of f16 and bf16 its bits that are set */
    bool has_negative_zero, nan_has_sign;
} format;
static const format formats[] = {
    {KV8_E4M3, 4, 3, 7, 0x7e, 0x7f, true, true},
    {KV8_E4M3FNUZ, 4, 3, 8, 0x7f, 0x80, false, false},
    {KV8_E5M2, 5, 2, 15, 0x7b, 0x7f, true, true},
    {KV8_F16, 5, 10, 15, 0x7bff, 0x7e00, true, true},
    {KV8_BF16, 8, 7, 127, 0x7f7f, 0x7fc0, true, true},
};
enum {
    NUM_FORMATS = sizeof formats / sizeof formats[0],
    CHUNK = 1 << 14 /* f32s a task: the buffers stay in the first caches */
};
static const uint32_t infinity_bits = 0x7f800000u;

typedef struct thread_state {
    float values[CHUNK];
    uint16_t codes[CHUNK], wanted[CHUNK];
    kv8_narrow_counts counts[NUM_FORMATS];
    uint64_t num_wrong;
    uint32_t wrong_bits; /* one of them */
    int wrong_format;
} thread_state;

typedef struct walk {
    kv8_isa isa;
    uint32_t *first[NUM_FORMATS]; /* [code] = first f32 magnitude that encodes to it */
    thread_state *threads;
} walk;

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* first[max_code + 1] is the first magnitude beyond infinity: NaN. */
static uint32_t *intervals_create(const format *f) {
    uint32_t *const first = calloc(f->max_code + 2, sizeof *first);
    assert_non_null(first);
    for (uint32_t code = 0; code < f->max_code; code++) {
        const double below = field_value(code, f->exponent_bits, f->mantissa_bits, f->bias);
        const double above = field_value(code + 1, f->exponent_bits, f->mantissa_bits, f->bias);
        const float middle = (float)((below + above) / 2);
        assert_true((double)middle == (below + above) / 2 && below < above);
        /* A tie goes to the even one of code and code + 1. */
        first[code + 1] = bits_of(middle) + (code + 1) % 2;
    }
    first[f->max_code + 1] = infinity_bits + 1;
    return first;
}

static void put(const format *f, uint16_t *codes, size_t begin, size_t end, uint32_t code) {
    if (kv8_dtype_size(f->dtype) == 1) {
        memset((uint8_t *)codes + begin, (int)code, end - begin);
    } else {
        for (size_t i = begin; i < end; i++) codes[i] = (uint16_t)code;
    }
}

/* Codes wanted for CHUNK numbers from `start` on (all of one sign, numbers before NaN): returns
 * how many of them are numbers. */
static size_t wanted_codes(const format *f, const uint32_t *first, uint32_t start,
                           uint16_t *wanted) {
    const uint32_t sign = start >> 31 << (f->exponent_bits + f->mantissa_bits);
    const uint32_t magnitude = start & 0x7fffffffu;
    uint32_t code = 0, beyond = f->max_code + 1;
    if (magnitude >= first[beyond]) return 0;
    while (beyond - code > 1) { /* first[code] <= magnitude < first[beyond] */
        const uint32_t middle = (code + beyond) / 2;
        *(first[middle] <= magnitude ? &code : &beyond) = middle;
    }
    size_t i = 0;
    for (; i < CHUNK && code <= f->max_code; code++) {
        const size_t left = first[code + 1] - (magnitude + (uint32_t)i);
        const size_t end = left < CHUNK - i ? i + left : CHUNK;
        put(f, wanted, i, end, code == 0 && !f->has_negative_zero ? 0 : sign | code);
        i = end;
    }
    return i;
}

static bool is_nan_code(const format *f, const uint16_t *codes, size_t i, uint32_t negative) {
    const bool narrow = kv8_dtype_size(f->dtype) == 1;
    const uint32_t code = narrow ? ((const uint8_t *)codes)[i] : codes[i];
    const uint32_t sign = negative << (f->exponent_bits + f->mantissa_bits);
    if (!f->nan_has_sign) return code == f->nan;
    return narrow ? code == (sign | f->nan) : (code & f->nan) == f->nan && (code & 0x8000u) == sign;
}

static void walk_chunk(void *cookie, size_t index, int32_t thread_idx) {
    const walk *const w = cookie;
    thread_state *const t = &w->threads[thread_idx];
    const uint32_t start = (uint32_t)(index * CHUNK);
    for (uint32_t i = 0; i < CHUNK; i++) {
        const uint32_t bits = start + i;
        memcpy(&t->values[i], &bits, sizeof bits);
    }
    for (int f = 0; f < NUM_FORMATS; f++) {
        const size_t size = kv8_dtype_size(formats[f].dtype);
        if (kv8_narrow(w->isa, formats[f].dtype, t->values, CHUNK, 1, t->codes, &t->counts[f]) !=
            KV8_OK)
            t->num_wrong++;
        const size_t numbers = wanted_codes(&formats[f], w->first[f], start, t->wanted);
        bool right = memcmp(t->codes, t->wanted, numbers * size) == 0;
        for (size_t i = numbers; i < CHUNK; i++)
            right = right && is_nan_code(&formats[f], t->codes, i, start >> 31);
        if (right) continue;
        t->num_wrong++;
        t->wrong_bits = start;
        t->wrong_format = f;
    }
}

static void check_walk(const walk *w, int32_t num_threads) {
    kv8_narrow_counts counts[NUM_FORMATS] = {0};
    for (int32_t i = 0; i < num_threads; i++) {
        const thread_state *const t = &w->threads[i];
        if (t->num_wrong > 0)
            fail_msg("%s, %s: wrong code for an f32 in the %d patterns from 0x%08x on",
                     kv8_isa_name(w->isa), kv8_dtype_name(formats[t->wrong_format].dtype), CHUNK,
                     t->wrong_bits);
        for (int f = 0; f < NUM_FORMATS; f++) {
            counts[f].clips += t->counts[f].clips;
            counts[f].nans += t->counts[f].nans;
        }
    }
    for (int f = 0; f < NUM_FORMATS; f++) { /* of both signs */
        const uint64_t beyond = infinity_bits - bits_of(kv8_dtype_max(formats[f].dtype));
        assert_int_equal(counts[f].clips, 2 * beyond);
        assert_int_equal(counts[f].nans, 2 * 0x7fffffu);
    }
}

static void encode_every_f32(void **state) {
    (void)state;
    walk w = {0};
    kv8_isa best;
    assert_ok(kv8_machine_isa(&best));
    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 0));
    const int32_t num_threads = kv8_threads_count(threads);
    w.threads = calloc((size_t)num_threads, sizeof *w.threads);
    assert_non_null(w.threads);
    for (int f = 0; f < NUM_FORMATS; f++) w.first[f] = intervals_create(&formats[f]);

    const kv8_isa isas[] = {
#define KV8_FORMATS_KERNELS(isa, rung) isa,
#include "formats_kernels.inc"
#undef KV8_FORMATS_KERNELS
    };
    for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
        if (isas[i] > best || (isas[i] == KV8_ISA_SCALAR && best != KV8_ISA_SCALAR)) continue;
        w.isa = isas[i];
        memset(w.threads, 0, (size_t)num_threads * sizeof *w.threads);
        kv8_threads_run(threads, ((size_t)1 << 32) / CHUNK, walk_chunk, &w);
        check_walk(&w, num_threads);
    }

    for (int f = 0; f < NUM_FORMATS; f++) free(w.first[f]);
    free(w.threads);
    kv8_threads_destroy(threads);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(encode_every_f32)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
