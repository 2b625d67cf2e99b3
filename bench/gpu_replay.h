/* gpu_replay.h - what the benchmarks of a GPU share: opening it, and seconds of a recorded graph.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_GPU_REPLAY_H
#define KV8_GPU_REPLAY_H

#include <stdio.h>
#include <stdlib.h>

#include <kv8/device.h>

#define TRY(call)                                                 \
    do {                                                          \
        if ((call) != KV8_OK) {                                   \
            fprintf(stderr, "bench: %s\n", kv8_status_message()); \
            exit(1);                                              \
        }                                                         \
    } while (0)

typedef struct bench_gpu {
    kv8_device *device;
    kv8_stream *stream;
    kv8_device_ceilings ceilings; /* at 1 GiB */
} bench_gpu;

/* The first GPU; ends the program with a line where there is none. */
static inline bench_gpu gpu_open(void) {
    bench_gpu g = {.device = NULL};
    if (kv8_device_open(&g.device, 0) != KV8_OK || kv8_device_num_images() == 0) {
        printf("SKIPPED: no GPU or no kernels: %s\n", kv8_status_message());
        exit(0);
    }
    TRY(kv8_stream_create(&g.stream, g.device));
    TRY(kv8_device_measure_ceilings(g.device, (size_t)1 << 30, &g.ceilings));
    return g;
}
static inline void gpu_close(bench_gpu *g) {
    kv8_stream_destroy(g->stream);
    kv8_device_close(g->device);
}

static inline void *gpu_take(const bench_gpu *g, size_t bytes) {
    void *at = NULL;
    TRY(kv8_device_alloc(g->device, bytes, &at));
    return at;
}
static inline void *gpu_upload(const bench_gpu *g, const void *from, size_t bytes) {
    void *const at = gpu_take(g, bytes);
    TRY(kv8_stream_copy(g->stream, at, from, bytes));
    TRY(kv8_stream_synchronize(g->stream));
    return at;
}

static inline int compare_seconds(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct replay_seconds {
    double best, median;
} replay_seconds;

/* Ends the capture of the stream and replays what it recorded; the first replays do not count. */
static inline replay_seconds gpu_replay(const bench_gpu *g) {
    enum { UNCOUNTED = 3, COUNTED = 15 };
    kv8_graph *graph;
    kv8_event *begin, *end;
    double seconds[UNCOUNTED + COUNTED];
    TRY(kv8_stream_capture_end(g->stream, &graph));
    TRY(kv8_event_create(&begin, g->device));
    TRY(kv8_event_create(&end, g->device));
    for (int i = 0; i < UNCOUNTED + COUNTED; i++) {
        TRY(kv8_event_record(begin, g->stream));
        TRY(kv8_graph_launch(graph, g->stream));
        TRY(kv8_event_record(end, g->stream));
        TRY(kv8_event_elapsed(begin, end, &seconds[i]));
    }
    kv8_event_destroy(begin);
    kv8_event_destroy(end);
    kv8_graph_destroy(graph);
    qsort(seconds + UNCOUNTED, COUNTED, sizeof *seconds, compare_seconds);
    return (replay_seconds){seconds[UNCOUNTED], seconds[UNCOUNTED + COUNTED / 2]};
}

#endif
