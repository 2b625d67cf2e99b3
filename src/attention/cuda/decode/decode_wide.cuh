// decode_wide.cuh - a launch for 17 to 128 packed rows of one request with few keys: rows to
// verify, a short chunk's. Like decode_cluster.cuh, but on wgmma: 64 packed rows are the M of both
// products, so that keys are widened once for all of them.
//
// A cluster of blocks has one KV head; its keys are cut evenly among the blocks, and each block's
// among its two warpgroups, KEYS at a time. A step: codes come into registers while the step before
// is computed, are widened into shared memory under the 128-byte swizzle, K and V alike, and are
// multiplied with every tile of rows. At the end the warpgroups exchange halves of their sums, and
// every block hands the others those of their rows.
//
// Grid: (blocks of a cluster: 8 or 16, num_kv_heads). Block: 256, two a multiprocessor, since a GPU
// does not seat a cluster of 16 for each of eight KV heads otherwise. Bound by: latency.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode/decode_combine.cuh"
#include "decode/decode_wide_loader.cuh"

namespace kv8 {

template <Format F_, int TILES_, int KEYS_, int MASK_BYTES_>
struct WideConfig {
    static constexpr int MASK_BYTES = MASK_BYTES_;  // query tokens times a block's keys / 8
    static constexpr bool HAS_MASK = MASK_BYTES > 0;
    static constexpr Format F = F_;  // of K and of V
    static constexpr int DIM = 64;
    static constexpr int TILES = TILES_, ROWS = 64 * TILES;  // of 64 packed rows
    static constexpr int KEYS = KEYS_;                       // of a step: 32 or 64
    static constexpr int WARPGROUPS = 2, THREADS = 128 * WARPGROUPS;
    static constexpr int LEAST_RANKS = 8;  // blocks of a cluster
    static constexpr int MAX_BLOCK_KEYS = 16384 / TILES / TILES / LEAST_RANKS + 2 * KEYS;
    static constexpr int Q_BYTES = 64 * 2 * DIM;  // of a tile; then the first 32 rows again
    static constexpr int ALL_Q_BYTES = TILES * Q_BYTES + (TILES == 1 ? 32 * 2 * DIM : 0);
    static constexpr int STEP_BYTES = KEYS * 2 * DIM;  // of K or of V, widened
    // Steps of a warpgroup, K and V of two; later the half of its sums that it gives away.
    static constexpr int RESULT_BYTES = TILES * 4 * 128 * 16;
    static constexpr int WARPGROUP_BYTES =
        4 * STEP_BYTES > RESULT_BYTES ? 4 * STEP_BYTES : RESULT_BYTES;
    static constexpr int FIXED_BYTES = ALL_Q_BYTES + WARPGROUPS * WARPGROUP_BYTES;
    static_assert(size_of(F) == 1 && (KEYS == 32 || KEYS == 64));
};

// What a block got: by the block it is from, then by row of its own, 16 float4 of a row's sums.
template <class C>
struct WideExchange {
    static constexpr int MOST_OWN = C::ROWS / C::LEAST_RANKS;
    float4 o[C::ROWS * 16];  // [ranks][rows / ranks][16]
    float4 sums[C::ROWS];    // [ranks][rows / ranks]: maximum, sum
    RowEnd ends[MOST_OWN];
    float factor[C::ROWS];                  // from a row's sums of products to scores in base 2
    float2 result[C::WARPGROUPS][C::ROWS];  // maximum, sum
    uint16_t sick[C::WARPGROUPS][2][C::KEYS][C::DIM / 16];  // bits of V's dims that are NaN
    Lengths lengths;
    uint64_t barrier;
};

// The block's own in its cluster: rows [begin, begin + 2^row_bits), as far as there are.
template <class C>
struct WideRank {
    static constexpr int HEAD_BITS = C::TILES == 1 ? 6 : 7;
    static_assert(C::ROWS == 1 << HEAD_BITS);
    int rank, ranks, row_bits;

