// decode_warpgroup_attention.cuh - what a warpgroup computes of 17 to 32 packed rows and one KV
// head, four granules of keys a step.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_kernel.cuh"
#include "ptx_matrices_sm90.cuh"

namespace kv8 {

template <Format FK_, Format FV_, int DIM_, int ROWS_, int STAGES_, bool HAS_MASK_>
struct WarpgroupConfig : DecodeConfig<FK_, FV_, DIM_, ROWS_ / 8, 16, STAGES_, true> {
    using Base = DecodeConfig<FK_, FV_, DIM_, ROWS_ / 8, 16, STAGES_, true>;
    static constexpr bool HAS_MASK = HAS_MASK_;
    static constexpr int WARPGROUPS = 4, RING_WARPS = 4;
    static constexpr int STEP_KEYS = 4 * TOKENS;
    static constexpr int SEGMENTS = DIM_ / 64;  // of dims, an M of the second wgmma each
    // A step is done with its K sooner than with its V. Where there is room for few stages the K
    // that takes its place is asked for at once, a step before its V.
    static constexpr bool KEYS_AHEAD = STAGES_ == 2;
    static constexpr int AHEAD = STAGES_ - !KEYS_AHEAD;  // granules whose K is asked for
    // Where a lane g has its dims: of the t-th 16 that of row g, and of row g + 8 the next one.
    struct V {
        static constexpr int BYTES = Base::V::BYTES;
        __device__ static int dim(int t, int g) { return 16 * t + 2 * g; }
    };
    // Of a warpgroup: its warps' rings, in whose place the result comes; Q; weights of two steps.
    static constexpr int STAGES_BYTES = STAGES_ * Base::STAGE_BYTES;  // of a warp
    static constexpr int Q_AT = 4 * STAGES_BYTES, Q_BYTES = ROWS_ * 2 * Base::DIM;
    static constexpr int P_AT = Q_AT + Q_BYTES, P_BYTES = ROWS_ * 2 * STEP_KEYS;
    static constexpr int RING_BYTES = (P_AT + 2 * P_BYTES) / 4;  // a warp's part of all
    static constexpr int FIXED_BYTES = Base::WARPS * RING_BYTES;
    static_assert((FK_ == E4M3 || FK_ == INT8) && (FV_ == E4M3 || FV_ == INT8));
    static_assert((DIM_ == 64 || DIM_ == 128) && ROWS_ <= 32);
    static_assert(Base::STAGE_BYTES % 128 == 0 && Q_AT % 1024 == 0 && Q_BYTES % 1024 == 0);
    static_assert(Base::RESULT_BYTES <= Q_AT);
};

// What a warpgroup shares beside.
template <class C>
struct WarpgroupMemory {
    float4 columns[C::ROWS / 2];  // factors and references of two packed rows
    KeyRange seen[C::ROWS];       // keys of the split that a row sees
    int most[C::ROWS];            // largest scores of a step, in_order()
    float sums[4][C::ROWS];
    uint32_t sick[C::STEP_KEYS][C::DIM / 32];  // bits of V's dims that are NaN
};

// Integers in the order of f32, and back.
__device__ __forceinline__ int in_order(int bits) {
    return bits ^ (bits >> 31 & 0x7fffffff);
}

// A warpgroup's thread: of scores, keys g and g + 8 of its warp's granule by columns 2c and 2c + 1
// of every n-tile; of O, two dims of each segment by the same columns.
template <class C>
class WarpgroupAttention {
   public:
    __device__ WarpgroupAttention(const kv8_kernel_args &args, const Split &of, int of_head,
                                  uint32_t memory_at, WarpgroupMemory<C> &mine)
        : a(args),
          split(of),
          memory(mine),
          head(of_head),
          warp(threadIdx.x / 32 % 4),
          g(threadIdx.x % 32 / 4),
          c(threadIdx.x % 4),
          barrier(1 + threadIdx.x / 128),
          scales_apart(args.soft_cap > 0),
          base(memory_at) {
        // Four matrices of 8 x 8: the first two of V are a granule's tokens 0 to 7 and 8 to 15, the
        // others the next warp's; of weights an n-tile's keys 0 to 7 and 8 to 15, then the next's.
        const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
        k_lane = base + warp * C::STAGES_BYTES + C::RK::at_byte(g, 16 * c);
        v_lane = base + matrix / 2 * C::STAGES_BYTES + C::RK::TILE_BYTES +
                 C::RV::at(matrix % 2 * 8 + row, warp);
        p_lane =
            base + C::P_AT + (matrix / 2 * 8 + row) * 128 + ((2 * warp + matrix % 2) ^ row) * 16;
        p_at = matrix_descriptor(base + C::P_AT, 16);
        if (C::FK == INT8) k_scale_at = scale_at(a.k, 0);
        if (C::FV == INT8) v_scale_at = scale_at(a.v, TOKENS);
        q_at = matrix_descriptor(base + C::Q_AT, 16);
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) sum[nt][0] = sum[nt][1] = 0;
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++)
#pragma unroll
            for (int i = 0; i < C::ROWS / 2; i++) o[segment][i] = 0;
    }

    __device__ __forceinline__ void sync() const {
        named_barrier_sync(barrier, 128);
    }

    // Starts the loads of Q: PARTS threads a row.
    __device__ __forceinline__ void load_queries() {
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
            const int n = row_of(i), row = split.row_begin + n, token = divide(row, a.by_group);
            q[i][0][0] = q[i][0][1] = q[i][1][0] = q[i][1][1] = 0;
            if (n >= split.num_rows) continue;
            const uint16_t *const from =
                static_cast<const uint16_t *>(a.q) +
                (split.request.qo_begin + token) * a.q_stride_row +
                (head * a.group_size + row - token * a.group_size) * a.q_stride_head + part() * 8;
            load_four(from, q[i][0]);
            load_four(from + 4, q[i][1]);
        }
    }
    // Q in f16 to shared memory, in the order of dims in which lanes own those of K: of step s of
    // 16 lane c has dims 16 c + 4 s of the segment and the next three at 2c, 2c + 1, 2c + 8 and
    // 2c + 9. And what else is known of rows.
    __device__ __forceinline__ void store_queries() {
        float scale = a.score_scale;
        if (a.k_scale != nullptr)
            scale *= __ldg(a.k_scale + split.request.index * a.k_scale_stride_batch +
                           head * a.k_scale_stride_head);
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
            const int n = row_of(i);
            float factor = scale;
            if (a.q_dtype == BF16) factor *= narrow_eight<PARTS>(q[i]);
            if (part() == 0) {
                float *const columns = reinterpret_cast<float *>(memory.columns + n / 2) + n % 2;
                columns[0] = factor, columns[2] = NO_SCORE;
            }
            const int lane = part() % 8 / 2, first_step = part() % 2 * 2;
            const uint32_t to = base + C::Q_AT + (part() / 8 * C::ROWS + n) * 128 + 4 * lane;
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int pair = 0; pair < 2; pair++)
                    store_shared(to + ((2 * (first_step + step) + pair) ^ n % 8) * 16,
                                 q[i][step][pair]);
        }
        fence_stores_before_wgmma();
        if (thread() >= C::ROWS) return;
        KeyRange seen = {0, INT_MAX};
        if (thread() < split.num_rows) seen = visible_keys(a, split.request, token_of(thread()));
        seen.end = min(seen.end, end_key());
        memory.seen[thread()] = seen, memory.most[thread()] = INT_MIN;
    }

    // Once all know of gaps.
    __device__ __forceinline__ void start() {
        whole = {split.all.begin, min(split.all.end, end_key())};
    }
    // Step i, whose keys begin at first_key, in the stage of every ring at byte `stage`.
    // `meanwhile` runs once all warps have K of this step and V of the one before.
    template <class MEANWHILE>
    __device__ __forceinline__ void step(int i, int first_key, uint32_t stage,
                                         MEANWHILE &&meanwhile) {
        const bool masked = first_key < whole.begin || first_key + C::STEP_KEYS > whole.end;
        const uint32_t to = p_lane + i % 2 * C::P_BYTES;
        float s[C::ROWS / 2], add[C::NT][2];
        bool over;
        float4 columns[C::NT];
        copy_wait<C::AHEAD - 1>();
        __syncwarp();
        multiply_keys(stage, s, columns);
        const RowScales v_rows = row_scales<C::FV>(v_scale_at + stage);
        if (C::FK == INT8) scale_rows(s, row_scales<C::FK>(k_scale_at + stage));
        const bool is_apart = masked || scales_apart;
        if (is_apart) {
            scale(s);
            if (a.soft_cap > 0) cap_scores(s);
            if (masked) mask(first_key + warp * TOKENS, s);
            over = weigh<true>(s, columns, v_rows, add, to);
        } else {
            over = weigh<false>(s, columns, v_rows, add, to);
        }
        fence_stores_before_wgmma();
        if (C::KEYS_AHEAD) copy_wait<C::AHEAD - 2>();  // V, which all read
        if (named_barrier_any(barrier, 128, over)) {
            if (!is_apart) scale(s);
            raise(s, v_rows);
            load_columns(columns);
            weigh<true>(s, columns, v_rows, add, to);
            fence_stores_before_wgmma();
            sync();
        }
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) sum[nt][0] += add[nt][0], sum[nt][1] += add[nt][1];
        meanwhile();
        multiply_values(i, first_key, stage, masked);
    }

    // The result, in the place of the rings.
    __device__ __forceinline__ void store_result(uint8_t *to) {
        finish_values();
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                float x = sum[nt][col];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
                if (g == 0) memory.sums[warp][nt * 8 + 2 * c + col] = x;
            }
        sync();  // and nobody reads the rings
        float4 *const fragments = reinterpret_cast<float4 *>(to);
        float *const maxima = reinterpret_cast<float *>(to + C::FRAGMENTS * 512);
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++)
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++) {
                const float *const x = o[segment] + 4 * nt;
                fragments[((4 * segment + warp) * C::NT + nt) * 32 + threadIdx.x % 32] =
                    make_float4(x[0], x[1], x[2], x[3]);
            }
        if (thread() < C::ROWS) {
            const int n = thread();
            maxima[n] = reference(n);
            maxima[C::ROWS + n] =
                memory.sums[0][n] + memory.sums[1][n] + (memory.sums[2][n] + memory.sums[3][n]);
        }
    }

   private:
    static constexpr float LIMIT = 2 * LAZY_LIMIT;  // of two keys' weights
    static constexpr float LARGE = 0x1p16f;  // references from where products are rounded first
    static constexpr int PARTS = C::DIM / 8, QUERIES = C::ROWS * PARTS / 128;
    const kv8_kernel_args &a;
    const Split &split;
    WarpgroupMemory<C> &memory;
    const int head, warp, g, c, barrier;
    KeyRange whole;     // keys of the split that all rows see
    bool scales_apart;  // of the warp: scores are scaled, and rounded, before their weights
    // By how a chunk of K or V lies elsewhere in the next segment.
    static constexpr uint32_t SEGMENT_BIT = 64;
    // Of V: of a granule, tokens below 8 and from 8 on.
    using Codes = uint32_t[C::SEGMENTS][4][2];
    const uint32_t base;
    uint32_t k_lane, v_lane, p_lane, q_at, p_at;
    uint32_t k_scale_at, v_scale_at;  // int8: of the scale of token g in the first stage
    uint32_t q[QUERIES][2][2];
    float o[C::SEGMENTS][C::ROWS / 2], sum[C::NT][2];
    // Of four granules, that the second product reads until it is waited for.
    uint32_t v[4][4];

    __device__ static int thread() {
        return threadIdx.x % 128;
    }
    __device__ static int part() {
        return threadIdx.x % PARTS;
    }
    __device__ static int row_of(int i) {
        return (i * 128 + thread()) / PARTS;
    }
    __device__ int token_of(int n) const {
        return divide(split.row_begin + n, a.by_group);
    }
    // What the last step has of the split behind it is nothing: what lies there is from earlier.
    __device__ int end_key() const {
        return split.granule_end * TOKENS;
    }
    __device__ float reference(int n) const {
        return reinterpret_cast<const float *>(memory.columns + n / 2)[2 + n % 2];
    }
    // int8: scales of tokens g and g + 8 of the warp's granule. Pages hold whole granules and an
    // even number of scales: a token's place in the granule says which half of a word it is.
    __device__ uint32_t scale_at(const kv8_kernel_pages &p, int first) const {
        const auto scale = reinterpret_cast<uintptr_t>(p.row_scale + head * p.scale_stride_head +
                                                       g * p.scale_stride_slot);
        return base + warp * C::STAGES_BYTES + C::SCALES + (first + g) * C::SCALE_PITCH +
               uint32_t(scale & 2);
    }
    template <Format F>
    __device__ static RowScales row_scales(uint32_t at) {
        RowScales r = {{1, 1}};
        if constexpr (F == INT8)
#pragma unroll
            for (int half = 0; half < 2; half++)
                r.of[half] = scale_of_bits(load_shared<2>(at + half * 8 * C::SCALE_PITCH).w[0]);
        return r;
    }
    __device__ static void scale_rows(float (&s)[C::ROWS / 2], const RowScales &rows) {
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; i++) s[i] *= rows.of[i / 2 % 2];
    }
    // Sums of products of the warp's granule, once the second product of the step before is done.
    __device__ __forceinline__ void multiply_keys(uint32_t stage, float (&s)[C::ROWS / 2],
                                                  float4 (&columns)[C::NT]) {
        Words<16> upper[C::SEGMENTS], lower[C::SEGMENTS];
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++) {
            const uint32_t from = k_lane + stage ^ segment * SEGMENT_BIT;
            upper[segment] = load_shared<16>(from);
            lower[segment] = load_shared<16>(from + 8 * C::RK::PITCH);
        }
        finish_values();
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++) {
            uint32_t k[4][4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                widen4<C::FK>(upper[segment].w[n], k[n][0], k[n][2]);
                widen4<C::FK>(lower[segment].w[n], k[n][1], k[n][3]);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) registers_pin(k[n]);
            wgmma_fence();
#pragma unroll
            for (int n = 0; n < 4; n++)
                wgmma_registers_along_k(s, k[n],
                                        descriptor_at(q_at, segment * C::ROWS * 128 + 32 * n),
                                        segment + n != 0);
            wgmma_commit();
            if (C::SEGMENTS == 1) load_columns(columns);
            wgmma_wait<0>();
            registers_pin(s);
#pragma unroll
            for (int n = 0; n < 4; n++) registers_pin(k[n]);
        }
        if (C::SEGMENTS > 1) load_columns(columns);  // before, there are no registers for them
    }
    __device__ __forceinline__ void load_columns(float4 (&columns)[C::NT]) const {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) columns[nt] = memory.columns[4 * nt + c];
    }
    // Sums of products -> scores in base 2, rounded before a reference is taken off, as references
    // are: of huge scores a rest of the product would count.
    __device__ __forceinline__ void scale(float (&s)[C::ROWS / 2]) const {
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) {
            const float4 column = memory.columns[4 * nt + c];
            float *const x = s + 4 * nt;
            x[0] = __fmul_rn(x[0], column.x), x[1] = __fmul_rn(x[1], column.y);
            x[2] = __fmul_rn(x[2], column.x), x[3] = __fmul_rn(x[3], column.y);
        }
    }
    // cap * tanh(x / cap), by tanh(y) = 1 - 2 / (1 + e^2y).
    __device__ void cap_scores(float (&s)[C::ROWS / 2]) const {
        constexpr float TWO_LOG2E = 2.885390081777927f;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; i++)
            s[i] = a.soft_cap * tanh_of_exponent(s[i] * (TWO_LOG2E / a.soft_cap));
    }
    // Of the thread's scores those whose keys a mask hides, of a granule that begins at `first`.
    __device__ __noinline__ static uint32_t hidden_keys(const kv8_kernel_args &a,
                                                        const Split &split, int first) {
        const int lane = threadIdx.x % 32;
        uint32_t hidden = 0;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; i++) {
            const int n = i / 4 * 8 + lane % 4 * 2 + i % 2, key = first + i / 2 % 2 * 8 + lane / 4;
            if (n >= split.num_rows) continue;
            const int q_token = divide(split.row_begin + n, a.by_group);
            const KeyRange seen = visible_keys(a, split.request, q_token);
            if (key >= seen.begin && key < seen.end && !mask_bit(a, split.request, q_token, key))
                hidden |= 1u << i;
        }
        return hidden;
    }
    // -inf where a row may not see a key; those of the granule begin at `first`.
    __device__ void mask(int first, float (&s)[C::ROWS / 2]) const {
        if (C::HAS_MASK) {
            const uint32_t hidden = hidden_keys(a, split, first);
#pragma unroll
            for (int i = 0; i < C::ROWS / 2; i++)
                if (hidden >> i & 1) s[i] = -INFINITY;
        }
        const bool missing = is_missing(first);
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const KeyRange seen = memory.seen[n];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = first + half * 8 + g;
                    if (key < seen.begin || key >= seen.end || missing)
                        s[4 * nt + 2 * half + col] = -INFINITY;
                }
            }
    }
    // Whether the page of a granule that somebody sees is not there.
    __device__ bool is_missing(int first) const {
        return __builtin_expect(split.has_gaps, 0) && first < split.any.end &&
               !page_exists(a, split.pages[divide(first, a.by_page)]);
    }

    // Weights relative to each row's reference to shared memory, in f16, and the sums of the two
    // keys of a thread; true if one nears f16's end. NaN, whose row is NaN, is no reason.
    // IS_SCALED: s are scores, else sums of products.
    template <bool IS_SCALED>
    __device__ __forceinline__ bool weigh(const float (&s)[C::ROWS / 2],
                                          const float4 (&columns)[C::NT], const RowScales &v_rows,
                                          float (&add)[C::NT][2], uint32_t to) const {
        const auto weight = [](float x, float factor, float reference) {
            return exp2_fast(IS_SCALED ? x - reference : __fmaf_rn(x, factor, -reference));
        };
        // What V is multiplied by: of a key that a row may not see 0, whatever its scale.
        const auto times_scale = [&](float w, float x, int half) {
            if (C::FV != INT8) return w;
            return IS_SCALED && x == -INFINITY ? 0.0f : w * v_rows.of[half];
        };
        float most[2] = {0, 0};
#pragma unroll
        for (int first = 0; first < C::NT; first += 2) {
            uint32_t p[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int nt = first + i;
                const float4 &of = columns[nt];
                const float *const x = s + 4 * nt;
                const float w[4] = {weight(x[0], of.x, of.z), weight(x[1], of.y, of.w),
                                    weight(x[2], of.x, of.z), weight(x[3], of.y, of.w)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float left = w[2 * half], right = w[2 * half + 1];
                    p[2 * i + half] = pack_f16(times_scale(left, x[2 * half], half),
                                               times_scale(right, x[2 * half + 1], half));
                    if (C::FV == INT8) most[half] = fmaxf(most[half], fmaxf(left, right));
                }
                add[nt][0] = w[0] + w[2], add[nt][1] = w[1] + w[3];
                if (C::FV != INT8) most[0] = fmaxf(most[0], fmaxf(add[nt][0], add[nt][1]));
            }
            store_matrices_transposed(to + first * 1024, p);
        }
        if (C::FV != INT8) return most[0] >= LIMIT;
        return fmaxf(most[0] * factor_of<C::FV>(v_rows, 0), most[1] * factor_of<C::FV>(v_rows, 1)) >
               LAZY_LIMIT;
    }
    // The reference of a row whose largest score is `all`: the largest weight above LAZY_LIMIT
    // becomes 2^LAZY_TARGET.
    __device__ static float raised(float all, float old) {
        return exp2_fast(all - old) > LAZY_LIMIT ? all - LAZY_TARGET : old;
    }
    __device__ float largest(int n) const {
        return __int_as_float(in_order(memory.most[n]));
    }
    // New references where they are asked for, of all rows of the warpgroup.
    __device__ void raise(const float (&s)[C::ROWS / 2], const RowScales &v_rows) {
        bool is_large = false;
        const float more[2] = {factor_in_score<C::FV>(v_rows, 0),
                               factor_in_score<C::FV>(v_rows, 1)};
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                float most = fmaxf(s[4 * nt + col] + more[0], s[4 * nt + 2 + col] + more[1]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
                if (g == 0)
                    atomicMax(&memory.most[nt * 8 + 2 * c + col], in_order(__float_as_int(most)));
            }
        sync();
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const float old = reference(n), to = raised(largest(n), old);
                const float keep = exp2_fast(old - to);
                is_large |= to != NO_SCORE && fabsf(to) > LARGE;
                sum[nt][col] *= keep;
#pragma unroll
                for (int segment = 0; segment < C::SEGMENTS; segment++)
                    o[segment][4 * nt + col] *= keep, o[segment][4 * nt + 2 + col] *= keep;
            }
        scales_apart |= __any_sync(~0u, is_large) != 0;
        sync();
        if (thread() < C::ROWS) {
            const int n = thread();
            const float to = raised(largest(n), reference(n));
            reinterpret_cast<float *>(memory.columns + n / 2)[2 + n % 2] = to;
            memory.most[n] = INT_MIN;
        }
        sync();
    }

    // O += V * weights under way, of the warp's 16 dims of each segment.
    __device__ __forceinline__ void multiply_values(int i, int first_key, uint32_t stage,
                                                    bool masked) {
        Codes codes;
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++)
#pragma unroll
            for (int n = 0; n < 4; n += 2)
                load_matrices_transposed(
                    codes[segment][n][0], codes[segment][n][1], codes[segment][n + 1][0],
                    codes[segment][n + 1][1],
                    v_lane + stage + n * C::STAGES_BYTES ^ segment * SEGMENT_BIT);
        if (C::FV == E4M3 && masked && named_barrier_any(barrier, 128, has_nan(codes)))
            take_nan(first_key, codes);
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++) {
            if (segment > 0) finish_values();  // of v, which there is once
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    widen4<C::FV>(__byte_perm(codes[segment][n][half], 0, 0x3120), v[n][2 * half],
                                  v[n][2 * half + 1]);
            pin_values(segment);
            wgmma_fence();
#pragma unroll
            for (int n = 0; n < 4; n++)
                wgmma_registers_along_k(o[segment], v[n],
                                        descriptor_at(p_at, i % 2 * C::P_BYTES + 32 * n), 1);
            wgmma_commit();
        }
    }
    __device__ __forceinline__ void pin_values(int segment) {
        registers_pin(o[segment]);
#pragma unroll
        for (int n = 0; n < 4; n++) registers_pin(v[n]);
    }
    __device__ __forceinline__ void finish_values() {
        wgmma_wait<0>();
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++) pin_values(segment);
    }

    __device__ static bool has_nan(const Codes &codes) {
        uint32_t any = 0;
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                any |= nan_signs(codes[segment][n][0]) | nan_signs(codes[segment][n][1]);
        return any != 0;
    }
    // A weight of 0 does not hide a NaN: it becomes 0, and NaN the sums of those rows that see it.
    __device__ void take_nan(int first_key, Codes &codes) {
        for (int i = thread(); i < C::STEP_KEYS * C::DIM / 32; i += 128) memory.sick[0][i] = 0;
        sync();
#pragma unroll
        for (int segment = 0; segment < C::SEGMENTS; segment++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                uint32_t &x = codes[segment][n / 2][n % 2];
                const uint32_t signs = nan_signs(x);
#pragma unroll
                for (int byte = 0; byte < 4; byte++)
                    if (signs >> (8 * byte + 7) & 1)
                        atomicOr(&memory.sick[8 * n + 2 * c + byte / 2][dim_of(segment) / 32],
                                 1u << (dim_of(segment) + byte % 2) % 32);
                x &= ~((signs >> 7) * 0xffu);
            }
        sync();
#pragma unroll 1
        for (int i = 0; i < C::STEP_KEYS; i++)
#pragma unroll
            for (int segment = 0; segment < C::SEGMENTS; segment++)
                spoil(first_key + i, segment,
                      memory.sick[i][dim_of(segment) / 32] >> dim_of(segment) % 32 & 3);
    }
    // The first of the thread's two dims of a segment.
    __device__ int dim_of(int segment) const {
        return 64 * segment + 16 * warp + 2 * g;
    }
    // Which of them are NaN of a key.
    __device__ void spoil(int key, int segment, uint32_t dims) {
        if (dims == 0) return;
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                const int n = nt * 8 + 2 * c + col;
                const KeyRange seen = memory.seen[n];
                if (key < seen.begin || key >= seen.end) continue;
                if (C::HAS_MASK && n < split.num_rows &&
                    !mask_bit(a, split.request, token_of(n), key))
                    continue;
                if (dims & 1) o[segment][4 * nt + col] = NAN;
                if (dims & 2) o[segment][4 * nt + 2 + col] = NAN;
            }
    }
};

}  // namespace kv8
