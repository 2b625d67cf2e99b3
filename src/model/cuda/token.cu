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
// memory, and by the blocks' meetings.
//
// SPDX-License-Identifier: Apache-2.0
#include "experts_gate.cuh"
#include "token_attention.cuh"
#include "token_experts.cuh"

namespace kv8 {

constexpr int HIDDEN = KV8_TOKEN_HIDDEN, TOP_K = KV8_TOKEN_TOP_K;
constexpr float ROUTER_STEP = 1.0f / (int64_t{1} << KV8_TOKEN_ROUTER_BITS);
constexpr float ROUTER_LIMIT = 0x1p20f;  // of a block's part
constexpr int MOST_ROWS = 64;            // of a block, of QKV; and of the head at once
static_assert(QKV_WIDTH / KV8_TOKEN_MIN_BLOCKS < MOST_ROWS, "rows of a block");
constexpr int HEAD_ROWS = 32;
static_assert(HEAD_ROWS % (2 * DenseRows<HIDDEN>::ROWS) == 0, "both stages ahead in turn");
constexpr int COMPUTE_REGISTERS = 208, COPY_REGISTERS = 88;  // of a thread; 168 at the launch

enum Place { QKV_DONE, ATTENDED, COMBINED, RESIDUAL, GATED, EXPERTS_DONE, TOKEN_DONE };
static_assert(TOKEN_DONE + 1 == KV8_TOKEN_MEETINGS, "meetings");
static_assert(TOP_K == 2 * TEAMS, "a team has two experts of down");

struct Shared {
    uint64_t full[KV8_TOKEN_STAGES], empty[KV8_TOKEN_STAGES];
    uint64_t routable;  // the layer's router has all its sums
    float expert_weights[TOP_K];
    float cos_sin[HEAD_DIM];
    alignas(16) float scratch[KV8_TOKEN_WARPS];
    kv8_token_layer layers[KV8_TOKEN_MAX_LAYERS];
    union alignas(16) {
        float rows[MOST_ROWS * KV8_TOKEN_WARPS];
        StripSums strips;
        CombineScratch combine;
        FewScratch few;
        struct {
            float x[32];
            float sums[2][KV8_TOKEN_MAX_EXPERTS];
        } router;
    };
};

// Rows of O of a block: pairs, which the router's weights are read in.
__device__ __forceinline__ Share rows_of_o() {
    Share s(HIDDEN / 2, blockIdx.x, gridDim.x);
    s.begin *= 2, s.end *= 2;
    return s;
}

__device__ __forceinline__ uint32_t *meeting_word(const kv8_token_args &a, Place place) {
    return a.meetings + place * KV8_TOKEN_MEETING_WORDS;
}

// --- the copying warp ---

struct Routing {
    int experts[TOP_K];
    float weights[TOP_K];
};

// The best experts of the router's sums, ties to the lower id, NaN last; and their softmax. By a
// warp.
__device__ __forceinline__ Routing route(const kv8_token_args &a, const float (&bias)[4]) {
    const int lane = threadIdx.x % 32;
    int64_t sums[4];
    float squares[KV8_TOKEN_MAX_BLOCKS / 32], square = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[i] = lane + 32 * i < a.num_experts ? __ldcg(a.router + lane + 32 * i) : 0;
#pragma unroll
    for (int i = 0; i < KV8_TOKEN_MAX_BLOCKS / 32; i++)
        squares[i] =
            lane + 32 * i < static_cast<int>(gridDim.x) ? __ldcg(a.squares + lane + 32 * i) : 0;
#pragma unroll
    for (int i = 0; i < KV8_TOKEN_MAX_BLOCKS / 32; i++) square += squares[i];
    const float scale = rsqrtf(warp_sum(square) / HIDDEN + a.eps);
    uint32_t keys[4];  // grow with the logit; 1: NaN, 0: none
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float logit = static_cast<float>(sums[i]) * ROUTER_STEP * scale + bias[i] + 0.0f;
        const uint32_t bits = __float_as_uint(logit);
        keys[i] = isnan(logit) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
        if (lane + 32 * i >= a.num_experts) keys[i] = 0;
    }
    Routing r;
    float best = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
        const uint32_t top =
            __reduce_max_sync(~0u, max(max(keys[0], keys[1]), max(keys[2], keys[3])));
        uint32_t id = ~0u;
#pragma unroll
        for (int i = 3; i >= 0; i--)
            if (keys[i] == top) id = lane + 32 * i;
        id = __reduce_min_sync(~0u, id);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (id == static_cast<uint32_t>(lane + 32 * i)) keys[i] = 0;
        const float logit = top == 1 ? NAN : __uint_as_float(top >> 31 ? top & 0x7fffffffu : ~top);
        if (k == 0) best = logit;
        r.experts[k] = id;
        r.weights[k] = __expf(logit - best);
        sum += r.weights[k];
    }
