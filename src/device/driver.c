/* driver.c - loads libcuda.so.1 and its symbols once per process, and turns the driver's results
 * into statuses with its own words.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kv8_driver driver;
static char refusal[256]; /* why there is none; "" = there is one */

/* dlsym gives an object pointer; POSIX lets its bits be a function's. */
static bool find_symbol(void *library, const char *name, void *function_out) {
    void *const symbol = dlsym(library, name);
    memcpy(function_out, &symbol, sizeof symbol);
    return symbol != NULL;
}

static const char *find_symbols(void *library) {
#define FIND(symbol, arguments) \
    if (!find_symbol(library, #symbol, &driver.symbol)) return #symbol;
#define FIND_OPTIONAL(symbol, arguments) (void)find_symbol(library, #symbol, &driver.symbol);
    KV8_DRIVER_SYMBOLS(FIND)
    KV8_DRIVER_OPTIONAL(FIND_OPTIONAL)
#undef FIND
#undef FIND_OPTIONAL
    return NULL;
}

/* The library stays loaded: its threads and exit handlers do not survive being unloaded. */
static void load(void) {
    void *const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(refusal, sizeof refusal, "no NVIDIA driver: %s", dlerror());
        return;
    }
    const char *const missing = find_symbols(library);
    if (missing != NULL) {
        snprintf(
            refusal, sizeof refusal,
            "the NVIDIA driver is too old: libcuda.so.1 has no %s; kv8 needs that of CUDA 11.8 "
            "or later",
            missing);
        return;
    }
    const cu_result result = driver.cuInit(0);
    const char *words = NULL;
    if (result != CU_OK) {
        driver.cuGetErrorString(result, &words);
        snprintf(refusal, sizeof refusal, "the NVIDIA driver does not start: %s",
                 words == NULL ? "unknown error" : words);
        return;
    }
    int version = 0;
    driver.cuDriverGetVersion(&version);
    driver.version = version;
}

kv8_status kv8_driver_get(const kv8_driver **driver_out) {
    *driver_out = NULL;
    pthread_once(&once, load);
    if (refusal[0] != '\0') return kv8_fail(KV8_ERR_NOT_FOUND, "%s", refusal);
    *driver_out = &driver;
    return KV8_OK;
}

static kv8_status status_of(cu_result result) {
    switch (result) {
        case CU_OUT_OF_MEMORY: return KV8_ERR_NO_MEMORY;
        case CU_NO_DEVICE: return KV8_ERR_NOT_FOUND;
        case CU_NO_BINARY_FOR_GPU: return KV8_ERR_UNSUPPORTED;
    }
    return KV8_ERR_DEVICE;
}

kv8_status kv8_driver_check(const kv8_driver *cu, cu_result result, const char *format, ...) {
    if (result == CU_OK) return KV8_OK;
    const char *name = NULL, *words = NULL;
    cu->cuGetErrorName(result, &name);
    cu->cuGetErrorString(result, &words);
    if (words == NULL)
        kv8_fail(KV8_ERR_DEVICE, "error %d", result);
    else
        kv8_fail(KV8_ERR_DEVICE, "%s (%s)", words, name == NULL ? "no name" : name);
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return kv8_fail_within(status_of(result), "%s", what);
}
