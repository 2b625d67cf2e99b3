/* append_rows.h - rows into pages in host memory: the one place where a row is rotated, quantised
 * and stored. Takes no page and knows no cache; where a row goes is a call out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_ROWS_H
#define KV8_APPEND_ROWS_H

#include "formats_impl.h"

#include <kv8/formats.h>

/* Entry (page, slot, head) is at data + page * page_bytes + slot * slot_bytes + head * head_bytes.
 */
typedef struct kv8_row_array {
    uint8_t *data; /* NULL = there is none */
    int64_t page_bytes, slot_bytes, head_bytes;
} kv8_row_array;

/* K or V: from where, and to where. */
typedef struct kv8_append_target {
    kv8_row_format format;
    const uint8_t *source;
    int64_t source_row_bytes, source_head_bytes;
    kv8_row_array rows, scales;
    const float *scale; /* [scale_idx of a place, head]; NULL = 1 */
    int64_t scale_stride_idx, scale_stride_head;
    uint64_t *counters; /* [num_kv_heads, 2 (clips, NaN)], added to; NULL = not counted */
} kv8_append_target;

typedef struct kv8_row_place {
    int64_t page; /* < 0: the row is left out */
    int32_t slot;
    int64_t scale_idx;
} kv8_row_place;

typedef struct kv8_append_job {
    kv8_isa isa; /* resolved */
    kv8_dtype src_dtype;
    int32_t num_rows, num_kv_heads;
    kv8_append_target target[2]; /* K, V */
    const float *cos_sin;        /* [num_rows, values of a K row]; NULL = K is not rotated */
    bool interleaved;
    const int32_t *indptr; /* [num_requests + 1]; NULL = all rows are request 0's */
    int32_t num_requests;
    kv8_row_place (*place)(const void *cookie, int32_t row, int32_t request);
    const void *cookie;
} kv8_append_job;

/* Everything has been checked. */
void kv8_append_rows(const kv8_append_job *job, kv8_threads *threads);

/* The request that owns a row: the last one whose rows begin at or before it. */
int32_t kv8_append_request_of(const int32_t *indptr, int32_t num_requests, int32_t row);

#endif