    __device__ WideRank() {
        rank = cluster_rank();
        ranks = cluster_size();
        row_bits = HEAD_BITS - (ranks == 16 ? 4 : 3);
    }
    __device__ int row_begin() const { return rank << row_bits; }
    __device__ int num_rows(int of_all) const {
        return min(max(of_all - row_begin(), 0), 1 << row_bits);
    }
};

template <class C>
__device__ WideKeys wide_keys(const kv8_kernel_args &a, const Request &r, const WideRank<C> &own) {
    const KeyRange top = visible_keys(a, r, 0), low = visible_keys(a, r, max(r.qo_len - 1, 0));
    WideKeys k;
    k.any = {min(top.begin, low.begin), low.end};
    k.all = {low.begin, top.end};
    if (r.qo_len <= 0 || k.any.end <= k.any.begin) k.any = {0, 0};
    k.base = k.any.begin / C::KEYS * C::KEYS;
    const int steps = (k.any.end - k.base + C::KEYS - 1) / C::KEYS;
    const int each = (steps + own.ranks - 1) / own.ranks;
    k.step_begin = min(own.rank * each, steps);
    k.step_end = min((own.rank + 1) * each, steps);
    return k;
}

// The thread of a warpgroup whose place in the products this one has. Of at most 32 packed rows
// the second warpgroup has them in its last two warps, where the first has them in its first two:
// the exponentials of either are other schedulers'.
template <class C>
__device__ __forceinline__ int thread_of_rows(int num_rows) {
    const bool swaps = C::TILES == 1 && num_rows <= 32 && threadIdx.x >= 128;
    return threadIdx.x % 128 ^ (swaps ? 64 : 0);
}

// WideAttention is a warpgroup's thread: of every tile two rows, g and g + 8 of its warp's 16.
template <class C>
class WideAttention {
   public:
    __device__ WideAttention(const kv8_kernel_args &args, const Request &of,
                             const WideKeys &of_keys, const WideMask<C> &of_mask)
        : a(args),
          r(of),
          keys(of_keys),
          mask_bits(of_mask),
          thread(thread_of_rows<C>(of.qo_len * args.group_size)),
          lane_row(thread / 32 * 16 + thread % 32 / 4) {
#pragma unroll
        for (int t = 0; t < C::TILES; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) top[t][i] = NO_SCORE, sum[t][i] = 0;
#pragma unroll
            for (int i = 0; i < 32; i++) o[t][i] = 0;
        }
    }
    // The scores of tile t and the step at `stage`, then its products with V under way. Its keys
    // begin at first_key.
    __device__ __forceinline__ void start_tile(int t, uint32_t q, uint32_t stage, int first_key,
                                               const float *factors, uint32_t (&p)[C::KEYS / 4]) {
        float s[C::KEYS / 2];
        registers_pin(o[t]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::DIM / 16; i++)
            wgmma_shared<false>(s, descriptor_at(q, t * C::Q_BYTES + 32 * i),
                                descriptor_at(stage, 32 * i), i != 0);
        wgmma_commit();
        const float factor[2] = {factors[64 * t + lane_row], factors[64 * t + lane_row + 8]};
        wgmma_wait<0>();
        registers_pin(s);
        if (has_rows(t)) {
            // Rounded before a reference is taken off, as references are: of huge scores a rest of
            // the product would count.
#pragma unroll
            for (int i = 0; i < C::KEYS / 2; i++) s[i] = __fmul_rn(s[i], factor[i / 2 % 2]);
            if (is_masked(first_key)) mask(t, first_key, s);
            weigh(t, s, p);
        } else {
#pragma unroll
            for (int i = 0; i < C::KEYS / 4; i++) p[i] = 0;
        }
        registers_pin(p);
        registers_pin(o[t]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::KEYS / 16; i++)
            wgmma_registers<false>(o[t], p + 4 * i, descriptor_at(stage, C::STEP_BYTES + 2048 * i),
                                   1);
        wgmma_commit();
    }
    // Any of the warp's 16 rows of the tile.
    __device__ __forceinline__ bool has_rows(int t) const {
        return 64 * t + thread / 32 * 16 < r.qo_len * a.group_size;
    }
    // Some row does not see some key.
    __device__ __forceinline__ bool is_masked(int first_key) const {
        return first_key < keys.all.begin || first_key + C::KEYS > keys.all.end;
    }
    // V that was NaN and is 0 in shared memory, for the rows that see it.
    __device__ __noinline__ static void spoil(const kv8_kernel_args &a, const Request &r, int row,
                                              int first_key, const uint16_t (*sick)[C::DIM / 16],
                                              uint32_t (&found)[2]) {
        KeyRange seen = visible_keys(a, r, divide(row, a.by_group));
        if (C::HAS_MASK && row >= r.qo_len * a.group_size) seen.end = 0;
        found[0] = found[1] = 0;
        for (int key = max(seen.begin - first_key, 0); key < min(seen.end - first_key, C::KEYS);
             key++) {
            if (C::HAS_MASK && !mask_bit(a, r, divide(row, a.by_group), first_key + key)) continue;
            found[0] |= sick[key][0] | uint32_t(sick[key][1]) << 16;
            found[1] |= sick[key][2] | uint32_t(sick[key][3]) << 16;
        }
    }
    __device__ __forceinline__ void add_nan(int first_key, const uint16_t (*sick)[C::DIM / 16]) {
#pragma unroll
        for (int t = 0; t < C::TILES; t++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 64 * t + lane_row + 8 * i;
                uint32_t found[2];
                spoil(a, r, row, first_key, sick, found);
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    const int dim = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
                    if (found[dim / 32] >> dim % 32 & 1) o[t][j / 2 * 4 + 2 * i + j % 2] = NAN;
                }
            }
    }

    float o[C::TILES][32], top[C::TILES][2], sum[C::TILES][2];
    const kv8_kernel_args &a;
    const Request &r;
    const WideKeys &keys;
    const WideMask<C> &mask_bits;
    const int thread, lane_row;

   private:
    __device__ __forceinline__ void mask(int t, int first_key, float (&s)[C::KEYS / 2]) const {
        if constexpr (C::HAS_MASK) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 64 * t + lane_row + 8 * i, token = divide(row, a.by_group);
#pragma unroll
                for (int word = 0; word < C::KEYS / 32; word++) {
                    uint32_t seen = 0;
                    if (token < r.qo_len)
                        seen = mask_bits.seen_keys(keys, token, first_key + 32 * word);
                    seen >>= threadIdx.x % 4 * 2;
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        if ((seen >> (j / 2 * 8 + j % 2) & 1) == 0)
                            s[word * 16 + j / 2 * 4 + 2 * i + j % 2] = -INFINITY;
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 64 * t + lane_row + 8 * i;
                KeyRange seen = visible_keys(a, r, divide(row, a.by_group));
                if (row >= r.qo_len * a.group_size) seen.end = 0;
#pragma unroll
                for (int j = 0; j < C::KEYS / 4; j++) {
                    const int key = first_key + j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
                    if (key < seen.begin || key >= seen.end)
                        s[j / 2 * 4 + 2 * i + j % 2] = -INFINITY;
                }
            }
        }
    }
    // Weights in f16 and a lane's sums of them, relative to each row's reference.
    __device__ __forceinline__ void exponentials(int t, const float (&s)[C::KEYS / 2],
                                                 uint32_t (&p)[C::KEYS / 4],
                                                 float (&add)[2]) const {
        float part[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
        for (int i = 0; i < C::KEYS / 4; i++) {
            const float low = exp2_fast(s[2 * i] - top[t][i % 2]);
            const float high = exp2_fast(s[2 * i + 1] - top[t][i % 2]);
            part[i % 2][0] += low, part[i % 2][1] += high;
            p[i] = pack_f16(low, high);
        }
        add[0] = part[0][0] + part[0][1], add[1] = part[1][0] + part[1][1];
    }
    // A row's reference is found in the first step that it sees and then only where a lane's sum
    // nears f16's end. NaN, whose row is NaN, is no reason to look.
    __device__ __forceinline__ void weigh(int t, const float (&s)[C::KEYS / 2],
                                          uint32_t (&p)[C::KEYS / 4]) {
        constexpr float LIMIT = 2 * LAZY_LIMIT;
        float add[2];
        exponentials(t, s, p, add);
        if (__any_sync(~0u, add[0] >= LIMIT || add[1] >= LIMIT)) {
            raise(t, s);
            exponentials(t, s, p, add);
        }
        sum[t][0] += add[0], sum[t][1] += add[1];
    }
    // The largest weight of a row that has one above LAZY_LIMIT becomes 2^LAZY_TARGET.
    __device__ __forceinline__ void raise(int t, const float (&s)[C::KEYS / 2]) {
        float most[2] = {s[0], s[2]}, keep[2];
#pragma unroll
        for (int i = 0; i < C::KEYS / 2; i++) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float all = quad_max(most[i]);
            const float to =
                exp2_fast(all - top[t][i]) > LAZY_LIMIT ? all - LAZY_TARGET : top[t][i];
            keep[i] = exp2_fast(top[t][i] - to);
            top[t][i] = to;
            sum[t][i] *= keep[i];
        }
#pragma unroll
        for (int i = 0; i < 32; i++) o[t][i] *= keep[i / 2 % 2];
    }
};

