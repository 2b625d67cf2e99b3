/* random_weights.c - the pools of random values, and the checkpoint over them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "random_weights.h"

#include <math.h>
#include <string.h>

#include "formats_impl.h"

enum { SLACK = 16 << 20, OFFSET_STEP = 64, SLICE = 1 << 20 };

kv8_status kv8_random_weights_open(kv8_random_weights *out, size_t capacity,
                                   const kv8_allocator *allocator) {
    *out = (kv8_random_weights){.allocator = allocator, .capacity = capacity};
    void *memory = NULL;
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_alloc(allocator, capacity, sizeof *out->tensors, "random tensors", &memory));
    out->tensors = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, capacity, sizeof *out->kinds, "random tensors", &memory));
    out->kinds = memory;
    KV8_TRY_GOTO(kv8_alloc(allocator, capacity, sizeof *out->names, "random tensors", &memory));
    out->names = memory;
    return KV8_OK;
fail:
    kv8_random_weights_close(out);
    return status;
}

void kv8_random_weights_close(kv8_random_weights *random) {
    const kv8_allocator *const a = random->allocator;
    for (int k = 0; k < KV8_NUM_RANDOM_KINDS; k++)
        kv8_release(a, random->pools[k].data, random->pools[k].bytes, 1);
    kv8_release(a, random->names, random->capacity, sizeof *random->names);
    kv8_release(a, random->kinds, random->capacity, sizeof *random->kinds);
    kv8_release(a, random->tensors, random->capacity, sizeof *random->tensors);
    *random = (kv8_random_weights){0};
}

void kv8_random_weights_add(kv8_random_weights *random, const char *name, kv8_random_kind kind,
                            const int64_t *dims, int32_t num_dims) {
    const size_t i = random->num++;
    assert(i < random->capacity);
    const bool is_bytes = kind == KV8_RANDOM_BLOCKS || kind == KV8_RANDOM_SCALES;
    kv8_tensor *const tensor = &random->tensors[i];
    snprintf(random->names[i], sizeof random->names[i], "%s", name);
    random->kinds[i] = kind;
    *tensor = (kv8_tensor){.name = random->names[i],
                           .type = is_bytes ? KV8_TENSOR_U8 : KV8_TENSOR_BF16,
                           .num_dims = num_dims,
                           .bytes = is_bytes ? 1 : sizeof(kv8_bf16)};
    for (int32_t d = 0; d < num_dims; d++) {
        tensor->shape[d] = dims[d];
        tensor->bytes *= (uint64_t)dims[d];
    }
}

/* --- values --- */

typedef struct filling {
    kv8_random_kind kind;
    uint8_t *data;
    size_t bytes;
    float spread;  /* of bf16 values, which are even from -spread to it */
    uint8_t scale; /* e8m0: this one or the next */
} filling;

/* splitmix64: the word at an index, whoever asks. */
static uint64_t random_word(uint64_t index) {
    uint64_t z = index * 0x9e3779b97f4a7c15u + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t word_of(const filling *f, uint64_t word) {
    uint64_t out = 0;
    switch (f->kind) {
        case KV8_RANDOM_ONES: return 0x3f803f803f803f80u;
        case KV8_RANDOM_BLOCKS: return word;
        case KV8_RANDOM_SCALES:
            return (word & 0x0101010101010101u) + f->scale * 0x0101010101010101u;
        default: break;
    }
    for (int i = 0; i < 4; i++) {
        const float value = f->spread * (float)(int16_t)(word >> 16 * i) / 32768;
        const kv8_bf16 code = kv8_bf16_from_f32(value);
        uint16_t bits;
        memcpy(&bits, &code, sizeof bits);
        out |= (uint64_t)bits << 16 * i;
    }
    return out;
}

static void fill_slice(void *cookie, size_t slice, int32_t thread_idx) {
    const filling *const f = cookie;
    const size_t begin = slice * SLICE, end = begin + SLICE < f->bytes ? begin + SLICE : f->bytes;
    (void)thread_idx;
    for (size_t at = begin; at < end; at += sizeof(uint64_t)) {
        const uint64_t word = word_of(f, random_word(at + (uint64_t)f->kind));
        memcpy(f->data + at, &word, sizeof word);
    }
}

/* Sums over `width` inputs are about as large as the inputs. */
static kv8_status fill_pool(kv8_random_weights *random, kv8_random_kind kind, int64_t width,
                            kv8_threads *threads) {
    static const double e2m1_rms = 2.93, even_rms = 0.577;
    const double each = 1 / sqrt((double)width);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(random->allocator, random->pools[kind].bytes, 1, "random weights", &memory));
    random->pools[kind].data = memory;
    filling f = {.kind = kind,
                 .data = memory,
                 .bytes = random->pools[kind].bytes,
                 .spread = (float)(each / even_rms),
                 .scale = (uint8_t)(127 + (int)floor(log2(each / e2m1_rms)))};
    kv8_threads_run(threads, (f.bytes + SLICE - 1) / SLICE, fill_slice, &f);
    return KV8_OK;
}

static uint64_t hash_of(const char *name) {
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    for (; *name != '\0'; name++) hash = (hash ^ (uint8_t)*name) * 0x100000001b3u;
    return hash;
}

kv8_status kv8_random_weights_fill(kv8_random_weights *random, const char *label, int64_t width,
                                   kv8_threads *threads, kv8_checkpoint *out) {
    for (size_t i = 0; i < random->num; i++) {
        size_t *const bytes = &random->pools[random->kinds[i]].bytes;
        const size_t needed = kv8_round_up((size_t)random->tensors[i].bytes, OFFSET_STEP) + SLACK;
        if (needed > *bytes) *bytes = needed;
    }
    for (int k = 0; k < KV8_NUM_RANDOM_KINDS; k++) {
        if (random->pools[k].bytes > 0)
            KV8_TRY(fill_pool(random, (kv8_random_kind)k, width, threads));
    }
    for (size_t i = 0; i < random->num; i++) {
        const uint64_t step = hash_of(random->names[i]) % (SLACK / OFFSET_STEP);
        random->tensors[i].data = random->pools[random->kinds[i]].data + step * OFFSET_STEP;
    }
    return kv8_checkpoint_of(out, label, random->tensors, random->num, random->allocator);
}
