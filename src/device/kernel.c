/* kernel.c - the embedded images: which kernels they hold, loading them, launching.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "driver.h"

/* --- the table --- */

int32_t kv8_device_num_images(void) {
    return kv8_images_count;
}

const kv8_device_image_info *kv8_device_get_image(int32_t image_idx) {
    return image_idx < 0 || image_idx >= kv8_images_count ? NULL : &kv8_images[image_idx].info;
}

const char *kv8_device_images_note(void) {
    return kv8_images_note;
}

bool kv8_archs_run_on(const char *archs, int32_t sm_version) {
    while (*archs != '\0') {
        const char *at = archs + strspn(archs, " ");
        if (strncmp(at, "sm_", 3) != 0) return false;
        int32_t arch = 0;
        for (at += 3; *at >= '0' && *at <= '9'; at++) arch = 10 * arch + (*at - '0');
        const bool exact = *at != ' ' && *at != '\0';
        if (exact ? arch == sm_version
                  : arch / 10 == sm_version / 10 && arch % 10 <= sm_version % 10)
            return true;
        archs = at + strcspn(at, " ");
    }
    return false;
}

/* Few tens of names, looked up when plans are made. */
static const kv8_image_kernel *find_kernel(const char *name) {
    for (int32_t i = 0; i < kv8_image_kernels_count; i++) {
        if (strcmp(kv8_image_kernels[i].name, name) == 0) return &kv8_image_kernels[i];
    }
    return NULL;
}

bool kv8_kernel_exists(const kv8_device *device, const char *name) {
    const kv8_image_kernel *const kernel = find_kernel(name);
    return kernel != NULL && kv8_archs_run_on(kernel->archs, device->info.sm_version);
}

/* --- loading --- */

/* With the device's context current. */
static kv8_status load_module(kv8_device *device, int32_t image_idx, cu_module *module_out) {
    const kv8_driver *const cu = device->driver;
    kv8_status status = KV8_OK;
    pthread_mutex_lock(&device->lock);
    if (device->modules[image_idx] == NULL)
        status = kv8_driver_check(
            cu, cu->cuModuleLoadData(&device->modules[image_idx], kv8_images[image_idx].fatbin),
            "loading the kernels of %s", kv8_images[image_idx].info.name);
    *module_out = device->modules[image_idx];
    pthread_mutex_unlock(&device->lock);
    return status;
}

static kv8_status get_attribute(const kv8_kernel *kernel, int attribute, int *value_out) {
    const kv8_driver *const cu = kernel->device->driver;
    return kv8_driver_check(cu, cu->cuFuncGetAttribute(value_out, attribute, kernel->function),
                            "attribute %d of %s", attribute, kernel->name);
}

/* The kernel takes one argument of the size that the host will pass. */
static kv8_status check_args(const kv8_kernel *kernel) {
    const kv8_driver *const cu = kernel->device->driver;
    if (cu->cuFuncGetParamInfo == NULL) return KV8_OK; /* drivers before CUDA 12.4 cannot tell */
    size_t offset = 0, bytes = 0, second = 0;
    KV8_TRY(kv8_driver_check(cu, cu->cuFuncGetParamInfo(kernel->function, 0, &offset, &bytes),
                             "argument of %s", kernel->name));
    if (bytes != kernel->args_bytes)
        return kv8_fail(KV8_ERR_INVALID, "%s takes an argument of %zu bytes, not of %zu",
                        kernel->name, bytes, kernel->args_bytes);
    if (cu->cuFuncGetParamInfo(kernel->function, 1, &offset, &second) == CU_OK)
        return kv8_fail(KV8_ERR_INVALID, "%s takes more than one argument", kernel->name);
    return KV8_OK;
}

/* The permission is the function's, not the plan's: always all there is, so that plans which need
 * less do not take it from those which need more. */
static kv8_status allow_dynamic(kv8_kernel *kernel, size_t dynamic_bytes) {
    const kv8_driver *const cu = kernel->device->driver;
    const size_t limit = (size_t)kernel->device->info.shared_bytes_per_block - kernel->shared_bytes;
    if (dynamic_bytes > limit)
        return kv8_fail(KV8_ERR_INVALID, "%s: %zu bytes of shared memory, %s has %zu for a block",
                        kernel->name, dynamic_bytes, kernel->device->info.name, limit);
    kernel->dynamic_bytes = dynamic_bytes;
    if (dynamic_bytes == 0) return KV8_OK;
    return kv8_driver_check(
        cu, cu->cuFuncSetAttribute(kernel->function, CU_FUNC_MAX_DYNAMIC_SHARED_BYTES, (int)limit),
        "%zu bytes of shared memory for %s", limit, kernel->name);
}

