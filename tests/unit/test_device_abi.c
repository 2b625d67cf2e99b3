/* test_device_abi.c - what src/device/driver.h declares of the CUDA driver is what cuda.h says.
 * Built only where there is a cuda.h; it compiles or it does not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <cuda.h>

#include "driver.h"
#include "testing.h"

#define SAME(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #ours)
SAME(CU_OK, CUDA_SUCCESS);
SAME(CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME(CU_ATTR_NUM_SMS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(CU_ATTR_MEMORY_CLOCK_KHZ, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
SAME(CU_ATTR_MEMORY_BUS_BITS, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
SAME(CU_ATTR_L2_BYTES, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
SAME(CU_ATTR_SM_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(CU_ATTR_SM_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(CU_ATTR_SHARED_BYTES_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(CU_FUNC_MAX_THREADS, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
SAME(CU_FUNC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
SAME(CU_FUNC_LOCAL_BYTES, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
SAME(CU_FUNC_NUM_REGS, CU_FUNC_ATTRIBUTE_NUM_REGS);
SAME(CU_FUNC_MAX_DYNAMIC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(CU_STREAM_IS_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(CU_CAPTURE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME(CU_LAUNCH_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(CU_LAUNCH_CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(CU_LAUNCH_PROGRAMMATIC, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(CU_MAP_F32, CU_TENSOR_MAP_DATA_TYPE_FLOAT32);
SAME(CU_MAP_BF16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
SAME(CU_MAP_SWIZZLE_128, CU_TENSOR_MAP_SWIZZLE_128B);
SAME(CU_MAP_L2_256, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
SAME(KV8_TENSOR_MAP_WORDS * 8, sizeof(CUtensorMap));
SAME(sizeof(cu_address), sizeof(CUdeviceptr));
SAME(sizeof(cu_device), sizeof(CUdevice));
SAME(sizeof(cu_launch_attribute), sizeof(CUlaunchAttribute));
SAME(offsetof(cu_launch_attribute, value), offsetof(CUlaunchAttribute, value));
SAME(sizeof(cu_launch_config), sizeof(CUlaunchConfig));
SAME(offsetof(cu_launch_config, block), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(cu_launch_config, dynamic_bytes), offsetof(CUlaunchConfig, sharedMemBytes));
SAME(offsetof(cu_launch_config, stream), offsetof(CUlaunchConfig, hStream));
SAME(offsetof(cu_launch_config, attributes), offsetof(CUlaunchConfig, attrs));
SAME(offsetof(cu_launch_config, num_attributes), offsetof(CUlaunchConfig, numAttrs));

/* cuda.h renames what it has replaced; ours must still be the name it gives to our prototype. */
#define TEXT_(name)     #name
#define TEXT(name)      TEXT_(name)
#define NAMED(old, now) assert_string_equal(TEXT(old), now)

static void names_are_those_of_the_header(void **state) {
    (void)state;
    NAMED(cuDeviceTotalMem, "cuDeviceTotalMem_v2");
    NAMED(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2");
    NAMED(cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    NAMED(cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    NAMED(cuMemAlloc, "cuMemAlloc_v2");
    NAMED(cuMemFree, "cuMemFree_v2");
    NAMED(cuMemGetInfo, "cuMemGetInfo_v2");
    NAMED(cuStreamDestroy, "cuStreamDestroy_v2");
    NAMED(cuStreamBeginCapture, "cuStreamBeginCapture_v2");
    NAMED(cuEventDestroy, "cuEventDestroy_v2");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(names_are_those_of_the_header)};
    return cmocka_run_group_tests_name("device_abi", tests, NULL, NULL);
}
