// decode.cuh - decode attention over paged K and V: the kernel on tensor cores.
//
// Work: a *stream* is (request, tile of ROWS packed query rows, block of KV heads); its keys are
// cut into granules of 16 tokens. All streams stand in one line and block i of the grid takes the
// i-th equal share, so many short and one very long request balance alike. A share's part of a
// stream is a *piece*. A stream of one piece is finished by its block; otherwise the pieces leave
// partial results in the workspace and the block that arrives last joins them, in key order.
//
// Within a block every warp is on its own: one KV head, every num_slices-th granule, a private ring
// of cp.async stages; no barrier until the piece ends. Scores run as K (tokens on M) . Q^T, so a
// group of 8 query heads fills N; codes are widened to f16 exactly, in registers. The running
// maximum is lazy: a reference per row that only moves when a score exceeds it by 2^14.
//
// Grid: any number of blocks, as many as fit the machine. Block: WARPS * 32. Bound by: memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode_args.h"
#include "decode_tile.cuh"

namespace kv8 {

template <Format F_, int DIM_, int NT_, int WARPS_, int STAGES_, int DEPTH_, bool GRANULE_PAGES_>
struct DecodeConfig {
    static constexpr Format F = F_;
    static constexpr int DIM = DIM_;
    static constexpr int NT = NT_;  // n-tiles of 8 packed query rows
    static constexpr int ROWS = NT * 8;
    static constexpr int WARPS = WARPS_, THREADS = WARPS * 32;
    static constexpr int STAGES = STAGES_;
    static constexpr int DEPTH = DEPTH_;  // granules of a stage
    // Pages hold whole granules: one table entry for each. Otherwise one for every token.
    static constexpr bool GRANULE_PAGES = GRANULE_PAGES_;
    static constexpr bool IS_BF16 = F == BF16;
    static constexpr int P_PARTS = IS_BF16 ? 2 : 1;  // bf16 probabilities are kept to 16 bits
    using K = KeyTile<F, DIM>;
    using V = ValueTile<F, DIM>;
    using R = Row<F, DIM>;
    static constexpr int STAGE_BYTES = DEPTH * 2 * R::TILE_BYTES;
    // A warp's result: float4 [FRAGMENTS][32 lanes] as the MMA leaves it, then maxima, then sums.
    static constexpr int FRAGMENTS = DIM / 16 * NT;
    static constexpr int RESULT_BYTES = FRAGMENTS * 512 + 2 * ROWS * 4;
    static constexpr int WARP_BYTES =
        (STAGES * STAGE_BYTES > RESULT_BYTES ? STAGES * STAGE_BYTES : RESULT_BYTES) + 1023 & ~1023;
    static constexpr int RING_BYTES = WARPS * WARP_BYTES;
    // After the rings: one Record per request and one more.
    static constexpr int smem_bytes(int max_batch) { return RING_BYTES + (max_batch + 1) * 32; }
};

struct KeyRange {
    int begin, end;
};
struct Request {
    int index, qo_begin, qo_len, kv_len;
    const int32_t *pages;
};

// first_page: the request's place in page_indices; CSR alone.
__device__ inline Request make_request(const kv8_decode_args &a, int b, int qo_begin, int qo_len,
                                       int kv_len, int first_page) {
    return {b, qo_begin, qo_len, kv_len,
            a.page_indptr != nullptr ? a.page_indices + first_page
                                     : a.block_table + b * a.block_table_stride};
}
// Keys that causal and window leave to query token t: begin and end both grow with t.
__device__ inline KeyRange visible_keys(const kv8_decode_args &a, const Request &r, int t) {
    const int position = r.kv_len - r.qo_len + t;
    KeyRange k = {0, r.kv_len};
    if (a.causal) k.end = max(position + 1, 0);
    if (a.window_left >= 0) k.begin = min(max(position - a.window_left, 0), k.end);
    return k;
}
__device__ inline int granules_of(KeyRange k) {
    return k.end > k.begin ? (k.end + TOKENS - 1) / TOKENS - k.begin / TOKENS : 0;
}
__device__ inline KeyRange request_keys(const kv8_decode_args &a, const Request &r) {
    if (r.qo_len == 0) return {0, 0};
    const KeyRange first = visible_keys(a, r, 0), last = visible_keys(a, r, r.qo_len - 1);
    return {min(first.begin, last.begin), last.end};
}
// One block's part of one stream.
struct Piece {
    Request request;
    int row_begin, num_rows;  // packed rows: token * group_size + head of the group
    int head_begin;           // first KV head
    int stream;               // index among all streams
    int granule_begin, granule_end;
    int stream_begin, stream_end;  // units of the whole stream in the line
};

// What a warp keeps of its rows: o for every dim, reference maximum and sum (of this lane's tokens)
// for columns 2c and 2c + 1 of every n-tile.
template <class C>
struct State {
    float o[C::DIM / 16][C::NT][4];
    float max[C::NT][2], sum[C::NT][2];
};

constexpr float NO_KEY = -1e30f;     // below every score, and finite
constexpr float LAZY_RAISE = 14.0f;  // probabilities stay below 2^14 in f16
constexpr float LAZY_TARGET = 6.0f;  // a new maximum gets 2^6: small ones keep their bits longer

// Walks one warp's granules of a piece.
template <class C>
class Walker {
   public:
    __device__ Walker(const kv8_decode_args &args, const Piece &piece_in, uint32_t ring_in,
                      int head_in, int slice, int num_slices)
        : a(args),
          piece(piece_in),
          ring(ring_in),
          head(head_in),
          lane(threadIdx.x % 32),
          g(lane / 4),
          c(lane % 4),
          first(piece_in.granule_begin + slice),
          step(num_slices) {
        const Request &r = piece.request;
        const KeyRange top = visible_keys(a, r, piece.row_begin / a.group_size);
        const KeyRange low =
            visible_keys(a, r, (piece.row_begin + piece.num_rows - 1) / a.group_size);
        any = {min(top.begin, low.begin), low.end};
        all = {low.begin, top.end};
        if (a.mask_bits != nullptr) all = {0, 0};
        const int left = piece.granule_end - first;
        count = left > 0 ? (left + step - 1) / step : 0;
    }

