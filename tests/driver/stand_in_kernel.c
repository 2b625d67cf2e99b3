/* stand_in_kernel.c - modules and functions as images.c describes them, and launches with the
 * limits of the GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "stand_in_impl.h"

enum {
    SM_REGISTERS = 65536,
    SM_THREADS = 2048,
    DEFAULT_DYNAMIC = 48 << 10,
    RESERVED_SHARED = 1 << 10
};

/* --- modules --- */

/* sm_80 runs on 8.x, sm_86 on 8.6 and above, sm_90a on 9.0 alone. */
static bool runs_on(const char *archs, int32_t sm_version) {
    int arch = 0, length = 0;
    char letter = 0;
    for (const char *at = archs; sscanf(at, " sm_%d%n", &arch, &length) == 1; at += length) {
        letter = at[length];
        if (letter != ' ' && letter != '\0') length++;
        if (arch == sm_version) return true;
        if (letter != 'a' && arch / 10 == sm_version / 10 && arch < sm_version) return true;
    }
    return false;
}

cu_result cuModuleLoadData(cu_module *out, const void *fatbin) {
    ENTER_CONTEXT(cuModuleLoadData);
    static const uint8_t magic[8] = STAND_IN_MAGIC;
    const stand_in_image *const image = fatbin;
    if (memcmp(image->magic, magic, sizeof magic) != 0) return 200; /* INVALID_IMAGE */
    if (!runs_on(image->archs, stand_in_current_gpu()->sm_version)) return CU_NO_BINARY_FOR_GPU;
    cu_module const module = stand_in_memory(sizeof *module);
    module->image = image;
    module->functions = stand_in_memory((size_t)image->num_kernels * sizeof *module->functions);
    for (int32_t i = 0; i < image->num_kernels; i++)
        module->functions[i] = (struct CUfunc_st){&image->kernels[i], DEFAULT_DYNAMIC, false};
    stand_in.live.modules++;
    *out = module;
    return CU_OK;
}
cu_result cuModuleUnload(cu_module module) {
    ENTER(cuModuleUnload);
    if (stand_in_current() == NULL) return CU_INVALID_CONTEXT;
    stand_in_run_all();
    free(module->functions);
    free(module);
    stand_in.live.modules--;
    return fault;
}
cu_result cuModuleGetFunction(cu_function *out, cu_module module, const char *name) {
    ENTER_CONTEXT(cuModuleGetFunction);
    for (int32_t i = 0; i < module->image->num_kernels; i++) {
        *out = &module->functions[i];
        if (strcmp(module->image->kernels[i].name, name) == 0) return CU_OK;
    }
    *out = NULL;
    return CU_NOT_FOUND;
}

/* --- functions --- */

static int32_t num_registers(const stand_in_kernel *kernel) {
    const int32_t most = SM_REGISTERS / (kernel->max_threads * kernel->min_blocks);
    return most > 255 ? 255 : most & ~7;
}

cu_result cuFuncGetAttribute(int *out, int attribute, cu_function function) {
    ENTER_CONTEXT(cuFuncGetAttribute);
    switch (attribute) {
        case CU_FUNC_MAX_THREADS: *out = function->kernel->max_threads; return CU_OK;
        case CU_FUNC_SHARED_BYTES:
        case CU_FUNC_LOCAL_BYTES: *out = 0; return CU_OK;
        case CU_FUNC_NUM_REGS: *out = num_registers(function->kernel); return CU_OK;
    }
    return CU_INVALID_VALUE;
}
static int32_t most_dynamic(void) {
    return stand_in_shared_optin(stand_in_current_gpu()->sm_version);
}
cu_result cuFuncSetAttribute(cu_function function, int attribute, int value) {
    ENTER_CONTEXT(cuFuncSetAttribute);
    if (attribute == CU_FUNC_MAX_DYNAMIC_SHARED_BYTES) {
        if (value < 0 || value > most_dynamic()) return CU_INVALID_VALUE;
        function->max_dynamic_bytes = value;
        return CU_OK;
    }
    if (attribute != CU_FUNC_WIDE_CLUSTERS || stand_in_current_gpu()->sm_version < 90)
        return CU_INVALID_VALUE;
    function->wide_clusters = value != 0;
    return CU_OK;
}
cu_result cuFuncGetParamInfo(cu_function function, size_t idx, size_t *offset, size_t *bytes) {
    ENTER_CONTEXT(cuFuncGetParamInfo);
    if (idx > 0) return CU_INVALID_VALUE;
    *offset = 0;
    *bytes = function->kernel->args_bytes;
    return CU_OK;
}
/* A map that tests can read: address, columns, rows, box rows, bytes of an element. */
cu_result cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address,
                                 const uint64_t *sizes, const uint64_t *strides,
                                 const uint32_t *box, const uint32_t *steps, int interleave,
                                 int swizzle, int promotion, int fill) {
    ENTER_CONTEXT(cuTensorMapEncodeTiled);
    (void)steps;
    const uint32_t size = type == CU_MAP_U64 ? 8 : type == CU_MAP_F32 ? 4 : 2;
    const bool plain = size == 8 && swizzle == 0 && box[0] <= 256 && box[0] % 2 == 0;
    const bool swizzled = (size == 4 || type == CU_MAP_BF16) && swizzle == CU_MAP_SWIZZLE_128 &&
                          box[0] * size == 128 && strides[0] == sizes[0] * size;
    if (!(swizzled || plain) || rank != 2 || interleave != 0 || fill != 0 ||
        promotion != CU_MAP_L2_256 || (uintptr_t)map % 64 != 0 || (uintptr_t)address % 16 != 0 ||
        strides[0] % 16 != 0 || box[1] > 256)
        return CU_INVALID_VALUE;
    const uint64_t words[KV8_TENSOR_MAP_WORDS] = {(uint64_t)(uintptr_t)address, sizes[0], sizes[1],
                                                  box[1], size};
    memcpy(map, words, sizeof words);
    return CU_OK;
}

