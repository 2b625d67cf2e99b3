/* device_staging.c - pieces of page-locked memory on their way to the device, and device memory
 * that begins as zeros.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_staging.h"

enum { PIECES = 4 }; /* of the largest, so that few are waited for */

kv8_status kv8_staging_take(kv8_staging *staging, kv8_stream *stream, size_t most_bytes) {
    kv8_device *const device = kv8_stream_device(stream);
    void *memory = NULL;
    *staging = (kv8_staging){.stream = stream};
    staging->bytes = PIECES * kv8_round_up(most_bytes, KV8_STAGING_ALIGNMENT);
    KV8_TRY(kv8_device_alloc_host(device, staging->bytes, &memory));
    staging->host = memory;
    KV8_TRY(kv8_device_alloc(device, staging->bytes, &memory));
    staging->device = memory;
    return KV8_OK;
}

void kv8_staging_release(kv8_staging *staging) {
    if (staging->stream == NULL) return;
    kv8_device *const device = kv8_stream_device(staging->stream);
    kv8_device_free(device, staging->device);
    kv8_device_free_host(device, staging->host);
}

kv8_status kv8_staging_stage(kv8_staging *staging, size_t bytes, kv8_staged *out) {
    const size_t taken = kv8_round_up(bytes, KV8_STAGING_ALIGNMENT);
    if (taken > staging->bytes - staging->used) {
        KV8_TRY(kv8_stream_synchronize(staging->stream));
        staging->used = 0;
    }
    *out = (kv8_staged){staging->host + staging->used, staging->device + staging->used, bytes};
    staging->used += taken;
    return KV8_OK;
}

kv8_status kv8_staging_send(const kv8_staging *staging, const kv8_staged *piece) {
    return kv8_stream_copy(staging->stream, piece->device, piece->host, piece->bytes);
}

kv8_status kv8_take_zeros(kv8_stream *stream, size_t count, size_t size, void **out) {
    kv8_device *const device = kv8_stream_device(stream);
    size_t bytes = 0;
    *out = NULL;
    if (!kv8_mul_size(count, size, &bytes))
        return kv8_fail(KV8_ERR_INVALID, "cache: %zu times %zu bytes overflow", count, size);
    KV8_TRY(kv8_device_alloc(device, bytes, out));
    const kv8_status status = kv8_stream_fill(stream, *out, 0, bytes);
    if (status == KV8_OK) return KV8_OK;
    kv8_device_free(device, *out);
    *out = NULL;
    return status;
}