    template <class MEANWHILE>
    __device__ void run(State<C> &state, MEANWHILE &&meanwhile) {
        look_up(0, page_now, slot_now);
        look_up(1, page_next, slot_next);
        k_lane = lane_base(a.k), v_lane = lane_base(a.v);
        float scale[C::NT];
        load_q(scale);
        const int num_tiles = (count + C::DEPTH - 1) / C::DEPTH;
#pragma unroll 1
        for (int s = 0; s < C::STAGES - 1; s++) {
            if (s < num_tiles) fetch(s, s);
            copy_commit();
        }
        narrow_q(scale);  // while the first copies are on their way
        meanwhile();
        load_row_scales(0);
        int at = 0, next = C::STAGES - 1;  // stages of the ring
#pragma unroll 1
        for (int t = 0; t < num_tiles; t++) {
            copy_wait<C::STAGES - 2>();
            __syncwarp();
            if (t + C::STAGES - 1 < num_tiles) fetch(t + C::STAGES - 1, next);
            copy_commit();
            const float k_row = next_k_row, v_row = next_v_row;
            if (C::F == INT8 && t + 1 < num_tiles) load_row_scales(t + 1);
            compute(t, at, k_row, v_row, state);
            at = at + 1 == C::STAGES ? 0 : at + 1;
            next = next + 1 == C::STAGES ? 0 : next + 1;
        }
        copy_wait<0>();
        __syncwarp();
    }

   private:
    const kv8_decode_args &a;
    const Piece &piece;
    const uint32_t ring;
    const int head, lane, g, c;
    const int first, step;  // granules first, first + step, ..: `count` of them
    int count;
    KeyRange any, all;  // keys that some row, that all rows see
    uint32_t q[1][C::NT][C::DIM / 16][2];
    float factor[C::NT][2];  // of columns 2c, 2c + 1: score in base 2 = sum * factor
    const uint8_t *k_lane, *v_lane;
    int page_now, slot_now, page_next, slot_next;
    float next_k_row, next_v_row;

    __device__ int granule(int i) const {
        return first + i * step;
    }

