/* stream.c - streams, the copies and events on them, and graphs recorded from them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

/* Evaluates a driver call with the device's context current. */
#define ON_DEVICE(device, status, call, ...)                      \
    do {                                                          \
        status = kv8_device_enter(device);                        \
        if (status == KV8_OK) {                                   \
            status = kv8_driver_check(cu, cu->call, __VA_ARGS__); \
            kv8_device_leave(device);                             \
        }                                                         \
    } while (0)

/* --- streams --- */

static kv8_status new_stream(kv8_stream **out, kv8_device *device) {
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_stream), "stream", &memory));
    *out = memory;
    (*out)->device = device;
    return KV8_OK;
}

kv8_status kv8_stream_create(kv8_stream **out, kv8_device *device) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(device);
    KV8_TRY(new_stream(out, device));
    const kv8_driver *const cu = device->driver;
    kv8_status status;
    ON_DEVICE(device, status, cuStreamCreate(&(*out)->handle, CU_STREAM_IS_NON_BLOCKING), "stream");
    if (status != KV8_OK) {
        kv8_release(NULL, *out, 1, sizeof **out);
        *out = NULL;
    }
    return status;
}

kv8_status kv8_stream_wrap(kv8_stream **out, kv8_device *device, void *handle) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(device);
    KV8_TRY(new_stream(out, device));
    (*out)->handle = handle;
    (*out)->borrowed = true;
    return KV8_OK;
}

void kv8_stream_destroy(kv8_stream *stream) {
    if (stream == NULL) return;
    if (!stream->borrowed && kv8_device_enter(stream->device) == KV8_OK) {
        stream->device->driver->cuStreamDestroy_v2(stream->handle);
        kv8_device_leave(stream->device);
    }
    kv8_release(NULL, stream, 1, sizeof *stream);
}

kv8_device *kv8_stream_device(const kv8_stream *stream) {
    return stream->device;
}

kv8_status kv8_stream_copy(kv8_stream *stream, void *to, const void *from, size_t bytes) {
    KV8_REQUIRE(stream);
    if (bytes == 0) return KV8_OK;
    KV8_REQUIRE(to, from);
    const kv8_driver *const cu = stream->device->driver;
    KV8_TRY(kv8_timeline_begin(stream, "copy"));
    kv8_status status;
    ON_DEVICE(stream->device, status,
              cuMemcpyAsync((cu_address)(uintptr_t)to, (cu_address)(uintptr_t)from, bytes,
                            stream->handle),
              "copy of %zu bytes", bytes);
    return status == KV8_OK ? kv8_timeline_end(stream) : status;
}

kv8_status kv8_stream_fill(kv8_stream *stream, void *to, uint8_t byte, size_t bytes) {
    KV8_REQUIRE(stream);
    if (bytes == 0) return KV8_OK;
    KV8_REQUIRE(to);
    const kv8_driver *const cu = stream->device->driver;
    KV8_TRY(kv8_timeline_begin(stream, "fill"));
    kv8_status status;
    ON_DEVICE(stream->device, status,
              cuMemsetD8Async((cu_address)(uintptr_t)to, byte, bytes, stream->handle),
              "fill of %zu bytes", bytes);
    return status == KV8_OK ? kv8_timeline_end(stream) : status;
}

kv8_status kv8_stream_synchronize(kv8_stream *stream) {
    KV8_REQUIRE(stream);
    const kv8_driver *const cu = stream->device->driver;
    kv8_status status;
    ON_DEVICE(stream->device, status, cuStreamSynchronize(stream->handle), "work on the GPU");
    return status;
}

/* --- events --- */

struct kv8_event {
    kv8_device *device;
    cu_event handle;
};

kv8_status kv8_event_create(kv8_event **out, kv8_device *device) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(device);
    const kv8_driver *const cu = device->driver;
    void *memory;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_event), "event", &memory));
    kv8_event *const event = memory;
    event->device = device;
    kv8_status status;
    ON_DEVICE(device, status, cuEventCreate(&event->handle, 0), "event");
    if (status == KV8_OK)
        *out = event;
    else
        kv8_release(NULL, event, 1, sizeof *event);
    return status;
}

void kv8_event_destroy(kv8_event *event) {
    if (event == NULL) return;
    if (kv8_device_enter(event->device) == KV8_OK) {
        event->device->driver->cuEventDestroy_v2(event->handle);
        kv8_device_leave(event->device);
    }
    kv8_release(NULL, event, 1, sizeof *event);
}

