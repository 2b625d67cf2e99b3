/* stand_in_stream.c - memory, streams whose work waits, events, captures and graphs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "stand_in_impl.h"

/* --- memory --- */

enum { ALIGNMENT = 256, GARBAGE = 0xa5 };

static cu_result allocate(size_t bytes, bool is_host, void **out) {
    const cu_context context = stand_in_current();
    const size_t limit = stand_in_current_gpu()->memory_bytes;
    if (bytes == 0) return CU_INVALID_VALUE;
    if (bytes > limit || (!is_host && context->used_bytes > limit - bytes)) return CU_OUT_OF_MEMORY;
    void *const memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (memory == NULL) return CU_OUT_OF_MEMORY;
    memset(memory, GARBAGE, bytes);
    allocation *const a = stand_in_memory(sizeof *a);
    *a = (allocation){.next = stand_in.allocations,
                      .begin = (uintptr_t)memory,
                      .bytes = bytes,
                      .context = context,
                      .is_host = is_host};
    stand_in.allocations = a;
    if (!is_host) context->used_bytes += bytes;
    (*(is_host ? &stand_in.live.host_memory : &stand_in.live.memory))++;
    *out = memory;
    return CU_OK;
}

static cu_result release(uintptr_t at, bool is_host) {
    allocation **link = &stand_in.allocations;
    while (*link != NULL && ((*link)->begin != at || (*link)->is_host != is_host))
        link = &(*link)->next;
    allocation *const a = *link;
    if (a == NULL) return CU_INVALID_VALUE;
    stand_in_run_all(); /* work that may use it */
    *link = a->next;
    if (!is_host) a->context->used_bytes -= a->bytes;
    (*(is_host ? &stand_in.live.host_memory : &stand_in.live.memory))--;
    free(a);
    free((void *)at);
    return CU_OK;
}

static const allocation *find_allocation(cu_address at) {
    const allocation *a = stand_in.allocations;
    while (a != NULL && (at < a->begin || at - a->begin >= a->bytes)) a = a->next;
    return a;
}
bool stand_in_leaves_memory(cu_address at, size_t bytes) {
    const allocation *const a = find_allocation(at);
    return a != NULL && bytes > a->bytes - (size_t)(at - a->begin);
}

cu_result cuMemAlloc_v2(cu_address *out, size_t bytes) {
    ENTER_CONTEXT(cuMemAlloc_v2);
    if (stand_in_breaks_capture()) return CU_CAPTURE_UNSUPPORTED;
    void *memory = NULL;
    const cu_result result = allocate(bytes, false, &memory);
    *out = (uintptr_t)memory;
    return result;
}
cu_result cuMemFree_v2(cu_address at) {
    ENTER(cuMemFree_v2);
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    if (stand_in_breaks_capture()) return CU_CAPTURE_UNSUPPORTED;
    const cu_result result = release((uintptr_t)at, false);
    return result == CU_OK ? fault : result;
}
cu_result cuMemGetInfo_v2(size_t *left, size_t *total) {
    ENTER_CONTEXT(cuMemGetInfo_v2);
    *total = stand_in_current_gpu()->memory_bytes;
    *left = *total - stand_in_current()->used_bytes;
    return CU_OK;
}
cu_result cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    ENTER_CONTEXT(cuMemHostAlloc);
    if (stand_in_breaks_capture()) return CU_CAPTURE_UNSUPPORTED;
    return flags == CU_HOST_PORTABLE ? allocate(bytes, true, out) : CU_INVALID_VALUE;
}
cu_result cuMemFreeHost(void *at) {
    ENTER(cuMemFreeHost);
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    if (stand_in_breaks_capture()) return CU_CAPTURE_UNSUPPORTED;
    const cu_result result = release((uintptr_t)at, true);
    return result == CU_OK ? fault : result;
}
cu_result cuMemGetAddressRange_v2(cu_address *begin, size_t *bytes, cu_address at) {
    ENTER_CONTEXT(cuMemGetAddressRange_v2);
    const allocation *const a = find_allocation(at);
    if (a == NULL || a->is_host) return CU_INVALID_VALUE;
    *begin = a->begin;
    *bytes = a->bytes;
    return CU_OK;
}

/* --- work --- */

static void take_mark(mark *m) {
    if (m != NULL) m->refs++;
}
static void drop_mark(mark *m) {
    if (m != NULL && --m->refs == 0) free(m);
}

/* Appends a copy that owns what it points to. */
static void append(op_list *list, const op *given) {
    op *const copy = stand_in_memory(sizeof *copy);
    *copy = *given;
    copy->next = NULL;
    take_mark(copy->mark);
    if (copy->kind == OP_LAUNCH) {
        void *const args = stand_in_memory(copy->launch.args_bytes);
        memcpy(args, given->launch.args, copy->launch.args_bytes);
        copy->launch.args = args;
    }
    if (list->first == NULL) list->end = &list->first;
    *list->end = copy;
    list->end = &copy->next;
}
static void append_all(op_list *list, const op_list *given) {
    for (const op *each = given->first; each != NULL; each = each->next) append(list, each);
}
static void release_op(op *each) {
    drop_mark(each->mark);
    if (each->kind == OP_LAUNCH) free((void *)(uintptr_t)each->launch.args);
    free(each);
}
static void release_all(op_list *list) {
    while (list->first != NULL) {
        op *const each = list->first;
        list->first = each->next;
        release_op(each);
    }
}

