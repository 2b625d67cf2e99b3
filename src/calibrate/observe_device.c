/* observe_device.c - observers on a GPU, the host's part: sums and maxima of device memory laid out
 * as an observer's, and the launches that count into them. What counts is cuda/observe.cu.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/calibrate_device.h>

#include "device_impl.h"
#include "observer.h"

enum { NUM_SOURCES = KV8_F16 - KV8_F32 + 1 };

struct kv8_device_observer {
    const kv8_allocator *allocator;
    kv8_device *device;
    kv8_observer *layout; /* where cells lie; what is read lands in it */
    uint8_t *memory;      /* the device's: sums, maxima, then one word, whether it is on */
    size_t sums_bytes, maxima_bytes;
    kv8_kernel ones[NUM_SOURCES], eights[NUM_SOURCES];
};

/* --- create --- */

static kv8_status get_kernels(kv8_device_observer *observer) {
    for (int i = 0; i < NUM_SOURCES; i++) {
        for (int eights = 0; eights < 2; eights++) {
            char name[64];
            snprintf(name, sizeof name, "kv8_observe_%s_x%d__sm80",
                     kv8_dtype_name((kv8_dtype)(KV8_F32 + i)), eights ? 8 : 1);
            KV8_TRY(kv8_kernel_get(eights ? &observer->eights[i] : &observer->ones[i],
                                   observer->device, name, sizeof(kv8_observe_kernel_args), 0));
        }
    }
    return KV8_OK;
}

static kv8_status check_heads(const kv8_device_observer *observer) {
    enum { MAX_GRID_Y = 65535 };
    int64_t num = 0;
    for (int i = 0; i < KV8_OBSERVED_COUNT; i++) num += observer->layout->tensors[i].num;
    if (num > MAX_GRID_Y)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "observer: %lld heads of K, V and Q, a GPU counts %d",
                        (long long)num, MAX_GRID_Y);
    return KV8_OK;
}

static size_t bytes_of(const kv8_device_observer *observer) {
    return observer->sums_bytes + observer->maxima_bytes + sizeof(uint32_t);
}

/* The first `bytes` of the memory, which begins as garbage. */
static kv8_status clear_counts(const kv8_device_observer *observer, kv8_stream *stream,
                               size_t bytes) {
    KV8_TRY(kv8_stream_fill(stream, observer->memory, 0, bytes));
    return kv8_stream_synchronize(stream);
}

kv8_status kv8_device_observer_create(kv8_device_observer **out, kv8_stream *stream,
                                      const kv8_observer_options *options) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "kv8_device_observer_create: out is NULL");
    *out = NULL;
    KV8_REQUIRE(stream);
    KV8_TAKE_STRUCT(kv8_observer_options, options);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(options->allocator, 1, sizeof(kv8_device_observer), "observer", &memory));
    kv8_device_observer *const observer = memory;
    observer->allocator = options->allocator;
    observer->device = kv8_stream_device(stream);
    kv8_status status;
    KV8_TRY_GOTO(kv8_observer_create(&observer->layout, options));
    KV8_TRY_GOTO(check_heads(observer));
    KV8_TRY_GOTO(get_kernels(observer));
    observer->sums_bytes = observer->layout->num_sums * sizeof(uint64_t);
    observer->maxima_bytes = observer->layout->num_maxima * sizeof(float);
    KV8_TRY_GOTO(kv8_device_alloc(observer->device, bytes_of(observer), &memory));
    observer->memory = memory;
    KV8_TRY_GOTO(clear_counts(observer, stream, bytes_of(observer)));
    *out = observer;
    return KV8_OK;
fail:
    kv8_device_observer_destroy(observer);
    return status;
}

void kv8_device_observer_destroy(kv8_device_observer *observer) {
    if (observer == NULL) return;
    kv8_device_free(observer->device, observer->memory);
    kv8_observer_destroy(observer->layout);
    kv8_release(observer->allocator, observer, 1, sizeof *observer);
}

/* --- start and stop --- */

static uint32_t *is_on(const kv8_device_observer *observer) {
    return (uint32_t *)(void *)(observer->memory + observer->sums_bytes + observer->maxima_bytes);
}

kv8_status kv8_device_observer_start(kv8_device_observer *observer, kv8_stream *stream) {
    KV8_REQUIRE(observer, stream);
    return kv8_stream_fill(stream, is_on(observer), 1, sizeof(uint32_t));
}

kv8_status kv8_device_observer_stop(kv8_device_observer *observer, kv8_stream *stream) {
    KV8_REQUIRE(observer, stream);
    return kv8_stream_fill(stream, is_on(observer), 0, sizeof(uint32_t));
}

/* --- add --- */

