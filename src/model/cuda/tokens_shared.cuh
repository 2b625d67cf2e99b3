// tokens_shared.cuh - what the warps of a block of tokens.cu have in common: shared memory, the
// words that blocks meet at, a token as attention takes it.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "token_attention.cuh"
#include "tokens_dense.cuh"
#include "tokens_experts.cuh"

namespace kv8 {

constexpr int SLICE = 32;  // rows of O of a block, at most
static_assert((HIDDEN / 2 + KV8_TOKEN_MIN_BLOCKS - 1) / KV8_TOKEN_MIN_BLOCKS * 2 <= SLICE, "rows");
constexpr int ATTENDED_BYTES = Q_WIDTH * 2 + 16;  // of a row in shared memory
constexpr int DENSE_ROWS = 32;                    // at once, the sums of those before beside them
static_assert(DENSE_ROWS % (2 * DenseRows<HIDDEN>::ROWS) == 0, "both stages ahead in turn");
static_assert(SLICE <= 2 * DENSE_ROWS, "sums");
enum Place {
    ENTERED,
    QKV_DONE,
    ATTENDED,
    COMBINED,
    RESIDUAL,
    GATED,
    EXPERTS_DONE,
    LAST,
    TOKENS_DONE
};
static_assert(TOKENS_DONE < KV8_TOKEN_MEETINGS, "a word each");

// What the block attends for: blocks from `first` on, `count`, are a token's; this is the idx-th.
struct Attending {
    int token;  // -1: none
    int first, count, idx;
};

template <int X>
struct Shared {
    uint64_t full[RING_STAGES], empty[RING_STAGES];
    uint64_t routable, listed;  // the router has the sums of this block; experts are known
    int64_t router_before[X][KV8_TOKEN_MAX_EXPERTS];
    ChosenExperts experts;
    int chosen[MAX_PAIRS];
    float expert_weights[MAX_PAIRS];
    int row_pairs[X_ROWS];     // of the rows of down
    float poison[X];           // NaN when the router's sums do not hold a part of the block's
    float residual[X][SLICE];  // of the rows of O
    alignas(16) float cos_sin[X][HEAD_DIM];
    Attending attending[KV8_TOKENS_WINDOWS];
    int num_splits[KV8_TOKENS_WINDOWS];  // of all tokens with many keys
    uint32_t many[KV8_TOKENS_WINDOWS];   // which these are
    kv8_token_layer layers[KV8_TOKEN_MAX_LAYERS];
    union alignas(16) {
        struct {
            union alignas(16) {
                float rows[2 * DENSE_ROWS * X * KV8_TOKEN_WARPS];
                uint16_t gain[HIDDEN];
                StripExchange exchange;
                CombineScratch combine;
                struct {
                    float x[X][SLICE];
                    float sums[X][2][KV8_TOKEN_MAX_EXPERTS];
                } router;
            };
            union alignas(16) {
                uint8_t x[X_ROWS * X_ROW_BYTES];
                uint8_t attended[4 * ATTENDED_BYTES];
            };
        };
        HeadScratch heads;
    };
};

// A token as attention takes it (ROW of token_attention.cuh), of which each block has a part.
struct TokensRow {
    const float *qkv;
    float *partials, *partial_sums;
    uint32_t *attended;
    int page_size, idx;

    __device__ TokensRow(const kv8_tokens_args &a, int token, int first_block)
        : qkv(a.qkv + token * QKV_WIDTH),
          partials(a.partials + int64_t{first_block} * Q_WIDTH),
          partial_sums(a.partial_sums + first_block * QO_HEADS * 2),
          attended(a.attended + token * (Q_WIDTH / 2)),
          page_size(a.page_size),
          idx(token) {}
    __device__ const int32_t *pages_of(const kv8_token_layer &l) const {
        return l.page_indices + __ldg(l.page_indptr + idx);
    }
    __device__ void hand_attended(int at, float x, float y, uint32_t turn) const {
        hand_word(attended + at / 2, pack_f16(x, y), turn);
    }
};

// Of words that are handed on in layer i.
__device__ __forceinline__ uint32_t turn_of(int layer) {
    return (layer + 1) & 1;
}

__device__ __forceinline__ Meeting meeting(const kv8_tokens_args &a, Place place,
                                           uint32_t expected) {
    return {a.meetings + place * KV8_TOKEN_MEETING_WORDS, expected};
}

}  // namespace kv8
