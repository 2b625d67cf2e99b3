/* device_plan.h - what a plan of attention on a GPU holds: the kernels that its runs choose among,
 * each with its launch, and the layout of the workspace.
 *
 * Private to attention, shared by device_plan.c, device_run.c and device_describe.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_PLAN_H
#define KV8_DEVICE_PLAN_H

#include <kv8/attention_device.h>

#include "device_variants.h"

/* A kernel of the plan. Plain data. */
typedef struct kv8_device_choice {
    const kv8_variant *variant;
    kv8_kernel kernel;
    kv8_launch launch;
    union { /* the kernel's tail, but for pointers into the workspace */
        kv8_decode_tail decode;
        kv8_prefill_tail prefill;
    };
} kv8_device_choice;

/* Where a kernel's partial results lie in the workspace. */
typedef struct kv8_partials_layout {
    size_t arrivals_at; /* counters, 0 between launches */
    size_t sums_at, partials_at;
} kv8_partials_layout;

/* Byte offsets into the workspace. */
typedef struct kv8_device_layout {
    size_t queue_at; /* counters too; all of them are in the first zeroed_bytes */
    size_t zeroed_bytes;
    /* Of one place, but where a run launches both at once. */
    kv8_partials_layout decode, prefill;
    size_t items_at, blocks_at, indptr_at, broken_at; /* prefill's work list */
    size_t decode_lens_at;                            /* rows of each request that are decode's */
    size_t unmasked_at;                               /* of specs with a mask, where it begins */
    size_t size;
} kv8_device_layout;

struct kv8_attention_device_plan {
    kv8_attention_spec spec; /* resolved */
    kv8_device *device;
    const kv8_allocator *allocator;
    kv8_allocator allocator_copy;
    kv8_device_choice choices[KV8_MAX_CHOICES]; /* in order of preference */
    int num_choices;
    int32_t decode_rows; /* beside prefill: of a request, that are decode's; 0 = none are */
    kv8_kernel schedule; /* of prefill's work list */
    kv8_kernel masks;    /* before it, of specs with a mask */
    kv8_device_layout layout;
};

enum { KV8_DEVICE_ALIGNMENT = 256 };

/* As kv8_attention_device_plan_create, of kernels alone whose name is like `pattern` (of fnmatch;
 * NULL: of all): for tests, which hold each against the oracle. KV8_ERR_UNSUPPORTED where there is
 * none. */
kv8_status kv8_attention_device_plan_create_of(kv8_attention_device_plan **out, kv8_device *device,
                                               const kv8_attention_spec *spec, const char *pattern,
                                               const kv8_allocator *allocator);

/* K's or V's pages as kernels address them. */
kv8_kernel_pages kv8_device_pages(const kv8_attention_spec *spec, const kv8_paged *paged,
                                  kv8_dtype dtype);
/* The first kernel that takes a run; NULL where the plan has none. */
const kv8_device_choice *kv8_device_choose(const kv8_attention_device_plan *plan, uint32_t needs,
                                           int32_t batch, const kv8_kernel_pages *k,
                                           const kv8_kernel_pages *v);

/* A kernel of the plan for a run of so many requests: the grid and the tail of windows' kernel,
 * which shares out their heads, are the run's. */
kv8_device_choice kv8_device_choice_of_run(const kv8_attention_device_plan *plan,
                                           const kv8_device_choice *choice, int32_t batch);

/* The first kernel of decode that takes a run beside prefill's, for requests of up to decode_rows
 * query rows; NULL: there is none, and prefill takes all. */
const kv8_device_choice *kv8_device_choose_beside(const kv8_attention_device_plan *plan,
                                                  uint32_t needs, int32_t batch,
                                                  const kv8_kernel_pages *k,
                                                  const kv8_kernel_pages *v);

/* n / d = high half of n * factor, shifted, for n below 2^31: with 2^(s-1) < d <= 2^s and factor =
 * ceil(2^(31+s) / d), factor * d exceeds 2^(31+s) by less than 2^s, and n times that by less than
 * 2^(31+s). */
static inline kv8_divisor kv8_make_divisor(int32_t d) {
    if (d == 1) return (kv8_divisor){0};
    uint32_t s = 1;
    while ((int64_t)1 << s < d) s++;
    const uint64_t whole = (uint64_t)1 << (31 + s);
    return (kv8_divisor){.factor = (uint32_t)((whole + (uint64_t)d - 1) / (uint64_t)d),
                         .shift = s - 1};
}

#endif