static kv8_observe_plane plane_of(const kv8_device_observer *observer, kv8_observed_tensor tensor,
                                  int32_t layer, const kv8_observe_source *source) {
    const kv8_observed *const t = &observer->layout->tensors[tensor];
    uint64_t *const sums = (uint64_t *)(void *)observer->memory;
    uint32_t *const maxima = (uint32_t *)(void *)(observer->memory + observer->sums_bytes);
    return (kv8_observe_plane){.source = source->data,
                               .stride_row = source->stride_row,
                               .stride_head = source->stride_head,
                               .sums = sums + kv8_observer_sums_at(t, layer, 0),
                               .maxima = maxima + kv8_observer_maxima_at(t, layer, 0),
                               .first = t->first,
                               .num_heads = source->data == NULL ? 0 : t->num,
                               .head_dim = t->head_dim};
}

/* Eight elements at a time: they lie whole and aligned in every row, a rotated row's partners too.
 */
static bool fits_eights(const kv8_observe_kernel_args *a) {
    const bool rotates = a->cos_sin != NULL;
    if (rotates && (a->plane[KV8_OBSERVED_K].head_dim % (2 * KV8_OBSERVE_VECTOR) != 0 ||
                    (uintptr_t)a->cos_sin % 16 != 0))
        return false;
    for (int i = 0; i < KV8_OBSERVED_COUNT; i++) {
        const kv8_observe_plane *const p = &a->plane[i];
        const int64_t elements = p->stride_row | p->stride_head | p->head_dim;
        if (p->num_heads > 0 &&
            (elements % KV8_OBSERVE_VECTOR != 0 || (uintptr_t)p->source % 16 != 0))
            return false;
    }
    return true;
}

/* Rows of one block: many, so that clearing and adding up its counts is paid once for them, but no
 * more than leave every multiprocessor its BLOCKS_PER_SM. */
static int32_t rows_per_block(const kv8_device_observer *observer, int64_t num_rows,
                              int64_t num_heads) {
    enum { BLOCKS_PER_SM = 4, LEAST = 32, MOST = 1024 };
    const int64_t blocks = (int64_t)BLOCKS_PER_SM * kv8_device_get_info(observer->device)->num_sms;
    const int64_t rows = kv8_ceil_div(num_rows * num_heads, blocks);
    return (int32_t)kv8_min_i64(kv8_max_i64(rows, LEAST), MOST);
}

kv8_status kv8_device_observer_add(kv8_device_observer *observer, kv8_stream *stream, int32_t layer,
                                   const kv8_observe_args *args) {
    enum { MAX_ROWS = 1 << 30 };
    KV8_REQUIRE(observer, stream);
    KV8_TAKE_STRUCT(kv8_observe_args, args);
    kv8_observe_source sources[KV8_OBSERVED_COUNT];
    KV8_TRY(kv8_observer_check_add(observer->layout, layer, args, sources));
    if (args->num_rows > MAX_ROWS)
        return kv8_fail(KV8_ERR_INVALID, "observer: num_rows is %lld, must be at most %d on a GPU",
                        (long long)args->num_rows, MAX_ROWS);
    kv8_observe_kernel_args a = {.cos_sin = args->k == NULL ? NULL : args->cos_sin,
                                 .is_on = is_on(observer),
                                 .rows_in_use = args->rows_in_use,
                                 .max_rows = (int32_t)args->num_rows,
                                 .interleaved = args->interleaved};
    int64_t num_heads = 0;
    for (int i = 0; i < KV8_OBSERVED_COUNT; i++) {
        a.plane[i] = plane_of(observer, (kv8_observed_tensor)i, layer, &sources[i]);
        num_heads += a.plane[i].num_heads;
    }
    if (a.max_rows == 0 || num_heads == 0) return KV8_OK;
    a.rows_per_block = rows_per_block(observer, a.max_rows, num_heads);
    const int source = (int)args->src_dtype - KV8_F32;
    const kv8_kernel *const kernel =
        fits_eights(&a) ? &observer->eights[source] : &observer->ones[source];
    const kv8_launch launch = {
        .grid = {(uint32_t)kv8_ceil_div(a.max_rows, a.rows_per_block), (uint32_t)num_heads},
        .block = {KV8_OBSERVE_THREADS}};
    return kv8_kernel_launch(kernel, stream, &launch, &a);
}

/* --- read --- */

kv8_status kv8_device_observer_read(kv8_device_observer *observer, kv8_stream *stream,
                                    kv8_observer *into) {
    KV8_REQUIRE(observer, stream, into);
    kv8_observer *const landing = observer->layout;
    KV8_TRY(kv8_observer_check_merge(into, landing));
    KV8_TRY(kv8_stream_copy(stream, landing->sums, observer->memory, observer->sums_bytes));
    KV8_TRY(kv8_stream_copy(stream, landing->maxima, observer->memory + observer->sums_bytes,
                            observer->maxima_bytes));
    KV8_TRY(kv8_stream_synchronize(stream));
    KV8_TRY(clear_counts(observer, stream, observer->sums_bytes + observer->maxima_bytes));
    return kv8_observer_merge(into, landing);
}
