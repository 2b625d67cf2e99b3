/* decode_pages.cu - decode attention by copies of whole pages. Grid: one block per multiprocessor;
 * block, shared memory and bytes moved: decode_pages.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "decode_pages.cuh"

#define KV8_DECODE_PAGES(format, name, head_dim, kv_heads, warps, stages, fixed_bytes) \
    KV8_DECODE_PAGES_DEFINE(name, kv8::format, head_dim, kv_heads, warps, stages, fixed_bytes)
#include "decode_kernels.inc"