kv8_status kv8_event_record(kv8_event *event, kv8_stream *stream) {
    KV8_REQUIRE(event, stream);
    const kv8_driver *const cu = event->device->driver;
    kv8_status status;
    ON_DEVICE(event->device, status, cuEventRecord(event->handle, stream->handle), "event record");
    return status;
}

kv8_status kv8_event_synchronize(kv8_event *event) {
    KV8_REQUIRE(event);
    const kv8_driver *const cu = event->device->driver;
    kv8_status status;
    ON_DEVICE(event->device, status, cuEventSynchronize(event->handle), "work before an event");
    return status;
}

kv8_status kv8_stream_wait(kv8_stream *stream, kv8_event *event) {
    KV8_REQUIRE(stream, event);
    const kv8_driver *const cu = stream->device->driver;
    kv8_status status;
    ON_DEVICE(stream->device, status, cuStreamWaitEvent(stream->handle, event->handle, 0),
              "wait for an event");
    return status;
}

kv8_status kv8_event_elapsed(kv8_event *begin, kv8_event *end, double *seconds_out) {
    KV8_REQUIRE(begin, end, seconds_out);
    const kv8_driver *const cu = end->device->driver;
    kv8_status status;
    float milliseconds = 0;
    ON_DEVICE(end->device, status, cuEventSynchronize(end->handle), "work before an event");
    if (status == KV8_OK)
        ON_DEVICE(end->device, status,
                  cuEventElapsedTime(&milliseconds, begin->handle, end->handle), "elapsed time");
    if (status == KV8_OK) *seconds_out = (double)milliseconds * 1e-3;
    return status;
}

/* --- graphs --- */

struct kv8_graph {
    kv8_device *device;
    cu_graph recorded;
    cu_graph_exec handle;
};

kv8_status kv8_stream_capture_begin(kv8_stream *stream) {
    KV8_REQUIRE(stream);
    const kv8_driver *const cu = stream->device->driver;
    kv8_status status;
    ON_DEVICE(stream->device, status,
              cuStreamBeginCapture_v2(stream->handle, CU_CAPTURE_THREAD_LOCAL), "capture");
    stream->is_capturing = status == KV8_OK;
    return status;
}

bool kv8_stream_overlaps(const kv8_stream *stream, int64_t num_rows) {
    enum { MOST = 512 };
    return stream->is_capturing && num_rows <= MOST;
}

kv8_status kv8_stream_capture_end(kv8_stream *stream, kv8_graph **out) {
    KV8_REQUIRE(stream, out);
    *out = NULL;
    kv8_device *const device = stream->device;
    const kv8_driver *const cu = device->driver;
    cu_graph recorded = NULL;
    void *memory = NULL;
    kv8_graph *graph = NULL;
    kv8_status status;
    const kv8_status marked = kv8_timeline_begin(stream, NULL);
    stream->is_capturing = false;
    ON_DEVICE(device, status, cuStreamEndCapture(stream->handle, &recorded), "end of capture");
    if (status != KV8_OK) return status;
    KV8_TRY_GOTO(marked);
    KV8_TRY_GOTO(kv8_alloc(NULL, 1, sizeof(kv8_graph), "graph", &memory));
    graph = memory;
    graph->device = device;
    ON_DEVICE(device, status, cuGraphInstantiateWithFlags(&graph->handle, recorded, 0), "graph");
    if (status != KV8_OK) goto fail;
    graph->recorded = recorded;
    *out = graph;
    return KV8_OK;
fail:
    kv8_release(NULL, graph, 1, sizeof *graph);
    cu->cuGraphDestroy(recorded);
    return status;
}

kv8_status kv8_graph_launch(kv8_graph *graph, kv8_stream *stream) {
    KV8_REQUIRE(graph, stream);
    const kv8_driver *const cu = graph->device->driver;
    const bool is_seen = kv8_stream_times_graphs(stream);
    kv8_status status;
    if (!is_seen) KV8_TRY(kv8_timeline_begin(stream, "graph"));
    ON_DEVICE(graph->device, status, cuGraphLaunch(graph->handle, stream->handle), "graph launch");
    return status == KV8_OK && !is_seen ? kv8_timeline_end(stream) : status;
}

void kv8_graph_destroy(kv8_graph *graph) {
    if (graph == NULL) return;
    if (kv8_device_enter(graph->device) == KV8_OK) {
        graph->device->driver->cuGraphExecDestroy(graph->handle);
        graph->device->driver->cuGraphDestroy(graph->recorded);
        kv8_device_leave(graph->device);
    }
    kv8_release(NULL, graph, 1, sizeof *graph);
}
