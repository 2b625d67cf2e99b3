// row_end.cuh - the end of a row: the sink joins the denominator, V's scale the output, and results
// are written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/batch.cuh"
#include "common/softmax.cuh"
#include "ptx_sm80.cuh"
#include "widen.cuh"

namespace kv8 {

// What the end of a row needs: its sink and the scale of V, as they are given.
struct RowEnd {
    float sink, v_scale;
};
__device__ inline RowEnd row_end_or_default(const kv8_kernel_args &a, const RowEnd &end) {
    return {a.sink_logit == nullptr ? -INFINITY : end.sink * LOG2E,
            a.v_scale == nullptr ? 1.0f : end.v_scale};
}

// O of f32 and of 8 bits: apart, so that the end of a row stays short where O is as Q.
static __device__ __noinline__ void store2_rare(const kv8_kernel_args &a, int64_t at, float x,
                                                float y) {
    if (a.o_dtype == KV8_F32) {
        float *const o = static_cast<float *>(a.o) + at;
        o[0] = x, o[1] = y;
        return;
    }
    const float per = a.o_scale == nullptr ? 1.0f : __fdividef(1.0f, __ldg(a.o_scale));
    uint8_t *const o = static_cast<uint8_t *>(a.o) + at;
    const uint32_t both =
        a.o_dtype == E4M3 ? pack_e4m3(x * per, y * per) : pack_e5m2(x * per, y * per);
    o[0] = uint8_t(both), o[1] = uint8_t(both >> 8);
}
__device__ inline void store2(const kv8_kernel_args &a, int64_t at, float x, float y) {
    if (a.o_dtype != BF16 && a.o_dtype != F16) {
        store2_rare(a, at, x, y);
        return;
    }
    uint16_t *const o = static_cast<uint16_t *>(a.o) + at;
    const uint32_t both = a.o_dtype == BF16 ? pack_bf16(x, y) : pack_f16(x, y);
    o[0] = uint16_t(both), o[1] = uint16_t(both >> 16);
}

// Where a row's o and lse lie.
struct RowPlace {
    int64_t o, lse;
};
__device__ inline RowPlace row_place(const kv8_kernel_args &a, const Request &r, int head,
                                     int row) {
    const int token = divide(row, a.by_group),
              qo_head = head * a.group_size + row - token * a.group_size;
    const int64_t q_row = r.qo_begin + token;
    return {q_row * a.o_stride_row + qo_head * a.o_stride_head,
            q_row * a.lse_stride_row + qo_head * a.lse_stride_head};
}
// What a row's values are multiplied by: the sink joins the denominator, once; lse never has it.
struct RowFactor {
    float factor;
    bool is_empty;  // o = 0
};
__device__ inline RowFactor row_factor(const RowEnd &end, float max, float sum) {
    const float top = fmaxf(max, end.sink);
    const float weight = exp2_fast(max - top);
    const float denominator = sum * weight + exp2_fast(end.sink - top);
    return {__fdividef(weight, denominator) * end.v_scale, sum == 0 || end.sink == INFINITY};
}
// The end of a row at two dims, and what is one for a row.
__device__ inline void store_row(const kv8_kernel_args &a, int64_t at, const RowFactor &f, float x,
                                 float y) {
    store2(a, at, f.is_empty ? 0.0f : x * f.factor, f.is_empty ? 0.0f : y * f.factor);
}
__device__ inline void store_lse(const kv8_kernel_args &a, int64_t at, float max, float sum) {
    a.lse[at] = sum == 0 ? -INFINITY : (max + __log2f(sum)) * a.lse_scale;
}
__device__ inline void finish(const kv8_kernel_args &a, const Request &r, int head, int row,
                              int dim, const RowEnd &end, float x, float y, float max, float sum) {
    const RowPlace place = row_place(a, r, head, row);
    store_row(a, place.o + dim, row_factor(end, max, sum), x, y);
    if (a.lse != nullptr && dim == 0) store_lse(a, place.lse, max, sum);
}

}  // namespace kv8
