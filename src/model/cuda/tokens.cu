// tokens.cu - a token each of a few sequences in one kernel: embedding, every layer, logits.
//
// As token.cu, of which a layer's phases differ in these:
//   - activations are f16, where one token has f32 or two f16;
//   - the blocks share the tokens' attention in proportion to their keys, each attends for one;
//   - experts that several tokens chose are read once: the tokens are the columns of their
//     products (tokens_experts.cuh). What an expert gives a token is written by itself, and
//     added up by whoever has the rows of O: that block keeps these of the residual stream.
//
// A word that blocks hand to each other has the parity of its layer as its last bit. The number of
// layers is even: whatever tokens a launch has, it leaves the words of all as the next one expects.
//
// Grid: as many blocks as multiprocessors, all resident (a cooperative launch). Block: 8 warps that
// compute, one that copies and routes, three that route. Bytes: every weight of the tokens once, K
// and V once. Bound by: memory, and by the blocks' meetings.
//
// SPDX-License-Identifier: Apache-2.0
#define KV8_RING_STAGES KV8_TOKENS_STAGES
#include "experts_gate.cuh"
#include "tokens_copy.cuh"
#include "tokens_rows.cuh"

namespace kv8 {

constexpr int COMPUTE_REGISTERS = 208, COPY_REGISTERS = 88;  // of a thread; 168 at the launch

template <int X>
__device__ __forceinline__ const float *sums_of(const Shared<X> &shared, int row, int token) {
    return shared.rows + (row * X + token) * KV8_TOKEN_WARPS;
}

// The first layer's stream.
template <int X>
__device__ __forceinline__ void embed(const kv8_tokens_args &a, Shared<X> &shared) {
    const Own own(a);
    float x = 0;
    if (own.lives)
        x = widen_bf16(__ldg(a.embedding + int64_t{a.token_ids[own.token]} * HIDDEN + own.at));
    if (own.token < X) shared.residual[own.token][own.row] = x;
    hand_rows(a, own, x, a.entering, a.entering_squares, turn_of(0));
}

// The rows of QKV or of the head that the block has, by the normed rows in shared.x: what(row,
// token, sum), of DENSE_ROWS rows at a time, a warp a token.
template <int X, class WHAT>
__device__ __forceinline__ void multiply_rows(const Share &rows, Shared<X> &shared,
                                              RingReader &ring, WHAT &&what) {
    DenseInput<HIDDEN> x[X / 2];
#pragma unroll
    for (int p = 0; p < X / 2; p++) load_pair<HIDDEN, X_ROW_BYTES>(x[p], smem_address(shared.x), p);
    PairedRows<HIDDEN, X / 2> weights(ring);
    const int row = threadIdx.x % DENSE_ROWS, token = threadIdx.x / DENSE_ROWS;
#pragma unroll 1
    for (int r = rows.begin; r < rows.end; r += DENSE_ROWS) {
        const int n = min(DENSE_ROWS, rows.end - r);
        const int first = (r - rows.begin) % (2 * DENSE_ROWS);
        weights.multiply(ring, x, shared.rows + first * X * KV8_TOKEN_WARPS, n, rows.end - r - n);
        meet_warps();
        if (row < n && token < X)
            what(r + row, token, add_warps(sums_of(shared, first + row, token)));
    }
}

// Some warps a half of a query head of a token, the fewer the more tokens there are.
template <int X>
__device__ __forceinline__ void combine_tokens(const kv8_tokens_args &a, const kv8_token_layer &l,
                                               uint32_t turn, Shared<X> &shared) {
    const uint32_t many = shared.many[l.window];
    const int num_items = __popc(many) * COMBINE_ITEMS, lane = threadIdx.x % 32;
    const WarpRow mine(__popc(many));
    CombineScratch &scratch = shared.combine;
#pragma unroll 1
    for (int first = blockIdx.x; first < num_items;
         first += KV8_TOKEN_WARPS / mine.parts * gridDim.x) {
        const int n = first + mine.row * gridDim.x, item = n % COMBINE_ITEMS;
        const bool lives = n < num_items;
        const int token = set_bit(many, lives ? n / COMBINE_ITEMS : 0);
        const int first_block = a.first_block[l.window][token];
        const HeadEnd end(l, item / 2);
        const TokensRow row(a, token, first_block);
        const KeySplits keys(l.window_left, a.positions[token],
                             a.first_block[l.window][token + 1] - first_block);
        const RowSums part = add_splits(row, item, mine.part, lives ? keys.splits : 0, mine.parts);
        scratch.put(part);
        meet_warps();
        if (mine.part == 0) {
            const float y = scratch.join(threadIdx.x / 32, mine.parts).finish(end);
            const float next = __shfl_down_sync(~0u, y, 1);
            if (lives && lane % 2 == 0)
                row.hand_attended(item * COMBINE_DIMS + lane, y, next, turn);
        }
        meet_warps();
    }
}

// O into the residual stream, and the block's part of the router's product, as of one token.
template <int X>
__device__ __forceinline__ void compute_o(const kv8_tokens_args &a, const kv8_token_layer &l,
                                          const Meeting &before, uint32_t turn, Shared<X> &shared,
                                          RingReader &ring) {
    constexpr int HALF = SLICE / 4;
    const Share rows = rows_of_o();
    const int t = threadIdx.x, expert = t % KV8_TOKEN_MAX_EXPERTS, half = t / KV8_TOKEN_MAX_EXPERTS;
    // Two threads an expert, neighbouring pairs of rows to each in turn.
    uint32_t router[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const int pair = 2 * i + half;
        router[i] = 0;
        if (expert < a.num_experts && 2 * pair < rows.count())
            router[i] = __ldg(reinterpret_cast<const uint32_t *>(
                l.router + int64_t{expert} * HIDDEN + rows.begin + 2 * pair));
    }
    const Own own(a);
    uint16_t bias = 0, gain = 0;
    if (own.lives) bias = __ldg(l.o_bias + own.at), gain = __ldg(l.mlp_norm + own.at);
    before.hear();
    DenseInput<Q_WIDTH> x[X / 2];
#pragma unroll
    for (int first = 0; first < X; first += 4) {
        const WarpRow mine(min(a.num_tokens - first, 4));
        const int token = first + mine.row;
        if (first > 0) meet_warps();
        if (token < min(a.num_tokens, first + 4))
            take_row<8>(
                a.attended + token * (Q_WIDTH / 2), Q_WIDTH / 8, mine, turn, [] {},
                [&](int n, const Handed<4> &h) {
                    reinterpret_cast<uint4 *>(shared.attended + mine.row * ATTENDED_BYTES)[n] =
                        words_of(h);
                });
        meet_warps();
#pragma unroll
        for (int p = 0; p < 2; p++)
            load_pair<Q_WIDTH, ATTENDED_BYTES>(x[first / 2 + p], smem_address(shared.attended), p);
    }
    PairedRows<Q_WIDTH, X / 2> weights(ring);
    weights.multiply(ring, x, shared.rows, rows.count(), 0);
    meet_warps();
    float sum = 0;
    if (own.lives)
        sum = shared.residual[own.token][own.row] + widen_bf16(bias) +
              add_warps(sums_of(shared, own.row, own.token));
    hand_rows(a, own, sum, a.residual, a.squares, turn);
    meet_warps();
    if (own.token < X) {
        shared.residual[own.token][own.row] = sum;
        shared.router.x[own.token][own.row] = sum * widen_bf16(gain);
    }
    meet_warps();
    float part[X] = {};
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float2 weights = widen_f16(router[i]);
#pragma unroll
        for (int token = 0; token < X; token++) {
            const float2 pair =
                reinterpret_cast<const float2 *>(shared.router.x[token])[2 * i + half];
            part[token] = fmaf(weights.y, pair.y, fmaf(weights.x, pair.x, part[token]));
        }
    }
#pragma unroll
    for (int token = 0; token < X; token++) shared.router.sums[token][half][expert] = part[token];
    meet_warps();
#pragma unroll
    for (int token = half; token < X; token += 2) {
        const auto &sums = shared.router.sums[token];
        if (expert >= a.num_experts || token >= a.num_tokens) continue;
        if (!add_to_router(a.router + token * KV8_TOKEN_MAX_EXPERTS + expert,
                           sums[0][expert] + sums[1][expert]))
            shared.poison[token] = NAN;
    }
    meet_warps();
}

