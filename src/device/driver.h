/* driver.h - the CUDA driver as a table of symbols loaded at run time. The few types, prototypes
 * and constants are declared here, so that the build needs no toolkit; test_device_abi compares
 * them with cuda.h where there is one. Names carry the ABI version they had when their prototype
 * was fixed (cuMemAlloc_v2): the driver keeps every one it ever exported.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DRIVER_H
#define KV8_DRIVER_H

#include <pthread.h>

#include "device_impl.h"

typedef int cu_result; /* 0 = success */
typedef int cu_device;
typedef uint64_t cu_address;
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream;
typedef struct CUevent_st *cu_event;
typedef struct CUmod_st *cu_module;
typedef struct CUfunc_st *cu_function;
typedef struct CUgraph_st *cu_graph;
typedef struct CUgraphExec_st *cu_graph_exec;

enum {
    CU_OK = 0,
    CU_OUT_OF_MEMORY = 2,
    CU_NO_DEVICE = 100,
    CU_NO_BINARY_FOR_GPU = 209,

    CU_ATTR_NUM_SMS = 16,
    CU_ATTR_MEMORY_CLOCK_KHZ = 36,
    CU_ATTR_MEMORY_BUS_BITS = 37,
    CU_ATTR_L2_BYTES = 38,
    CU_ATTR_SM_MAJOR = 75,
    CU_ATTR_SM_MINOR = 76,
    CU_ATTR_SHARED_BYTES_OPTIN = 97,

    CU_FUNC_MAX_THREADS = 0,
    CU_FUNC_SHARED_BYTES = 1,
    CU_FUNC_LOCAL_BYTES = 3,
    CU_FUNC_NUM_REGS = 4,
    CU_FUNC_MAX_DYNAMIC_SHARED_BYTES = 8,
    CU_FUNC_WIDE_CLUSTERS = 14,

    CU_STREAM_IS_NON_BLOCKING = 1,
    CU_CAPTURE_THREAD_LOCAL = 1,
    CU_HOST_PORTABLE = 1,
    CU_EVENT_NODE = 1, /* of a recorded graph, not a mark of the recording */

    CU_LAUNCH_COOPERATIVE = 2,
    CU_LAUNCH_CLUSTER = 4,
    CU_LAUNCH_PROGRAMMATIC = 6,

    CU_MAP_U64 = 4,
    CU_MAP_F32 = 7,
    CU_MAP_BF16 = 9,
    CU_MAP_SWIZZLE_128 = 3,
    CU_MAP_L2_256 = 3
};

typedef struct cu_launch_attribute {
    int32_t id;
    char pad[4];
    union {
        char pad[64];
        struct {
            uint32_t x, y, z;
        } cluster;
        int32_t programmatic;
        int32_t cooperative;
    } value;
} cu_launch_attribute;

typedef struct cu_launch_config {
    uint32_t grid[3], block[3], dynamic_bytes;
    cu_stream stream;
    cu_launch_attribute *attributes;
    uint32_t num_attributes;
} cu_launch_config;

/* X(symbol, arguments): what is needed, and below what newer drivers have besides:
 * cuTensorMapEncodeTiled (map out, element type, rank, address, sizes, strides in bytes from the
 * second dimension on, box, element strides, interleave, swizzle, promotion in the L2, fill). */