static kv8_status fill_kernel(kv8_kernel *kernel, int32_t image_idx, size_t dynamic_bytes) {
    const kv8_driver *const cu = kernel->device->driver;
    cu_module module;
    cu_function function = NULL;
    int registers, threads, shared_bytes, local_bytes;
    KV8_TRY(load_module(kernel->device, image_idx, &module));
    KV8_TRY(kv8_driver_check(cu, cu->cuModuleGetFunction(&function, module, kernel->name),
                             "kernel %s", kernel->name));
    kernel->function = function;
    KV8_TRY(check_args(kernel));
    KV8_TRY(get_attribute(kernel, CU_FUNC_NUM_REGS, &registers));
    KV8_TRY(get_attribute(kernel, CU_FUNC_MAX_THREADS, &threads));
    KV8_TRY(get_attribute(kernel, CU_FUNC_SHARED_BYTES, &shared_bytes));
    KV8_TRY(get_attribute(kernel, CU_FUNC_LOCAL_BYTES, &local_bytes));
    kernel->num_registers = registers;
    kernel->max_threads = threads;
    kernel->shared_bytes = (size_t)shared_bytes;
    kernel->local_bytes = (size_t)local_bytes;
    return allow_dynamic(kernel, dynamic_bytes);
}

kv8_status kv8_kernel_get(kv8_kernel *kernel_out, kv8_device *device, const char *name,
                          size_t args_bytes, size_t dynamic_bytes) {
    const kv8_image_kernel *const found = find_kernel(name);
    if (found == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "kernel %s is not in this build, whose CUDA kernels are %s", name,
                        kv8_images_note);
    if (!kv8_archs_run_on(found->archs, device->info.sm_version))
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "kernel %s is not for %s (sm_%d); this build's CUDA kernels are %s", name,
                        device->info.name, device->info.sm_version, kv8_images_note);
    kv8_kernel kernel = {.name = found->name, .device = device, .args_bytes = args_bytes};
    KV8_TRY(kv8_device_enter(device));
    const kv8_status status = fill_kernel(&kernel, found->image_idx, dynamic_bytes);
    kv8_device_leave(device);
    if (status == KV8_OK) *kernel_out = kernel;
    return status;
}

kv8_status kv8_kernel_max_blocks(const kv8_kernel *kernel, uint32_t num_threads,
                                 size_t dynamic_bytes, int32_t *blocks_out) {
    const kv8_driver *const cu = kernel->device->driver;
    KV8_TRY(kv8_device_enter(kernel->device));
    int blocks = 0;
    const kv8_status status =
        kv8_driver_check(cu,
                         cu->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                             &blocks, kernel->function, (int)num_threads, dynamic_bytes),
                         "occupancy of %s", kernel->name);
    kv8_device_leave(kernel->device);
    if (status == KV8_OK) *blocks_out = blocks;
    return status;
}

/* --- launching --- */

static uint32_t at_least_1(uint32_t n) {
    return n == 0 ? 1 : n;
}

static kv8_status check_launch(const kv8_kernel *kernel, const kv8_stream *stream,
                               const kv8_launch *launch) {
    if (stream->device != kernel->device)
        return kv8_fail(KV8_ERR_INVALID, "launch of %s: the stream is another device's",
                        kernel->name);
    if (launch->dynamic_bytes > kernel->dynamic_bytes)
        return kv8_fail(KV8_ERR_INVALID,
                        "launch of %s: %zu bytes of shared memory, it was got with %zu",
                        kernel->name, launch->dynamic_bytes, kernel->dynamic_bytes);
    const uint32_t *const block = launch->block;
    const uint64_t threads =
        (uint64_t)at_least_1(block[0]) * at_least_1(block[1]) * at_least_1(block[2]);
    if (threads > (uint64_t)kernel->max_threads)
        return kv8_fail(KV8_ERR_INVALID, "launch of %s: %llu threads a block, it can have %d",
                        kernel->name, (unsigned long long)threads, kernel->max_threads);
    return KV8_OK;
}

enum { MAX_ATTRIBUTES = 3 };
/* `attributes`: room for as many. overlaps: programmatic dependent launch. */
static cu_launch_config launch_config(const kv8_launch *launch, bool overlaps,
                                      cu_launch_attribute *attributes) {
    memset(attributes, 0, MAX_ATTRIBUTES * sizeof *attributes);
    cu_launch_config config = {.dynamic_bytes = (uint32_t)launch->dynamic_bytes,
                               .attributes = attributes};
    for (int i = 0; i < 3; i++) {
        config.grid[i] = at_least_1(launch->grid[i]);
        config.block[i] = at_least_1(launch->block[i]);
    }
    const uint32_t *const cluster = launch->cluster;
    if (cluster[0] != 0 || cluster[1] != 0 || cluster[2] != 0) {
        cu_launch_attribute *const attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_CLUSTER;
        attribute->value.cluster.x = at_least_1(cluster[0]);
        attribute->value.cluster.y = at_least_1(cluster[1]);
        attribute->value.cluster.z = at_least_1(cluster[2]);
    }
    if (launch->cooperative) {
        cu_launch_attribute *const attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_COOPERATIVE;
        attribute->value.cooperative = 1;
    }
    if (overlaps) {
        cu_launch_attribute *const attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_PROGRAMMATIC;
        attribute->value.programmatic = 1;
    }
    return config;
}