// --- queries ---

// Eight threads a row: the block's rows of Q into shared memory in f16, bf16 times a power of two
// that takes its largest value to [2^14, 2^15), and each row's factor. Rows that are not there are
// zeros.
template <class C>
__device__ void store_queries(const kv8_kernel_args &a, const Request &r, int head, uint32_t q,
                              float *factors) {
    const int part = threadIdx.x % 8, num_rows = r.qo_len * a.group_size;
    float scale = a.score_scale;
    if (a.k_scale != nullptr)
        scale *= __ldg(a.k_scale + r.index * a.k_scale_stride_batch + head * a.k_scale_stride_head);
    uint32_t w[C::ROWS / 32][2][2];
#pragma unroll
    for (int i = 0; i < C::ROWS / 32; i++) {
        const int row = 32 * i + threadIdx.x / 8, token = divide(row, a.by_group);
        w[i][0][0] = w[i][0][1] = w[i][1][0] = w[i][1][1] = 0;
        if (row >= num_rows) continue;
        const uint16_t *const from =
            static_cast<const uint16_t *>(a.q) + (r.qo_begin + token) * a.q_stride_row +
            (head * a.group_size + row - token * a.group_size) * a.q_stride_head + part * 8;
        load_four(from, w[i][0]);
        load_four(from + 4, w[i][1]);
    }
#pragma unroll
    for (int i = 0; i < C::ROWS / 32; i++) {
        const int row = 32 * i + threadIdx.x / 8;
        float factor = scale;
        if (a.q_dtype == BF16) factor *= narrow_eight(w[i]);
        if (part == 0) factors[row] = factor;
        const uint32_t x[4] = {w[i][0][0], w[i][0][1], w[i][1][0], w[i][1][1]};
        const uint32_t to = q + row * 128 + (part ^ row % 8) * 16;
        store_shared_16(to, x);
        if (C::TILES == 1 && i == 0) store_shared_16(to + C::Q_BYTES, x);
    }
}