static int32_t blocks_per_sm(const stand_in_kernel *kernel, int threads, size_t dynamic_bytes) {
    const int32_t by_threads = SM_THREADS / threads;
    const int32_t by_registers = SM_REGISTERS / (num_registers(kernel) * threads);
    const int32_t by_shared =
        (int32_t)(((size_t)most_dynamic() + RESERVED_SHARED) / (dynamic_bytes + RESERVED_SHARED));
    const int32_t fewer = by_threads < by_registers ? by_threads : by_registers;
    return fewer < by_shared ? fewer : by_shared;
}
cu_result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, cu_function function, int threads,
                                                      size_t dynamic_bytes) {
    ENTER_CONTEXT(cuOccupancyMaxActiveBlocksPerMultiprocessor);
    if (threads < 1 || threads > function->kernel->max_threads) return CU_INVALID_VALUE;
    *out = blocks_per_sm(function->kernel, threads, dynamic_bytes);
    return CU_OK;
}

/* --- launches --- */

static uint64_t product(const uint32_t n[3]) {
    return (uint64_t)n[0] * n[1] * n[2];
}

static cu_result read_attributes(const cu_launch_config *config, stand_in_launch *launch) {
    for (uint32_t i = 0; i < config->num_attributes; i++) {
        const cu_launch_attribute *const attribute = &config->attributes[i];
        if (stand_in_current_gpu()->sm_version < 90) return CU_INVALID_VALUE;
        if (attribute->id == CU_LAUNCH_CLUSTER) {
            launch->cluster[0] = attribute->value.cluster.x;
            launch->cluster[1] = attribute->value.cluster.y;
            launch->cluster[2] = attribute->value.cluster.z;
        } else if (attribute->id == CU_LAUNCH_PROGRAMMATIC) {
            launch->overlaps_previous = attribute->value.programmatic != 0;
        } else if (attribute->id == CU_LAUNCH_COOPERATIVE) {
            launch->cooperative = attribute->value.cooperative != 0;
        } else {
            return CU_INVALID_VALUE;
        }
    }
    return CU_OK;
}

/* A grid of whole clusters, which are of 8 blocks at most unless the function may have wider. */
static cu_result check_cluster(const struct CUfunc_st *function, const stand_in_launch *launch) {
    const uint64_t blocks = product(launch->cluster);
    if (blocks == 0) return CU_OK;
    for (int i = 0; i < 3; i++)
        if (launch->grid[i] % launch->cluster[i] != 0) return CU_INVALID_VALUE;
    return blocks <= (function->wide_clusters ? 16u : 8u) ? CU_OK : 912; /* INVALID_CLUSTER_SIZE */
}

static cu_result describe(const cu_launch_config *config, const struct CUfunc_st *function,
                          stand_in_launch *launch) {
    *launch = (stand_in_launch){.name = function->kernel->name,
                                .dynamic_bytes = config->dynamic_bytes,
                                .args_bytes = function->kernel->args_bytes};
    memcpy(launch->grid, config->grid, sizeof launch->grid);
    memcpy(launch->block, config->block, sizeof launch->block);
    const cu_result read = read_attributes(config, launch);
    if (read != CU_OK) return read;
    if (product(launch->grid) == 0 || launch->grid[0] > INT32_MAX || launch->grid[1] > 65535 ||
        launch->grid[2] > 65535 || product(launch->block) == 0 ||
        (int32_t)config->dynamic_bytes > function->max_dynamic_bytes)
        return CU_INVALID_VALUE;
    if (product(launch->block) > (uint64_t)function->kernel->max_threads)
        return CU_LAUNCH_OUT_OF_RESOURCES;
    const uint64_t resident = (uint64_t)blocks_per_sm(function->kernel, (int)product(launch->block),
                                                      launch->dynamic_bytes) *
                              (uint64_t)stand_in_current_gpu()->num_sms;
    if (launch->cooperative && product(launch->grid) > resident)
        return 720; /* COOPERATIVE_LAUNCH_TOO_LARGE */
    return check_cluster(function, launch);
}

cu_result cuOccupancyMaxActiveClusters(int *out, cu_function function,
                                       const cu_launch_config *config) {
    ENTER_CONTEXT(cuOccupancyMaxActiveClusters);
    stand_in_launch launch;
    const cu_result result = describe(config, function, &launch);
    if (result != CU_OK) return result;
    const uint64_t wide = product(launch.cluster);
    const int32_t blocks =
        blocks_per_sm(function->kernel, (int)product(launch.block), launch.dynamic_bytes) *
        stand_in_current_gpu()->num_sms;
    *out = wide == 0 ? 0 : blocks / (int)wide;
    return CU_OK;
}

cu_result cuLaunchKernelEx(const cu_launch_config *config, cu_function function, void **arguments,
                           void **extra) {
    ENTER_CONTEXT(cuLaunchKernelEx);
    if (extra != NULL) return CU_INVALID_VALUE;
    op given = {.kind = OP_LAUNCH};
    const cu_result result = describe(config, function, &given.launch);
    if (result != CU_OK) return result;
    given.launch.args = arguments[0];
    stand_in_give(config->stream, given);
    return CU_OK;
}
