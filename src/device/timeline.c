/* timeline.c - where a stream's time goes: an event at every launch and copy that it is given,
 * those of recorded graphs among them, and the time from each to the next.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "driver.h"

enum { FIRST_MARKS = 4096, READ_MARKS = 512 /* so many are read soon */ };

/* From here to the next mark the stream did `name`, NULL: nothing. */
typedef struct mark {
    const char *name, *scope;
    cu_event event;
} mark;

struct kv8_timeline {
    kv8_device *device;
    bool sees_graphs;
    bool in_piece; /* kv8_stream_begin_piece */
    const char *scope;
    mark *marks; /* [num] of capacity */
    int32_t num, capacity;
};

static kv8_status make_first(kv8_timeline *t) {
    const kv8_driver *const cu = t->device->driver;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, FIRST_MARKS, sizeof *t->marks, "timeline", &memory));
    t->marks = memory;
    t->capacity = FIRST_MARKS;
    KV8_TRY(kv8_device_enter(t->device));
    kv8_status status = KV8_OK;
    for (int32_t i = 0; status == KV8_OK && i < FIRST_MARKS; i++)
        status = kv8_driver_check(cu, cu->cuEventCreate(&t->marks[i].event, 0), "event");
    kv8_device_leave(t->device);
    return status;
}

/* Twice as many marks; the new ones have their events when they are used. */
static kv8_status grow(kv8_timeline *t) {
    const size_t before = (size_t)t->capacity;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 2 * before, sizeof *t->marks, "timeline", &memory));
    memcpy(memory, t->marks, before * sizeof *t->marks);
    kv8_release(NULL, t->marks, before, sizeof *t->marks);
    t->marks = memory;
    t->capacity *= 2;
    return KV8_OK;
}

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
    const kv8_status status = make_first(t);
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
        for (int32_t i = 0; i < timeline->capacity && timeline->marks[i].event != NULL; i++)
            timeline->device->driver->cuEventDestroy_v2(timeline->marks[i].event);
        kv8_device_leave(timeline->device);
    }
    kv8_release(NULL, timeline->marks, (size_t)timeline->capacity, sizeof *timeline->marks);
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
    if (t->num == t->capacity) KV8_TRY(grow(t));
    mark *const m = &t->marks[t->num];
    m->name = name;
    m->scope = t->scope;
    KV8_TRY(kv8_device_enter(t->device));
    cu_result result = m->event == NULL ? cu->cuEventCreate(&m->event, 0) : CU_OK;
    if (result == CU_OK)
        result = stream->is_capturing
                     ? cu->cuEventRecordWithFlags(m->event, stream->handle, CU_EVENT_NODE)
                     : cu->cuEventRecord(m->event, stream->handle);
    t->num += result == CU_OK;
    kv8_device_leave(t->device);
    return kv8_driver_check(cu, result, "event record");
}

bool kv8_timeline_sees(const kv8_stream *stream) {
    const kv8_timeline *const t = stream->timeline;
    return t != NULL && !t->in_piece && (!stream->is_capturing || t->sees_graphs);
}

kv8_status kv8_timeline_begin(kv8_stream *stream, const char *name) {
    return kv8_timeline_sees(stream) ? add_mark(stream, name) : KV8_OK;
}

/* A graph's work follows without a gap: what comes next ends what came before. */
kv8_status kv8_timeline_end(kv8_stream *stream) {
    return kv8_timeline_sees(stream) && !stream->is_capturing ? add_mark(stream, NULL) : KV8_OK;
}

kv8_status kv8_stream_begin_piece(kv8_stream *stream, const char *name) {
    kv8_timeline *const t = stream->timeline;
    if (t == NULL || t->sees_graphs) return KV8_OK;
    KV8_TRY(kv8_timeline_begin(stream, name));
    t->in_piece = true;
    return KV8_OK;
}

kv8_status kv8_stream_end_piece(kv8_stream *stream) {
    kv8_timeline *const t = stream->timeline;
    if (t == NULL || !t->in_piece) return KV8_OK;
    t->in_piece = false;
    return kv8_timeline_end(stream);
}

bool kv8_timeline_has_room(const kv8_timeline *timeline) {
    return timeline->num < READ_MARKS;
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