    // Table entries of 32 granules, or of the 16 * DEPTH tokens of one tile, one per lane; always
    // one batch ahead of its use. A page that no row of the tile may see is -1, and never read.
    __device__ void look_up(int batch, int &page, int &slot) const {
        constexpr int SPAN = C::GRANULE_PAGES ? TOKENS : 1;  // tokens of an entry
        int token;
        bool wanted;
        if constexpr (C::GRANULE_PAGES) {
            const int i = batch * 32 + lane;
            token = granule(i) * TOKENS;
            wanted = i < count;
        } else {
            const int i = batch * C::DEPTH + lane / TOKENS;
            token = granule(i) * TOKENS + lane % TOKENS;
            wanted = lane < C::DEPTH * TOKENS && i < count;
        }
        wanted = wanted && token < any.end && token + SPAN > any.begin;
        if (wanted && a.mask_bits != nullptr) wanted = mask_shows(token, SPAN);
        page = -1, slot = 0;
        if (!wanted) return;
        const int index = token / a.page_size;
        slot = token - index * a.page_size;
        page = __ldg(piece.request.pages + index);
    }
    __device__ bool mask_shows_or_none(int key) const {
        return a.mask_bits == nullptr || mask_shows(key, 1);
    }
    // Does some row of the tile see one of these keys?
    __device__ bool mask_shows(int key, int num_keys) const {
        const int first = piece.row_begin / a.group_size;
        const int last = (piece.row_begin + piece.num_rows - 1) / a.group_size;
        for (int q_token = first; q_token <= last; q_token++) {
            const KeyRange seen = visible_keys(a, piece.request, q_token);
            for (int k = max(key, seen.begin); k < min(key + num_keys, seen.end); k++)
                if (mask_bit(q_token, k)) return true;
        }
        return false;
    }

    // Starts the copies of tile t (DEPTH granules) into a stage.
    __device__ void fetch(int t, int stage) {
        const uint32_t to = ring + stage * C::STAGE_BYTES;
        if (!C::GRANULE_PAGES && t > 0) {
            page_now = page_next, slot_now = slot_next;
            look_up(t + 1, page_next, slot_next);
        }
#pragma unroll
        for (int j = 0; j < C::DEPTH; j++) {
            const int i = t * C::DEPTH + j;
            if (i >= count) break;
            if (C::GRANULE_PAGES && i > 0 && i % 32 == 0) {
                page_now = page_next, slot_now = slot_next;
                look_up(i / 32 + 1, page_next, slot_next);
            }
            const int token = granule(i) * TOKENS;
            const bool whole = token >= any.begin && token + TOKENS <= any.end;
            copy_tile(a.k, k_lane, token, whole, i, j, to + j * C::R::TILE_BYTES);
            copy_tile(a.v, v_lane, token, whole, i, j, to + (C::DEPTH + j) * C::R::TILE_BYTES);
        }
    }
    // lane_base: this lane's place in the head's first row of page 0.
    __device__ void copy_tile(const kv8_decode_pages &p, const uint8_t *lane_base, int token,
                              bool whole, int i, int j, uint32_t to) const {
        using R = typename C::R;
        constexpr bool EVEN = 32 % R::CHUNKS == 0;  // every pass moves on by whole rows
        const uint8_t *base = lane_base;
        if constexpr (C::GRANULE_PAGES) {
            const int page = __shfl_sync(~0u, page_now, i % 32);
            if (page < 0) whole = false, token = any.end;  // nothing is inside
            base += page * p.stride_page + __shfl_sync(~0u, slot_now, i % 32) * p.stride_slot;
        }
#pragma unroll
        for (int n = 0; n < (R::CHUNKS * TOKENS + 31) / 32; n++) {
            const int index = n * 32 + lane;
            const int row = index / R::CHUNKS, chunk = index % R::CHUNKS;
            const uint8_t *from = base;
            bool inside = whole || (token + row >= any.begin && token + row < any.end);
            if constexpr (!EVEN) from = base + chunk * 16;
            if constexpr (C::GRANULE_PAGES) {
                from += EVEN ? n * (32 / R::CHUNKS) * p.stride_slot : row * p.stride_slot;
            } else {
                const int holder = j * TOKENS + (row & (TOKENS - 1));
                const int page = __shfl_sync(~0u, page_now, holder);
                from += page * p.stride_page + __shfl_sync(~0u, slot_now, holder) * p.stride_slot;
                inside = page >= 0;
            }
            if (R::CHUNKS * TOKENS % 32 == 0 || row < TOKENS)
                copy16(to + R::at(row, chunk), from, inside ? 16 : 0);
        }
    }
    __device__ const uint8_t *lane_base(const kv8_decode_pages &p) const {
        using R = typename C::R;
        const uint8_t *base = p.data + head * p.stride_head;
        if (32 % R::CHUNKS != 0) return base;
        base += lane % R::CHUNKS * 16;
        return C::GRANULE_PAGES ? base + lane / R::CHUNKS * p.stride_slot : base;
    }

