/* device_ceiling.c - what no kernel on this GPU can beat, measured now: a streaming read of a given
 * number of bytes, the driver's own copy, and products. Of the first two it replays a graph of
 * passes back to back, so that launches cost what they cost a graph, over more memory than the L2
 * holds, so that every pass is a cold one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ceiling_args.h"
#include "driver.h"

enum { WORD = 16, PIECE = KV8_READ_CEILING_THREADS * KV8_READ_CEILING_UNROLL, BLOCKS_PER_SM = 4 };
enum { LEAST_PASSES = 8, MOST_PASSES = 256, LEAST_REPLAYS = 7, MOST_REPLAYS = 1000 };
/* Of replays before those that count: clocks rise from idle within it. And of those. */
static const double WARM_SECONDS = 0.04, COUNTED_SECONDS = 0.06;

typedef struct ceiling_run {
    kv8_device *device;
    kv8_stream *stream;
    kv8_event *begin, *end;
    kv8_kernel read, products;
    uint8_t *pool; /* [pool_bytes], after it 4 bytes for the kernel's result */
    size_t bytes, pool_bytes;
} ceiling_run;

static kv8_status start_read_by(ceiling_run *run, size_t offset, size_t num_blocks) {
    const kv8_read_ceiling_args args = {.data = run->pool + offset,
                                        .num_words = run->bytes / WORD,
                                        .result_out = (void *)(run->pool + run->pool_bytes),
                                        .unlikely = 0x5bd1e995};
    const kv8_launch launch = {.grid = {(uint32_t)num_blocks}, .block = {KV8_READ_CEILING_THREADS}};
    return kv8_kernel_launch(&run->read, run->stream, &launch, &args);
}
/* Two shapes of it: a block for every piece, or as many as are at work at once. Which of them is
 * faster depends on the GPU and on the bytes. */
static kv8_status start_read_of_pieces(ceiling_run *run, size_t offset) {
    const size_t pieces = (run->bytes / WORD + PIECE - 1) / PIECE;
    return start_read_by(run, offset, pieces < INT32_MAX ? pieces : INT32_MAX);
}
static kv8_status start_read_by_few(ceiling_run *run, size_t offset) {
    return start_read_by(run, offset, BLOCKS_PER_SM * (size_t)run->device->info.num_sms);
}

/* Half of the pool to the other half: bytes / 2 are read and bytes / 2 written. */
static kv8_status start_copy(ceiling_run *run, size_t offset) {
    const size_t half = run->bytes / 2;
    return kv8_stream_copy(run->stream, run->pool + offset, run->pool + offset + half, half);
}

static kv8_status capture(ceiling_run *run, kv8_status (*start)(ceiling_run *, size_t),
                          size_t num_passes, kv8_graph **out) {
    const size_t num_places = run->pool_bytes / run->bytes;
    KV8_TRY(kv8_stream_capture_begin(run->stream));
    kv8_status status = KV8_OK;
    for (size_t pass = 0; status == KV8_OK && pass < num_passes; pass++)
        status = start(run, pass % num_places * run->bytes);
    const kv8_status ended = kv8_stream_capture_end(run->stream, out);
    return status != KV8_OK ? status : ended;
}