// Gate and up of the block's strips, then down of those of one expert, or of two as their rows fit,
// weighted: of each pair by itself.
template <int X>
__device__ __forceinline__ void compute_experts(const kv8_tokens_args &a, int layer, uint32_t all,
                                                Shared<X> &shared, RingReader &ring) {
    const uint32_t turn = turn_of(layer), x = smem_address(shared.x);
    const ChosenExperts &experts = shared.experts;
    const int t = threadIdx.x, g = t % 32 / 4;
    barrier_wait(smem_address(&shared.listed), layer & 1);
    const Share down = strips_of(experts.count, DOWN_STRIPS);
    const int end_item = (down.end - 1) / DOWN_STRIPS + 1;
    Share strips = strips_of(experts.count, GATE_UP_STRIPS);
    bool is_down = false;
    int item = 0, next = down.begin / DOWN_STRIPS;
    int of_first = 0, num_rows = 0;  // of down: rows of `item`, and of all
#pragma unroll 1
    while (true) {
        multiply_strips(
            ring, strips, x, shared.exchange, [&](int strip, int column, float low, float high) {
                if (is_down) {
                    const bool is_first = strip / DOWN_STRIPS == item;
                    if (column >= num_rows || (column < of_first) != is_first) return;
                    const int pair = shared.row_pairs[column];
                    const float weight = shared.expert_weights[pair];
                    float *const to =
                        a.down + pair * HIDDEN + strip % DOWN_STRIPS * KV8_STRIP_ROWS + g;
                    hand(to, low * weight, turn), hand(to + 8, high * weight, turn);
                } else {
                    const uint32_t choice =
                        experts.pairs[strip / GATE_UP_STRIPS] >> (column * TOP_K) &
                        ((1 << TOP_K) - 1);
                    const float y = gate(low, high, a.alpha, a.limit);
                    const float other = __shfl_down_sync(~0u, y, 4);
                    if (choice == 0 || g % 2 != 0) return;
                    const int pair = column * TOP_K + __ffs(static_cast<int>(choice)) - 1;
                    hand_word(a.gated + (pair * HIDDEN + strip % GATE_UP_STRIPS * 8 + g) / 2,
                              pack_f16(y, other), turn);
                }
            });
        meet_warps();
        if (!is_down) {
            is_down = true;
            meeting(a, GATED, 0).call();
            meeting(a, GATED, all).hear();
        }
        if (next >= end_item) break;
        item = next++;
        num_rows = of_first = __popc(experts.pairs[item]);
        if (next < end_item && num_rows + __popc(experts.pairs[next]) <= X_ROWS)
            num_rows += __popc(experts.pairs[next++]);
        if (t < num_rows)
            shared.row_pairs[t] = t < of_first ? set_bit(experts.pairs[item], t)
                                               : set_bit(experts.pairs[item + 1], t - of_first);
        meet_warps();
        const WarpRow row(num_rows);
        if (row.row < num_rows)
            take_row<6>(
                a.gated + shared.row_pairs[row.row] * (HIDDEN / 2), HIDDEN / 8, row, turn, [] {},
                [&](int n, const Handed<4> &h) {
                    reinterpret_cast<uint4 *>(shared.x + row.row * X_ROW_BYTES)[n] = words_of(h);
                });
        meet_warps();
        strips.begin = max(down.begin, item * DOWN_STRIPS);
        strips.end = min(down.end, next * DOWN_STRIPS);
    }
    meeting(a, EXPERTS_DONE, 0).call();
}