kv8_status kv8_kernel_max_clusters(const kv8_kernel *kernel, const kv8_launch *launch,
                                   int32_t *clusters_out) {
    const kv8_driver *const cu = kernel->device->driver;
    cu_launch_attribute attributes[MAX_ATTRIBUTES];
    const cu_launch_config config = launch_config(launch, false, attributes);
    int clusters = 0;
    KV8_TRY(kv8_device_enter(kernel->device));
    /* A GPU that refuses the one or the other has no such clusters. */
    if (cu->cuFuncSetAttribute(kernel->function, CU_FUNC_WIDE_CLUSTERS, 1) != CU_OK ||
        cu->cuOccupancyMaxActiveClusters(&clusters, kernel->function, &config) != CU_OK)
        clusters = 0;
    kv8_device_leave(kernel->device);
    *clusters_out = clusters;
    return KV8_OK;
}

kv8_status kv8_kernel_launch(const kv8_kernel *kernel, kv8_stream *stream, const kv8_launch *launch,
                             const void *args) {
    enum { OVERLAPS_FROM = 90 }; /* sm_90 */
    KV8_TRY(check_launch(kernel, stream, launch));
    const kv8_driver *const cu = kernel->device->driver;
    cu_launch_attribute attributes[MAX_ATTRIBUTES];
    const bool overlaps = launch->overlaps_previous &&
                          kernel->device->info.sm_version >= OVERLAPS_FROM &&
                          !kv8_timeline_sees(stream);
    cu_launch_config config = launch_config(launch, overlaps, attributes);
    config.stream = stream->handle;
    KV8_TRY(kv8_timeline_begin(stream, kernel->name));
    void *const pointer = (void *)(uintptr_t)args; /* the driver reads it only */
    void *arguments[] = {pointer};
    KV8_TRY(kv8_device_enter(kernel->device));
    const kv8_status status = kv8_driver_check(
        cu, cu->cuLaunchKernelEx(&config, kernel->function, arguments, NULL),
        "launch of %s, grid %u x %u x %u, block %u x %u x %u, %u bytes of shared memory",
        kernel->name, config.grid[0], config.grid[1], config.grid[2], config.block[0],
        config.block[1], config.block[2], config.dynamic_bytes);
    kv8_device_leave(kernel->device);
    return status == KV8_OK ? kv8_timeline_end(stream) : status;
}

/* --- matrices of the copy engine --- */

typedef struct matrix_layout {
    int type, swizzle;
    int64_t rows, cols, row_bytes; /* from row to row */
    int32_t box_rows, box_cols;
} matrix_layout;

static kv8_status make_map(uint64_t map_out[KV8_TENSOR_MAP_WORDS], const kv8_device *device,
                           const void *data, const matrix_layout *m) {
    const kv8_driver *const cu = device->driver;
    if (cu->cuTensorMapEncodeTiled == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "this driver (CUDA %d.%d) describes no matrices to the copy engine",
                        cu->version / 1000, cu->version % 1000 / 10);
    const uint64_t sizes[2] = {(uint64_t)m->cols, (uint64_t)m->rows};
    const uint64_t strides[1] = {(uint64_t)m->row_bytes};
    const uint32_t box[2] = {(uint32_t)m->box_cols, (uint32_t)m->box_rows}, steps[2] = {1, 1};
    _Alignas(64) uint64_t map[KV8_TENSOR_MAP_WORDS];
    KV8_TRY(kv8_device_enter(device));
    const kv8_status status = kv8_driver_check(
        cu,
        cu->cuTensorMapEncodeTiled(map, m->type, 2, (void *)(uintptr_t)data, sizes, strides, box,
                                   steps, 0, m->swizzle, CU_MAP_L2_256, 0),
        "the map of a matrix of %lld x %lld", (long long)m->rows, (long long)m->cols);
    kv8_device_leave(device);
    if (status == KV8_OK) memcpy(map_out, map, sizeof map);
    return status;
}

kv8_status kv8_tensor_map_make(uint64_t map_out[KV8_TENSOR_MAP_WORDS], const kv8_device *device,
                               const void *data, bool is_f32, int64_t rows, int64_t cols,
                               int32_t box_rows) {
    const int32_t size = is_f32 ? 4 : 2;
    const matrix_layout swizzled = {.type = is_f32 ? CU_MAP_F32 : CU_MAP_BF16,
                                    .swizzle = CU_MAP_SWIZZLE_128,
                                    .rows = rows,
                                    .cols = cols,
                                    .row_bytes = cols * size,
                                    .box_rows = box_rows,
                                    .box_cols = 128 / size};
    return make_map(map_out, device, data, &swizzled);
}

kv8_status kv8_words_map_make(uint64_t map_out[KV8_TENSOR_MAP_WORDS], const kv8_device *device,
                              const void *data, int64_t rows, int64_t words, int64_t row_bytes,
                              int32_t box_rows, int32_t box_words) {
    const matrix_layout plain = {.type = CU_MAP_U64,
                                 .rows = rows,
                                 .cols = words,
                                 .row_bytes = row_bytes,
                                 .box_rows = box_rows,
                                 .box_cols = box_words};
    return make_map(map_out, device, data, &plain);
}