    // int8: lane l loads the scales of token l of tile t.
    __device__ void load_row_scales(int t) {
        if constexpr (C::F == INT8) {
            const int i = t * C::DEPTH + lane / TOKENS;
            const int token = granule(i) * TOKENS + lane % TOKENS;
            next_k_row = next_v_row = 0;
            if (lane >= C::DEPTH * TOKENS || i >= count || token < any.begin || token >= any.end)
                return;
            const int index = token / a.page_size, slot = token - index * a.page_size;
            if (!mask_shows_or_none(token)) return;
            const int64_t page = __ldg(piece.request.pages + index);
            next_k_row = __half2float(__ushort_as_half(
                __ldg(a.k.row_scale + page * a.k.scale_stride_page + slot * a.k.scale_stride_slot +
                      head * a.k.scale_stride_head)));
            next_v_row = __half2float(__ushort_as_half(
                __ldg(a.v.row_scale + page * a.v.scale_stride_page + slot * a.v.scale_stride_slot +
                      head * a.v.scale_stride_head)));
        }
    }

    __device__ static uint32_t load_pair(const uint16_t *from) {
        if (reinterpret_cast<uintptr_t>(from) % 4 == 0)
            return __ldg(reinterpret_cast<const uint32_t *>(from));
        return __ldg(from) | uint32_t(__ldg(from + 1)) << 16;
    }
    // Q as the B fragment of the first MMA, still in its own format, and each row's factor.
    __device__ void load_q(float (&scale)[C::NT]) {
        const Request &r = piece.request;
        float common = a.score_scale;
        if (a.k_scale != nullptr)
            common *= a.k_scale[r.index * a.k_scale_stride_batch + head * a.k_scale_stride_head];
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
            const int n = nt * 8 + g;
            const int row = piece.row_begin + n, token = row / a.group_size;
            const uint16_t *from = static_cast<const uint16_t *>(a.q);
            if (n < piece.num_rows)
                from += (r.qo_begin + token) * a.q_stride_row +
                        (head * a.group_size + row - token * a.group_size) * a.q_stride_head;
#pragma unroll
            for (int s = 0; s < C::DIM / 16; s++) {
                constexpr int PER = 64 / size_of(C::F) / 16;  // steps of a segment
                const int d = C::K::dim(s / PER, c, s % PER * 4);
                q[0][nt][s][0] = q[0][nt][s][1] = 0;
                if (n < piece.num_rows) {
                    q[0][nt][s][0] = load_pair(from + d);
                    q[0][nt][s][1] = load_pair(from + d + 2);
                }
            }
            scale[nt] = common;
        }
    }
    // Q into the format of the MMA: a row of bf16 is scaled by a power of two into f16's range.
    // Then every column's factor.
    __device__ void narrow_q(const float (&scale)[C::NT]) {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
            float x = scale[nt];
            if (!C::IS_BF16 && a.q_dtype == BF16) x *= narrow_row(q[0][nt]);
#pragma unroll
            for (int i = 0; i < 2; i++) factor[nt][i] = __shfl_sync(~0u, x, (2 * c + i) * 4);
        }
    }
    // bf16 pairs of one row (spread over the four lanes of c) to f16, times 2^e; returns 2^-e.
    __device__ static float narrow_row(uint32_t (&row)[C::DIM / 16][2]) {
        uint32_t top = 0;  // largest exponent, where bf16 keeps it
#pragma unroll
        for (int s = 0; s < C::DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t low = row[s][i] & 0x7f80u, high = row[s][i] >> 16 & 0x7f80u;
                if (low < 0x7f80u) top = max(top, low);
                if (high < 0x7f80u) top = max(top, high);
            }
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));
        // The largest magnitude lands in [2^14, 2^15); both factors stay normal numbers.
        const int shift = min(max(14 - (int(top >> 7) - 127), -126), 126);
        const float up = __int_as_float((shift + 127) << 23);
