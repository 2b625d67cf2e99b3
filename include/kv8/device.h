/* kv8/device.h - a CUDA GPU: what it is, its memory, streams, events and graphs.
 *
 * libkv8 links to no CUDA library. The first call here loads the driver (libcuda.so.1); without
 * one, or without a GPU, kv8_device_open gives KV8_ERR_NOT_FOUND and one line that says why, and
 * everything else of kv8 works as ever. What the driver itself refuses is KV8_ERR_DEVICE with the
 * driver's own words, KV8_ERR_NO_MEMORY when it is out of memory. Work on a stream runs after the
 * call has returned: its failure is reported by a later call, kv8_stream_synchronize at the latest.
 *
 * A kv8_device uses the GPU's primary context, as the CUDA runtime and everything built on it do:
 * pointers and streams may be exchanged with them. Objects of one device may be used from any
 * thread, one thread at a time per object. All of them must be gone before their device is closed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_H
#define KV8_DEVICE_H

#include <kv8/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- the device --- */

typedef struct kv8_device kv8_device;

typedef struct kv8_device_info {
    char name[128];
    int32_t device_idx;     /* as the driver counts them */
    int32_t sm_version;     /* 10 * major + minor: 90 for Hopper */
    int32_t num_sms;        /* multiprocessors */
    int32_t driver_version; /* newest CUDA the driver knows, 1000 * major + 10 * minor */
    uint64_t memory_bytes;
    uint64_t l2_bytes;
    uint64_t shared_bytes_per_block; /* most that one block can have, opted in */
    double memory_gb_s; /* by clock and bus width, 1e9 bytes per second; 0 where not told */
} kv8_device_info;

/* GPUs the driver shows; 0 and KV8_ERR_NOT_FOUND where there is no driver or none of them. */
KV8_API KV8_NODISCARD kv8_status kv8_device_count(int32_t *count_out);
/* *out is NULL on failure. KV8_ERR_INVALID when device_idx is not below the count. */
KV8_API KV8_NODISCARD kv8_status kv8_device_open(kv8_device **out, int32_t device_idx);
KV8_API void kv8_device_close(kv8_device *device);
/* Borrowed until close. */
KV8_API const kv8_device_info *kv8_device_get_info(const kv8_device *device);

/* What no kernel can beat, measured now, in about 0.3 s: the best replay of a graph of passes back
 * to back over cold memory, a few times `bytes` of it, given back. KV8_ERR_UNSUPPORTED in a build
 * without CUDA kernels. */
typedef struct kv8_device_ceilings {
    double read_gb_s; /* a plain streaming read of `bytes`, 1e9 bytes per second */
    double copy_gb_s; /* the driver's copy within the device: bytes read and bytes written */
} kv8_device_ceilings;
KV8_API KV8_NODISCARD kv8_status kv8_device_measure_ceilings(kv8_device *device, size_t bytes,
                                                             kv8_device_ceilings *ceilings_out);
/* Likewise of products of f16 with sums of f32, near-random numbers, in about 0.1 s: 1e12
 * operations per second, a product and a sum being two. KV8_ERR_UNSUPPORTED on a GPU whose fastest
 * products this build has no kernel for: all but 9.0. */
KV8_API KV8_NODISCARD kv8_status kv8_device_measure_products(kv8_device *device,
                                                             double *tflop_s_out);

/* --- kernels in this build --- */

/* One compiled .cu: what is in the library, whether or not this machine has a GPU. */
typedef struct kv8_device_image_info {
    const char *name;    /* of the .cu file, without its ending */
    const char *archs;   /* "sm_80 sm_90a" */
    const char *kernels; /* names, one space between */
    uint64_t bytes;
} kv8_device_image_info;
/* 0 in a build without CUDA kernels: kv8_device_images_note says why. */
KV8_API int32_t kv8_device_num_images(void);
KV8_API const kv8_device_image_info *kv8_device_get_image(int32_t image_idx);
/* Which machine code is in the library and how to build it for other GPUs, in one line: "sm_90
 * sm_90a (for other GPUs configure with -DKV8_CUDA_ARCHS=all)", or "none: " and why. */
KV8_API const char *kv8_device_images_note(void);

/* --- memory --- */

/* Device memory, aligned to 256 bytes, not cleared. *ptr_out is NULL on failure; zero bytes are
 * KV8_ERR_INVALID. NULL may be freed; freeing waits for work that may use the memory. */
KV8_API KV8_NODISCARD kv8_status kv8_device_alloc(kv8_device *device, size_t bytes, void **ptr_out);
KV8_API void kv8_device_free(kv8_device *device, void *ptr);
/* Bytes that nobody on this GPU has taken now. */
KV8_API KV8_NODISCARD kv8_status kv8_device_available(kv8_device *device, uint64_t *bytes_out);
/* The same of page-locked host memory: copies from and to it do not hold up the caller, and the
 * device may read and write it at the same address. */
KV8_API KV8_NODISCARD kv8_status kv8_device_alloc_host(kv8_device *device, size_t bytes,
                                                       void **ptr_out);
KV8_API void kv8_device_free_host(kv8_device *device, void *ptr);

/* --- streams --- */

typedef struct kv8_stream kv8_stream;

KV8_API KV8_NODISCARD kv8_status kv8_stream_create(kv8_stream **out, kv8_device *device);
/* A stream made elsewhere (a CUstream or cudaStream_t of this device; NULL is the default
 * stream), borrowed: destroy leaves it alone. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_wrap(kv8_stream **out, kv8_device *device,
                                                 void *cu_stream);
KV8_API void kv8_stream_destroy(kv8_stream *stream);
/* Between host and device memory in any direction. From or to ordinary host memory the call may
 * wait; the host must leave both ends alone until the stream has come past the copy. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_copy(kv8_stream *stream, void *to, const void *from,
                                                 size_t bytes);
KV8_API KV8_NODISCARD kv8_status kv8_stream_fill(kv8_stream *stream, void *to, uint8_t byte,
                                                 size_t bytes);
/* Waits until all work of the stream is done. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_synchronize(kv8_stream *stream);

/* --- events: moments of a stream --- */

typedef struct kv8_event kv8_event;

KV8_API KV8_NODISCARD kv8_status kv8_event_create(kv8_event **out, kv8_device *device);
KV8_API void kv8_event_destroy(kv8_event *event);
KV8_API KV8_NODISCARD kv8_status kv8_event_record(kv8_event *event, kv8_stream *stream);
/* Waits until the stream has come past the event; at once for one never recorded. */
KV8_API KV8_NODISCARD kv8_status kv8_event_synchronize(kv8_event *event);
/* Work given to the stream from here on waits for the event. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_wait(kv8_stream *stream, kv8_event *event);
/* Between two recorded events; waits for the later one. */
KV8_API KV8_NODISCARD kv8_status kv8_event_elapsed(kv8_event *begin, kv8_event *end,
                                                   double *seconds_out);

/* --- graphs: work recorded once, replayed at the cost of one launch --- */

typedef struct kv8_graph kv8_graph;

/* From here to capture_end, work given to the stream by this thread is recorded and not run. The
 * default stream cannot be captured. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_capture_begin(kv8_stream *stream);
/* Ends the recording, also after a failed call within it. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_stream_capture_end(kv8_stream *stream, kv8_graph **out);
KV8_API KV8_NODISCARD kv8_status kv8_graph_launch(kv8_graph *graph, kv8_stream *stream);
KV8_API void kv8_graph_destroy(kv8_graph *graph);

#ifdef __cplusplus
}
#endif
#endif