/* The best replay: a ceiling, not an average. */
static kv8_status measure(ceiling_run *run, kv8_status (*start)(ceiling_run *, size_t),
                          double *gb_s_out) {
    const size_t num_places = run->pool_bytes / run->bytes;
    const size_t most = num_places < MOST_PASSES ? num_places : MOST_PASSES;
    const size_t num_passes = most > LEAST_PASSES ? most : LEAST_PASSES;
    kv8_graph *graph = NULL;
    double spent = 0, counted = 0;
    kv8_status status;
    KV8_TRY_GOTO(capture(run, start, num_passes, &graph));
    for (int replays = 0;
         (counted < COUNTED_SECONDS || replays < LEAST_REPLAYS) && replays < MOST_REPLAYS;) {
        double seconds = 0;
        if (num_passes < num_places) /* too little to push itself out of the L2 */
            KV8_TRY_GOTO(kv8_stream_fill(run->stream, run->pool, 0x5a, run->pool_bytes));
        KV8_TRY_GOTO(kv8_event_record(run->begin, run->stream));
        KV8_TRY_GOTO(kv8_graph_launch(graph, run->stream));
        KV8_TRY_GOTO(kv8_event_record(run->end, run->stream));
        KV8_TRY_GOTO(kv8_event_elapsed(run->begin, run->end, &seconds));
        spent += seconds;
        if (spent < WARM_SECONDS) continue;
        counted += seconds;
        replays++;
        const double gb_s = (double)(run->bytes * num_passes) / seconds * 1e-9;
        if (gb_s > *gb_s_out) *gb_s_out = gb_s;
    }
fail:
    kv8_graph_destroy(graph);
    return status;
}

kv8_status kv8_device_measure_ceilings(kv8_device *device, size_t bytes,
                                       kv8_device_ceilings *ceilings_out) {
    KV8_REQUIRE(device, ceilings_out);
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
    KV8_TRY_GOTO(measure(&run, start_read_of_pieces, &found.read_gb_s));
    KV8_TRY_GOTO(measure(&run, start_read_by_few, &found.read_gb_s));
    KV8_TRY_GOTO(measure(&run, start_copy, &found.copy_gb_s));
    *ceilings_out = found;
fail:
    kv8_event_destroy(run.end);
    kv8_event_destroy(run.begin);
    kv8_stream_destroy(run.stream);
    kv8_device_free(device, pool);
    return status;
}

/* The best launch of some. */
static kv8_status multiply(ceiling_run *run, float *result, double *tflop_s_out) {
    enum { STEPS = 2048 };
    const kv8_product_ceiling_args args = {
        .result_out = result, .unlikely = 0x1.8p-100F, .num_steps = STEPS};
    const kv8_launch launch = {.grid = {(uint32_t)run->device->info.num_sms},
                               .block = {KV8_PRODUCT_CEILING_THREADS}};
    const double operations = (double)KV8_PRODUCT_CEILING_STEP * STEPS * launch.grid[0];
    double spent = 0, counted = 0;
    for (int launches = 0;
         (counted < COUNTED_SECONDS || launches < LEAST_REPLAYS) && launches < MOST_REPLAYS;) {
        double seconds = 0;
        KV8_TRY(kv8_event_record(run->begin, run->stream));
        KV8_TRY(kv8_kernel_launch(&run->products, run->stream, &launch, &args));
        KV8_TRY(kv8_event_record(run->end, run->stream));
        KV8_TRY(kv8_event_elapsed(run->begin, run->end, &seconds));
        spent += seconds;
        if (spent < WARM_SECONDS) continue;
        counted += seconds;
        launches++;
        const double tflop_s = operations / seconds * 1e-12;
        if (tflop_s > *tflop_s_out) *tflop_s_out = tflop_s;
    }
    return KV8_OK;
}

kv8_status kv8_device_measure_products(kv8_device *device, double *tflop_s_out) {
    KV8_REQUIRE(device, tflop_s_out);
    ceiling_run run = {.device = device};
    void *result = NULL;
    double found = 0;
    kv8_status status;
    KV8_TRY_GOTO(kv8_kernel_get(&run.products, device, "kv8_product_ceiling__sm90",
                                sizeof(kv8_product_ceiling_args), 0));
    KV8_TRY_GOTO(kv8_device_alloc(device, sizeof(float), &result));
    KV8_TRY_GOTO(kv8_stream_create(&run.stream, device));
    KV8_TRY_GOTO(kv8_event_create(&run.begin, device));
    KV8_TRY_GOTO(kv8_event_create(&run.end, device));
    KV8_TRY_GOTO(multiply(&run, result, &found));
    *tflop_s_out = found;
fail:
    kv8_event_destroy(run.end);
    kv8_event_destroy(run.begin);
    kv8_stream_destroy(run.stream);
    kv8_device_free(device, result);
    return status;
}