// --- the end ---

// Sums of both warpgroups: each has half of the dims, which the other leaves in shared memory. On
// its way all blocks of the cluster have come.
template <class C>
__device__ __forceinline__ void combine_warpgroups(WideAttention<C> &own, uint8_t *results,
                                                   float2 (*sums)[C::ROWS]) {
    const int warpgroup = threadIdx.x / 128, thread = own.thread;
    float4 *const mine = reinterpret_cast<float4 *>(results + warpgroup * C::WARPGROUP_BYTES);
    const float4 *const others =
        reinterpret_cast<const float4 *>(results + (1 - warpgroup) * C::WARPGROUP_BYTES);
#pragma unroll
    for (int t = 0; t < C::TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float x[4];  // of the half that the other has
#pragma unroll
            for (int j = 0; j < 4; j++)
                x[j] = warpgroup == 0 ? own.o[t][16 + 4 * i + j] : own.o[t][4 * i + j];
            mine[(4 * t + i) * 128 + thread] = make_float4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            own.sum[t][i] = quad_sum(own.sum[t][i]);
            if (thread % 4 == 0)
                sums[warpgroup][64 * t + own.lane_row + 8 * i] =
                    make_float2(own.top[t][i], own.sum[t][i]);
        }
    }
    cluster_wait();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < C::TILES; t++) {
        float keep[2], add[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 of_other = sums[1 - warpgroup][64 * t + own.lane_row + 8 * i];
            const float top = fmaxf(own.top[t][i], of_other.x);
            keep[i] = exp2_fast(own.top[t][i] - top), add[i] = exp2_fast(of_other.x - top);
            own.top[t][i] = top;
            own.sum[t][i] = own.sum[t][i] * keep[i] + of_other.y * add[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 of_other = others[(4 * t + i) * 128 + thread];
            const float x[4] = {of_other.x, of_other.y, of_other.z, of_other.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float mine_too =
                    warpgroup == 0 ? own.o[t][4 * i + j] : own.o[t][16 + 4 * i + j];
                own.o[t][4 * i + j] = mine_too * keep[j / 2] + x[j] * add[j / 2];
            }
        }
    }
}

