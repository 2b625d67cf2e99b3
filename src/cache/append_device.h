/* append_device.h - the append kernels of one source dtype, for those who keep them without a plan.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_DEVICE_H
#define KV8_APPEND_DEVICE_H

#include "append_check.h"
#include "device_impl.h"

/* K as it comes, rotated in halves, rotated in pairs. */
enum { KV8_NUM_ROTATIONS = 3 };

typedef struct kv8_append_kernels {
    kv8_kernel ones[KV8_NUM_ROTATIONS], eights[KV8_NUM_ROTATIONS];
} kv8_append_kernels;

kv8_status kv8_append_kernels_get(kv8_append_kernels *kernels_out, kv8_device *device,
                                  kv8_dtype src_dtype);
/* Rows by args and a spec that have been read. */
kv8_status kv8_append_kernels_launch(const kv8_append_kernels *kernels, kv8_stream *stream,
                                     const kv8_append_spec *spec, const kv8_append_inputs *in);

#endif
