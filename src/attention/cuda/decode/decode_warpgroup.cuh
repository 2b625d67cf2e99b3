// decode_warpgroup.cuh - a block of a decode launch for 17 to 32 packed rows of a request: rows to
// verify. As decode_kernel.cuh, but four warps are a team.
//
// A warpgroup has one KV head and four granules of keys a step, one a warp: each warp copies its
// own granule's K and V into a ring, widens its K in registers and multiplies it with Q (M of a
// wgmma; packed rows are N). Weights meet in shared memory, and behind a barrier each warp
// multiplies 16 dims of all four granules' V, widened in registers (M of the second wgmma), with
// all of them. So codes are widened once for all rows, and O of a warp is a quarter of what it is
// where each warp has its own keys.
//
// Grid: any number of blocks, one a multiprocessor. Block: 512. Bound by: latency of a step, close
// to memory.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_kernel.cuh"
#include "decode/decode_warpgroup_loader.cuh"
#include "ptx_matrices_sm90.cuh"

namespace kv8 {

template <Format F_, int ROWS_, int STAGES_, bool HAS_MASK_>
struct WarpgroupConfig : DecodeConfig<F_, F_, 64, ROWS_ / 8, 16, STAGES_, true> {
    using Base = DecodeConfig<F_, F_, 64, ROWS_ / 8, 16, STAGES_, true>;
    static constexpr bool HAS_MASK = HAS_MASK_;
    static constexpr int WARPGROUPS = 4, RING_WARPS = 4;
    static constexpr int STEP_KEYS = 4 * TOKENS;
    // Where a lane g has its dims: of warp t that of row g, and of row g + 8 the next one.
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
    static_assert(F_ == E4M3 && Q_AT % 1024 == 0 && Q_BYTES % 1024 == 0 && ROWS_ <= 32);
    static_assert(Base::RESULT_BYTES <= Q_AT);
};

// What a warpgroup shares beside.
template <class C>
struct WarpgroupMemory {
    float4 columns[C::ROWS / 2];  // factors and references of two packed rows
    KeyRange seen[C::ROWS];       // keys of the split that a row sees
    int most[C::ROWS];            // largest scores of a step, in_order()
    float sums[4][C::ROWS];
    uint32_t sick[C::STEP_KEYS][2];  // bits of V's dims that are NaN
};

// Integers in the order of f32, and back.
__device__ __forceinline__ int in_order(int bits) {
    return bits ^ (bits >> 31 & 0x7fffffff);
}

// A warpgroup's thread: of scores, keys g and g + 8 of its warp's granule by columns 2c and 2c + 1
// of every n-tile; of O, two dims by the same columns.
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
        q_at = matrix_descriptor(base + C::Q_AT, 16);
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++) sum[nt][0] = sum[nt][1] = 0;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; i++) o[i] = 0;
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
    // 16 lane c has dims 16 c + 4 s and the next three at 2c, 2c + 1, 2c + 8 and 2c + 9. And what
    // else is known of rows.
    __device__ __forceinline__ void store_queries() {
        float scale = a.score_scale;
        if (a.k_scale != nullptr)
            scale *= __ldg(a.k_scale + split.request.index * a.k_scale_stride_batch +
                           head * a.k_scale_stride_head);
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
            const int n = row_of(i);
            float factor = scale;
            if (a.q_dtype == BF16) factor *= narrow_eight(q[i]);
            if (part() == 0) {
                float *const columns = reinterpret_cast<float *>(memory.columns + n / 2) + n % 2;
                columns[0] = factor, columns[2] = NO_SCORE;
            }
            const int lane = part() / 2, first_step = part() % 2 * 2;
            const uint32_t to = base + C::Q_AT + n * 128 + 4 * lane;
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
    // `meanwhile` runs once all warps have what they need of the step before.
    template <class MEANWHILE>
    __device__ __forceinline__ void step(int i, int first_key, uint32_t stage,
                                         MEANWHILE &&meanwhile) {
        const bool masked = first_key < whole.begin || first_key + C::STEP_KEYS > whole.end;
        const uint32_t to = p_lane + i % 2 * C::P_BYTES;
        float s[C::ROWS / 2], add[C::NT][2];
        bool over;
        float4 columns[C::NT];
        multiply_keys(stage, s, columns);
        const bool is_apart = masked || scales_apart;
        if (is_apart) {
            scale(s);
            if (a.soft_cap > 0) cap_scores(s);
            if (masked) mask(first_key + warp * TOKENS, s);
            over = weigh<true>(s, columns, add, to);
        } else {
            over = weigh<false>(s, columns, add, to);
        }
        fence_stores_before_wgmma();
        if (named_barrier_any(barrier, 128, over)) {
            if (!is_apart) scale(s);
            raise(s);
            load_columns(columns);
            weigh<true>(s, columns, add, to);
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
        for (int nt = 0; nt < C::NT; nt++)
            fragments[(warp * C::NT + nt) * 32 + threadIdx.x % 32] =
                make_float4(o[4 * nt], o[4 * nt + 1], o[4 * nt + 2], o[4 * nt + 3]);
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
    static constexpr int PARTS = 8, QUERIES = C::ROWS * PARTS / 128;
    const kv8_kernel_args &a;
    const Split &split;
    WarpgroupMemory<C> &memory;
    const int head, warp, g, c, barrier;
    KeyRange whole;     // keys of the split that all rows see
    bool scales_apart;  // of the warp: scores are scaled, and rounded, before their weights
    const uint32_t base;
    uint32_t k_lane, v_lane, p_lane, q_at, p_at;
    uint32_t q[QUERIES][2][2];
    float o[C::ROWS / 2], sum[C::NT][2];
    uint32_t v[4][4];  // of four granules, that the second product reads until it is waited for

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
    // Sums of products of the warp's granule, once the second product of the step before is done.
    __device__ __forceinline__ void multiply_keys(uint32_t stage, float (&s)[C::ROWS / 2],
                                                  float4 (&columns)[C::NT]) {
        uint32_t k[4][4];
        const Words<16> upper = load_shared<16>(k_lane + stage);
        const Words<16> lower = load_shared<16>(k_lane + stage + 8 * C::RK::PITCH);
        finish_values();
#pragma unroll
        for (int n = 0; n < 4; n++) {
            widen4_key<C::FK>(upper.w[n], k[n][0], k[n][2]);
            widen4_key<C::FK>(lower.w[n], k[n][1], k[n][3]);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) registers_pin(k[n]);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < 4; n++)
            wgmma_registers_along_k(s, k[n], descriptor_at(q_at, 32 * n), n != 0);
        wgmma_commit();
        load_columns(columns);
        wgmma_wait<0>();
        registers_pin(s);
#pragma unroll
        for (int n = 0; n < 4; n++) registers_pin(k[n]);
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
                                          const float4 (&columns)[C::NT], float (&add)[C::NT][2],
                                          uint32_t to) const {
        const auto weight = [](float x, float factor, float reference) {
            return exp2_fast(IS_SCALED ? x - reference : __fmaf_rn(x, factor, -reference));
        };
        float most = 0;
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
                p[2 * i] = pack_f16(w[0], w[1]), p[2 * i + 1] = pack_f16(w[2], w[3]);
                add[nt][0] = w[0] + w[2], add[nt][1] = w[1] + w[3];
                most = fmaxf(most, fmaxf(add[nt][0], add[nt][1]));
            }
            store_matrices_transposed(to + first * 1024, p);
        }
        return most >= LIMIT;
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
    __device__ void raise(const float (&s)[C::ROWS / 2]) {
        bool is_large = false;
#pragma unroll
        for (int nt = 0; nt < C::NT; nt++)
#pragma unroll
            for (int col = 0; col < 2; col++) {
                float most = fmaxf(s[4 * nt + col], s[4 * nt + 2 + col]);
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
                o[4 * nt + col] *= keep, o[4 * nt + 2 + col] *= keep;
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

    // O += V * weights under way, of the warp's 16 dims.
    __device__ __forceinline__ void multiply_values(int i, int first_key, uint32_t stage,
                                                    bool masked) {
        uint32_t codes[4][2];  // of a granule, tokens below 8 and from 8 on
#pragma unroll
        for (int n = 0; n < 4; n += 2)
            load_matrices_transposed(codes[n][0], codes[n][1], codes[n + 1][0], codes[n + 1][1],
                                     v_lane + stage + n * C::STAGES_BYTES);
        if (masked && named_barrier_any(barrier, 128, has_nan(codes))) take_nan(first_key, codes);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                widen4<C::FV>(__byte_perm(codes[n][half], 0, 0x3120), v[n][2 * half],
                              v[n][2 * half + 1]);
        pin_values();
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < 4; n++)
            wgmma_registers_along_k(o, v[n], descriptor_at(p_at, i % 2 * C::P_BYTES + 32 * n), 1);
        wgmma_commit();
    }
    __device__ __forceinline__ void pin_values() {
        registers_pin(o);
#pragma unroll
        for (int n = 0; n < 4; n++) registers_pin(v[n]);
    }
    __device__ __forceinline__ void finish_values() {
        wgmma_wait<0>();
        pin_values();
    }

    __device__ static bool has_nan(const uint32_t (&codes)[4][2]) {
        uint32_t any = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) any |= nan_signs(codes[n][0]) | nan_signs(codes[n][1]);
        return any != 0;
    }
    // A weight of 0 does not hide a NaN: it becomes 0, and NaN the sums of those rows that see it.
    __device__ void take_nan(int first_key, uint32_t (&codes)[4][2]) {
        memory.sick[thread() / 2][thread() % 2] = 0;
        sync();
        const int dim = 16 * warp + 2 * g;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            uint32_t &x = codes[n / 2][n % 2];
            const uint32_t signs = nan_signs(x);
#pragma unroll
            for (int byte = 0; byte < 4; byte++)
                if (signs >> (8 * byte + 7) & 1)
                    atomicOr(&memory.sick[8 * n + 2 * c + byte / 2][dim / 32],
                             1u << (dim + byte % 2) % 32);
            x &= ~((signs >> 7) * 0xffu);
        }
        sync();
#pragma unroll 1
        for (int i = 0; i < C::STEP_KEYS; i++)
            spoil(first_key + i, memory.sick[i][dim / 32] >> dim % 32 & 3);
    }
    // Which of the thread's two dims of a key are NaN.
    __device__ void spoil(int key, uint32_t dims) {
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
                if (dims & 1) o[4 * nt + col] = NAN;
                if (dims & 2) o[4 * nt + 2 + col] = NAN;
            }
    }
};

