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

template <Format F_, int DIM_, int NT_, int WARPS_, int STAGES_, bool GRANULE_PAGES_>
struct DecodeConfig {
    static constexpr Format F = F_;
    static constexpr int DIM = DIM_;
    static constexpr int NT = NT_;  // n-tiles of 8 packed query rows
    static constexpr int ROWS = NT * 8;
    static constexpr int WARPS = WARPS_, THREADS = WARPS * 32;
    static constexpr int STAGES = STAGES_;
    // Pages hold whole granules: one table entry for each. Otherwise one for every token.
    static constexpr bool GRANULE_PAGES = GRANULE_PAGES_;
    static constexpr bool IS_BF16 = F == BF16;
    static constexpr int P_PARTS = IS_BF16 ? 2 : 1;  // bf16 probabilities are kept to 16 bits
    using K = KeyTile<F, DIM>;
    using V = ValueTile<F, DIM>;
    using R = Row<F, DIM>;
    // A stage: a granule of K, of V, and of int8 for each of their rows the word that has its scale
    // and how far to shift it.
    static constexpr int SCALES = 2 * R::TILE_BYTES, SCALE_BYTES = F == INT8 ? 2 * TOKENS * 8 : 0;
    static constexpr int STAGE_BYTES = SCALES + SCALE_BYTES;
    // A warp's result: float4 [FRAGMENTS][32 lanes] as the MMA leaves it, then maxima, then sums.
    static constexpr int FRAGMENTS = DIM / 16 * NT;
    static constexpr int RESULT_BYTES = FRAGMENTS * 512 + 2 * ROWS * 4;
    static constexpr int WARP_BYTES =
        (STAGES * STAGE_BYTES > RESULT_BYTES ? STAGES * STAGE_BYTES : RESULT_BYTES) + 1023 & ~1023;
    static constexpr int RING_BYTES = WARPS * WARP_BYTES;
    // After the rings: one Record per request and one more.
    static constexpr int smem_bytes(int max_batch) { return RING_BYTES + (max_batch + 1) * 32; }
};

