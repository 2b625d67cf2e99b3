/* timeline.c - where a stream's time goes: an event at every launch and copy that it is given,
 * those of recorded graphs among them, and the time from each to the next.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

enum { MAX_MARKS = 4096 };

/* From here to the next mark the stream did `name`, NULL: nothing. */
typedef struct mark {
    const char *name, *scope;
    cu_event event;
} mark;

struct kv8_timeline {
    kv8_device *device;
    bool sees_graphs;
    const char *scope;
    int32_t num;
    mark marks[MAX_MARKS];
};

kv8_status kv8_timeline_create(kv8_timeline **out, kv8_device *device, bool sees_graphs) {
    const kv8_driver *const cu = device->driver;
    *out = NULL;
    if (sees_graphs && cu->cuEventRecordWithFlags == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "this driver (CUDA %d.%d) times nothing within a graph", cu->version / 1000,
                        cu->version % 1000 / 10);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_timeline), "timeline", &memory));
    kv8_timeline *const t = memory;
    t->device = device;
    t->sees_graphs = sees_graphs;
    kv8_status status = kv8_device_enter(device);
    for (int32_t i = 0; status == KV8_OK && i < MAX_MARKS; i++)
        status = kv8_driver_check(cu, cu->cuEventCreate(&t->marks[i].event, 0), "event");
    kv8_device_leave(device);
    if (status != KV8_OK) {
        kv8_timeline_destroy(t);
        return status;
    }
    *out = t;
    return KV8_OK;
}

void kv8_timeline_destroy(kv8_timeline *timeline) {
    if (timeline == NULL) return;
    if (kv8_device_enter(timeline->device) == KV8_OK) {
        for (int32_t i = 0; i < MAX_MARKS && timeline->marks[i].event != NULL; i++)
            timeline->device->driver->cuEventDestroy_v2(timeline->marks[i].event);
        kv8_device_leave(timeline->device);
    }
    kv8_release(NULL, timeline, 1, sizeof *timeline);
}

void kv8_stream_set_timeline(kv8_stream *stream, kv8_timeline *timeline) {
    stream->timeline = timeline;
}

bool kv8_stream_times_graphs(const kv8_stream *stream) {
    return stream->timeline != NULL && stream->timeline->sees_graphs;
}

void kv8_stream_set_scope(kv8_stream *stream, const char *scope) {
    if (stream->timeline != NULL) stream->timeline->scope = scope;
}

static kv8_status add_mark(kv8_stream *stream, const char *name) {
    kv8_timeline *const t = stream->timeline;
    const kv8_driver *const cu = t->device->driver;
    if (t->num == MAX_MARKS)
        return kv8_fail(KV8_ERR_FULL, "a timeline of more than %d launches", (int)MAX_MARKS);
    mark *const m = &t->marks[t->num++];
    m->name = name;
    m->scope = t->scope;
    KV8_TRY(kv8_device_enter(t->device));
    const cu_result result =
        stream->is_capturing ? cu->cuEventRecordWithFlags(m->event, stream->handle, CU_EVENT_NODE)
                             : cu->cuEventRecord(m->event, stream->handle);
    kv8_device_leave(t->device);
    return kv8_driver_check(cu, result, "event record");
}

bool kv8_timeline_sees(const kv8_stream *stream) {
    return stream->timeline != NULL && (!stream->is_capturing || stream->timeline->sees_graphs);
}

kv8_status kv8_timeline_begin(kv8_stream *stream, const char *name) {
    return kv8_timeline_sees(stream) ? add_mark(stream, name) : KV8_OK;
}

/* A graph's work follows without a gap: what comes next ends what came before. */
kv8_status kv8_timeline_end(kv8_stream *stream) {
    return kv8_timeline_sees(stream) && !stream->is_capturing ? add_mark(stream, NULL) : KV8_OK;
}

bool kv8_timeline_has_room(const kv8_timeline *timeline) {
    return timeline->num < MAX_MARKS / 8;
}

kv8_status kv8_timeline_read(kv8_timeline *t, kv8_timeline_visitor visit, void *cookie) {
    const kv8_driver *const cu = t->device->driver;
    if (t->num == 0) return KV8_OK;
    KV8_TRY(kv8_device_enter(t->device));
    kv8_status status = KV8_OK;
    for (int32_t i = 0; status == KV8_OK && i + 1 < t->num; i++) {
        float milliseconds = 0;
        status = kv8_driver_check(
            cu, cu->cuEventElapsedTime(&milliseconds, t->marks[i].event, t->marks[i + 1].event),
            "elapsed time");
        visit(cookie, t->marks[i].scope, t->marks[i].name, (double)milliseconds * 1e-3);
    }
    kv8_device_leave(t->device);
    if (status != KV8_OK) t->num = 0;
    if (status != KV8_OK) return status;
    const mark last = t->marks[t->num - 1];
    t->marks[t->num - 1] = t->marks[0];
    t->marks[0] = last;
    t->num = 1;
    return KV8_OK;
}
