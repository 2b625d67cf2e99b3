/* device_staging.h - what a cache's host part sends to the GPU's memory: page-locked memory and as
 * much device memory beside it, filled from the front; when it is full, the stream is waited for
 * and filling starts anew, so that nothing is overwritten that the device has yet to read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_STAGING_H
#define KV8_DEVICE_STAGING_H

#include "device_impl.h"

enum { KV8_STAGING_ALIGNMENT = 256 };

typedef struct kv8_staging {
    kv8_stream *stream;
    uint8_t *host, *device;
    size_t bytes, used;
} kv8_staging;

/* Room for pieces of at most most_bytes, several at a time. After a failure kv8_staging_release
 * gives back what was taken. */
kv8_status kv8_staging_take(kv8_staging *staging, kv8_stream *stream, size_t most_bytes);
void kv8_staging_release(kv8_staging *staging);

typedef struct kv8_staged {
    uint8_t *host, *device; /* the same bytes; the device's once they are sent */
    size_t bytes;
} kv8_staged;
kv8_status kv8_staging_stage(kv8_staging *staging, size_t bytes, kv8_staged *out);
kv8_status kv8_staging_send(const kv8_staging *staging, const kv8_staged *piece);

/* Device memory of `count` times `size` bytes that holds zeros; *out is NULL on failure. */
kv8_status kv8_take_zeros(kv8_stream *stream, size_t count, size_t size, void **out);

#endif
