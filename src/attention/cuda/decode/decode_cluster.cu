/* decode_cluster.cu - decode attention for one request. Grid: clusters of 8 or 16 blocks, one for
 * each KV head; block, shared memory and bytes moved: decode_cluster.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode/decode_cluster.cuh"

#define KV8_DECODE_CLUSTER(format, name, head_dim, rows, warps, stages, fixed_bytes) \
    KV8_DECODE_CLUSTER_DEFINE(name, kv8::format, head_dim, rows, warps, stages, fixed_bytes)
#include "decode/decode_kernels.inc"