// find_unmasked() by all warps, which share out the rows and keys of a split.
template <int WARPS>
__device__ inline void find_unmasked_by_block(const kv8_kernel_args &a, Split &p) {
    __shared__ int hidden[WARPS];
    const int warp = threadIdx.x / 32, first_row = divide(p.row_begin, a.by_group);
    const int last_row = divide(p.row_begin + p.num_rows - 1, a.by_group);
    const int rows = last_row - first_row + 1, parts = max(WARPS / rows, 1);
    const KeyRange top = visible_keys(a, p.request, first_row);
    const KeyRange low = visible_keys(a, p.request, last_row);
    const int begin = p.granule_begin * TOKENS, end = min(p.granule_end * TOKENS, top.end);
    const int each = (max(end - begin, 0) / parts + 8) / 8 * 8;
    int first = top.end;
    for (int i = warp; i < rows * parts; i += WARPS) {
        const int part = begin + i / rows * each;
        first = min(first, first_hidden(a, p.request, first_row + i % rows, part,
                                        min(part + each, end), top.end));
    }
    if (threadIdx.x % 32 == 0) hidden[warp] = first;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) first = min(first, hidden[i]);
    if (threadIdx.x == 0) p.all = {low.begin, first};
    __syncthreads();
}

// A warpgroup's steps of a split. `meanwhile` runs while the first copies are on their way.
template <class C, class MEANWHILE>
__device__ __forceinline__ void run_warpgroup(const kv8_kernel_args &a, Split &split, int head,
                                              int first, int count, uint8_t *bytes,
                                              WarpgroupMemory<C> &memory, MEANWHILE &&meanwhile) {
    constexpr int AHEAD = C::STAGES - 1;
    const uint32_t base = keep(smem_address(bytes));
    const int warp = threadIdx.x / 32 % 4, left = split.granule_end - first - warp;
    const int own = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
    WarpgroupAttention<C> attention(a, split, head, base, memory);
    attention.load_queries();
    WarpgroupLoader<C> loader(a, split, base + warp * C::STAGES_BYTES, head, first + warp,
                              a.decode.num_slices, own);
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) loader.issue(i, i * C::STAGE_BYTES);
    loader.find_gaps();
    meanwhile();
    attention.store_queries();
    __syncthreads();  // Q is there, and what find_gaps() says of the split
    attention.start();
    uint32_t stage = 0, free = AHEAD * C::STAGE_BYTES;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        copy_wait<AHEAD - 1>();
        __syncwarp();
        attention.step(i, (first + i * a.decode.num_slices) * TOKENS, stage,
                       [&] { loader.issue(i + AHEAD, free); });
        free = stage;
        stage = stage + C::STAGE_BYTES == C::STAGES_BYTES ? 0 : stage + C::STAGE_BYTES;
    }
    copy_wait_all();
    attention.store_result(bytes);
}

