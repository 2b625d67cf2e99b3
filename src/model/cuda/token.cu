// token.cu - one whole token of gpt-oss in one kernel: embedding, every layer, logits.
//
// A layer's phases, and where all blocks meet:
//   norm, QKV | attention over ranges of keys | combine | O, residual, the router's sums |
//   routing, norm, gate and up | down |
// Every block has its share of the rows, strips and keys of each. One warp copies them through a
// ring in shared memory in the order of the whole token, and so is ahead by as much as the ring
// holds: only the experts' weights wait, for the routing.
//
// Sums have an order of their own: the router's, to which all blocks add, are whole numbers; the
// experts' output comes in two parts, because a block has the experts of a strip one after another
// and shares no strip with more than one neighbour.
//
// Grid: as many blocks as multiprocessors, all resident (a cooperative launch). Block: 8 warps that
// compute and one that copies. Bytes: every weight of the token once, K and V once. Bound by:
// memory, and by the blocks' meetings: what one block hands to all tells itself when it has come
// (token_ring.cuh), so that no fence stands in them.
//
// SPDX-License-Identifier: Apache-2.0
#define KV8_RING_STAGES KV8_TOKEN_STAGES
#include "experts_gate.cuh"
#include "token_attention.cuh"
#include "token_draw.cuh"
#include "token_experts.cuh"
#include "token_router.cuh"

