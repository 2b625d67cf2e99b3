/* stand_in.c - the stand-in's state, its faults, the machine, and what the driver says of errors,
 * devices and contexts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "stand_in_impl.h"

stand_in_state stand_in = {.gpus = {{90, 132, (size_t)139 << 30}}, .num_gpus = 1};
pthread_mutex_t stand_in_lock;

__attribute__((constructor)) static void make_lock(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&stand_in_lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
    stand_in_reset();
}

void *stand_in_memory(size_t bytes) {
    void *const memory = calloc(1, bytes);
    if (memory == NULL) abort();
    return memory;
}

/* --- control --- */

static const char *const call_names[] = {
#define NAME(symbol, arguments) #symbol,
    KV8_DRIVER_SYMBOLS(NAME) KV8_DRIVER_OPTIONAL(NAME)
#undef NAME
};

static int32_t find_call(const char *name) {
    for (int32_t i = 0; name != NULL && i < NUM_CALLS; i++)
        if (strcmp(call_names[i], name) == 0) return i;
    if (name != NULL) abort(); /* a test that names no call */
    return NUM_CALLS;
}

void stand_in_reset(void) {
    static const stand_in_gpu h200 = {90, 132, (size_t)139 << 30};
    pthread_mutex_lock(&stand_in_lock);
    stand_in_set_gpus(&h200, 1);
    stand_in_fail(NULL, 0, CU_OK);
    memset(stand_in.calls, 0, sizeof stand_in.calls);
    stand_in.num_calls = 0;
    stand_in.on_launch = NULL;
    for (int32_t i = 0; i < stand_in.num_launches; i++)
        free((void *)(uintptr_t)stand_in.launches[i].args);
    free(stand_in.launches);
    stand_in.launches = NULL;
    stand_in.num_launches = stand_in.launches_room = 0;
    pthread_mutex_unlock(&stand_in_lock);
}
/* The records of the last test. */
__attribute__((destructor)) static void forget(void) {
    stand_in_reset();
}

void stand_in_set_gpus(const stand_in_gpu *gpus, int32_t num_gpus) {
    if (num_gpus > MAX_GPUS) abort();
    pthread_mutex_lock(&stand_in_lock);
    for (int32_t i = 0; i < num_gpus; i++) stand_in.gpus[i] = gpus[i];
    stand_in.num_gpus = num_gpus;
    pthread_mutex_unlock(&stand_in_lock);
}

void stand_in_fail(const char *call, int64_t nth, int result) {
    pthread_mutex_lock(&stand_in_lock);
    stand_in.fault_call = find_call(call);
    stand_in.fault_after = nth;
    stand_in.fault_result = result;
    stand_in.failed_call = NULL;
    pthread_mutex_unlock(&stand_in_lock);
}

const char *stand_in_failed_call(void) {
    return stand_in.failed_call;
}

int64_t stand_in_num_calls(const char *call) {
    const int32_t idx = find_call(call);
    return idx == NUM_CALLS ? stand_in.num_calls : stand_in.calls[idx];
}

int32_t stand_in_num_launches(void) {
    return stand_in.num_launches;
}
const stand_in_launch *stand_in_get_launch(int32_t launch_idx) {
    return &stand_in.launches[launch_idx];
}
void stand_in_on_launch(void (*run)(const stand_in_launch *launch)) {
    stand_in.on_launch = run;
}

/* --- the first line of a call --- */

static bool is_about_errors(int32_t call) {
    return call == CALL_cuGetErrorName || call == CALL_cuGetErrorString;
}

/* A kernel of stand_in_on_launch may call: the outermost call is timed. */
static _Thread_local int32_t depth;
static _Thread_local uint64_t entered_ns, spent_ns;

static uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
double stand_in_seconds(void) {
    return (double)spent_ns * 1e-9;
}

cu_result stand_in_enter(int32_t call) {
    if (depth++ == 0) entered_ns = clock_ns();
    pthread_mutex_lock(&stand_in_lock);
    stand_in.calls[call]++;
    stand_in.num_calls += !is_about_errors(call);
    const bool counts =
        stand_in.fault_call == call || (stand_in.fault_call == NUM_CALLS && !is_about_errors(call));
    if (!counts || stand_in.fault_after == 0 || --stand_in.fault_after > 0) return CU_OK;
    stand_in.failed_call = call_names[call];
    return stand_in.fault_result;
}

void stand_in_unlock(const int *locked) {
    (void)locked;
    pthread_mutex_unlock(&stand_in_lock);
    if (--depth == 0) spent_ns += clock_ns() - entered_ns;
}

/* --- errors --- */

static const struct error_words {
    cu_result result;
    const char *name, *words;
} errors[] = {
    {CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CU_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CU_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CU_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CU_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CU_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CU_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CU_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const struct error_words *find_error(cu_result result) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].result == result) return &errors[i];
    return NULL;
}
cu_result cuGetErrorName(cu_result result, const char **out) {
    ENTER_OR_FAIL(cuGetErrorName);
    const struct error_words *const error = find_error(result);
    *out = error == NULL ? NULL : error->name;
    return error == NULL ? CU_INVALID_VALUE : CU_OK;
}
cu_result cuGetErrorString(cu_result result, const char **out) {
    ENTER_OR_FAIL(cuGetErrorString);
    const struct error_words *const error = find_error(result);
    *out = error == NULL ? NULL : error->words;
    return error == NULL ? CU_INVALID_VALUE : CU_OK;
}

