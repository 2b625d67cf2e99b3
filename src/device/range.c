/* range.c - ranges of host code for outside profilers, through NVTX, whose headers come with the
 * CUDA toolkit; none in a build without them. A profiler puts itself in by NVTX's own means;
 * without one a range costs a comparison.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_impl.h"

#ifdef KV8_HAS_NVTX

#include <nvtx3/nvToolsExt.h>
#include <pthread.h>
#include <stdarg.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nvtxDomainHandle_t domain; /* NULL: nobody listens */

static void open_domain(void) {
    domain = nvtxDomainCreateA("kv8");
}

void kv8_range_begin(const char *format, ...) {
    pthread_once(&once, open_domain);
    if (domain == NULL) return;
    char words[128];
    va_list args;
    va_start(args, format);
    vsnprintf(words, sizeof words, format, args);
    va_end(args);
    nvtxEventAttributes_t range = {.version = NVTX_VERSION,
                                   .size = NVTX_EVENT_ATTRIB_STRUCT_SIZE,
                                   .messageType = NVTX_MESSAGE_TYPE_ASCII};
    range.message.ascii = words; /* whoever listens copies it */
    nvtxDomainRangePushEx(domain, &range);
}

void kv8_range_end(const int *unused) {
    (void)unused;
    if (domain != NULL) nvtxDomainRangePop(domain);
}

#else

void kv8_range_begin(const char *format, ...) {
    (void)format;
}

void kv8_range_end(const int *unused) {
    (void)unused;
}

#endif