/* Takes the launch over, its args too. */
static void record_launch(op *each) {
    if (stand_in.num_launches == stand_in.launches_room) {
        stand_in.launches_room = 2 * stand_in.launches_room + 16;
        stand_in.launches =
            realloc(stand_in.launches, (size_t)stand_in.launches_room * sizeof *stand_in.launches);
        if (stand_in.launches == NULL) abort();
    }
    const stand_in_launch launch = each->launch;
    each->kind = OP_FILL; /* owns nothing */
    stand_in.launches[stand_in.num_launches++] = launch;
    if (stand_in.on_launch != NULL) stand_in.on_launch(&launch);
}

static void run_op(op *each) {
    stand_in.clock_ns += 1000 + each->bytes / 500; /* 500 GB/s */
    switch (each->kind) {
        case OP_COPY: memmove(each->to, each->from, each->bytes); break;
        case OP_FILL: memset(each->to, each->byte, each->bytes); break;
        case OP_LAUNCH: record_launch(each); break;
        case OP_RECORD:
            each->mark->done = true;
            each->mark->time_ns = stand_in.clock_ns;
            break;
        case OP_WAIT:
            if (!each->mark->done) stand_in_run_stream(each->mark->stream);
            break;
    }
}

void stand_in_run_stream(cu_stream stream) {
    while (stream->work.first != NULL) {
        op *const each = stream->work.first;
        stream->work.first = each->next;
        run_op(each);
        release_op(each);
    }
}
void stand_in_run_all(void) {
    stand_in_run_stream(&stand_in.default_stream);
    for (cu_stream each = stand_in.streams; each != NULL; each = each->next)
        stand_in_run_stream(each);
}

static cu_stream stream_of(cu_stream handle) {
    return handle == NULL ? &stand_in.default_stream : handle;
}
void stand_in_give(cu_stream handle, op given) {
    cu_stream const stream = stream_of(handle);
    append(stream->is_capturing ? &stream->captured : &stream->work, &given);
}

cu_result cuMemcpyAsync(cu_address to, cu_address from, size_t bytes, cu_stream stream) {
    ENTER_CONTEXT(cuMemcpyAsync);
    if (stand_in_leaves_memory(to, bytes) || stand_in_leaves_memory(from, bytes))
        return CU_INVALID_VALUE;
    stand_in_give(stream, (op){.kind = OP_COPY,
                               .to = (void *)(uintptr_t)to,
                               .from = (const void *)(uintptr_t)from,
                               .bytes = bytes});
    return CU_OK;
}
cu_result cuMemsetD8Async(cu_address to, unsigned char byte, size_t bytes, cu_stream stream) {
    ENTER_CONTEXT(cuMemsetD8Async);
    if (find_allocation(to) == NULL || stand_in_leaves_memory(to, bytes)) return CU_INVALID_VALUE;
    stand_in_give(stream,
                  (op){.kind = OP_FILL, .to = (void *)(uintptr_t)to, .byte = byte, .bytes = bytes});
    return CU_OK;
}

/* --- streams --- */

cu_result cuStreamCreate(cu_stream *out, unsigned flags) {
    ENTER_CONTEXT(cuStreamCreate);
    if (flags != CU_STREAM_IS_NON_BLOCKING) return CU_INVALID_VALUE;
    cu_stream const stream = stand_in_memory(sizeof *stream);
    stream->next = stand_in.streams;
    stand_in.streams = stream;
    stand_in.live.streams++;
    *out = stream;
    return CU_OK;
}
cu_result cuStreamDestroy_v2(cu_stream stream) {
    ENTER(cuStreamDestroy_v2);
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    stand_in_run_stream(stream);
    release_all(&stream->captured);
    cu_stream *link = &stand_in.streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    stand_in.live.streams--;
    free(stream);
    return fault;
}
cu_result cuStreamSynchronize(cu_stream handle) {
    ENTER_CONTEXT(cuStreamSynchronize);
    cu_stream const stream = stream_of(handle);
    if (stream->is_capturing) {
        stream->is_broken = true;
        return CU_CAPTURE_UNSUPPORTED;
    }
    stand_in_run_stream(stream);
    return CU_OK;
}

/* --- events --- */

