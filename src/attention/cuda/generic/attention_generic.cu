// attention_generic.cu - attention for whatever the tensor core kernels do not take: any head_dim
// up to 576, K and V of any two formats and head_dims, strides of any alignment, Q and O of any
// format, every option. Right first; no row's keys are split, so batch_invariant too.
//
// Grid: (num_qo_heads, any), blocks of 4 warps; a block takes query rows (token, head) one after
// another. Each warp takes every fourth key, a lane every 32nd dim; the four results are combined
// in shared memory. Bound by instructions: about 40 per key and 32 dims.
//
// SPDX-License-Identifier: Apache-2.0
#include "codec.cuh"
#include "common/batch.cuh"
#include "common/softmax.cuh"

namespace kv8 {

constexpr int WARPS = 4, MAX_DIM = 576, PER_LANE = MAX_DIM / 32;

__device__ inline int size_of(int dtype) {
    return dtype == KV8_F32 ? 4 : dtype == KV8_BF16 || dtype == KV8_F16 ? 2 : 1;
}

__device__ inline float widen(int dtype, const uint8_t *codes, int64_t at) {
    switch (dtype) {
        case KV8_F32: return reinterpret_cast<const float *>(codes)[at];
        case KV8_BF16: return kv8_bf16_decode(reinterpret_cast<const uint16_t *>(codes)[at]);
        case KV8_F16: return kv8_f16_decode(reinterpret_cast<const uint16_t *>(codes)[at]);
#define DECODE(words, rule, name, dtype, mantissa, bias, max) \
    case dtype: return kv8_##name##_decode(codes[at]);
            KV8_FLOAT8_FORMATS(DECODE)
#undef DECODE
        default: return static_cast<float>(reinterpret_cast<const int8_t *>(codes)[at]);
    }
}

// One query row: where it is, what it may see.
struct Query {
    Request request;
    int token, head, kv_head;  // token within the request
    int64_t row;               // of q and o
    KeyRange keys;
    const int32_t *pages;
};

__device__ inline Query find_query(const kv8_kernel_args &a, int row, int head) {
    int low = 0, high = a.batch - 1;  // the last request that begins at or before the row
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (a.qo_indptr[mid] <= row)
            low = mid;
        else
            high = mid - 1;
    }
    const Lengths lengths = load_lengths(a, low);
    Query q;
    q.request = make_request(a, low, lengths), q.pages = request_pages(a, low, lengths);
    q.row = row, q.head = head, q.kv_head = head / a.group_size;
    q.token = row - q.request.qo_begin;
    q.keys = visible_keys(a, q.request, q.token);
    if (a.key_begin != nullptr) q.keys.begin = max(q.keys.begin, a.key_begin[row]);
    if (a.key_end != nullptr) q.keys.end = min(q.keys.end, a.key_end[row]);
    return q;
}

__device__ inline float row_scale(const kv8_kernel_pages &p, int64_t page, int slot, int head) {
    if (p.row_scale == nullptr) return 1.0f;
    return kv8_f16_decode(p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                      head * p.scale_stride_head]);
}

// sm_scale * k_scale * q_scale, in base 2.
__device__ inline float score_factor(const kv8_kernel_args &a, const Query &q) {
    const int b = q.request.index;
    float factor = a.score_scale;
    if (a.k_scale != nullptr)
        factor *= a.k_scale[b * a.k_scale_stride_batch + q.kv_head * a.k_scale_stride_head];
    if (a.q_scale != nullptr)
        factor *= a.q_scale[b * a.q_scale_stride_batch + q.row * a.q_scale_stride_row +
                            q.kv_head * a.q_scale_stride_kv_head +
                            (q.head - q.kv_head * a.group_size) * a.q_scale_stride_group];
    return factor;
}

struct Result {
    float o[PER_LANE], max, sum;  // o: dims lane, lane + 32..
};

// The page of a key, counted where it is not there: at its first key that the row may see.
__device__ inline bool find_page(const kv8_kernel_args &a, const Query &q, int key, int64_t &page,
                                 int &slot) {
    const int index = divide(key, a.by_page);
    slot = key - index * a.page_size, page = q.pages[index];
    if (uint32_t(page) < a.num_pages) return true;
    if (a.bad_pages != nullptr && threadIdx.x % 32 == 0 && (slot == 0 || key == q.keys.begin))
        atomicAdd(a.bad_pages, 1);
    return false;
}

