/* stand_in.h - a CUDA driver without a GPU, for tests of kv8's host code: libcuda.so.1 with every
 * symbol of src/device/driver.h over host memory. A test program that is linked with it gets it
 * from kv8's own dlopen, since a library of that name is loaded already. Beside it, images.c takes
 * the place of the embedded kernels: their names, architectures, arguments and threads as the .cu
 * files declare them, no machine code.
 *
 * What it does as the driver does: contexts are pushed and popped, work waits in its stream until
 * somebody waits for it, streams run in order and wait for events, captures record and graphs
 * replay, launches are refused that the GPU would refuse, memory of the device begins as garbage.
 * What a kernel computes is left to stand_in_on_launch; every launch is recorded as it runs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STAND_IN_H
#define KV8_STAND_IN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* --- what images.c tells of the kernels --- */

typedef struct stand_in_kernel {
    const char *name;
    size_t args_bytes;
    int32_t max_threads, min_blocks; /* __launch_bounds__ */
} stand_in_kernel;

/* What the library takes for a fatbin. */
typedef struct stand_in_image {
    uint8_t magic[8]; /* begins as a fatbin does */
    const stand_in_kernel *kernels;
    int32_t num_kernels;
    const char *archs; /* of the machine code: "sm_80 sm_90a" */
} stand_in_image;
#define STAND_IN_MAGIC \
    { 0x50, 0xed, 0x55, 0xba }

/* --- the machine --- */

typedef struct stand_in_gpu {
    int32_t sm_version, num_sms;
    size_t memory_bytes;
} stand_in_gpu;

/* One H200 and no faults, no records. What is alive stays; driver_version is CUDA 12.4's. */
void stand_in_reset(void);
void stand_in_set_gpus(const stand_in_gpu *gpus, int32_t num_gpus); /* 4 at most */

/* --- faults --- */

/* The nth use from here on (1: the next) of the call, such as "cuMemAlloc_v2", returns `result`
 * once; NULL: of any call, but those that ask for an error's words. Calls that give something back
 * give it back all the same. nth 0: no fault. */
void stand_in_fail(const char *call, int64_t nth, int result);
/* The call that a fault hit since stand_in_fail, NULL: none yet. */
const char *stand_in_failed_call(void);
/* Uses since the reset; NULL: of all calls, but those that ask for an error's words. */
int64_t stand_in_num_calls(const char *call);

/* Seconds that this thread has spent in calls of the driver: a step's time without them is the
 * host's own. */
double stand_in_seconds(void);

/* --- records --- */

typedef struct stand_in_launch {
    const char *name;
    uint32_t grid[3], block[3], cluster[3]; /* cluster: 0 without */
    uint32_t dynamic_bytes;
    bool overlaps_previous, cooperative;
    size_t args_bytes;
    const void *args; /* a copy of the argument block */
} stand_in_launch;

/* Launches that have run since the reset; valid until the next. */
int32_t stand_in_num_launches(void);
const stand_in_launch *stand_in_get_launch(int32_t launch_idx);
/* Is called as a launch runs, in place of the kernel. NULL: nothing. */
void stand_in_on_launch(void (*run)(const stand_in_launch *launch));

/* What is alive now. */
typedef struct stand_in_live {
    int32_t contexts, modules, streams, events, graphs, execs, memory, host_memory;
    int32_t pushed; /* contexts on this thread's stack */
} stand_in_live;
stand_in_live stand_in_get_live(void);

#endif