namespace kv8 {

constexpr int MOST_ROWS = 64;  // of a block, of QKV; and of the head at once
static_assert(QKV_WIDTH / KV8_TOKEN_MIN_BLOCKS < MOST_ROWS, "rows of a block");
constexpr int HEAD_ROWS = 32;
static_assert(HEAD_ROWS % (2 * DenseRows<HIDDEN>::ROWS) == 0, "both stages ahead in turn");
constexpr int COMPUTE_REGISTERS = 208, COPY_REGISTERS = 88;  // of a thread; 168 at the launch

enum Place {
    QKV_DONE,
    ATTENDED,
    COMBINED,
    RESIDUAL,
    GATED,
    EXPERTS_DONE,
    TURNS,
    BEST_KNOWN,
    SUMMED,
    TOKEN_DONE
};
static_assert(TOKEN_DONE < KV8_TOKEN_MEETINGS, "a word each");
static_assert(TOP_K == 2 * TEAMS, "a team has two experts of down");

struct Shared {
    uint64_t full[KV8_TOKEN_STAGES], empty[KV8_TOKEN_STAGES];
    uint64_t routable;  // the router has the sums of this block
    int64_t router_before[KV8_TOKEN_MAX_EXPERTS];
    float poison;  // NaN when the router's sums do not hold a part of the block's
    float expert_weights[TOP_K];
    float cos_sin[HEAD_DIM];
    float scale;  // of the experts' normed row
    alignas(16) float scratch[KV8_TOKEN_WARPS];
    kv8_token_layer layers[KV8_TOKEN_MAX_LAYERS];
    union alignas(16) {
        struct {
            float rows[MOST_ROWS * KV8_TOKEN_WARPS];
            union alignas(16) {
                SplitRow<HIDDEN> normed;
                SplitRow<Q_WIDTH> attended;
            };
        };
        StripSums strips;
        CombineScratch combine;
        HeadScratch heads;
        DrawScratch draw;
        struct {
            float x[32];
            float sums[2][KV8_TOKEN_MAX_EXPERTS];
        } router;
    };
};

__device__ __forceinline__ uint32_t *meeting_word(const kv8_token_args &a, Place place) {
    return a.meetings + place * KV8_TOKEN_MEETING_WORDS;
}

__device__ __forceinline__ TokenRow row_of(const kv8_token_args &a) {
    return {a.qkv, a.partials, a.partial_sums, a.attended, a.page_size};
}

__device__ __forceinline__ uint32_t turn_of(uint32_t turns, int layer) {
    return (turns + layer + 1) & 1;
}

// --- the copying warp ---

// Strips of gate and up stand expert by expert; those of down strip by strip, the experts in turn.
__device__ __forceinline__ Share gate_up_strips() {
    return Share(TOP_K * GATE_UP_STRIPS, blockIdx.x, gridDim.x);
}
__device__ __forceinline__ Share down_strips() {
    return Share(TOP_K * DOWN_STRIPS, blockIdx.x, gridDim.x);
}

__device__ __forceinline__ void copy_experts(RingWriter &ring, const kv8_token_layer &l,
                                             const Routing &r) {
    const Share up = gate_up_strips(), down = down_strips();
#pragma unroll 1
    for (int u = up.begin; u < up.end; u++) {
        ring.in_flight = u == up.end - 1 ? 2 : 3;
        const int64_t strip =
            int64_t{expert_of(r, u / GATE_UP_STRIPS)} * GATE_UP_STRIPS + u % GATE_UP_STRIPS;
        ring.put(l.gate_up + strip * STRIP_BYTES, STRIP_BYTES);
    }
#pragma unroll 1
    for (int u = down.begin; u < down.end; u++) {
        const int64_t strip = int64_t{expert_of(r, u % TOP_K)} * DOWN_STRIPS + u / TOP_K;
        ring.put(l.down + strip * STRIP_BYTES, STRIP_BYTES);
    }
}

template <Format F>
__device__ __forceinline__ void copy_token(const kv8_token_args &a, Shared &shared, uint32_t rings,
                                           uint32_t turns) {
    const int lane = threadIdx.x % 32;
    RingWriter ring;
    ring.ring = rings, ring.full = smem_address(shared.full);
    ring.empty = smem_address(shared.empty);
    ring.policy = leave_first_policy(), ring.in_flight = 2;
    const Share qkv(QKV_WIDTH, blockIdx.x, gridDim.x), o = rows_of_o();
#pragma unroll 1
    for (int i = 0; i < a.num_layers; i++) {
        const kv8_token_layer &l = shared.layers[i];
        if (lane == 0) copy_rows<HIDDEN>(ring, l.qkv, qkv);
        __syncwarp();
        const KeySplits keys(l.window_left, a.position, gridDim.x);
        const int block = blockIdx.x;
        const TokenRow row = row_of(a);
        if (keys.are_few() && block < KV_HEADS)
            copy_few<Keys<F, 1>>(ring, l, row.pages_of(l), keys, block, a.page_size);
        if (!keys.are_few() && block < keys.splits)
            copy_keys<Keys<F, KV_HEADS>>(ring, l, row.pages_of(l), keys.of(block), a.page_size);
        if (lane == 0) copy_rows<Q_WIDTH>(ring, l.o, o);
        __syncwarp();
        float bias[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            bias[k] = lane + 32 * k < a.num_experts
                          ? widen_bf16(__ldg(l.router_bias + lane + 32 * k))
                          : 0;
        barrier_wait(smem_address(&shared.routable), i & 1);
        const Routing r = route({a.router, a.squares, a.num_experts, a.eps}, bias,
                                shared.router_before, turn_of(turns, i));
        if (lane == 0) {
#pragma unroll
            for (int k = 0; k < TOP_K; k++) shared.expert_weights[k] = r.weights[k];
            copy_experts(ring, l, r);
        }
        __syncwarp();
    }
    if (lane == 0) copy_rows<HIDDEN>(ring, a.head, Share(a.vocab_size, blockIdx.x, gridDim.x));
}

// --- the computing warps ---

// The normed row that a layer begins with: of the first the embedding; of others in two parts, as
// the experts of the layer before leave it. What waits for nobody is loaded before.
__device__ __forceinline__ void norm_row(const kv8_token_args &a, const uint16_t *gain,
                                         const uint16_t *embedding, const Meeting &before,
                                         uint32_t turn, Shared &shared, DenseInput<HIDDEN> &row) {
    const Gains gains(gain);
    float x[FOURTHS][4], squares = 0;
    if (embedding != nullptr) {
#pragma unroll
        for (int i = 0; i < FOURTHS; i++) {
            uint2 e = make_uint2(0, 0);
            if (const uint16_t *const from = fourth_of(embedding, i))
                e = __ldg(reinterpret_cast<const uint2 *>(from));
            x[i][0] = low_bf16(e.x), x[i][1] = high_bf16(e.x);
            x[i][2] = low_bf16(e.y), x[i][3] = high_bf16(e.y);
        }
    } else {
        before.hear();
        Handed<4> parts[2 * FOURTHS];
        take(parts, turn,
             [&](int n) { return fourth_of(a.residual + (1 + n % 2) * HIDDEN, n / 2); });
#pragma unroll
        for (int i = 0; i < FOURTHS; i++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[i][k] =
                    fourth(i) < HIDDEN / 4 ? parts[2 * i].value(k) + parts[2 * i + 1].value(k) : 0;
    }
#pragma unroll
    for (int i = 0; i < FOURTHS; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) squares = fmaf(x[i][k], x[i][k], squares);
    const float scale = rsqrtf(block_sum(squares, shared.scratch) / HIDDEN + a.eps);
#pragma unroll
    for (int i = 0; i < FOURTHS; i++) {
        gains.scale(i, scale, x[i]);
        if (fourth(i) < HIDDEN / 4) shared.normed.put(fourth(i), x[i]);
    }
    meet_warps();
    row.load(shared.normed);
}

__device__ __forceinline__ void compute_qkv(const kv8_token_args &a, const kv8_token_layer &l,
                                            const uint16_t *embedding, const Meeting &before,
                                            uint32_t turn, Shared &shared, RingReader &ring) {
    const Share rows(QKV_WIDTH, blockIdx.x, gridDim.x);
    const int row = threadIdx.x;
    const float bias = row < rows.count() ? widen_bf16(__ldg(l.qkv_bias + rows.begin + row)) : 0;
    DenseInput<HIDDEN> x;
    norm_row(a, l.attention_norm, embedding, before, turn ^ 1, shared, x);
    DenseRows<HIDDEN> weights(ring);  // its stages would be filled in front of the norm's reads
    weights.multiply(ring, x, shared.rows, rows.count(), 0);
    meet_warps();
    if (row < rows.count())
        hand(a.qkv + rows.begin + row, add_warps(shared.rows + row * KV8_TOKEN_WARPS) + bias, turn);
    meet_warps();
}

// O into the residual stream, and the block's part of the router's product with its normed row: the
// root mean square divides the result.
__device__ __forceinline__ void compute_o(const kv8_token_args &a, const kv8_token_layer &l,
                                          const uint16_t *embedding, const Meeting &before,
                                          uint32_t turn, Shared &shared, RingReader &ring) {
    constexpr int MOST_PAIRS = (HIDDEN / KV8_TOKEN_MIN_BLOCKS + 3) / 2, HALF = (MOST_PAIRS + 1) / 2;
    static_assert(2 * MOST_PAIRS <= 32, "rows of a warp");
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
    const bool has_row = t < rows.count();
    const int at = rows.begin + t;
    Handed<1> residual[2];
    const auto residual_at = [&](int i) {
        return has_row && embedding == nullptr ? a.residual + (1 + i) * HIDDEN + at : nullptr;
    };
    ask(residual, turn ^ 1, residual_at);
    uint16_t first = 0, bias = 0, gain = 0;
    if (has_row) {
        if (embedding != nullptr) first = __ldg(embedding + at);
        bias = __ldg(l.o_bias + at), gain = __ldg(l.mlp_norm + at);
    }
    DenseRows<Q_WIDTH> weights(ring);
    constexpr int EACH = Q_WIDTH / 4 / COMPUTE_THREADS;
    const auto attended = [&](int i) { return a.attended + 4 * (t + i * COMPUTE_THREADS); };
    Handed<4> parts[EACH];
    before.hear();
    take(parts, turn, attended);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        shared.attended.put(t + i * COMPUTE_THREADS, {parts[i].value(0), parts[i].value(1),
                                                      parts[i].value(2), parts[i].value(3)});
    meet_warps();
    DenseInput<Q_WIDTH> x;
    x.load(shared.attended);
    weights.multiply(ring, x, shared.rows, rows.count(), 0);
    meet_warps();
    float normed = 0;
    if (t < 32) {
        float sum = 0;
        get(residual, turn ^ 1, residual_at);
        if (has_row) {
            sum = residual[0].value(0) + residual[1].value(0) + widen_bf16(first) +
                  widen_bf16(bias) + add_warps(shared.rows + t * KV8_TOKEN_WARPS);
            hand(a.residual + at, sum, turn);
            normed = sum * widen_bf16(gain);
        }
        sum = warp_sum(sum * sum);
        if (t == 0) hand(a.squares + blockIdx.x, sum, turn);
    }
    meet_warps();
    if (t < 32) shared.router.x[t] = normed;
    meet_warps();
    float part = 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float2 pair =
            reinterpret_cast<const float2 *>(shared.router.x)[min(2 * i + half, 15)];
        const float2 weights = widen_f16(router[i]);
        part = fmaf(weights.y, pair.y, fmaf(weights.x, pair.x, part));
    }
    shared.router.sums[half][expert] = part;
    meet_warps();
    if (t < a.num_experts) {
        part = shared.router.sums[0][t] + shared.router.sums[1][t];
        if (!add_to_router(a.router + t, part)) shared.poison = NAN;
    }
    meet_warps();
}

// The strips of a share, from the first that is this team's turn.
template <class STRIP>
__device__ __forceinline__ void for_strips(RingReader &ring, const Share &strips, STRIP &&strip) {
    const uint32_t begin = ring.n;
#pragma unroll 1
    for (int i = StripInput::team(); i < strips.count(); i += TEAMS) {
        ring.n = begin + i;
        strip(i);
    }
    ring.n = begin + strips.count();
}

__device__ __forceinline__ void compute_gate_up(const kv8_token_args &a, const kv8_token_layer &l,
                                                const Meeting &before, uint32_t turn,
                                                Shared &shared, RingReader &ring) {
    const int t = threadIdx.x;
    if (t == 0) barrier_arrive(smem_address(&shared.routable));
    const Gains gains(l.mlp_norm);
    before.hear();
    Handed<4> x[FOURTHS];
    Squares squares;
    const auto row_at = [&](int i) { return fourth_of(a.residual, i); };
    const auto square_at = [&](int i) { return squares_at(a.squares, i); };
    // Squares by one warp: what all ask of one address stands in line there.
    if (t < 32) ask(squares, turn, square_at);
    ask(x, turn, row_at);
    if (t < 32) {
        get(squares, turn, square_at);
        const float of_all = norm_scale(a.eps, squares);
        if (t == 0) shared.scale = of_all;
    }
    get(x, turn, row_at);
    meet_warps();
    const float scale = shared.scale;
#pragma unroll
    for (int i = 0; i < FOURTHS; i++) {
        float y[4] = {x[i].value(0), x[i].value(1), x[i].value(2), x[i].value(3)};
        gains.scale(i, scale, y);
        if (fourth(i) < HIDDEN / 4)
            reinterpret_cast<uint2 *>(shared.strips.x)[fourth(i)] =
                make_uint2(pack_f16(y[0], y[1]), pack_f16(y[2], y[3]));
    }
    meet_warps();
    StripInput in;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
#pragma unroll
        for (int p = 0; p < 4; p++)
            in.pairs[i][p] =
                StripInput::block(i) < HIDDEN
                    ? *reinterpret_cast<const uint32_t *>(shared.strips.x + StripInput::pair(i, p))
                    : 0;
    const Share strips = gate_up_strips();
    for_strips(ring, strips, [&](int i) { multiply_strip(ring, in, shared.strips, i); });
    meet_warps();
    const int idx = t / 8, row = t % 8;
    if (idx < strips.count()) {
        const int strip = strips.begin + idx, output = strip % GATE_UP_STRIPS * 8 + row;
        const float value =
            gate(shared.strips.row(idx, row), shared.strips.row(idx, row + 8), a.alpha, a.limit);
        const uint32_t other = __shfl_xor_sync(3u << t % 32 / 2 * 2, pack_f16(value, 0), 1);
        if (row % 2 == 0)
            hand_word(a.gated + strip / GATE_UP_STRIPS * HIDDEN + StripInput::place(output),
                      pack_f16(value, 0) & 0xffff | other << 16, turn);
    }
    meet_warps();
}

// Down, weighted, and the residual: the part of the block that has a strip's first expert takes it.
__device__ __forceinline__ void compute_down(const kv8_token_args &a, const Meeting &before,
                                             uint32_t turn, Shared &shared, RingReader &ring) {
    const Share strips = down_strips();
    const int t = threadIdx.x, idx = t / KV8_STRIP_ROWS, row = t % KV8_STRIP_ROWS;
    const int first_strip = strips.begin / TOP_K, strip = first_strip + idx;
    const int from = max(strip * TOP_K, strips.begin), to = min((strip + 1) * TOP_K, strips.end);
    const int at = strip * KV8_STRIP_ROWS + row;
    const float residual = from < to ? take(a.residual + at, turn) + shared.poison : 0;
    // Teams take turns, so that each has two of the experts.
    const int turn_at = strips.begin + StripInput::team();
    before.hear();
    StripInput in[2];
    Handed<4> x[2 * FOURS];
    take(x, turn, [&](int n) {
        const int k = n / FOURS, i = n % FOURS;
        const uint16_t *const from = a.gated + (turn_at + TEAMS * k) % TOP_K * HIDDEN;
        return StripInput::block(i) < HIDDEN ? from + StripInput::block(i) + threadIdx.x % 4 * 8
                                             : nullptr;
    });
#pragma unroll
    for (int n = 0; n < 2 * FOURS; n++)
#pragma unroll
        for (int p = 0; p < 4; p++) in[n / FOURS].pairs[n % FOURS][p] = x[n].w[p] & ~1u;
    for_strips(ring, strips, [&](int i) {
        StripInput mine;
#pragma unroll
        for (int j = 0; j < FOURS; j++)
#pragma unroll
            for (int p = 0; p < 4; p++)
                mine.pairs[j][p] = i / TEAMS % 2 == 0 ? in[0].pairs[j][p] : in[1].pairs[j][p];
        multiply_strip(ring, mine, shared.strips, i);
    });
    meet_warps();
    if (from < to) {
        float sum = from == strip * TOP_K ? residual : 0;
        for (int u = from; u < to; u++)
            sum = fmaf(shared.expert_weights[u % TOP_K], shared.strips.row(u - strips.begin, row),
                       sum);
        float *const parts = a.residual + HIDDEN;
        if (from == strip * TOP_K) hand(parts + at, sum, turn);
        if (to == (strip + 1) * TOP_K)
            hand(parts + HIDDEN + at, from == strip * TOP_K ? 0 : sum, turn);
    }
    meet_warps();
}

__device__ __forceinline__ void compute_head(const kv8_token_args &a, const Meeting &before,
                                             uint32_t turn, Shared &shared, RingReader &ring) {
    const Share rows(a.vocab_size, blockIdx.x, gridDim.x);
    DenseRows<HIDDEN> weights(ring);
    DenseInput<HIDDEN> x;
    norm_row(a, a.final_norm, nullptr, before, turn, shared, x);
#pragma unroll 1
    for (int r = rows.begin; r < rows.end; r += HEAD_ROWS) {
        const int n = min(HEAD_ROWS, rows.end - r);
        float *const sums = shared.rows + (r - rows.begin) % (2 * HEAD_ROWS) * KV8_TOKEN_WARPS;
        weights.multiply(ring, x, sums, n, rows.end - r - n);
        meet_warps();
        if (static_cast<int>(threadIdx.x) < n)
            a.logits[r + threadIdx.x] = add_warps(sums + threadIdx.x * KV8_TOKEN_WARPS);
    }
}

template <Format F>
__device__ __forceinline__ void compute_token(const kv8_token_args &a, Shared &shared,
                                              uint32_t rings, uint32_t turns) {
    const uint32_t blocks = gridDim.x, block = blockIdx.x;
    RingReader ring;
    ring.ring = rings, ring.full = smem_address(shared.full);
    ring.empty = smem_address(shared.empty);
    const uint16_t *embedding = a.embedding + int64_t{a.token_id} * HIDDEN;
    uint32_t attended = 0, combined = 0;  // arrivals so far
    const auto meeting = [&](Place place, uint32_t expected) {
        return Meeting{meeting_word(a, place), expected};
    };
#pragma unroll 1
    for (int i = 0; i < a.num_layers; i++) {
        const kv8_token_layer &l = shared.layers[i];
        const uint32_t turn = turn_of(turns, i);
        const uint32_t all = blocks * (i + 1);
        compute_qkv(a, l, embedding, meeting(EXPERTS_DONE, blocks * i), turn, shared, ring);
        meeting(QKV_DONE, 0).call();
        const KeySplits keys(l.window_left, a.position, blocks);
        if (keys.are_few()) {
            if (block < KV_HEADS) {
                attend_few<Keys<F, 1>>(ring, row_of(a), l, keys, block, meeting(QKV_DONE, all),
                                       turn, shared.cos_sin, shared.heads);
                meeting(COMBINED, 0).call();
            }
            combined += KV_HEADS;
        } else {
            if (block < static_cast<uint32_t>(keys.splits)) {
                attend<Keys<F, KV_HEADS>>(ring, row_of(a), l, keys, block, meeting(QKV_DONE, all),
                                          turn, shared.cos_sin, shared.heads);
                meeting(ATTENDED, 0).arrive();
            }
            attended += keys.splits;
            if (block < COMBINE_ITEMS) {
                for (uint32_t item = block; item < COMBINE_ITEMS; item += blocks) {
                    const HeadEnd end(l, item / 2);
                    if (item == block) meeting(ATTENDED, attended).wait();
                    combine_item(row_of(a), end, item, keys.splits, turn, shared.combine);
                    meet_warps();
                }
                meeting(COMBINED, 0).call();
            }
            combined += min(blocks, static_cast<uint32_t>(COMBINE_ITEMS));
        }
        compute_o(a, l, embedding, meeting(COMBINED, combined), turn, shared, ring);
        meeting(RESIDUAL, 0).call();
        compute_gate_up(a, l, meeting(RESIDUAL, all), turn, shared, ring);
        meeting(GATED, 0).call();
        compute_down(a, meeting(GATED, all), turn, shared, ring);
        meeting(EXPERTS_DONE, 0).call();
        embedding = nullptr;
    }
    compute_head(a, meeting(EXPERTS_DONE, blocks * a.num_layers), turn_of(turns, a.num_layers - 1),
                 shared, ring);
    if (a.drawn != nullptr)
        draw_token(a, meeting(BEST_KNOWN, blocks), meeting(SUMMED, blocks), shared.draw);
    // The last block to get here leaves the meetings as it found them.
    if (threadIdx.x != 0) return;
    if (atomicAdd(meeting_word(a, TOKEN_DONE), 1) != blocks - 1) return;
    for (int i = 0; i <= TOKEN_DONE; i++)
        *meeting_word(a, static_cast<Place>(i)) = i == TURNS ? turns + a.num_layers : 0;
}

__device__ __forceinline__ void put_angle(const kv8_token_args &a, Shared &shared, int pair) {
    put_angle(a.position, __ldg(a.inv_freq + pair), a.rope_factor, pair, shared.cos_sin);
}

template <Format F>
__device__ __forceinline__ void token_body(const kv8_token_args &a) {
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ Shared shared;
    const int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < KV8_TOKEN_STAGES; i++) {
            barrier_init(smem_address(shared.full + i), 1);
            barrier_init(smem_address(shared.empty + i), KV8_TOKEN_WARPS);
        }
        shared.poison = 0;
        barrier_init(smem_address(&shared.routable), 1);
        barrier_init_fence();
    }
    if (t < HEAD_DIM / 2) put_angle(a, shared, t);
    constexpr int WORDS = sizeof(kv8_token_layer) / 8;
    const auto *const from = reinterpret_cast<const uint64_t *>(a.layers);
    for (int i = t; i < a.num_layers * WORDS; i += KV8_TOKEN_THREADS)
        reinterpret_cast<uint64_t *>(shared.layers)[i] = __ldg(from + i);
    if (t < a.num_experts) shared.router_before[t] = __ldcg(a.router + t);
    const uint32_t turns = __ldcg(meeting_word(a, TURNS));
    __syncthreads();
    if (t / 32 < KV8_TOKEN_WARPS) {
        registers_take<COMPUTE_REGISTERS>();
        compute_token<F>(a, shared, smem_address(rings), turns);
    } else {
        registers_give<COPY_REGISTERS>();
        if (t / 32 == KV8_TOKEN_WARPS) copy_token<F>(a, shared, smem_address(rings), turns);
    }
}

}  // namespace kv8

#define KV8_TOKEN_KERNEL(name, FORMAT)                                                    \
    extern "C" __global__ void __launch_bounds__(KV8_TOKEN_THREADS, 1)                    \
        kv8_gpt_oss_token_##name##_d64__sm90a(const __grid_constant__ kv8_token_args a) { \
        kv8::token_body<kv8::FORMAT>(a);                                                  \
    }
KV8_TOKEN_KERNEL(bf16, BF16)
KV8_TOKEN_KERNEL(e4m3, E4M3)
KV8_TOKEN_KERNEL(f16, F16)
KV8_TOKEN_KERNEL(e5m2, E5M2)
KV8_TOKEN_KERNEL(int8, INT8)