// The experts' parts into the residual stream, that of the next layer or the last.
template <int X>
__device__ __forceinline__ void add_experts(const kv8_tokens_args &a, const Meeting &before,
                                            int layer, Shared<X> &shared) {
    const Own own(a);
    const bool is_last = layer + 1 == a.num_layers;
    before.hear();
    Handed<1> parts[TOP_K];
    take(parts, turn_of(layer), [&](int k) {
        return own.lives ? a.down + (own.token * TOP_K + k) * HIDDEN + own.at : nullptr;
    });
    float x = 0;
    if (own.lives) {
        x = shared.residual[own.token][own.row] + shared.poison[own.token];
#pragma unroll
        for (int k = 0; k < TOP_K; k++) x += parts[k].value(0);
        shared.residual[own.token][own.row] = x;
    }
    hand_rows(a, own, x, is_last ? a.last : a.entering,
              is_last ? a.last_squares : a.entering_squares, turn_of(layer + 1));
}

template <Format F, int X>
__device__ __forceinline__ void attend_tokens(const kv8_tokens_args &a, const kv8_token_layer &l,
                                              uint32_t all, uint32_t turn, Shared<X> &shared,
                                              RingReader &ring) {
    const Attending at = shared.attending[l.window];
    if (at.token < 0) return;
    const TokensRow row(a, at.token, at.first);
    const KeySplits keys(l.window_left, a.positions[at.token], at.count);
    const float *const cos_sin = shared.cos_sin[at.token];
    if (keys.are_few()) {
        if (at.idx < KV_HEADS)
            attend_few<Keys<F, 1>>(ring, row, l, keys, at.idx, meeting(a, QKV_DONE, all), turn,
                                   cos_sin, shared.heads);
    } else if (at.idx < keys.splits) {
        attend<Keys<F, KV_HEADS>>(ring, row, l, keys, at.idx, meeting(a, QKV_DONE, all), turn,
                                  cos_sin, shared.heads);
        meeting(a, ATTENDED, 0).arrive();
    }
}