cu_result cuEventCreate(cu_event *out, unsigned flags) {
    ENTER_CONTEXT(cuEventCreate);
    if (flags != 0) return CU_INVALID_VALUE;
    *out = stand_in_memory(sizeof **out);
    stand_in.live.events++;
    return CU_OK;
}
cu_result cuEventDestroy_v2(cu_event event) {
    ENTER(cuEventDestroy_v2);
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    drop_mark(event->mark);
    free(event);
    stand_in.live.events--;
    return fault;
}
cu_result cuEventRecord(cu_event event, cu_stream handle) {
    ENTER_CONTEXT(cuEventRecord);
    drop_mark(event->mark);
    event->mark = stand_in_memory(sizeof *event->mark);
    *event->mark = (mark){.refs = 1, .stream = stream_of(handle)};
    stand_in_give(handle, (op){.kind = OP_RECORD, .mark = event->mark});
    return CU_OK;
}
cu_result cuEventRecordWithFlags(cu_event event, cu_stream handle, unsigned flags) {
    ENTER_CONTEXT(cuEventRecordWithFlags);
    if (flags != CU_EVENT_NODE) return CU_INVALID_VALUE;
    drop_mark(event->mark);
    event->mark = stand_in_memory(sizeof *event->mark);
    *event->mark = (mark){.refs = 1, .stream = stream_of(handle)};
    stand_in_give(handle, (op){.kind = OP_RECORD, .mark = event->mark});
    return CU_OK;
}
cu_result cuStreamWaitEvent(cu_stream stream, cu_event event, unsigned flags) {
    ENTER_CONTEXT(cuStreamWaitEvent);
    if (flags != 0) return CU_INVALID_VALUE;
    if (event->mark == NULL) return CU_OK; /* nothing to wait for */
    if (event->mark->stream->is_capturing && event->mark->stream != stream_of(stream))
        return CU_CAPTURE_UNSUPPORTED; /* the driver would capture this stream too */
    stand_in_give(stream, (op){.kind = OP_WAIT, .mark = event->mark});
    return CU_OK;
}
cu_result cuEventSynchronize(cu_event event) {
    ENTER_CONTEXT(cuEventSynchronize);
    if (event->mark == NULL || event->mark->done) return CU_OK;
    if (event->mark->stream->is_capturing) return CU_CAPTURE_UNSUPPORTED;
    stand_in_run_stream(event->mark->stream);
    return CU_OK;
}
cu_result cuEventElapsedTime(float *out, cu_event begin, cu_event end) {
    ENTER_CONTEXT(cuEventElapsedTime);
    if (begin->mark == NULL || end->mark == NULL) return CU_INVALID_HANDLE;
    if (!begin->mark->done || !end->mark->done) return CU_NOT_READY;
    *out = (float)((double)(end->mark->time_ns - begin->mark->time_ns) * 1e-6);
    return CU_OK;
}

/* --- captures and graphs --- */

bool stand_in_breaks_capture(void) {
    bool breaks = false;
    for (cu_stream each = stand_in.streams; each != NULL; each = each->next) {
        if (!each->is_capturing || !pthread_equal(each->capturer, pthread_self())) continue;
        each->is_broken = breaks = true;
    }
    return breaks;
}

cu_result cuStreamBeginCapture_v2(cu_stream stream, int mode) {
    ENTER_CONTEXT(cuStreamBeginCapture_v2);
    if (mode != CU_CAPTURE_THREAD_LOCAL) return CU_INVALID_VALUE;
    if (stream == NULL) return CU_CAPTURE_UNSUPPORTED;
    if (stream->is_capturing) return CU_ILLEGAL_STATE;
    stream->is_capturing = true;
    stream->is_broken = false;
    stream->capturer = pthread_self();
    return CU_OK;
}
cu_result cuStreamEndCapture(cu_stream stream, cu_graph *out) {
    ENTER(cuStreamEndCapture);
    *out = NULL;
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    if (stream == NULL || !stream->is_capturing) return CU_ILLEGAL_STATE;
    stream->is_capturing = false;
    if (fault != CU_OK || stream->is_broken) {
        release_all(&stream->captured);
        return fault != CU_OK ? fault : CU_CAPTURE_INVALIDATED;
    }
    cu_graph const graph = stand_in_memory(sizeof *graph);
    append_all(&graph->ops, &stream->captured);
    release_all(&stream->captured);
    stand_in.live.graphs++;
    *out = graph;
    return CU_OK;
}
cu_result cuGraphInstantiateWithFlags(cu_graph_exec *out, cu_graph graph,
                                      unsigned long long flags) {
    ENTER_CONTEXT(cuGraphInstantiateWithFlags);
    if (flags != 0) return CU_INVALID_VALUE;
    *out = stand_in_memory(sizeof **out);
    append_all(&(*out)->ops, &graph->ops);
    stand_in.live.execs++;
    return CU_OK;
}
cu_result cuGraphLaunch(cu_graph_exec exec, cu_stream handle) {
    ENTER_CONTEXT(cuGraphLaunch);
    cu_stream const stream = stream_of(handle);
    append_all(stream->is_capturing ? &stream->captured : &stream->work, &exec->ops);
    return CU_OK;
}
cu_result cuGraphDestroy(cu_graph graph) {
    ENTER(cuGraphDestroy);
    release_all(&graph->ops);
    free(graph);
    stand_in.live.graphs--;
    return fault;
}
cu_result cuGraphExecDestroy(cu_graph_exec exec) {
    ENTER(cuGraphExecDestroy);
    release_all(&exec->ops);
    free(exec);
    stand_in.live.execs--;
    return fault;
}
