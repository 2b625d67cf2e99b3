/* kv8/calibrate_device.h - an observer that counts on a CUDA GPU, beside the kernels that make K, V
 * and Q there: the numbers of kv8_observer, for the same rows the same.
 *
 * Starting, stopping and adding only give work to a stream: they wait for nothing and can be
 * captured. A replay of a captured add counts the rows that then lie there, while the observer is
 * on at that point of the stream, so graphs need not be captured again to start or stop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CALIBRATE_DEVICE_H
#define KV8_CALIBRATE_DEVICE_H

#include <kv8/calibrate.h>
#include <kv8/device.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kv8_device_observer kv8_device_observer;

/* On the stream's device; waits for the stream. A new observer is stopped. The options' threads and
 * isa are not looked at. KV8_ERR_UNSUPPORTED in a build without kernels for this GPU. *out is NULL
 * on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_device_observer_create(kv8_device_observer **out,
                                                            kv8_stream *stream,
                                                            const kv8_observer_options *options);
KV8_API void kv8_device_observer_destroy(kv8_device_observer *observer);
KV8_API KV8_NODISCARD kv8_status kv8_device_observer_start(kv8_device_observer *observer,
                                                           kv8_stream *stream);
KV8_API KV8_NODISCARD kv8_status kv8_device_observer_stop(kv8_device_observer *observer,
                                                          kv8_stream *stream);
/* The struct is the host's, every array in it the device's. */
KV8_API KV8_NODISCARD kv8_status kv8_device_observer_add(kv8_device_observer *observer,
                                                         kv8_stream *stream, int32_t layer,
                                                         const kv8_observe_args *args);
/* Waits for the stream, adds what was counted since the last read to `into`, an observer of the
 * same layers, heads and dims, and counts from 0 again. On failure neither has changed. Other
 * streams' adds must not run meanwhile. */
KV8_API KV8_NODISCARD kv8_status kv8_device_observer_read(kv8_device_observer *observer,
                                                          kv8_stream *stream, kv8_observer *into);

#ifdef __cplusplus
}
#endif
#endif