template <Format F, int X>
__device__ __forceinline__ void compute_tokens(const kv8_tokens_args &a, Shared<X> &shared,
                                               uint32_t rings) {
    const uint32_t blocks = gridDim.x;
    RingReader ring;
    ring.ring = rings, ring.full = smem_address(shared.full);
    ring.empty = smem_address(shared.empty);
    uint32_t attended = 0;  // arrivals so far
    embed(a, shared);
    meeting(a, ENTERED, 0).call();
    // Halves of layers, attention and experts; behind the last the head.
#pragma unroll 1
    for (int half = 0;; half++) {
        const int i = half / 2;
        const bool is_experts = half % 2 != 0, is_head = i == a.num_layers;
        const kv8_token_layer &l = shared.layers[is_head ? 0 : i];
        const uint32_t turn = turn_of(i), all = blocks * (i + 1);
        const Share rows(is_head ? a.vocab_size : QKV_WIDTH, blockIdx.x, blocks);
        const int row = threadIdx.x % DENSE_ROWS;
        float bias[2] = {};  // of QKV
        if (is_experts) {
            if (threadIdx.x == 0) barrier_arrive(smem_address(&shared.routable));
        } else if (!is_head) {
#pragma unroll
            for (int n = 0; n < 2; n++)
                if (row + n * DENSE_ROWS < rows.count())
                    bias[n] = widen_bf16(__ldg(l.qkv_bias + rows.begin + row + n * DENSE_ROWS));
        }
        const NormSource from =
            is_head
                ? NormSource{a.final_norm, a.last, a.last_squares, meeting(a, LAST, blocks), true}
            : is_experts
                ? NormSource{l.mlp_norm, a.residual, a.squares, meeting(a, RESIDUAL, all), false}
                : NormSource{l.attention_norm, a.entering, a.entering_squares,
                             meeting(a, ENTERED, all), false};
        norm_tokens(a, from, turn, shared);
        if (is_experts) {
            compute_experts(a, i, all, shared, ring);
            add_experts(a, meeting(a, EXPERTS_DONE, all), i, shared);
            if (i + 1 < a.num_layers)
                meeting(a, ENTERED, 0).call();
            else
                meeting(a, LAST, 0).arrive();
            continue;
        }
        multiply_rows(rows, shared, ring, [&](int at, int token, float sum) {
            if (token >= a.num_tokens) return;
            if (is_head)
                a.logits[int64_t{token} * a.vocab_size + at] = sum;
            else
                hand(a.qkv + token * QKV_WIDTH + at, sum + bias[(at - rows.begin) / DENSE_ROWS],
                     turn);
        });
        if (is_head) break;
        meeting(a, QKV_DONE, 0).call();
        attend_tokens<F>(a, l, all, turn, shared, ring);
        if (shared.many[l.window] != 0) {
            attended += shared.num_splits[l.window];
            meeting(a, ATTENDED, attended).wait();
            combine_tokens(a, l, turn, shared);
        }
        meeting(a, COMBINED, 0).call();
        compute_o(a, l, meeting(a, COMBINED, all), turn, shared, ring);
        meeting(a, RESIDUAL, 0).call();
    }
    // The last block to get here leaves the meetings as it found them.
    if (threadIdx.x != 0) return;
    if (atomicAdd(meeting(a, TOKENS_DONE, 0).word, 1) != blocks - 1) return;
    for (int i = 0; i <= TOKENS_DONE; i++) *meeting(a, static_cast<Place>(i), 0).word = 0;
}