// A row's 16 float4: of a warpgroup (half of the dims), a pair of columns of eight and a lane c,
// dims 32 * warpgroup + 16 * pair + 2c, + 1, + 8 and + 9.
template <class C>
__device__ __forceinline__ void hand_out_rows(const WideAttention<C> &own, const WideRank<C> &of,
                                              int num_rows, const WideExchange<C> &exchange) {
    const int warpgroup = threadIdx.x / 128, c = threadIdx.x % 4;
    const uint32_t barrier_here = smem_address(&exchange.barrier);
#pragma unroll
    for (int t = 0; t < C::TILES; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 64 * t + own.lane_row + 8 * i;
            if (row >= num_rows) continue;
            const int to = row >> of.row_bits;
            const int at = of.row_begin() + (row & ((1 << of.row_bits) - 1));
            const uint32_t barrier = cluster_address(barrier_here, to);
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const float *const x = own.o[t] + 8 * pair + 2 * i;
                store_cluster(
                    cluster_address(
                        smem_address(&exchange.o[at * 16 + 8 * warpgroup + 4 * pair + c]), to),
                    barrier, make_float4(x[0], x[1], x[4], x[5]));
            }
            if (warpgroup == 0 && c == 0)
                store_cluster(cluster_address(smem_address(&exchange.sums[at]), to), barrier,
                              make_float4(own.top[t][i], own.sum[t][i], 0, 0));
        }
}

// Joins what the block got of its own rows, and writes them.
template <class C>
__device__ __forceinline__ void finish_rows(const kv8_kernel_args &a, const Request &r, int head,
                                            const WideRank<C> &own, int num_own,
                                            const WideExchange<C> &exchange) {
    for (int i = threadIdx.x; i < num_own * 16; i += C::THREADS) {
        const int row = i / 16, quarter = i % 16;
        float max = NO_SCORE, sum = 0;
#pragma unroll 8
        for (int n = 0; n < own.ranks; n++)
            max = fmaxf(max, exchange.sums[(n << own.row_bits) + row].x);
        float4 o = {0, 0, 0, 0};
#pragma unroll 8
        for (int n = 0; n < own.ranks; n++) {
            const int at = (n << own.row_bits) + row;
            const float4 from = exchange.sums[at];
            const float w = exp2_fast(from.x - max);
            sum += from.y * w;
            add_weighted(o, exchange.o[at * 16 + quarter], {w, w});
        }
        const int dim = quarter / 8 * 32 + quarter / 4 % 2 * 16 + quarter % 4 * 2;
        const RowFactor f = row_factor(row_end_or_default(a, exchange.ends[row]), max, sum);
        const RowPlace place = row_place(a, r, head, own.row_begin() + row);
        store_row(a, place.o + dim, f, o.x, o.y);
        store_row(a, place.o + dim + 8, f, o.z, o.w);
        if (a.lse != nullptr && dim == 0) store_lse(a, place.lse, max, sum);
    }
}

