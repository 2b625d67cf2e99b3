/* bench_rows.c - a row of kv8 bench attention: the bytes and multiply-adds of its work, and how
 * near its time comes to the machine's limit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bench.h"

int32_t bench_request_keys(const bench_args *args, const bench_row *row, int32_t request) {
    return request == 0 && args->longest > 0 ? args->longest : row->context;
}

int32_t bench_request_rows(const bench_args *args, const bench_row *row, int32_t request) {
    return request == 0 && args->chunk > 0 ? args->chunk : row->qo_len;
}

int32_t bench_total_rows(const bench_args *args, const bench_row *row) {
    return bench_request_rows(args, row, 0) + (row->batch - 1) * row->qo_len;
}

void bench_seen_keys(const bench_args *args, const bench_row *row, int32_t request, int32_t query,
                     int32_t *begin, int32_t *end) {
    const int32_t rows = bench_request_rows(args, row, request);
    const int32_t position = bench_request_keys(args, row, request) - rows + query;
    int32_t first = args->left_padding;
    if (args->window >= 0 && position - args->window > first) first = position - args->window;
    if (args->attention_chunk > 0 && position - position % args->attention_chunk > first)
        first = position - position % args->attention_chunk;
    *end = position < 0 ? 0 : position + 1;
    *begin = first > *end ? *end : first;
}

bool bench_has_ranges(const bench_args *args) {
    return args->left_padding > 0 || args->attention_chunk > 0;
}

kv8_attention_spec bench_spec(const bench_args *args, const bench_row *row) {
    kv8_attention_spec spec = KV8_ATTENTION_SPEC_INIT;
    spec.num_qo_heads = args->num_qo_heads;
    spec.num_kv_heads = args->num_kv_heads;
    spec.head_dim = args->head_dim;
    spec.q_dtype = args->q;
    spec.k_dtype = row->kv.k;
    spec.v_dtype = row->kv.v;
    spec.o_dtype = args->o;
    spec.has_mask = args->tree;
    spec.has_key_range = bench_has_ranges(args);
    spec.page_size = args->page_size;
    spec.window_left = args->window;
    spec.causal = 1;
    spec.batch_invariant = args->batch_invariant;
    spec.isa = row->isa;
    spec.math = args->math;
    spec.max_batch = row->batch;
    spec.max_total_q = bench_total_rows(args, row);
    spec.max_kv_len = row->context > args->longest ? row->context : args->longest;
    return spec;
}

uint8_t *bench_tree_mask(const bench_args *args, const bench_row *row, int64_t *indptr) {
    indptr[0] = 0;
    for (int32_t i = 0; i < row->batch; i++) {
        const int64_t rows = bench_request_rows(args, row, i);
        indptr[i + 1] = indptr[i] + (rows * bench_request_keys(args, row, i) + 7) / 8;
    }
    uint8_t *const bits = malloc((size_t)indptr[row->batch]);
    if (bits == NULL) return NULL;
    memset(bits, 0xff, (size_t)indptr[row->batch]);
    for (int32_t i = 0; i < row->batch; i++) {
        const int32_t rows = bench_request_rows(args, row, i);
        const int32_t keys = bench_request_keys(args, row, i);
        for (int32_t query = 0; query < rows; query++) {
            int32_t ancestor = query;
            for (int32_t node = query; node >= 0; node--) {
                const int64_t bit = (int64_t)query * keys + keys - rows + node;
                if (node == ancestor)
                    ancestor = (ancestor - 1) / 2;
                else
                    bits[indptr[i] + bit / 8] &= (uint8_t) ~(1u << (bit % 8));
            }
        }
    }
    return bits;
}

/* Of one head; int8 has an f16 beside it. */
static double row_bytes(const bench_args *args, kv8_dtype dtype) {
    return args->head_dim * (double)kv8_dtype_size(dtype) + (dtype == KV8_INT8 ? 2 : 0);
}
double bench_slot_bytes(const bench_args *args, const bench_kv *kv) {
    return args->num_kv_heads * (row_bytes(args, kv->k) + row_bytes(args, kv->v));
}

int32_t bench_shared_tokens(int32_t shared_prefix, int32_t context, int32_t page_size) {
    return shared_prefix < context ? shared_prefix / page_size * page_size : shared_prefix;
}

/* Bytes of K and V that a query can see, each counted once however many share it, and multiply-adds
 * of both products. */
static void count_work(bench_row *row, const bench_args *args) {
    const double shared = bench_shared_tokens(row->shared_prefix, row->context, args->page_size);
    double pairs = 0, own_keys = 0, shared_keys = 0;
    for (int32_t request = 0; request < row->batch; request++) {
        const double keys = bench_request_keys(args, row, request);
        const int32_t rows_of = bench_request_rows(args, row, request);
        double first = keys; /* that any of its rows sees */
        for (int32_t r = 0; r < rows_of; r++) {
            int32_t begin, end;
            bench_seen_keys(args, row, request, r, &begin, &end);
            pairs += end - begin;
            first = fmin(first, begin);
        }
        own_keys += keys - fmax(first, shared);
        shared_keys = fmax(shared_keys, shared - first);
    }
    row->kv_bytes = (own_keys + shared_keys) * bench_slot_bytes(args, &row->kv);
    row->macs = 2 * pairs * args->num_qo_heads * args->head_dim;
}

int bench_rows_add(bench_rows *rows, const bench_args *args, const bench_row *of, int phase,
                   bench_row **row_out) {
    *row_out = NULL;
    if (phase == 0 ? !args->decode : !args->prefill) return CLI_OK;
    if (rows->num == BENCH_MAX_ROWS) return cli_fail("more than %d rows", (int)BENCH_MAX_ROWS);
    bench_row *const row = &rows->row[rows->num];
    *row = *of;
    row->phase = phase == 0 ? "decode" : "prefill";
    row->qo_len = phase == 0 ? 1 : args->qo_len;
    if (row->qo_len > row->context) row->qo_len = row->context;
    count_work(row, args);
    *row_out = row;
    return CLI_OK;
}

double bench_row_share(const bench_row *row) {
    const double read_us = row->kv_bytes / row->read_gb_s * 1e-3;
    const double dot_us = row->dot_gmac_s > 0 ? row->macs / row->dot_gmac_s * 1e-3 : 0;
    return fmax(read_us, dot_us) / row->us.median;
}

kv8_status bench_sick_value(const bench_args *args, const bench_row *row,
                            const kv8_attention_args *of, int32_t page, bench_nan *out) {
    const float nan = NAN;
    const bool in_q = args->sick == SICK_Q;
    const kv8_paged *const p = args->sick == SICK_V ? of->v : of->k;
    const int64_t slot = bench_request_keys(args, row, 0) / 2 % args->page_size;
    const void *base = in_q ? of->q : p->data;
    kv8_dtype dtype = in_q ? args->q : args->sick == SICK_V ? row->kv.v : row->kv.k;
    int64_t at =
        in_q ? row->qo_len / 2 * of->q_stride_row : page * p->stride_page + slot * p->stride_slot;
    if (!in_q && dtype == KV8_INT8) {
        base = p->row_scale;
        dtype = KV8_F16;
        at = page * p->row_scale_stride_page + slot * p->row_scale_stride_slot;
    }
    out->size = kv8_dtype_size(dtype);
    out->at = (void *)((uintptr_t)base + (size_t)at * out->size);
    return kv8_narrow(KV8_ISA_SCALAR, dtype, &nan, 1, 1, out->code, NULL);
}