// Who attends for whom, of the layers of one window.
template <int X>
__device__ __forceinline__ void share_blocks(const kv8_tokens_args &a, int window,
                                             Shared<X> &shared) {
    Attending at = {-1, 0, 0, 0};
    int splits = 0;
    uint32_t many = 0;
    for (int t = 0; t < a.num_tokens; t++) {
        const int first = a.first_block[window][t], end = a.first_block[window][t + 1];
        const int block = blockIdx.x;
        if (block >= first && block < end) at = {t, first, end - first, block - first};
        const KeySplits keys(a.window_left[window], a.positions[t], end - first);
        if (keys.are_few()) continue;
        many |= 1u << t, splits += keys.splits;
    }
    shared.attending[window] = at;
    shared.num_splits[window] = splits, shared.many[window] = many;
}

template <Format F, int X>
__device__ __forceinline__ void tokens_body(const kv8_tokens_args &a) {
    extern __shared__ __align__(128) uint8_t rings[];
    static_assert(sizeof(Shared<X>) <= KV8_TOKENS_SHARED_BYTES, "shared memory");
    Shared<X> &shared = *reinterpret_cast<Shared<X> *>(rings + KV8_TOKENS_RING_BYTES);
    const int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < RING_STAGES; i++) {
            barrier_init(smem_address(shared.full + i), 1);
            barrier_init(smem_address(shared.empty + i), KV8_TOKEN_WARPS);
        }
        barrier_init(smem_address(&shared.routable), 1);
        barrier_init(smem_address(&shared.listed), 1);
        barrier_init_fence();
    }
    if (t < X) shared.poison[t] = 0;
    if (t < KV8_TOKENS_WINDOWS) share_blocks(a, t, shared);
    for (int i = t; i < a.num_tokens * (HEAD_DIM / 2); i += KV8_TOKEN_THREADS) {
        const int token = i / (HEAD_DIM / 2), pair = i % (HEAD_DIM / 2);
        put_angle(a.positions[token], __ldg(a.inv_freq + pair), a.rope_factor, pair,
                  shared.cos_sin[token]);
    }
    constexpr int WORDS = sizeof(kv8_token_layer) / 8;
    const auto *const from = reinterpret_cast<const uint64_t *>(a.layers);
    for (int i = t; i < a.num_layers * WORDS; i += KV8_TOKEN_THREADS)
        reinterpret_cast<uint64_t *>(shared.layers)[i] = __ldg(from + i);
    for (int i = t; i < X * KV8_TOKEN_MAX_EXPERTS; i += KV8_TOKEN_THREADS)
        shared.router_before[i / KV8_TOKEN_MAX_EXPERTS][i % KV8_TOKEN_MAX_EXPERTS] =
            __ldcg(a.router + i);
    __syncthreads();
    if (t / 32 < KV8_TOKEN_WARPS) {
        registers_take<COMPUTE_REGISTERS>();
        compute_tokens<F>(a, shared, smem_address(rings));
    } else {
        registers_give<COPY_REGISTERS>();
        copy_tokens<F>(a, shared, smem_address(rings));
    }
}

}  // namespace kv8

#define KV8_TOKENS_KERNEL(name, FORMAT, X)                                                         \
    extern "C" __global__ void __launch_bounds__(KV8_TOKEN_THREADS, 1)                             \
        kv8_gpt_oss_tokens_##name##_d64_x##X##__sm90a(const __grid_constant__ kv8_tokens_args a) { \
        kv8::tokens_body<kv8::FORMAT, X>(a);                                                       \
    }
KV8_TOKENS_KERNEL(bf16, BF16, 4)
KV8_TOKENS_KERNEL(bf16, BF16, 8)
KV8_TOKENS_KERNEL(f16, F16, 4)
KV8_TOKENS_KERNEL(f16, F16, 8)
KV8_TOKENS_KERNEL(e4m3, E4M3, 4)
KV8_TOKENS_KERNEL(e4m3, E4M3, 8)
KV8_TOKENS_KERNEL(e5m2, E5M2, 4)
KV8_TOKENS_KERNEL(e5m2, E5M2, 8)
KV8_TOKENS_KERNEL(int8, INT8, 4)
KV8_TOKENS_KERNEL(int8, INT8, 8)