#pragma unroll
        for (int s = 0; s < C::DIM / 16; s++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                row[s][i] = pack_f16(__uint_as_float(row[s][i] << 16) * up,
                                     __uint_as_float(row[s][i] & 0xffff0000u) * up);
        return __int_as_float((127 - shift) << 23);
    }

    // Every row sees every token of tile t, and the tile is full.
    __device__ bool is_open(int t) const {
        const int last = t * C::DEPTH + C::DEPTH - 1;
        return last < count && granule(t * C::DEPTH) * TOKENS >= all.begin &&
               (granule(last) + 1) * TOKENS <= all.end;
    }
    __device__ bool mask_bit(int q_token, int key) const {
        if (a.mask_bits == nullptr) return true;
        const int64_t bit = int64_t(q_token) * piece.request.kv_len + key;
        return a.mask_bits[a.mask_indptr[piece.request.index] + bit / 8] >> (bit % 8) & 1;
    }

    __device__ void compute(int t, int stage, float k_row, float v_row, State<C> &state) {
        const uint32_t keys = ring + stage * C::STAGE_BYTES;
        const uint32_t values = keys + C::DEPTH * C::R::TILE_BYTES;
        float s[C::DEPTH][C::NT][4];
#pragma unroll
        for (int j = 0; j < C::DEPTH; j++) {
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) s[j][nt][i] = 0;
            C::K::template multiply<C::NT, C::IS_BF16, 1>(keys + j * C::R::TILE_BYTES, g, c, q,
                                                          s[j]);
        }
        const bool masked = !is_open(t);
        scale_scores(k_row, s);
        if (masked) mask_scores(t, s);
        raise_max(v_row, s, state);
#pragma unroll
        for (int j = 0; j < C::DEPTH; j++) {
            if (masked && t * C::DEPTH + j >= count) break;  // the stage holds old bytes there
            uint32_t p[C::P_PARTS][C::NT][2];
            weigh(j, v_row, s[j], p, state);
            const uint32_t tile = values + j * C::R::TILE_BYTES;
            if (masked && has_non_finite(tile))
                add_one_by_one(granule(t * C::DEPTH + j) * TOKENS, tile, p, state);
            else
                add_values(tile, p, state);
        }
    }

    // Sums of products -> scores in base 2.
    __device__ void scale_scores(float k_row, float (&s)[C::DEPTH][C::NT][4]) const {
#pragma unroll
        for (int j = 0; j < C::DEPTH; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float row_scale = 1;
                if constexpr (C::F == INT8)
                    row_scale = __shfl_sync(~0u, k_row, j * TOKENS + half * 8 + g);
#pragma unroll
                for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                    for (int col = 0; col < 2; col++) {
                        float &x = s[j][nt][half * 2 + col];
                        x *= C::F == INT8 ? factor[nt][col] * row_scale : factor[nt][col];
                        if (a.soft_cap > 0) x = cap(x);
                    }
            }
    }
    // cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + e^2y).
    __device__ float cap(float x) const {
        constexpr float TWO_LOG2E = 2.885390081777927f;
        const float e = exp2_fast(x * (TWO_LOG2E / a.soft_cap));
        return a.soft_cap * (1.0f - __fdividef(2.0f, 1.0f + e));
    }
    // What follows is rare: nothing of it may be computed ahead and held in registers.
    __device__ static void keep_here() {
        asm volatile("" ::: "memory");
    }
    // -inf where a row may not see a key.
    __device__ void mask_scores(int t, float (&s)[C::DEPTH][C::NT][4]) const {
        keep_here();
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const int q_token = (piece.row_begin + n) / a.group_size;
                KeyRange seen = visible_keys(a, piece.request, q_token);
                if (n >= piece.num_rows) seen.end = 0;
#pragma unroll
                for (int j = 0; j < C::DEPTH; j++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int i = t * C::DEPTH + j, key = granule(i) * TOKENS + half * 8 + g;
                        const bool sees = i < count && key >= seen.begin && key < seen.end &&
                                          mask_bit(q_token, key);
                        if (!sees) s[j][nt][half * 2 + col] = -INFINITY;
                    }
            }
    }

    // log2 of the factor that joins p on its way to V; int8 alone.
    __device__ static float log_of(float v_row) {
        return __log2f(fmaxf(v_row, 0x1p-24f));
    }

    __device__ void raise_max(float v_row, const float (&s)[C::DEPTH][C::NT][4],
                              State<C> &state) const {
        float top[C::NT][2];
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) top[nt][0] = top[nt][1] = NO_KEY;
#pragma unroll
        for (int j = 0; j < C::DEPTH; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float more = 0;
                if constexpr (C::F == INT8)
                    more = log_of(__shfl_sync(~0u, v_row, j * TOKENS + half * 8 + g));
#pragma unroll
                for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                    for (int col = 0; col < 2; col++)
                        top[nt][col] = fmaxf(top[nt][col], s[j][nt][half * 2 + col] + more);
            }
        bool raise = false;
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++)
                raise |= top[nt][col] > state.max[nt][col] + LAZY_RAISE;
        if (!__any_sync(~0u, raise)) return;
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                float m = top[nt][col];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
                m = fmaxf(state.max[nt][col], m - LAZY_TARGET);
                const float keep = exp2_fast(state.max[nt][col] - m);
                state.max[nt][col] = m;
                state.sum[nt][col] *= keep;
