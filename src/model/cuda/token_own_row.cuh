// token_own_row.cuh - K and V of the token itself, of one KV head by a warp: quantised as append
// does (append_body.cuh), into the page and into the copy of it that the ring holds.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "codec.cuh"
#include "decode/decode_tile.cuh"
#include "token_args.h"

namespace kv8 {

constexpr int HEAD_DIM = KV8_TOKEN_HEAD_DIM, KV_HEADS = KV8_TOKEN_KV_HEADS;
constexpr int QO_HEADS = KV8_TOKEN_QO_HEADS, GROUP = QO_HEADS / KV_HEADS;
constexpr int Q_WIDTH = QO_HEADS * HEAD_DIM, KV_WIDTH = KV_HEADS * HEAD_DIM;
constexpr int QKV_WIDTH = Q_WIDTH + 2 * KV_WIDTH;
static_assert(GROUP == 8 && KV_HEADS == KV8_TOKEN_WARPS && TOKENS == KV8_TOKEN_GRANULE,
              "a warp has the eight heads of a KV head");

__device__ __forceinline__ float rotated(float x, float y, float cosine, float sine, bool first) {
    return first ? __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine))
                 : __fadd_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine));
}

// As kv8_rope_angles: the angle is an f32 product, its cosine and sine are exact.
__device__ __forceinline__ void put_angle(int position, float inv_freq, float factor, int pair,
                                          float *cos_sin) {
    const float angle = __fmul_rn(static_cast<float>(position), inv_freq);
    double sine, cosine;
    sincos(static_cast<double>(angle), &sine, &cosine);
    cos_sin[pair] = static_cast<float>(cosine) * factor;
    cos_sin[HEAD_DIM / 2 + pair] = static_cast<float>(sine) * factor;
}

// Codes of dims lane and lane + 32; of int8 the row's scale, an f16, too.
template <Format F>
struct OwnCodes {
    using to = format<static_cast<kv8_dtype>(F)>;
    using code = typename to::code;
    code codes[2];
    uint32_t clips = 0, nans = 0;

    __device__ void encode(const float (&x)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            codes[i] = to::encode(x[i]);
            clips += fabsf(x[i]) > to::max;
            nans += isnan(x[i]) != 0;
        }
    }
};
template <>
struct OwnCodes<INT8> {
    using code = int8_t;
    code codes[2];
    uint16_t row_scale;
    uint32_t clips = 0, nans = 0;

    __device__ void encode(const float (&x)[2]) {
        float most = 0;
        bool infinite = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            nans += isnan(x[i]) != 0;
            infinite |= isinf(x[i]) != 0;
            if (isfinite(x[i])) most = fmaxf(most, fabsf(x[i]));
        }
        most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
        const bool has_nan = __any_sync(~0u, nans > 0);
        const bool empty = most == 0 && !__any_sync(~0u, infinite);
        row_scale = has_nan ? 0x7e00 : empty ? 0 : int8_row_scale(most);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float q = has_nan || empty ? 0 : __fdiv_rn(x[i], kv8_f16_decode(row_scale));
            codes[i] = int8_encode(q);
            clips += fabsf(q) > 127.0f;
        }
    }
};

// Where a row goes: in the page, and in the ring; its scale, of int8, likewise.
struct RowPlaces {
    uint8_t *page, *ring, *page_scale, *ring_scale;
};

template <Format F>
struct OwnRow {
    using Code = typename OwnCodes<F>::code;
    OwnCodes<F> k, v;

    __device__ static float divide(float x, float scale) {
        return isnan(x) ? __uint_as_float(__float_as_uint(x) | KV8_F32_QUIET) : __fdiv_rn(x, scale);
    }
    __device__ static void narrow(float x, float y, float scale, OwnCodes<F> &row,
                                  uint64_t *counters) {
        row.encode({divide(x, scale), divide(y, scale)});
        if (counters == nullptr || !__any_sync(~0u, row.clips + row.nans > 0)) return;
        auto *const cell = reinterpret_cast<unsigned long long *>(counters);
        if (row.clips > 0) atomicAdd(cell, static_cast<unsigned long long>(row.clips));
        if (row.nans > 0) atomicAdd(cell + 1, static_cast<unsigned long long>(row.nans));
    }
    // As QKV leaves them: K of the two dims, then V.
    __device__ static const float *at(const float *qkv, int head, int i) {
        return qkv + Q_WIDTH + head * HEAD_DIM + threadIdx.x % 32 + i / 2 * KV_WIDTH +
               i % 2 * (HEAD_DIM / 2);
    }
    __device__ void encode(const kv8_token_layer &l, const float4 &x, const float *cos_sin,
                           int head, float k_scale, float v_scale) {
        const int lane = threadIdx.x % 32;
        const float cosine = cos_sin[lane], sine = cos_sin[HEAD_DIM / 2 + lane];
        narrow(rotated(x.x, x.y, cosine, sine, true), rotated(x.y, x.x, cosine, sine, false),
               k_scale, k, l.k_counters == nullptr ? nullptr : l.k_counters + 2 * head);
        narrow(x.z, x.w, v_scale, v, l.v_counters == nullptr ? nullptr : l.v_counters + 2 * head);
    }
    __device__ static void store(const OwnCodes<F> &row, const RowPlaces &to) {
        const int lane = threadIdx.x % 32;
        const auto put = [&](uint8_t *at) {
            auto *const codes = reinterpret_cast<Code *>(at);
            codes[lane] = row.codes[0], codes[lane + HEAD_DIM / 2] = row.codes[1];
        };
        put(to.page), put(to.ring);
        if constexpr (F == INT8) {
            if (lane != 0) return;
            *reinterpret_cast<uint16_t *>(to.page_scale) = row.row_scale;
            *reinterpret_cast<uint16_t *>(to.ring_scale) = row.row_scale;
        }
    }
};

}  // namespace kv8