template <class C>
__device__ __forceinline__ void warpgroup_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t fixed[];
    __shared__ Block<C> block;
    __shared__ WarpgroupMemory<C> memory[C::WARPGROUPS];
    launch_dependents();
    int *const starts = reinterpret_cast<int *>(fixed + C::FIXED_BYTES);
    const int warp = threadIdx.x / 32, warpgroup = warp / 4;
    if (warp == 0)
        partition_first<C>(a, starts, block);
    else
        wait_for_previous();
    __syncthreads();
    const int slice = divide(warpgroup, a.decode.by_heads);
    const int in_block = warpgroup - slice * a.decode.heads_per_block;
#pragma unroll 1
    for (Split *at = block.splits; at->stream >= 0; at = block.other(at)) {
        Split &split = *at;
        if constexpr (C::HAS_MASK) find_unmasked_by_block<C::WARPS>(a, split);
        const int first = split.granule_begin + 4 * slice, left = split.granule_end - first;
        const int count = left > 0 ? divide(left + a.decode.num_slices - 1, a.decode.by_slices) : 0;
        const int head = split.head_begin + in_block;
        run_warpgroup<C>(a, split, head, first, count, fixed + warpgroup * 4 * C::RING_BYTES,
                         memory[warpgroup], [&] {
                             if (slice == 0 && warp % 4 == 0)
                                 copy_row_ends(a, split, head, block.ends + in_block * C::ROWS);
                             if (warp == 0)
                                 take_split<C>(a, starts, block.partition, block, *block.other(at),
                                               [&](int b) { return load_lengths(a, b); });
                         });
        __syncthreads();
        combine_splits<C>(a, split, fixed, block.ends);
        __syncthreads();  // shared memory is free again
    }
    if (block.any_empty) finish_empty(a, starts);
}

}  // namespace kv8

#define KV8_DECODE_WARPGROUP_DEFINE(name, format, head_dim, rows, stages, has_mask, fixed_bytes) \
    extern "C" __global__ void __launch_bounds__(512, 1)                                         \
        name(const __grid_constant__ kv8_kernel_args a) {                                        \
        using config = kv8::WarpgroupConfig<kv8::format, rows, stages, has_mask>;                \
        static_assert(config::FIXED_BYTES == fixed_bytes && head_dim == config::DIM);            \
        kv8::warpgroup_body<config>(a);                                                          \
    }
