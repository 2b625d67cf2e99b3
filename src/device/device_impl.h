/* device_impl.h - what device shows the rooms above beside kv8/device.h: the kernels that are
 * embedded in the library, and their launch. Knows handles and grids, never what a kernel
 * computes.
 *
 * In a .cu, `extern "C" __global__ void kv8_op_types__smNN(const __grid_constant__ kv8_op_args a)`:
 * one POD struct by value, declared in a header that C reads too. Its room's CMakeLists.txt names
 * the file with kv8_cuda_source(). On the host, at plan time
 *
 *   kv8_kernel kernel;
 *   KV8_TRY(kv8_kernel_get(&kernel, device, "kv8_op_types__smNN", sizeof(kv8_op_args), 0));
 *
 * and at run time, which allocates nothing,
 *
 *   KV8_TRY(kv8_kernel_launch(&kernel, stream, &launch, &args));
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_IMPL_H
#define KV8_DEVICE_IMPL_H

#include "base_impl.h"

#include <kv8/device.h>

/* A kernel on one device. Plain data: copy it, nothing to release; valid until the device is
 * closed. */
typedef struct kv8_kernel {
    const char *name;      /* borrowed from the library's table of images */
    kv8_device *device;    /* borrowed */
    void *function;        /* CUfunction */
    size_t args_bytes;     /* of the one argument */
    int32_t num_registers; /* per thread */
    int32_t max_threads;   /* per block, by registers and __launch_bounds__ */
    size_t shared_bytes;   /* static */
    size_t dynamic_bytes;  /* most that a launch may ask for */
    size_t local_bytes;    /* stack and spills per thread */
} kv8_kernel;

/* Finds the kernel in the embedded images, loads its image on first use and opts in to
 * dynamic_bytes of shared memory. KV8_ERR_UNSUPPORTED when no image has the name (a build without
 * CUDA has none) or the image has no code for this GPU; KV8_ERR_INVALID when the kernel's argument
 * is not args_bytes long or the shared memory is more than the GPU has. */
KV8_SHARED kv8_status kv8_kernel_get(kv8_kernel *kernel_out, kv8_device *device, const char *name,
                                     size_t args_bytes, size_t dynamic_bytes);

/* True when the library holds this kernel in code that this GPU runs: for plans, which choose. */
KV8_SHARED bool kv8_kernel_exists(const kv8_device *device, const char *name);

/* Blocks of this size that one multiprocessor holds at once. */
KV8_SHARED kv8_status kv8_kernel_max_blocks(const kv8_kernel *kernel, uint32_t num_threads,
                                            size_t dynamic_bytes, int32_t *blocks_out);

typedef struct kv8_launch {
    uint32_t grid[3], block[3]; /* 0 counts as 1 */
    uint32_t cluster[3];        /* all 0 = no clusters */
    size_t dynamic_bytes;       /* of shared memory */
    /* Programmatic dependent launch, from sm_90 on: may start while the kernel before it in the
     * stream still runs; it must call griddepcontrol.wait before it reads what that kernel writes
     * (cuda/take_turn.cuh). */
    bool overlaps_previous;
    /* All blocks run at once, or none: they may wait for each other. */
    bool cooperative;
} kv8_launch;
/* Whether the kernels of a step of so many rows should all overlap so: few rows, recorded in a
 * graph. Launched one by one, hundreds of such kernels in a row made a step of 2048 rows twice as
 * long on an H200. */
KV8_SHARED bool kv8_stream_overlaps(const kv8_stream *stream, int64_t num_rows);

/* Clusters of this launch that the GPU holds at once, 0 when it has none so wide; and permission
 * for clusters of more than 8 blocks, which not every GPU has. */
KV8_SHARED kv8_status kv8_kernel_max_clusters(const kv8_kernel *kernel, const kv8_launch *launch,
                                              int32_t *clusters_out);

/* `args` is the kernel's one argument, kernel->args_bytes long; it is copied. */
KV8_SHARED kv8_status kv8_kernel_launch(const kv8_kernel *kernel, kv8_stream *stream,
                                        const kv8_launch *launch, const void *args);

/* --- timelines: where a stream's time goes --- */