#pragma unroll
                for (int d = 0; d < C::DIM / 16; d++)
                    state.o[d][nt][col] *= keep, state.o[d][nt][col + 2] *= keep;
            }
    }

    // Scores of one granule -> probabilities as the second MMA's B fragment.
    __device__ void weigh(int j, float v_row, const float (&s)[C::NT][4],
                          uint32_t (&p)[C::P_PARTS][C::NT][2], State<C> &state) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float more = 1;
            if constexpr (C::F == INT8) more = __shfl_sync(~0u, v_row, j * TOKENS + half * 8 + g);
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++) {
                float x[2];
#pragma unroll
                for (int col = 0; col < 2; col++) {
                    x[col] = exp2_fast(s[nt][half * 2 + col] - state.max[nt][col]);
                    state.sum[nt][col] += x[col];
                    // What a row may not see has weight 0, whatever its scale.
                    if constexpr (C::F == INT8)
                        x[col] = s[nt][half * 2 + col] == -INFINITY ? 0.0f : x[col] * more;
                }
                if constexpr (C::IS_BF16) {
                    const uint32_t high = pack_bf16(x[0], x[1]);
                    p[0][nt][half] = transpose8x8(high);
                    p[1][nt][half] =
                        transpose8x8(pack_bf16(x[0] - __uint_as_float(high << 16),
                                               x[1] - __uint_as_float(high & 0xffff0000u)));
                } else {
                    p[0][nt][half] = transpose8x8(pack_f16(x[0], x[1]));
                }
            }
        }
    }

    __device__ void add_values(uint32_t tile, const uint32_t (&p)[C::P_PARTS][C::NT][2],
                               State<C> &state) const {
        C::V::each(tile, g, c, [&](int d, const uint32_t(&v)[4]) {
#pragma unroll
            for (int part = 0; part < C::P_PARTS; part++)
#pragma unroll
                for (int nt = 0; nt < C::NT; nt++) mma<C::IS_BF16>(state.o[d][nt], v, p[part][nt]);
        });
    }
    __device__ bool has_non_finite(uint32_t tile) const {
        const uint32_t exponent = C::IS_BF16 ? 0x7f80u : 0x7c00u;
        bool found = false;
        C::V::each(tile, g, c, [&](int, const uint32_t(&v)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                found |= (v[i] & exponent) == exponent || (v[i] >> 16 & exponent) == exponent;
        });
        return __any_sync(~0u, found);
    }
    // A probability of 0 does not hide a NaN: each query token's rows take only values they may
    // see.
    __device__ void add_one_by_one(int key, uint32_t tile,
                                   const uint32_t (&p)[C::P_PARTS][C::NT][2],
                                   State<C> &state) const {
        keep_here();
        const int begin = piece.row_begin / a.group_size;
        const int end = (piece.row_begin + piece.num_rows - 1) / a.group_size;
#pragma unroll 1
        for (int q_token = begin; q_token <= end; q_token++) {
            const KeyRange keys = visible_keys(a, piece.request, q_token);
            uint32_t keep[2];  // of tokens 2c, 2c + 1 and 2c + 8, 2c + 9
#pragma unroll
            for (int i = 0; i < 2; i++) {
                keep[i] = 0;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int k = key + 2 * c + i * 8 + n;
                    if (k >= keys.begin && k < keys.end && mask_bit(q_token, k))
                        keep[i] |= 0xffffu << (16 * n);
                }
            }
            C::V::each(tile, g, c, [&](int d, const uint32_t(&v)[4]) {
                const uint32_t seen[4] = {v[0] & keep[0], v[1] & keep[0], v[2] & keep[1],
                                          v[3] & keep[1]};
#pragma unroll
                for (int nt = 0; nt < C::NT; nt++) {
                    float sum[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int part = 0; part < C::P_PARTS; part++)
                        mma<C::IS_BF16>(sum, seen, p[part][nt]);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if ((piece.row_begin + nt * 8 + 2 * c + i % 2) / a.group_size == q_token)
                            state.o[d][nt][i] += sum[i];
                }
            });
        }
    }
};

}  // namespace kv8
