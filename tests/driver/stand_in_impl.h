/* stand_in_impl.h - what the stand-in's files share: one state under one lock, and the first line
 * of every call.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STAND_IN_IMPL_H
#define KV8_STAND_IN_IMPL_H

#include "driver.h"
#include "stand_in.h"

enum {
    CU_INVALID_VALUE = 1,
    CU_INVALID_CONTEXT = 201,
    CU_INVALID_HANDLE = 400,
    CU_ILLEGAL_STATE = 401,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_LAUNCH_OUT_OF_RESOURCES = 701,
    CU_CAPTURE_UNSUPPORTED = 900,
    CU_CAPTURE_INVALIDATED = 901
};

/* Symbols of the table in its order. */
enum {
#define STAND_IN_INDEX(symbol, arguments) CALL_##symbol,
    KV8_DRIVER_SYMBOLS(STAND_IN_INDEX) KV8_DRIVER_OPTIONAL(STAND_IN_INDEX)
#undef STAND_IN_INDEX
        NUM_CALLS
};
#define STAND_IN_PROTOTYPE(symbol, arguments) cu_result symbol arguments;
KV8_DRIVER_SYMBOLS(STAND_IN_PROTOTYPE)
KV8_DRIVER_OPTIONAL(STAND_IN_PROTOTYPE)
#undef STAND_IN_PROTOTYPE

enum { MAX_GPUS = 4 };
struct CUctx_st {
    int32_t retained;
    size_t used_bytes;
};

/* A moment of a stream; an event, its record in the stream and who waits for it share one. */
typedef struct mark {
    int32_t refs;
    bool done;
    uint64_t time_ns;
    cu_stream stream; /* where it is recorded, until it is done */
} mark;

typedef enum op_kind { OP_COPY, OP_FILL, OP_LAUNCH, OP_RECORD, OP_WAIT } op_kind;
typedef struct op {
    struct op *next;
    op_kind kind;
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
    uint8_t byte;
    stand_in_launch launch; /* owns its args */
    mark *mark;
} op;
typedef struct op_list {
    op *first, **end;
} op_list;

struct CUstream_st {
    op_list work;
    bool is_capturing, is_broken; /* broken: a call that a capture forbids */
    op_list captured;
    pthread_t capturer;
    cu_stream next; /* of those alive */
};
struct CUevent_st {
    mark *mark; /* NULL: never recorded */
};
struct CUgraph_st {
    op_list ops;
};
struct CUgraphExec_st {
    op_list ops;
};
struct CUfunc_st {
    const stand_in_kernel *kernel;
    int32_t max_dynamic_bytes;
    bool wide_clusters;
};
struct CUmod_st {
    const stand_in_image *image;
    struct CUfunc_st *functions; /* [num_kernels] */
};

typedef struct allocation {
    struct allocation *next;
    uintptr_t begin;
    size_t bytes;
    cu_context context;
    bool is_host;
} allocation;

typedef struct stand_in_state {
    stand_in_gpu gpus[MAX_GPUS];
    int32_t num_gpus;
    struct CUctx_st contexts[MAX_GPUS];
    int64_t calls[NUM_CALLS], num_calls;
    int32_t fault_call; /* NUM_CALLS: any */
    int64_t fault_after;
    int fault_result;
    const char *failed_call;
    stand_in_live live;
    allocation *allocations;
    cu_stream streams;
    struct CUstream_st default_stream;
    stand_in_launch *launches;
    int32_t num_launches, launches_room;
    void (*on_launch)(const stand_in_launch *);
    uint64_t clock_ns;
} stand_in_state;
extern stand_in_state stand_in;
extern pthread_mutex_t stand_in_lock; /* recursive: a kernel of stand_in_on_launch may call */

/* The call's fault, CU_OK mostly; takes the lock. */
cu_result stand_in_enter(int32_t call);
void stand_in_unlock(const int *locked);
/* The context that is current on this thread, NULL: none. */
cu_context stand_in_current(void);
const stand_in_gpu *stand_in_current_gpu(void);

/* Shared memory that a block may have. */
int32_t stand_in_shared_optin(int32_t sm_version);

/* First line of a call: counts it, and takes its fault into `fault`. */
#define ENTER(symbol)                                      \
    const cu_result fault = stand_in_enter(CALL_##symbol); \
    const int locked __attribute__((cleanup(stand_in_unlock), unused)) = 1
/* The same for a call that does nothing when it fails. */
#define ENTER_OR_FAIL(symbol) \
    ENTER(symbol);            \
    if (fault != CU_OK) return fault
#define ENTER_CONTEXT(symbol) \
    ENTER_OR_FAIL(symbol);    \
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT

/* Runs the stream's work, or all streams'. */
void stand_in_run_stream(cu_stream stream);
void stand_in_run_all(void);
/* True, and the capture is broken, while this thread captures a stream. */
bool stand_in_breaks_capture(void);
/* Takes a copy of the operation into the stream's work or its capture. */
void stand_in_give(cu_stream stream, op given);

/* True when [at, at + bytes) leaves the allocation in which it begins. */
bool stand_in_leaves_memory(cu_address at, size_t bytes);
void *stand_in_memory(size_t bytes); /* of 0 bits; ends the program without */

#endif