#pragma unroll
    for (int k = 0; k < TOP_K; k++) r.weights[k] = __fdividef(r.weights[k], sum);
    return r;
}

__device__ __forceinline__ int expert_of(const Routing &r, int k) {
    return k == 0 ? r.experts[0] : k == 1 ? r.experts[1] : k == 2 ? r.experts[2] : r.experts[3];
}

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
                                           int position) {
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
        const KeySplits keys(l.window_left, position, gridDim.x);
        const int block = blockIdx.x;
        if (keys.are_few() && block < KV_HEADS) grant_few<Keys<F, 1>>(ring);
        if (!keys.are_few() && block < keys.splits)
            copy_keys<Keys<F, KV_HEADS>>(ring, l, keys.of(block), a.page_size);
        float bias[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            bias[k] = lane + 32 * k < a.num_experts
                          ? widen_bf16(__ldg(l.router_bias + lane + 32 * k))
                          : 0;
        if (lane == 0) copy_rows<Q_WIDTH>(ring, l.o, o);
        __syncwarp();
        barrier_wait(smem_address(&shared.routable), i & 1);
        const Routing r = route(a, bias);
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

// The residual stream that a layer begins with: of the first the embedding; of others in two parts,
// as the experts of the layer before leave it.
__device__ __forceinline__ float2 load_row(const kv8_token_args &a, const uint16_t *embedding,
                                           int at) {
    if (embedding != nullptr) {
        const uint32_t e = __ldg(reinterpret_cast<const uint32_t *>(embedding + at));
        return make_float2(low_bf16(e), high_bf16(e));
    }
    const float2 x = __ldcg(reinterpret_cast<const float2 *>(a.residual + HIDDEN + at));
    const float2 y = __ldcg(reinterpret_cast<const float2 *>(a.residual + 2 * HIDDEN + at));
    return make_float2(x.x + y.x, x.y + y.y);
}

// Its normed row. What does not depend on the meeting is loaded before.
__device__ __forceinline__ void norm_row(const kv8_token_args &a, const uint16_t *gain,
                                         const uint16_t *embedding, const Meeting &before,
                                         Shared &shared, DenseInput<HIDDEN> &row) {
    using D = Dense<HIDDEN>;
    uint32_t gains[D::STEPS][4];
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            gains[j][i] = D::has(j, i)
                              ? __ldg(reinterpret_cast<const uint32_t *>(gain + D::column(j, i)))
                              : 0;
    before.wait();
    float2 x[D::STEPS][4];
    float squares = 0;
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[j][i] = D::has(j, i) ? load_row(a, embedding, D::column(j, i)) : make_float2(0, 0);
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            squares = fmaf(x[j][i].y, x[j][i].y, fmaf(x[j][i].x, x[j][i].x, squares));
    if (threadIdx.x / 4 % 2 != 0) squares = 0;  // two lanes have each column
    const float scale = rsqrtf(block_sum(squares, shared.scratch) / HIDDEN + a.eps);
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            row.set(j, i,
                    make_float2(x[j][i].x * (scale * low_bf16(gains[j][i])),
                                x[j][i].y * (scale * high_bf16(gains[j][i]))));
}

__device__ __forceinline__ void compute_qkv(const kv8_token_args &a, const kv8_token_layer &l,
                                            const uint16_t *embedding, const Meeting &before,
                                            Shared &shared, RingReader &ring) {
    const Share rows(QKV_WIDTH, blockIdx.x, gridDim.x);
    const int row = threadIdx.x;
    const float bias = row < rows.count() ? widen_bf16(__ldg(l.qkv_bias + rows.begin + row)) : 0;
    DenseRows<HIDDEN> weights(ring);
    DenseInput<HIDDEN> x;
    norm_row(a, l.attention_norm, embedding, before, shared, x);
    if (blockIdx.x == 0 && row < a.num_experts) a.router[row] = 0;
    weights.multiply(ring, x, shared.rows, rows.count(), 0);
    meet_warps();
    if (row < rows.count())
        a.qkv[rows.begin + row] = add_warps(shared.rows + row * KV8_TOKEN_WARPS) + bias;
}

// O into the residual stream, and the block's part of the router's product with its normed row: the
// root mean square divides the result.
__device__ __forceinline__ void compute_o(const kv8_token_args &a, const kv8_token_layer &l,
                                          const uint16_t *embedding, const Meeting &before,
                                          Shared &shared, RingReader &ring) {
    using D = Dense<Q_WIDTH>;
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
    float residual = 0, gain = 0;
    if (t < rows.count()) {
        const int at = rows.begin + t;
        residual = (embedding != nullptr
                        ? widen_bf16(__ldg(embedding + at))
                        : __ldcg(a.residual + HIDDEN + at) + __ldcg(a.residual + 2 * HIDDEN + at)) +
                   widen_bf16(__ldg(l.o_bias + at));
        gain = widen_bf16(__ldg(l.mlp_norm + at));
    }
    DenseRows<Q_WIDTH> weights(ring);
    before.wait();
    DenseInput<Q_WIDTH> x;
#pragma unroll
    for (int j = 0; j < D::STEPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x.set(j, i, __ldcg(reinterpret_cast<const float2 *>(a.attended + D::column(j, i))));
    weights.multiply(ring, x, shared.rows, rows.count(), 0);
    meet_warps();
    float normed = 0;
    if (t < 32) {
        float sum = 0;
        if (t < rows.count()) {
            sum = residual + add_warps(shared.rows + t * KV8_TOKEN_WARPS);
            a.residual[rows.begin + t] = sum;
            normed = sum * gain;
        }
        sum = warp_sum(sum * sum);
        if (t == 0) a.squares[blockIdx.x] = sum;
    }
    meet_warps();
    if (t < 32) shared.router.x[t] = normed;
    meet_warps();
    float part = 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float2 pair =
            reinterpret_cast<const float2 *>(shared.router.x)[min(2 * i + half, 15)];
        part = fmaf(high_bf16(router[i]), pair.y, fmaf(low_bf16(router[i]), pair.x, part));
    }
    shared.router.sums[half][expert] = part;
    meet_warps();
    if (t >= a.num_experts) return;
    part = shared.router.sums[0][t] + shared.router.sums[1][t];
    // What whole numbers do not hold makes the token NaN.
    if (!(fabsf(part) <= ROUTER_LIMIT)) a.squares[blockIdx.x] = NAN;
    atomicAdd(reinterpret_cast<unsigned long long *>(a.router) + t,
              static_cast<unsigned long long>(__float2ll_rn(part * (1.0f / ROUTER_STEP))));
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
                                                const Meeting &before, Shared &shared,
                                                RingReader &ring) {
    const int lane = threadIdx.x % 32, t = threadIdx.x;
    constexpr int FOURTHS = (HIDDEN / 4 + COMPUTE_THREADS - 1) / COMPUTE_THREADS;
    uint2 gains[FOURTHS];
#pragma unroll
    for (int i = 0; i < FOURTHS; i++) {
        const int at = t + i * COMPUTE_THREADS;
        gains[i] = make_uint2(0, 0);
        if (at < HIDDEN / 4) gains[i] = __ldg(reinterpret_cast<const uint2 *>(l.mlp_norm) + at);
    }
    if (t == 0) {
        before.poll();
        barrier_arrive(smem_address(&shared.routable));
    }
    meet_warps();
    float square = 0;
#pragma unroll
    for (int i = 0; i < KV8_TOKEN_MAX_BLOCKS / 32; i++)
        square +=
            lane + 32 * i < static_cast<int>(gridDim.x) ? __ldcg(a.squares + lane + 32 * i) : 0;
    float4 x[FOURTHS];
#pragma unroll
    for (int i = 0; i < FOURTHS; i++) {
        const int at = t + i * COMPUTE_THREADS;
        x[i] = make_float4(0, 0, 0, 0);
        if (at < HIDDEN / 4) x[i] = __ldcg(reinterpret_cast<const float4 *>(a.residual) + at);
    }
    const float scale = rsqrtf(warp_sum(square) / HIDDEN + a.eps);
#pragma unroll
    for (int i = 0; i < FOURTHS; i++) {
        const int at = t + i * COMPUTE_THREADS;
        if (at < HIDDEN / 4)
            reinterpret_cast<uint2 *>(shared.strips.x)[at] =
                make_uint2(pack_f16(x[i].x * (scale * low_bf16(gains[i].x)),
                                    x[i].y * (scale * high_bf16(gains[i].x))),
                           pack_f16(x[i].z * (scale * low_bf16(gains[i].y)),
                                    x[i].w * (scale * high_bf16(gains[i].y))));
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
    if (idx >= strips.count()) return;
    const int strip = strips.begin + idx, output = strip % GATE_UP_STRIPS * 8 + row;
    const float value =
        gate(shared.strips.row(idx, row), shared.strips.row(idx, row + 8), a.alpha, a.limit);
    a.gated[strip / GATE_UP_STRIPS * HIDDEN + StripInput::place(output)] =
        static_cast<uint16_t>(pack_f16(value, 0));
}

// Down, weighted, and the residual: the part of the block that has a strip's first expert takes it.
__device__ __forceinline__ void compute_down(const kv8_token_args &a, const Meeting &before,
                                             Shared &shared, RingReader &ring) {
    const Share strips = down_strips();
    const int t = threadIdx.x, idx = t / KV8_STRIP_ROWS, row = t % KV8_STRIP_ROWS;
    const int first_strip = strips.begin / TOP_K, strip = first_strip + idx;
    const int from = max(strip * TOP_K, strips.begin), to = min((strip + 1) * TOP_K, strips.end);
    const int at = strip * KV8_STRIP_ROWS + row;
    const float residual = from < to ? __ldcg(a.residual + at) : 0;
    before.wait();
    // Teams take turns, so that each has two of the experts.
    const int turn = strips.begin + StripInput::team();
    StripInput in[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (StripInput::block(i) < HIDDEN)
                x = __ldcg(reinterpret_cast<const uint4 *>(a.gated +
                                                           (turn + TEAMS * k) % TOP_K * HIDDEN +
                                                           StripInput::block(i) + t % 4 * 8));
            in[k].pairs[i][0] = x.x, in[k].pairs[i][1] = x.y;
            in[k].pairs[i][2] = x.z, in[k].pairs[i][3] = x.w;
        }
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
    if (from >= to) return;
    float sum = from == strip * TOP_K ? residual : 0;
    for (int u = from; u < to; u++)
        sum = fmaf(shared.expert_weights[u % TOP_K], shared.strips.row(u - strips.begin, row), sum);
    float *const parts = a.residual + HIDDEN;
    if (from == strip * TOP_K) parts[at] = sum;
    if (to == (strip + 1) * TOP_K) parts[HIDDEN + at] = from == strip * TOP_K ? 0 : sum;
}

__device__ __forceinline__ void compute_head(const kv8_token_args &a, const Meeting &before,
                                             Shared &shared, RingReader &ring) {
    const Share rows(a.vocab_size, blockIdx.x, gridDim.x);
    DenseRows<HIDDEN> weights(ring);
    DenseInput<HIDDEN> x;
    norm_row(a, a.final_norm, nullptr, before, shared, x);
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
                                              uint32_t rings, int position) {
    const uint32_t blocks = gridDim.x, block = blockIdx.x;
    RingReader ring;
    ring.ring = rings, ring.full = smem_address(shared.full);
    ring.empty = smem_address(shared.empty);
    const uint16_t *embedding = a.embedding + int64_t{__ldg(a.token_ids)} * HIDDEN;
    uint32_t attended = 0, combined = 0;  // arrivals so far
    const auto meeting = [&](Place place, uint32_t expected) {
        return Meeting{meeting_word(a, place), expected};
    };
#pragma unroll 1
    for (int i = 0; i < a.num_layers; i++) {
        const kv8_token_layer &l = shared.layers[i];
        const uint32_t all = blocks * (i + 1);
        compute_qkv(a, l, embedding, meeting(EXPERTS_DONE, blocks * i), shared, ring);
        meeting(QKV_DONE, 0).arrive();
        const KeySplits keys(l.window_left, position, blocks);
        if (keys.are_few()) {
            if (block < KV_HEADS) {
                attend_few<Keys<F, 1>>(ring, a, l, keys, block, meeting(QKV_DONE, all),
                                       shared.cos_sin, shared.few);
                meeting(COMBINED, 0).arrive();
            }
            combined += KV_HEADS;
        } else {
            if (block < static_cast<uint32_t>(keys.splits)) {
                attend<Keys<F, KV_HEADS>>(ring, a, l, keys, block, meeting(QKV_DONE, all),
                                          shared.cos_sin);
                meeting(ATTENDED, 0).arrive();
            }
            attended += keys.splits;
            if (block < COMBINE_ITEMS) {
                for (uint32_t item = block; item < COMBINE_ITEMS; item += blocks) {
                    const HeadEnd end(l, item / 2);
                    if (item == block) meeting(ATTENDED, attended).wait();
                    combine_item(a, end, item, keys.splits, shared.combine);
                    meet_warps();
                }
                meeting(COMBINED, 0).arrive();
            }
            combined += min(blocks, static_cast<uint32_t>(COMBINE_ITEMS));
        }
        compute_o(a, l, embedding, meeting(COMBINED, combined), shared, ring);
        meeting(RESIDUAL, 0).arrive();
        compute_gate_up(a, l, meeting(RESIDUAL, all), shared, ring);
        meeting(GATED, 0).arrive();
        compute_down(a, meeting(GATED, all), shared, ring);
        meeting(EXPERTS_DONE, 0).arrive();
        embedding = nullptr;
    }
    compute_head(a, meeting(EXPERTS_DONE, blocks * a.num_layers), shared, ring);
    // The last block to get here leaves the meetings as it found them.
    if (threadIdx.x != 0) return;
    if (atomicAdd(meeting_word(a, TOKEN_DONE), 1) != blocks - 1) return;
    for (int i = 0; i < KV8_TOKEN_MEETINGS; i++) a.meetings[i * KV8_TOKEN_MEETING_WORDS] = 0;
}

template <Format F>
__device__ __forceinline__ void token_body(const kv8_token_args &a) {
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ Shared shared;
    const int t = threadIdx.x, position = __ldg(a.positions);
    if (t == 0) {
        for (int i = 0; i < KV8_TOKEN_STAGES; i++) {
            barrier_init(smem_address(shared.full + i), 1);
            barrier_init(smem_address(shared.empty + i), KV8_TOKEN_WARPS);
        }
        barrier_init(smem_address(&shared.routable), 1);
        barrier_init_fence();
    }
    if (t < HEAD_DIM) shared.cos_sin[t] = __ldg(a.cos_sin + t);
    constexpr int WORDS = sizeof(kv8_token_layer) / 8;
    const auto *const from = reinterpret_cast<const uint64_t *>(a.layers);
    for (int i = t; i < a.num_layers * WORDS; i += KV8_TOKEN_THREADS)
        reinterpret_cast<uint64_t *>(shared.layers)[i] = __ldg(from + i);
    __syncthreads();
    if (t / 32 < KV8_TOKEN_WARPS) {
        registers_take<COMPUTE_REGISTERS>();
        compute_token<F>(a, shared, smem_address(rings), position);
    } else {
        registers_give<COPY_REGISTERS>();
        if (t / 32 == KV8_TOKEN_WARPS) copy_token<F>(a, shared, smem_address(rings), position);
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
