/* device_ceiling.c - what no kernel on this GPU can beat, measured now: a streaming read of a given
 * number of bytes, and the driver's own copy. Rotates over more memory than the L2 holds, so that
 * every pass is a cold one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_args.h"
#include "driver.h"

enum { NUM_PASSES = 24, NUM_WARM = 4, WORD = 16, BLOCKS_PER_SM = 4 };

typedef struct ceiling_run {
    kv8_device *device;
    kv8_stream *stream;
    kv8_event *begin, *end;
    kv8_kernel read;
    uint8_t *pool; /* [pool_bytes], after it 4 bytes for the kernel's result */
    size_t bytes, pool_bytes;
} ceiling_run;

static kv8_status start_read(ceiling_run *run, size_t offset) {
    const kv8_read_ceiling_args args = {.data = run->pool + offset,
                                        .num_words = run->bytes / WORD,
                                        .result_out = (void *)(run->pool + run->pool_bytes),
                                        .unlikely = 0x5bd1e995};
    const kv8_launch launch = {.grid = {BLOCKS_PER_SM * (uint32_t)run->device->info.num_sms},
                               .block = {KV8_READ_CEILING_THREADS}};
    return kv8_kernel_launch(&run->read, run->stream, &launch, &args);
}

/* Half of the pool to the other half: bytes / 2 are read and bytes / 2 written. */
static kv8_status start_copy(ceiling_run *run, size_t offset) {
    const size_t half = run->bytes / 2;
    return kv8_stream_copy(run->stream, run->pool + offset, run->pool + offset + half, half);
}

/* The best pass: a ceiling, not an average. */
static kv8_status measure(ceiling_run *run, kv8_status (*start)(ceiling_run *, size_t),
                          double *gb_s_out) {
    const size_t num_places = run->pool_bytes / run->bytes;
    double best = 0;
    for (size_t pass = 0; pass < NUM_PASSES; pass++) {
        double seconds = 0;
        KV8_TRY(kv8_event_record(run->begin, run->stream));
        KV8_TRY(start(run, pass % num_places * run->bytes));
        KV8_TRY(kv8_event_record(run->end, run->stream));
        KV8_TRY(kv8_event_elapsed(run->begin, run->end, &seconds));
        const double gb_s = (double)run->bytes / seconds * 1e-9;
        if (pass >= NUM_WARM && gb_s > best) best = gb_s;
    }
    *gb_s_out = best;
    return KV8_OK;
}

kv8_status kv8_device_measure_ceilings(kv8_device *device, size_t bytes,
                                       kv8_device_ceilings *ceilings_out) {
    if (device == NULL) return kv8_fail(KV8_ERR_INVALID, "ceilings: device is NULL");
    if (bytes < 2 * WORD || bytes > device->info.memory_bytes / 2)
        return kv8_fail(KV8_ERR_INVALID, "ceilings: %zu bytes, must be %d to half the GPU's %llu",
                        bytes, 2 * WORD, (unsigned long long)device->info.memory_bytes);
    ceiling_run run = {.device = device, .bytes = bytes / (2 * WORD) * (2 * WORD)};
    /* Four times the L2 between two reads of one byte, where the piece is not longer itself. */
    run.pool_bytes =
        run.bytes *
        (size_t)kv8_ceil_div((int64_t)(4 * device->info.l2_bytes + run.bytes), (int64_t)run.bytes);
    void *pool = NULL;
    kv8_device_ceilings found = {0};
    kv8_status status;
    KV8_TRY_GOTO(kv8_kernel_get(&run.read, device, "kv8_read_ceiling__sm80",
                                sizeof(kv8_read_ceiling_args), 0));
    KV8_TRY_GOTO(kv8_device_alloc(device, run.pool_bytes + sizeof(uint32_t), &pool));
    run.pool = pool;
    KV8_TRY_GOTO(kv8_stream_create(&run.stream, device));
    KV8_TRY_GOTO(kv8_event_create(&run.begin, device));
    KV8_TRY_GOTO(kv8_event_create(&run.end, device));
    KV8_TRY_GOTO(kv8_stream_fill(run.stream, run.pool, 0x5a, run.pool_bytes));
    KV8_TRY_GOTO(measure(&run, start_read, &found.read_gb_s));
    KV8_TRY_GOTO(measure(&run, start_copy, &found.copy_gb_s));
    *ceilings_out = found;
fail:
    kv8_event_destroy(run.end);
    kv8_event_destroy(run.begin);
    kv8_stream_destroy(run.stream);
    kv8_device_free(device, pool);
    return status;
}