/* Times every launch, copy and fill that a stream is given, and whole graphs; with sees_graphs what
 * is within graphs that are recorded from then on, each of which may be launched once before the
 * timeline is read: KV8_ERR_UNSUPPORTED where the driver does not. Timed work does not overlap. */
typedef struct kv8_timeline kv8_timeline;
KV8_SHARED kv8_status kv8_timeline_create(kv8_timeline **out, kv8_device *device, bool sees_graphs);
KV8_SHARED void kv8_timeline_destroy(kv8_timeline *timeline);
/* Borrowed; NULL ends it. */
KV8_SHARED void kv8_stream_set_timeline(kv8_stream *stream, kv8_timeline *timeline);
/* Whether its timeline sees into graphs. */
KV8_SHARED bool kv8_stream_times_graphs(const kv8_stream *stream);
/* What the stream is given from here on is told as of this scope, a literal. */
KV8_SHARED void kv8_stream_set_scope(kv8_stream *stream, const char *scope);
/* What the stream is given until the end is told as one piece of work, `name`, a literal, and may
 * overlap; where its timeline sees into graphs nothing changes. An end without a begin does
 * nothing. */
KV8_SHARED kv8_status kv8_stream_begin_piece(kv8_stream *stream, const char *name);
KV8_SHARED kv8_status kv8_stream_end_piece(kv8_stream *stream);
/* Few have come since the last reading: the next step's may be read with them. */
KV8_SHARED bool kv8_timeline_has_room(const kv8_timeline *timeline);
/* Everything since the last reading, in order: the kernel's name, "copy", "fill", "graph" or a
 * piece's, NULL for time in which the stream had nothing to do. The stream has been synchronised.
 * After a failure nothing is left to read. */
typedef void (*kv8_timeline_visitor)(void *cookie, const char *scope, const char *name,
                                     double seconds);
KV8_SHARED kv8_status kv8_timeline_read(kv8_timeline *timeline, kv8_timeline_visitor visit,
                                        void *cookie);

/* --- ranges: what the host does, for outside profilers (NVTX, domain "kv8") --- */

/* Names the rest of the block on this thread, within the ranges that are open there, in printf's
 * words, which are read only while a profiler listens. It ends where the block is left, however
 * that happens. One a block. */
#define KV8_RANGE(...)                                                         \
    __attribute__((cleanup(kv8_range_end), unused)) const int kv8_range_here = \
        (kv8_range_begin(__VA_ARGS__), 0)
KV8_SHARED void kv8_range_begin(const char *format, ...) __attribute__((format(printf, 1, 2)));
KV8_SHARED void kv8_range_end(const int *unused);

/* What tells the copy engine of sm_90 and later of a matrix [rows, cols] of bf16 or f32,
 * aligned to 16 and its rows to 16 bytes, moved in tiles of box_rows <= 256 rows by 128 bytes,
 * which stand in shared memory as rows of 128 bytes under the 128-byte swizzle, read as zeros and
 * not written where the matrix ends. An argument of a kernel holds it at a multiple of 64 bytes.
 * Only asks, so it may be called while a stream is captured. */
enum { KV8_TENSOR_MAP_WORDS = 16 };
KV8_SHARED kv8_status kv8_tensor_map_make(uint64_t map_out[KV8_TENSOR_MAP_WORDS],
                                          const kv8_device *device, const void *data, bool is_f32,
                                          int64_t rows, int64_t cols, int32_t box_rows);
/* The same of words of 8 bytes, row_bytes from row to row, read in tiles of box_rows by box_words,
 * each at most 256, which come into shared memory as they lie. */
KV8_SHARED kv8_status kv8_words_map_make(uint64_t map_out[KV8_TENSOR_MAP_WORDS],
                                         const kv8_device *device, const void *data, int64_t rows,
                                         int64_t words, int64_t row_bytes, int32_t box_rows,
                                         int32_t box_words);

/* Bytes from an address to the end of the device memory that was allocated around it; 0 where that
 * is not known. Only asks, so it may be called while a stream is captured. */
size_t kv8_device_bytes_from(kv8_device *device, const void *ptr);

/* The device of a stream. */
kv8_device *kv8_stream_device(const kv8_stream *stream);

#endif