__device__ inline int divide(int n, const kv8_decode_divisor &d) {
    return d.factor == 0 ? n : int(__umulhi(uint32_t(n), d.factor) >> d.shift);
}

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
        const KeyRange top = visible_keys(a, r, divide(piece.row_begin, a.by_group));
        const KeyRange low =
            visible_keys(a, r, divide(piece.row_begin + piece.num_rows - 1, a.by_group));
        any = {min(top.begin, low.begin), low.end};
        all = {low.begin, top.end};
        if (a.mask_bits != nullptr) all = {0, 0};
        const int left = piece.granule_end - first;
        count = left > 0 ? (left + step - 1) / step : 0;
    }

    template <class MEANWHILE>
    __device__ void run(State<C> &state, MEANWHILE &&meanwhile) {
        look_up(0, now);
        look_up(1, next);
        prepare_copies(a.k, k_lane, k_row), prepare_copies(a.v, v_lane, v_row);
        prepare_scales();
        float scale[C::NT];
        load_q(scale);
#pragma unroll 1
        for (int s = 0; s < C::STAGES - 1; s++) {
            if (s < count) fetch(s, s);
            copy_commit();
        }
        narrow_q(scale);  // while the first copies are on their way
        meanwhile();
        int at = 0, to = C::STAGES - 1;  // stages of the ring
#pragma unroll 1
        for (int t = 0; t < count; t++) {
            copy_wait<C::STAGES - 2>();
            __syncwarp();
            if (t + C::STAGES - 1 < count) fetch(t + C::STAGES - 1, to);
            copy_commit();
            compute(t, at, state);
            at = at + 1 == C::STAGES ? 0 : at + 1;
            to = to + 1 == C::STAGES ? 0 : to + 1;
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
    // Where a granule, or a token, lies: byte offsets of its first row of head 0; -1: nobody sees
    // it.
    struct Place {
        int64_t k, v;
        int page, slot;  // int8: its scales
    };
    Place now, next;
    // A lane's copies: its first address in page 0, and how much further each pass goes.
    static constexpr int PASSES = (C::R::CHUNKS * TOKENS + 31) / 32;
    const uint8_t *k_lane, *v_lane;
    uint32_t k_row[PASSES], v_row[PASSES];
    const uint16_t *scale_lane;  // int8: lane t has K's token t, lane 16 + t V's
    int64_t scale_page;
    int32_t scale_slot;

    __device__ int granule(int i) const {
        return first + i * step;
    }

    // Table entries of 32 granules, or of the 16 tokens of one, one per lane; always one batch
    // ahead of its use. A page that no row of the tile may see is never read.
    __device__ void look_up(int batch, Place &place) const {
        constexpr int SPAN = C::GRANULE_PAGES ? TOKENS : 1;  // tokens of an entry
        const int i = C::GRANULE_PAGES ? batch * 32 + lane : batch;
        const int token = granule(i) * TOKENS + (C::GRANULE_PAGES ? 0 : lane % TOKENS);
        place = {-1, -1, 0, 0};
        if (i >= count || token >= any.end || token + SPAN <= any.begin) return;
        if (a.mask_bits != nullptr && !mask_shows(token, SPAN)) return;
        const int index = divide(token, a.by_page);
        place.slot = token - index * a.page_size;
        place.page = __ldg(piece.request.pages + index);
        place.k = place.page * a.k.stride_page + place.slot * a.k.stride_slot;
        place.v = place.page * a.v.stride_page + place.slot * a.v.stride_slot;
    }
    // Does some row of the tile see one of these keys?
    __device__ bool mask_shows(int key, int num_keys) const {
        const int first = divide(piece.row_begin, a.by_group);
        const int last = divide(piece.row_begin + piece.num_rows - 1, a.by_group);
        for (int q_token = first; q_token <= last; q_token++) {
            const KeyRange seen = visible_keys(a, piece.request, q_token);
            for (int k = max(key, seen.begin); k < min(key + num_keys, seen.end); k++)
                if (mask_bit(q_token, k)) return true;
        }
        return false;
    }

    // Starts the copies of granule i into a stage.
    __device__ void fetch(int i, int stage) {
        if (C::GRANULE_PAGES ? i > 0 && i % 32 == 0 : i > 0) {
            now = next;
            look_up(C::GRANULE_PAGES ? i / 32 + 1 : i + 1, next);
        }
        const uint32_t to = ring + stage * C::STAGE_BYTES;
        const int token = granule(i) * TOKENS;
        copy_tile(now.k, k_lane, k_row, token, i, to);
        copy_tile(now.v, v_lane, v_row, token, i, to + C::R::TILE_BYTES);
        if constexpr (C::F == INT8) copy_scales(token, i, to + C::SCALES);
    }
    __device__ void copy_tile(int64_t offset, const uint8_t *lane_from,
                              const uint32_t (&row_from)[PASSES], int token, int i,
                              uint32_t to) const {
        using R = typename C::R;
        if constexpr (C::GRANULE_PAGES) {
            offset = __shfl_sync(~0u, offset, i % 32);
            if (offset >= 0 && token >= any.begin && token + TOKENS <= any.end) {
#pragma unroll
                for (int n = 0; n < PASSES; n++) {
                    const int index = n * 32 + lane, row = index / R::CHUNKS;
                    if (R::CHUNKS * TOKENS % 32 == 0 || row < TOKENS)
                        copy16(to + R::at(row, index % R::CHUNKS),
                               lane_from + offset + row_from[n]);
                }
                return;
            }
        }
#pragma unroll
        for (int n = 0; n < PASSES; n++) {
            const int index = n * 32 + lane, row = index / R::CHUNKS;
            const int64_t at = C::GRANULE_PAGES ? offset : __shfl_sync(~0u, offset, row % TOKENS);
            bool inside = at >= 0;  // an entry of its own says it all
            if constexpr (C::GRANULE_PAGES)
                inside = inside && token + row >= any.begin && token + row < any.end;
            if (R::CHUNKS * TOKENS % 32 == 0 || row < TOKENS)
                copy16_or_zero(to + R::at(row, index % R::CHUNKS),
                               lane_from + (inside ? at + row_from[n] : 0), inside);
        }
    }
    __device__ void prepare_copies(const kv8_decode_pages &p, const uint8_t *&lane_from,
                                   uint32_t (&row_from)[PASSES]) const {
        using R = typename C::R;
        lane_from = p.data + head * p.stride_head;
#pragma unroll
        for (int n = 0; n < PASSES; n++) {
            const int index = n * 32 + lane;
            row_from[n] = index % R::CHUNKS * 16;
            if constexpr (C::GRANULE_PAGES)
                row_from[n] += index / R::CHUNKS * uint32_t(p.stride_slot);
        }
    }

    // int8: lane t copies the word that holds the scale of K's token t, lane 16 + t of V's.
    __device__ void prepare_scales() {
        if constexpr (C::F == INT8) {
            const kv8_decode_pages &p = lane < TOKENS ? a.k : a.v;
            scale_lane = p.row_scale + head * p.scale_stride_head;
            scale_page = p.scale_stride_page, scale_slot = int32_t(p.scale_stride_slot);
        }
    }
    __device__ void copy_scales(int token, int i, uint32_t to) const {
        const int t = lane % TOKENS, holder = C::GRANULE_PAGES ? i % 32 : t;
        const int page = __shfl_sync(~0u, now.page, holder);
        const int slot = __shfl_sync(~0u, now.slot, holder) + (C::GRANULE_PAGES ? t : 0);
        const bool inside =
            __shfl_sync(~0u, now.k, holder) >= 0 && token + t >= any.begin && token + t < any.end;
        const uintptr_t at =
            reinterpret_cast<uintptr_t>(scale_lane + page * scale_page + slot * scale_slot);
        copy4_or_zero(to + lane * 8, reinterpret_cast<const void *>(at & ~uintptr_t(3)), inside);
        store_shared(to + lane * 8 + 4, uint32_t(at & 2) * 8);
    }
    // Scales of tokens g and g + 8 of a stage: of K, or of V.
    struct RowScales {
        float of[2];
    };
    __device__ RowScales row_scales(int stage, bool of_v) const {
        RowScales r = {{1, 1}};
        if constexpr (C::F == INT8)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const auto word = load_shared<8>(ring + stage * C::STAGE_BYTES + C::SCALES +
                                                 (of_v * TOKENS + half * 8 + g) * 8);
                r.of[half] = __half2float(
                    __ushort_as_half(static_cast<unsigned short>(word.w[0] >> word.w[1])));
            }
        return r;
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
            const int row = piece.row_begin + n, token = divide(row, a.by_group);
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

    // Every row sees every token of granule i.
    __device__ bool is_open(int i) const {
        const int token = granule(i) * TOKENS;
        return token >= all.begin && token + TOKENS <= all.end;
    }
    __device__ bool mask_bit(int q_token, int key) const {
        if (a.mask_bits == nullptr) return true;
        const int64_t bit = int64_t(q_token) * piece.request.kv_len + key;
        return a.mask_bits[a.mask_indptr[piece.request.index] + bit / 8] >> (bit % 8) & 1;
    }

    __device__ void compute(int i, int stage, State<C> &state) {
        const uint32_t keys = ring + stage * C::STAGE_BYTES, values = keys + C::R::TILE_BYTES;
        float s[C::NT][4];
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int x = 0; x < 4; x++) s[nt][x] = 0;
        C::K::template multiply<C::NT, C::IS_BF16, 1>(keys, g, c, q, s);
        const bool masked = !is_open(i);
        scale_scores(row_scales(stage, false), s);
        if (masked) mask_scores(granule(i) * TOKENS, s);
        const RowScales v_rows = row_scales(stage, true);
        raise_max(v_rows, s, state);
        uint32_t p[C::P_PARTS][C::NT][2];
        weigh(v_rows, s, p, state);
        if (masked && has_non_finite(values))
            add_one_by_one(granule(i) * TOKENS, values, p, state);
        else
            add_values(values, p, state);
    }

    // Sums of products -> scores in base 2.
    __device__ void scale_scores(const RowScales &rows, float (&s)[C::NT][4]) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
                for (int col = 0; col < 2; col++) {
                    float &x = s[nt][half * 2 + col];
                    x *= C::F == INT8 ? factor[nt][col] * rows.of[half] : factor[nt][col];
                    if (a.soft_cap > 0) x = cap(x);
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
    // -inf where a row may not see a key; those of a granule begin at `first_key`.
    __device__ void mask_scores(int first_key, float (&s)[C::NT][4]) const {
        keep_here();
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const int q_token = divide(piece.row_begin + n, a.by_group);
                KeyRange seen = visible_keys(a, piece.request, q_token);
                if (n >= piece.num_rows) seen.end = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = first_key + half * 8 + g;
                    if (key < seen.begin || key >= seen.end || !mask_bit(q_token, key))
                        s[nt][half * 2 + col] = -INFINITY;
                }
            }
    }

    __device__ void raise_max(const RowScales &v_rows, const float (&s)[C::NT][4],
                              State<C> &state) const {
        float top[C::NT][2];
        bool raise = false;
        // log2 of the factor that joins p on its way to V; int8 alone.
        float more[2] = {0, 0};
        if constexpr (C::F == INT8)
#pragma unroll
            for (int half = 0; half < 2; half++)
                more[half] = __log2f(fmaxf(v_rows.of[half], 0x1p-24f));
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                top[nt][col] = fmaxf(s[nt][col] + more[0], s[nt][2 + col] + more[1]);
                raise |= top[nt][col] > state.max[nt][col] + LAZY_RAISE;
            }
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
    __device__ void weigh(const RowScales &v_rows, const float (&s)[C::NT][4],
                          uint32_t (&p)[C::P_PARTS][C::NT][2], State<C> &state) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++) {
                float x[2];
#pragma unroll
                for (int col = 0; col < 2; col++) {
                    x[col] = exp2_fast(s[nt][half * 2 + col] - state.max[nt][col]);
                    state.sum[nt][col] += x[col];
                    // What a row may not see has weight 0, whatever its scale.
                    if constexpr (C::F == INT8)
                        x[col] =
                            s[nt][half * 2 + col] == -INFINITY ? 0.0f : x[col] * v_rows.of[half];
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
        const int begin = divide(piece.row_begin, a.by_group);
        const int end = divide(piece.row_begin + piece.num_rows - 1, a.by_group);
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
                        if (divide(piece.row_begin + nt * 8 + 2 * c + i % 2, a.by_group) == q_token)
                            state.o[d][nt][i] += sum[i];
                }
            });
        }
    }
};

}  // namespace kv8