/* --- devices --- */

cu_result cuInit(unsigned flags) {
    ENTER_OR_FAIL(cuInit);
    return flags == 0 ? CU_OK : CU_INVALID_VALUE;
}
cu_result cuDriverGetVersion(int *out) {
    ENTER_OR_FAIL(cuDriverGetVersion);
    *out = 12040;
    return CU_OK;
}
cu_result cuDeviceGetCount(int *out) {
    ENTER_OR_FAIL(cuDeviceGetCount);
    *out = stand_in.num_gpus;
    return CU_OK;
}
cu_result cuDeviceGet(cu_device *out, int idx) {
    ENTER_OR_FAIL(cuDeviceGet);
    if (idx < 0 || idx >= stand_in.num_gpus) return 101;
    *out = idx;
    return CU_OK;
}
cu_result cuDeviceGetName(char *out, int room, cu_device device) {
    ENTER_OR_FAIL(cuDeviceGetName);
    snprintf(out, (size_t)room, "Stand-in %d", stand_in.gpus[device].sm_version);
    return CU_OK;
}
cu_result cuDeviceTotalMem_v2(size_t *out, cu_device device) {
    ENTER_OR_FAIL(cuDeviceTotalMem_v2);
    *out = stand_in.gpus[device].memory_bytes;
    return CU_OK;
}

/* What the CUDA C++ programming guide lists per compute capability. */
int32_t stand_in_shared_optin(int32_t sm_version) {
    switch (sm_version) {
        case 80:
        case 87: return 163 << 10;
        case 90:
        case 100:
        case 103: return 227 << 10;
    }
    return 99 << 10;
}
cu_result cuDeviceGetAttribute(int *out, int attribute, cu_device device) {
    ENTER_OR_FAIL(cuDeviceGetAttribute);
    const stand_in_gpu *const gpu = &stand_in.gpus[device];
    switch (attribute) {
        case CU_ATTR_NUM_SMS: *out = gpu->num_sms; return CU_OK;
        case CU_ATTR_MEMORY_CLOCK_KHZ: *out = 3201000; return CU_OK;
        case CU_ATTR_MEMORY_BUS_BITS: *out = 6144; return CU_OK;
        case CU_ATTR_L2_BYTES: *out = 256 << 10; return CU_OK; /* few: tests fill multiples of it */
        case CU_ATTR_SM_MAJOR: *out = gpu->sm_version / 10; return CU_OK;
        case CU_ATTR_SM_MINOR: *out = gpu->sm_version % 10; return CU_OK;
        case CU_ATTR_SHARED_BYTES_OPTIN:
            *out = stand_in_shared_optin(gpu->sm_version);
            return CU_OK;
    }
    return CU_INVALID_VALUE;
}

/* --- contexts --- */

enum { MOST_PUSHED = 64 };
static _Thread_local cu_context pushed[MOST_PUSHED];
static _Thread_local int32_t num_pushed;

cu_context stand_in_current(void) {
    return num_pushed == 0 ? NULL : pushed[num_pushed - 1];
}
const stand_in_gpu *stand_in_current_gpu(void) {
    return &stand_in.gpus[stand_in_current() - stand_in.contexts];
}

cu_result cuDevicePrimaryCtxRetain(cu_context *out, cu_device device) {
    ENTER_OR_FAIL(cuDevicePrimaryCtxRetain);
    stand_in.contexts[device].retained++;
    stand_in.live.contexts++;
    *out = &stand_in.contexts[device];
    return CU_OK;
}
cu_result cuDevicePrimaryCtxRelease_v2(cu_device device) {
    ENTER(cuDevicePrimaryCtxRelease_v2);
    if (stand_in.contexts[device].retained == 0) return CU_INVALID_CONTEXT;
    stand_in.contexts[device].retained--;
    stand_in.live.contexts--;
    return fault;
}
cu_result cuCtxPushCurrent_v2(cu_context context) {
    ENTER_OR_FAIL(cuCtxPushCurrent_v2);
    if (context->retained == 0 || num_pushed == MOST_PUSHED) return CU_INVALID_CONTEXT;
    pushed[num_pushed++] = context;
    return CU_OK;
}
cu_result cuCtxPopCurrent_v2(cu_context *out) {
    ENTER(cuCtxPopCurrent_v2);
    if (num_pushed == 0) return CU_INVALID_CONTEXT;
    *out = pushed[--num_pushed];
    return fault;
}

stand_in_live stand_in_get_live(void) {
    pthread_mutex_lock(&stand_in_lock);
    stand_in_live live = stand_in.live;
    pthread_mutex_unlock(&stand_in_lock);
    live.pushed = num_pushed;
    return live;
}
