/* device.c - opens a GPU, says what it is, gives its memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "driver.h"

static kv8_status count_devices(const kv8_driver *cu, int32_t *count_out) {
    int count = 0;
    KV8_TRY(kv8_driver_check(cu, cu->cuDeviceGetCount(&count), "counting GPUs"));
    if (count == 0) return kv8_fail(KV8_ERR_NOT_FOUND, "the NVIDIA driver shows no GPU");
    *count_out = count;
    return KV8_OK;
}

kv8_status kv8_device_count(int32_t *count_out) {
    KV8_REQUIRE(count_out);
    *count_out = 0;
    const kv8_driver *cu = NULL;
    KV8_TRY(kv8_driver_get(&cu));
    return count_devices(cu, count_out);
}

static kv8_status get_attribute(const kv8_device *device, int attribute, int *value_out) {
    const kv8_driver *const cu = device->driver;
    *value_out = 0;
    return kv8_driver_check(cu, cu->cuDeviceGetAttribute(value_out, attribute, device->handle),
                            "attribute %d of GPU %d", attribute, device->info.device_idx);
}

static kv8_status fill_info(kv8_device *device) {
    const kv8_driver *const cu = device->driver;
    kv8_device_info *const info = &device->info;
    int major, minor, num_sms, l2_bytes, shared_bytes, clock_khz, bus_bits;
    KV8_TRY(get_attribute(device, CU_ATTR_SM_MAJOR, &major));
    KV8_TRY(get_attribute(device, CU_ATTR_SM_MINOR, &minor));
    KV8_TRY(get_attribute(device, CU_ATTR_NUM_SMS, &num_sms));
    KV8_TRY(get_attribute(device, CU_ATTR_L2_BYTES, &l2_bytes));
    KV8_TRY(get_attribute(device, CU_ATTR_SHARED_BYTES_OPTIN, &shared_bytes));
    KV8_TRY(get_attribute(device, CU_ATTR_MEMORY_CLOCK_KHZ, &clock_khz));
    KV8_TRY(get_attribute(device, CU_ATTR_MEMORY_BUS_BITS, &bus_bits));
    size_t memory_bytes = 0;
    KV8_TRY(kv8_driver_check(cu, cu->cuDeviceTotalMem_v2(&memory_bytes, device->handle),
                             "memory of GPU %d", info->device_idx));
    KV8_TRY(kv8_driver_check(
        cu, cu->cuDeviceGetName(info->name, (int)sizeof info->name, device->handle),
        "name of GPU %d", info->device_idx));
    info->sm_version = 10 * major + minor;
    info->num_sms = num_sms;
    info->driver_version = cu->version;
    info->memory_bytes = memory_bytes;
    info->l2_bytes = (uint64_t)l2_bytes;
    info->shared_bytes_per_block = (uint64_t)shared_bytes;
    info->memory_gb_s = 2.0 * clock_khz * 1e3 * bus_bits / 8 * 1e-9; /* two transfers a clock */
    return KV8_OK;
}

kv8_status kv8_device_open(kv8_device **out, int32_t device_idx) {
    KV8_REQUIRE(out);
    *out = NULL;
    const kv8_driver *cu = NULL;
    int32_t count = 0;
    KV8_TRY(kv8_driver_get(&cu));
    KV8_TRY(count_devices(cu, &count));
    if (device_idx < 0 || device_idx >= count)
        return kv8_fail(KV8_ERR_INVALID, "device %d: must be 0 to %d, the driver shows %d GPU%s",
                        device_idx, count - 1, count, count == 1 ? "" : "s");
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_device), "device", &memory));
    kv8_device *const device = memory;
    device->driver = cu;
    device->info.device_idx = device_idx;
    pthread_mutex_init(&device->lock, NULL);
    kv8_status status = KV8_OK;
    KV8_TRY_GOTO(kv8_alloc(NULL, (size_t)kv8_images_count, sizeof(cu_module), "modules", &memory));
    device->modules = memory;
    KV8_TRY_GOTO(kv8_driver_check(cu, cu->cuDeviceGet(&device->handle, device_idx),
                                  "opening GPU %d", device_idx));
    KV8_TRY_GOTO(fill_info(device));
    KV8_TRY_GOTO(kv8_driver_check(cu,
                                  cu->cuDevicePrimaryCtxRetain(&device->context, device->handle),
                                  "opening GPU %d", device_idx));
    *out = device;
    return KV8_OK;
fail:
    kv8_device_close(device);
    return status;
}