// A warp's keys: begin + warp, begin + warp + 4..
__device__ inline void attend(const kv8_kernel_args &a, const Query &q, Result &r) {
    const int lane = threadIdx.x % 32;
    const float factor = score_factor(a, q);
    const uint8_t *const from =
        static_cast<const uint8_t *>(a.q) +
        (q.row * a.q_stride_row + q.head * a.q_stride_head) * size_of(a.q_dtype);
    float query_dims[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int d = i * 32 + lane;
        query_dims[i] = d < a.head_dim ? widen(a.q_dtype, from, d) : 0.0f;
        r.o[i] = 0;
    }
    r.max = NO_KEY, r.sum = 0;
    for (int key = q.keys.begin + int(threadIdx.x / 32); key < q.keys.end; key += WARPS) {
        int64_t page;
        int slot;
        if (!mask_bit(a, q.request, q.token, key) || !find_page(a, q, key, page, slot)) continue;
        const uint8_t *const k = a.k.data + page * a.k.stride_page + slot * a.k.stride_slot +
                                 q.kv_head * a.k.stride_head;
        float s = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int d = i * 32 + lane;
            if (d < a.head_dim) s += query_dims[i] * widen(a.k_dtype, k, d);
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) s += __shfl_xor_sync(~0u, s, lanes);
        s *= factor * row_scale(a.k, page, slot, q.kv_head);
        if (a.soft_cap > 0) s = a.soft_cap * tanhf(s / a.soft_cap);
        const float raised = fmaxf(r.max, s), keep = exp2f(r.max - raised), p = exp2f(s - raised);
        r.max = raised;
        r.sum = r.sum * keep + p;
        const uint8_t *const v = a.v.data + page * a.v.stride_page + slot * a.v.stride_slot +
                                 q.kv_head * a.v.stride_head;
        const float weight = p * row_scale(a.v, page, slot, q.kv_head);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int d = i * 32 + lane;
            if (d < a.v_head_dim) r.o[i] = r.o[i] * keep + weight * widen(a.v_dtype, v, d);
        }
    }
}

__device__ inline void store(const kv8_kernel_args &a, int64_t at, float value) {
    uint8_t *const codes = static_cast<uint8_t *>(a.o) + at;
    switch (a.o_dtype) {
        case KV8_F32: static_cast<float *>(a.o)[at] = value; break;
        case KV8_BF16:
            static_cast<uint16_t *>(a.o)[at] = kv8_bf16_encode(value, KV8_F32_INF);
            break;
        case KV8_F16: static_cast<uint16_t *>(a.o)[at] = kv8_f16_encode(value, 65536.0f); break;
#define ENCODE(words, rule, name, dtype, mantissa, bias, max) \
    case dtype: *codes = kv8_##name##_encode(value); break;
            KV8_FLOAT8_FORMATS(ENCODE)
#undef ENCODE
    }
}

// Combines the warps' results; the sink joins the denominator, once; lse never has it.
__device__ inline void finish(const kv8_kernel_args &a, const Query &q, const float (*o)[MAX_DIM],
                              const float *maxima, const float *sums) {
    float top = NO_KEY, sum = 0, weight[WARPS];
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, maxima[w]);
    for (int w = 0; w < WARPS; w++) {
        weight[w] = exp2f(maxima[w] - top);
        sum += sums[w] * weight[w];
    }
    const float sink = a.sink_logit == nullptr ? -INFINITY : a.sink_logit[q.head] * LOG2E;
    const float shift = fmaxf(top, sink), part = exp2f(top - shift);
    const float denominator = sum * part + exp2f(sink - shift);
    float v_scale = a.v_scale == nullptr ? 1.0f
                                         : a.v_scale[q.request.index * a.v_scale_stride_batch +
                                                     q.kv_head * a.v_scale_stride_head];
    if (a.o_scale != nullptr) v_scale /= *a.o_scale;
    const bool empty = sum == 0 || sink == INFINITY;
    for (int d = threadIdx.x; d < a.v_head_dim; d += WARPS * 32) {
        float value = 0;
        for (int w = 0; w < WARPS; w++) value += o[w][d] * weight[w];
        store(a, q.row * a.o_stride_row + q.head * a.o_stride_head + d,
              empty ? 0.0f : value * part / denominator * v_scale);
    }
    if (a.lse != nullptr && threadIdx.x == 0)
        a.lse[q.row * a.lse_stride_row + q.head * a.lse_stride_head] =
            sum == 0 ? -INFINITY : (top + log2f(sum)) * a.lse_scale;
}

}  // namespace kv8

extern "C" __global__ void __launch_bounds__(128)
    kv8_attention_any_any_dany_generic__sm80(const __grid_constant__ kv8_kernel_args a) {
    __shared__ float o[kv8::WARPS][kv8::MAX_DIM], maxima[kv8::WARPS], sums[kv8::WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int total_q = a.qo_indptr[a.batch];
    for (int row = blockIdx.y; row < total_q; row += gridDim.y) {
        const kv8::Query q = kv8::find_query(a, row, blockIdx.x);
        if (q.token >= q.request.qo_len) continue;  // not in use
        kv8::Result r;
        kv8::attend(a, q, r);
#pragma unroll
        for (int i = 0; i < kv8::PER_LANE; i++) o[warp][i * 32 + lane] = r.o[i];
        if (lane == 0) maxima[warp] = r.max, sums[warp] = r.sum;
        __syncthreads();
        kv8::finish(a, q, o, maxima, sums);
        __syncthreads();
    }
}