#define KV8_DRIVER_SYMBOLS(X)                                                         \
    X(cuGetErrorName, (cu_result, const char **))                                     \
    X(cuGetErrorString, (cu_result, const char **))                                   \
    X(cuInit, (unsigned))                                                             \
    X(cuDriverGetVersion, (int *))                                                    \
    X(cuDeviceGetCount, (int *))                                                      \
    X(cuDeviceGet, (cu_device *, int))                                                \
    X(cuDeviceGetName, (char *, int, cu_device))                                      \
    X(cuDeviceGetAttribute, (int *, int, cu_device))                                  \
    X(cuDeviceTotalMem_v2, (size_t *, cu_device))                                     \
    X(cuDevicePrimaryCtxRetain, (cu_context *, cu_device))                            \
    X(cuDevicePrimaryCtxRelease_v2, (cu_device))                                      \
    X(cuCtxPushCurrent_v2, (cu_context))                                              \
    X(cuCtxPopCurrent_v2, (cu_context *))                                             \
    X(cuMemAlloc_v2, (cu_address *, size_t))                                          \
    X(cuMemFree_v2, (cu_address))                                                     \
    X(cuMemGetInfo_v2, (size_t *, size_t *))                                          \
    X(cuMemGetAddressRange_v2, (cu_address *, size_t *, cu_address))                  \
    X(cuMemHostAlloc, (void **, size_t, unsigned))                                    \
    X(cuMemFreeHost, (void *))                                                        \
    X(cuMemcpyAsync, (cu_address, cu_address, size_t, cu_stream))                     \
    X(cuMemsetD8Async, (cu_address, unsigned char, size_t, cu_stream))                \
    X(cuStreamCreate, (cu_stream *, unsigned))                                        \
    X(cuStreamDestroy_v2, (cu_stream))                                                \
    X(cuStreamSynchronize, (cu_stream))                                               \
    X(cuStreamWaitEvent, (cu_stream, cu_event, unsigned))                             \
    X(cuStreamBeginCapture_v2, (cu_stream, int))                                      \
    X(cuStreamEndCapture, (cu_stream, cu_graph *))                                    \
    X(cuEventCreate, (cu_event *, unsigned))                                          \
    X(cuEventDestroy_v2, (cu_event))                                                  \
    X(cuEventRecord, (cu_event, cu_stream))                                           \
    X(cuEventSynchronize, (cu_event))                                                 \
    X(cuEventElapsedTime, (float *, cu_event, cu_event))                              \
    X(cuGraphInstantiateWithFlags, (cu_graph_exec *, cu_graph, unsigned long long))   \
    X(cuGraphLaunch, (cu_graph_exec, cu_stream))                                      \
    X(cuGraphDestroy, (cu_graph))                                                     \
    X(cuGraphExecDestroy, (cu_graph_exec))                                            \
    X(cuModuleLoadData, (cu_module *, const void *))                                  \
    X(cuModuleUnload, (cu_module))                                                    \
    X(cuModuleGetFunction, (cu_function *, cu_module, const char *))                  \
    X(cuFuncGetAttribute, (int *, int, cu_function))                                  \
    X(cuFuncSetAttribute, (cu_function, int, int))                                    \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, cu_function, int, size_t)) \
    X(cuOccupancyMaxActiveClusters, (int *, cu_function, const cu_launch_config *))   \
    X(cuLaunchKernelEx, (const cu_launch_config *, cu_function, void **, void **))
#define KV8_DRIVER_OPTIONAL(X)                                                                    \
    X(cuEventRecordWithFlags, (cu_event, cu_stream, unsigned))                                    \
    X(cuFuncGetParamInfo, (cu_function, size_t, size_t *, size_t *))                              \
    X(cuTensorMapEncodeTiled, (void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, \
                               const uint32_t *, const uint32_t *, int, int, int, int))

typedef struct kv8_driver {
#define KV8_DRIVER_FIELD(symbol, arguments) cu_result(*symbol) arguments;
    KV8_DRIVER_SYMBOLS(KV8_DRIVER_FIELD)
    KV8_DRIVER_OPTIONAL(KV8_DRIVER_FIELD)
#undef KV8_DRIVER_FIELD
    int32_t version;
} kv8_driver;

/* Loads and initialises the driver on the first call; later ones repeat its verdict. */
kv8_status kv8_driver_get(const kv8_driver **driver_out);

/* KV8_OK for 0; else the status and "<what was tried>: <the driver's words> (CUDA_ERROR_...)". */
kv8_status kv8_driver_check(const kv8_driver *driver, cu_result result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* --- the device, for the files of this room --- */

struct kv8_device {
    const kv8_driver *driver;
    cu_device handle;
    cu_context context;
    kv8_device_info info;
    pthread_mutex_t lock; /* of modules */
    cu_module *modules;   /* [images], NULL until first use */
};

/* Makes the device's context current on this thread, and the one before it again. */
kv8_status kv8_device_enter(const kv8_device *device);
void kv8_device_leave(const kv8_device *device);

struct kv8_stream {
    kv8_device *device;
    cu_stream handle;
    bool borrowed, is_capturing;
    kv8_timeline *timeline; /* borrowed; NULL = none */
};

/* What the stream is given next is `name`'s until the next call, of which the end is one: nothing
 * without a timeline, nor within a recording that it does not see into. */
bool kv8_timeline_sees(const kv8_stream *stream);
kv8_status kv8_timeline_begin(kv8_stream *stream, const char *name);
kv8_status kv8_timeline_end(kv8_stream *stream);

/* --- the embedded images (generated: see cmake/cuda.cmake) --- */

typedef struct kv8_image {
    kv8_device_image_info info;
    const uint8_t *fatbin;
} kv8_image;
typedef struct kv8_image_kernel {
    const char *name;
    int32_t image_idx;
    const char *archs; /* "sm_80 sm_90a" */
} kv8_image_kernel;
extern const char kv8_images_note[]; /* kv8_device_images_note */
extern const kv8_image kv8_images[];
extern const int32_t kv8_images_count;
extern const kv8_image_kernel kv8_image_kernels[];
extern const int32_t kv8_image_kernels_count;

/* True when code for one of `archs` runs on sm_version: the same major number and a minor not
 * above it, or exactly it where the name ends in a letter. */
bool kv8_archs_run_on(const char *archs, int32_t sm_version);

#endif