void kv8_device_close(kv8_device *device) {
    if (device == NULL) return;
    const kv8_driver *const cu = device->driver;
    if (device->context != NULL) {
        if (kv8_device_enter(device) == KV8_OK) {
            for (int32_t i = 0; i < kv8_images_count; i++) {
                if (device->modules[i] != NULL) cu->cuModuleUnload(device->modules[i]);
            }
            kv8_device_leave(device);
        }
        cu->cuDevicePrimaryCtxRelease_v2(device->handle);
    }
    pthread_mutex_destroy(&device->lock);
    kv8_release(NULL, device->modules, (size_t)kv8_images_count, sizeof(cu_module));
    kv8_release(NULL, device, 1, sizeof *device);
}

const kv8_device_info *kv8_device_get_info(const kv8_device *device) {
    return &device->info;
}

kv8_status kv8_device_enter(const kv8_device *device) {
    const kv8_driver *const cu = device->driver;
    return kv8_driver_check(cu, cu->cuCtxPushCurrent_v2(device->context), "using GPU %d",
                            device->info.device_idx);
}

void kv8_device_leave(const kv8_device *device) {
    cu_context context;
    device->driver->cuCtxPopCurrent_v2(&context); /* cannot fail after enter */
}

/* --- memory --- */

static kv8_status check_bytes(size_t bytes) {
    if (bytes == 0) return kv8_fail(KV8_ERR_INVALID, "device memory: 0 bytes, must be at least 1");
    return KV8_OK;
}

kv8_status kv8_device_alloc(kv8_device *device, size_t bytes, void **ptr_out) {
    KV8_REQUIRE(device, ptr_out);
    *ptr_out = NULL;
    KV8_TRY(check_bytes(bytes));
    const kv8_driver *const cu = device->driver;
    KV8_TRY(kv8_device_enter(device));
    cu_address address = 0;
    const kv8_status status = kv8_driver_check(cu, cu->cuMemAlloc_v2(&address, bytes),
                                               "%zu bytes of device memory", bytes);
    kv8_device_leave(device);
    if (status == KV8_OK) *ptr_out = (void *)(uintptr_t)address;
    return status;
}

void kv8_device_free(kv8_device *device, void *ptr) {
    if (ptr == NULL || kv8_device_enter(device) != KV8_OK) return;
    device->driver->cuMemFree_v2((cu_address)(uintptr_t)ptr);
    kv8_device_leave(device);
}

kv8_status kv8_device_available(kv8_device *device, uint64_t *bytes_out) {
    KV8_REQUIRE(device, bytes_out);
    const kv8_driver *const cu = device->driver;
    size_t left = 0, total = 0;
    KV8_TRY(kv8_device_enter(device));
    const kv8_status status = kv8_driver_check(cu, cu->cuMemGetInfo_v2(&left, &total),
                                               "free memory of GPU %d", device->info.device_idx);
    kv8_device_leave(device);
    if (status == KV8_OK) *bytes_out = left;
    return status;
}

size_t kv8_device_bytes_from(kv8_device *device, const void *ptr) {
    const cu_address at = (cu_address)(uintptr_t)ptr;
    cu_address begin = 0;
    size_t bytes = 0;
    if (kv8_device_enter(device) != KV8_OK) return 0;
    const cu_result result = device->driver->cuMemGetAddressRange_v2(&begin, &bytes, at);
    kv8_device_leave(device);
    return result == CU_OK && at >= begin && at - begin < bytes ? bytes - (size_t)(at - begin) : 0;
}

kv8_status kv8_device_alloc_host(kv8_device *device, size_t bytes, void **ptr_out) {
    KV8_REQUIRE(device, ptr_out);
    *ptr_out = NULL;
    KV8_TRY(check_bytes(bytes));
    const kv8_driver *const cu = device->driver;
    KV8_TRY(kv8_device_enter(device));
    void *ptr = NULL;
    const kv8_status status =
        kv8_driver_check(cu, cu->cuMemHostAlloc(&ptr, bytes, CU_HOST_PORTABLE),
                         "%zu bytes of page-locked memory", bytes);
    kv8_device_leave(device);
    if (status == KV8_OK) *ptr_out = ptr;
    return status;
}

void kv8_device_free_host(kv8_device *device, void *ptr) {
    if (ptr == NULL || kv8_device_enter(device) != KV8_OK) return;
    device->driver->cuMemFreeHost(ptr);
    kv8_device_leave(device);
}