template <class C>
__device__ __forceinline__ void wide_cluster_body(const kv8_kernel_args &a) {
    extern __shared__ __align__(1024) uint8_t fixed[];
    __shared__ WideExchange<C> exchange;
    __shared__ WideMask<C> mask;
    launch_dependents();
    const int warp = threadIdx.x / 32, warpgroup = threadIdx.x / 128, head = blockIdx.y;
    const uint32_t barrier = smem_address(&exchange.barrier);
    const WideRank<C> own;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive_first();  // once all have come, their shared memory may be written
    if (warp == 0) {         // while the kernel ahead ends, the page table comes nearer
        const Lengths seen = load_lengths(a, 0);
        const WideKeys early = wide_keys<C>(a, make_request(a, 0, seen), own);
        Split hint = {};
        hint.pages = request_pages(a, 0, seen);
        hint.granule_begin = (early.base + early.step_begin * C::KEYS) / TOKENS;
        hint.granule_end = (early.base + early.step_end * C::KEYS) / TOKENS;
        prefetch_pages(a, hint);
    }
    wait_for_previous();
    mask.start(a);
    const Lengths lengths = load_lengths_once(a, 0, exchange.lengths);
    const Request r = make_request(a, 0, lengths);
    WideKeys keys = wide_keys<C>(a, r, own);
    const int num_rows = r.qo_len * a.group_size, num_own = own.num_rows(num_rows);
    const int first_key = keys.base + (keys.step_begin + warpgroup) * C::KEYS;
    const int count =
        max(keys.step_end - keys.step_begin - warpgroup + C::WARPGROUPS - 1, 0) / C::WARPGROUPS;
    WideLoader<C> loader(a, keys, mask, request_pages(a, 0, lengths), head, first_key);
    mask.find(a, r, keys);
    if (count > 0) loader.fetch();
    if (warp == 0) {
        Split ends;
        ends.request = r, ends.row_begin = own.row_begin(), ends.num_rows = num_own;
        copy_row_ends(a, ends, head, exchange.ends);
    }
    const uint32_t q = smem_address(fixed);
    const uint32_t stages = q + C::ALL_Q_BYTES + warpgroup * C::WARPGROUP_BYTES;
    store_queries<C>(a, r, head, q, exchange.factor);
    WideAttention<C> attention(a, r, keys, mask);
    const auto key_of = [&](int i) { return first_key + i * C::WARPGROUPS * C::KEYS; };
    // Step i, whose codes have come, into shared memory; true where this thread took NaN out of V,
    // of keys that some rows do not see.
    const auto widen_step = [&](int i) {
        bool sick = false;
        if (attention.is_masked(key_of(i)))
            sick = loader.clear_nan(exchange.sick[warpgroup][i % 2]);
        loader.widen(stages + i % 2 * (2 * C::STEP_BYTES));
        fence_stores_before_wgmma();
        return sick;
    };
    // All of the warpgroup have widened step i; true where any thread took NaN out.
    const auto publish = [&](int i, bool sick) {
        if (attention.is_masked(key_of(i))) return named_barrier_any(1 + warpgroup, 128, sick);
        named_barrier_sync(1 + warpgroup, 128);
        return false;
    };
    bool sick = false;
    if (count > 0)
        sick = widen_step(0);
    else
        fence_stores_before_wgmma();
    if (count > 1) loader.fetch();
    __syncthreads();  // Q is there
    if (count > 0) sick = publish(0, sick);
    const bool swaps = attention.thread != int(threadIdx.x % 128);
    const uint32_t q_at = matrix_descriptor(q + (swaps ? C::Q_BYTES / 2 : 0), 16);
    const uint32_t stage_at[2] = {matrix_descriptor(stages, 16),
                                  matrix_descriptor(stages + 2 * C::STEP_BYTES, 16)};
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const bool was_sick = sick;
        uint32_t p[C::TILES][C::KEYS / 4];
#pragma unroll
        for (int t = 0; t < C::TILES; t++)
            attention.start_tile(t, q_at, i % 2 == 0 ? stage_at[0] : stage_at[1], key_of(i),
                                 exchange.factor, p[t]);
        if (i + 1 < count) {
            sick = widen_step(i + 1);
            if (i + 2 < count) loader.fetch();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < C::TILES; t++) {
            registers_pin(attention.o[t]);
            registers_pin(p[t]);  // which the products read until here
        }
        if (__builtin_expect(was_sick, 0))
            attention.add_nan(key_of(i), exchange.sick[warpgroup][i % 2]);
        if (i + 1 < count) sick = publish(i + 1, sick);
    }
    copy_wait_all();
    __syncthreads();  // the steps' shared memory is free
    if (threadIdx.x == 0 && num_own > 0)
        expect_bytes(barrier, own.ranks * num_own * (16 + 1) * sizeof(float4));
    combine_warpgroups<C>(attention, fixed + C::ALL_Q_BYTES, exchange.result);
    hand_out_rows<C>(attention, own, num_rows, exchange);
    if (num_own == 0) return;
    wait_for_bytes(barrier, 0);
    finish_rows<C>(a, r, head, own, num_own, exchange);
}

}  // namespace kv8

#define KV8_DECODE_WIDE_DEFINE(name, format, rows, keys, mask_bytes, fixed_bytes) \
    extern "C" __global__ void __launch_bounds__(256, 2)                          \
        name(const __grid_constant__ kv8_kernel_args a) {                         \
        using config = kv8::WideConfig<kv8::format, rows / 64, keys, mask_bytes>; \
        static_assert(config::FIXED_BYTES == fixed_bytes);                        \
        kv8::wide_cluster_body<config>(a);                                        \
    }
