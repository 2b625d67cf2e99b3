// sampler.cuh - the draw of a token as kv8/engine.h defines it, one row by one block, or by a
// cluster of blocks that hold it in their shared memory: the body of the kernels.
//
// A warp has ids that follow one another, and warps and blocks follow one another too. Whatever is
// summed is a whole number, so that no order shows. Blocks meet in exchange(), which gives all of
// them every block's part; where one must decide, the first block does and tells the others.
//
// A cut looks for the logit at which it falls: mass is counted in buckets of the logits' order,
// from those near the largest on, then in buckets of one bucket, until so few ids are left that
// they can be sorted, or all that are left are equal.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"
#include "sampler_args.h"

namespace kv8 {

using u64 = unsigned long long;

constexpr uint32_t ALL = 0xffffffffu;
constexpr int DRAW_THREADS = KV8_DRAW_THREADS, DRAW_WARPS = KV8_DRAW_WARPS;
constexpr int BUCKETS = DRAW_THREADS, LISTED = DRAW_THREADS; /* one a thread */
constexpr uint32_t NO_BUCKET = ALL;

// --- numbers ---

// Whole numbers in the order of the floats; both zeros are one.
__device__ __forceinline__ uint32_t order_of(float logit) {
    const uint32_t bits = __float_as_uint(logit + 0.0f);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order >> 31 != 0 ? order & 0x7fffffffu : ~order);
}
// Larger for a larger logit, then for a lower id; never 0.
__device__ __forceinline__ u64 key_of(float logit, int32_t id) {
    return u64{order_of(logit)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ int32_t id_of(u64 key) {
    return static_cast<int32_t>(~static_cast<uint32_t>(key));
}
__device__ __forceinline__ float logit_of(u64 key) {
    return value_of(static_cast<uint32_t>(key >> 32));
}

// v_exp of math_tmpl.h for -25 <= x <= 0, operation by operation, times 2^36, rounded down: the
// mantissa, shifted.
__device__ __forceinline__ u64 weight_of(float logit, float high, float factor) {
    const float x = __fmul_rn(__fsub_rn(logit, high), factor);
    if (!(x >= -25.0f)) return 0;
    const float n = rintf(__fmul_rn(x, 1.44269504f));
    float r = __fadd_rn(__fmul_rn(n, -0.693359375f), x);
    r = __fadd_rn(__fmul_rn(n, 2.12194440e-4f), r);
    float p = 1.0f / 5040;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    const uint32_t bits = __float_as_uint(p);
    const u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
    const int exponent = static_cast<int>(bits >> 23) - 127 + static_cast<int>(n);
    return mantissa << 13 >> -exponent;
}

// --- a row ---

struct Slot {
    u64 a, b;
};
// What the first block decided of a cut.
struct Choice {
    u64 before;       // mass above the bucket, or of all that was looked at
    u64 mass;         // of the bucket; of a list: all that stays
    u64 key;          // of a list: the last that stays
    uint32_t bucket;  // NO_BUCKET: below what was looked at
    uint32_t count;   // ids in it
};
struct Board {
    Slot slots[2][KV8_DRAW_BLOCKS];  // a part from every block, of two exchanges in turn
    Slot warps[DRAW_WARPS];
    u64 mass[BUCKETS], list[LISTED];
    uint32_t counts[BUCKETS], num_listed;
    Choice choice;
};

template <bool CLUSTER>
struct Row {
    const kv8_draw_args &a;
    const kv8_draw_row &how;
    Board &board;
    float *x;              // of this block's ids, from `begin` on
    const uint32_t *mask;  // nullptr: none, or not now
    int32_t begin, end, warp_begin, warp_end;
    uint32_t rank, turn;

    static __device__ __forceinline__ uint32_t num_blocks() {
        if constexpr (CLUSTER) return KV8_DRAW_BLOCKS;
        return 1;
    }
    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
    static __device__ __forceinline__ void sync() {
        if constexpr (CLUSTER) {
            __syncwarp();
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
    }
    // What lies at `mine` in another block.
    template <typename T>
    static __device__ __forceinline__ T *at(T *mine, uint32_t rank) {
        if constexpr (CLUSTER) {
            u64 there;
            asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(rank));
            return reinterpret_cast<T *>(there);
        }
        return mine;
    }

    // what(id, logit) for this thread's ids.
    template <typename WHAT>
    __device__ __forceinline__ void for_mine(const WHAT &what) const {
        if (mask != nullptr) {
            for (int32_t i = warp_begin + lane(); i < warp_end; i += 32)
                what(i, mask[i / 32] >> i % 32 & 1 ? x[i - begin] : -INFINITY);
        } else {
#pragma unroll 4
            for (int32_t i = warp_begin + lane(); i < warp_end; i += 32) what(i, x[i - begin]);
        }
    }

    // The parts of all threads of all blocks, joined. Parts of this block's warps stay in
    // board.warps, those of the blocks in slots().
    template <typename JOIN>
    __device__ __forceinline__ Slot exchange(Slot mine, const JOIN &join) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            mine = join(mine,
                        {__shfl_xor_sync(ALL, mine.a, step), __shfl_xor_sync(ALL, mine.b, step)});
        if (lane() == 0) board.warps[warp()] = mine;
        __syncthreads();
        mine = board.warps[lane() % DRAW_WARPS];
#pragma unroll
        for (int step = DRAW_WARPS / 2; step > 0; step /= 2)
            mine = join(mine,
                        {__shfl_xor_sync(ALL, mine.a, step), __shfl_xor_sync(ALL, mine.b, step)});
        turn ^= 1;
        if (threadIdx.x < num_blocks()) *at(&board.slots[turn][rank], threadIdx.x) = mine;
        sync();
        Slot all = board.slots[turn][0];
        for (uint32_t r = 1; r < num_blocks(); r++) all = join(all, board.slots[turn][r]);
        return all;
    }
    template <typename VALUE>
    __device__ __forceinline__ u64 sum(const VALUE &value) {
        u64 mine = 0;
        for_mine([&](int32_t i, float l) { mine += value(i, l); });
        return exchange({mine, 0}, [](Slot p, Slot q) { return Slot{p.a + q.a, 0}; }).a;
    }
    // The first id at which the running sum exceeds `target`, below the sum that sum() has just
    // given: in the threads of one warp of all, the others get -1.
    template <typename VALUE>
    __device__ __forceinline__ int32_t find(const VALUE &value, u64 target) const {
        for (uint32_t r = 0; r < rank; r++) {
            const u64 part = board.slots[turn][r].a;
            if (target < part) return -1;
            target -= part;
        }
        for (int w = 0; w < warp(); w++) {
            const u64 part = board.warps[w].a;
            if (target < part) return -1;
            target -= part;
        }
        if (target >= board.warps[warp()].a) return -1;
        for (int32_t first = warp_begin;; first += 32) {
            const int32_t i = first + lane();
            u64 up_to = 0;
            if (i < warp_end) {
                const bool may = mask == nullptr || (mask[i / 32] >> i % 32 & 1) != 0;
                up_to = value(i, may ? x[i - begin] : -INFINITY);
            }
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const u64 other = __shfl_up_sync(ALL, up_to, step);
                if (lane() >= step) up_to += other;
            }
            const uint32_t beyond = __ballot_sync(ALL, up_to > target);
            if (beyond != 0) return first + __ffs(beyond) - 1;
            target -= __shfl_sync(ALL, up_to, 31);
        }
    }

    // --- cuts ---

    // The sum of m over this block's threads up to this one.
    __device__ __forceinline__ u64 sum_up_to(u64 m) const {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(ALL, m, step);
            if (lane() >= step) m += other;
        }
        if (lane() == 31) board.warps[warp()].a = m;
        __syncthreads();
        for (int w = 0; w < warp(); w++) m += board.warps[w].a;
        __syncthreads();
        return m;
    }
    // The first block's choice to all.
    __device__ __forceinline__ Choice tell() const {
        if (rank == 0) {
            __syncthreads();
            if (threadIdx.x > 0 && threadIdx.x < num_blocks())
                *at(&board.choice, threadIdx.x) = board.choice;
        }
        sync();
        return board.choice;
    }
    // Mass of the ids from order `low` to `high`, in buckets; which of them the limit falls into.
    template <typename VALUE>
    __device__ __forceinline__ Choice count_buckets(const VALUE &value, uint32_t low, uint32_t high,
                                                    int shift, u64 before, u64 limit) {
        for_mine([&](int32_t i, float l) {
            const uint32_t order = order_of(l);
            if (order < low || order > high) return;
            const u64 mass = value(i, l);
            if (mass == 0) return;
            atomicAdd(&board.mass[(order - low) >> shift], mass);
            atomicAdd(&board.counts[(order - low) >> shift], 1);
        });
        __syncthreads();
        const uint32_t bucket = BUCKETS - 1 - threadIdx.x;
        if (rank != 0 && board.counts[bucket] != 0) {
            atomicAdd(at(&board.mass[bucket], 0), board.mass[bucket]);
            atomicAdd(at(&board.counts[bucket], 0), board.counts[bucket]);
            board.mass[bucket] = 0;
            board.counts[bucket] = 0;
        }
        sync();
        if (rank == 0) {
            const u64 mass = board.mass[bucket], up_to = before + sum_up_to(mass);
            if (up_to >= limit && up_to - mass < limit)
                board.choice = {up_to - mass, mass, 0, bucket, board.counts[bucket]};
            else if (threadIdx.x == DRAW_THREADS - 1 && up_to < limit)
                board.choice = {up_to, 0, 0, NO_BUCKET, 0};
            board.mass[bucket] = 0;
            board.counts[bucket] = 0;
        }
        return tell();
    }
    // The first block's list, by falling key.
    __device__ __forceinline__ void sort_list(uint32_t num) const {
        uint32_t size = 2;
        while (size < num) size *= 2;
        for (uint32_t i = num + threadIdx.x; i < size; i += DRAW_THREADS) board.list[i] = 0;
        __syncthreads();
        for (uint32_t run = 2; run <= size; run *= 2) {
            for (uint32_t step = run / 2; step > 0; step /= 2) {
                const uint32_t i = 2 * threadIdx.x - threadIdx.x % step, k = i + step;
                if (threadIdx.x < size / 2) {
                    const u64 p = board.list[i], q = board.list[k];
                    if ((p < q) == ((i & run) == 0)) {
                        board.list[i] = q;
                        board.list[k] = p;
                    }
                }
                __syncthreads();
            }
        }
    }
    // Those that `takes` says, LISTED at most, to the first block's list, sorted there.
    template <typename TAKES>
    __device__ __forceinline__ uint32_t list(const TAKES &takes) {
        for_mine([&](int32_t i, float l) {
            if (!takes(i, l)) return;
            const uint32_t to = atomicAdd(at(&board.num_listed, 0), 1);
            *at(&board.list[to], 0) = key_of(l, i);
        });
        sync();
        if (rank != 0) return 0;
        const uint32_t num = board.num_listed;
        sort_list(num);
        if (threadIdx.x == 0) board.num_listed = 0;
        return num;
    }
    // Of the ids from order low to high, LISTED at most, among which the limit falls.
    template <typename VALUE>
    __device__ __forceinline__ Choice cut_list(const VALUE &value, uint32_t low, uint32_t high,
                                               u64 before, u64 limit) {
        const uint32_t num = list([&](int32_t i, float l) {
            const uint32_t order = order_of(l);
            return order >= low && order <= high && value(i, l) != 0;
        });
        if (rank == 0) {
            const u64 key = threadIdx.x < num ? board.list[threadIdx.x] : 0;
            const u64 mass = threadIdx.x < num ? value(id_of(key), logit_of(key)) : 0;
            const u64 up_to = before + sum_up_to(mass);
            if (up_to >= limit && up_to - mass < limit) board.choice = {before, up_to, key, 0, num};
        }
        return tell();
    }
    // Of equals that are too many to list.
    template <typename VALUE>
    __device__ __forceinline__ Choice cut_equals(const VALUE &value, uint32_t order,
                                                 const Choice &in, u64 limit) {
        const u64 each = in.mass / in.count, stay = (limit - in.before + each - 1) / each;
        const auto is_one = [&](int32_t i, float l) {
            return u64{order_of(l) == order && value(i, l) != 0};
        };
        sum(is_one);
        const int32_t last = find(is_one, stay - 1);
        if (last >= 0 && lane() < num_blocks())
            *at(&board.choice, lane()) = {in.before, in.before + stay * each,
                                          u64{order} << 32 | ~static_cast<uint32_t>(last), 0,
                                          in.count};
        sync();
        return board.choice;
    }
    // The ids that stay when, by falling logit and rising id, those go before which `limit` or more
    // of mass stands: all with this key or a larger one. `near`: order from which most of it lies.
    // *mass_out: of all that stay.
    template <typename VALUE>
    __device__ __forceinline__ u64 cut(const VALUE &value, u64 limit, uint32_t near, uint32_t top,
                                       u64 *mass_out) {
        uint32_t low = near, high = top;
        u64 before = 0;
        for (;;) {
            const int shift = max(0, 32 - __clz(high - low) - (31 - __clz(BUCKETS)));
            const Choice in = count_buckets(value, low, high, shift, before, limit);
            before = in.before;
            if (in.bucket == NO_BUCKET) {
                *mass_out = before;
                if (low == 0) return 0;  // all stay
                high = low - 1;
                low = 0;
                continue;
            }
            low += in.bucket << shift;
            high = min(high, low + (1u << shift) - 1);
            if (in.count > LISTED && low < high) continue;
            const Choice last = in.count <= LISTED ? cut_list(value, low, high, before, limit)
                                                   : cut_equals(value, low, in, limit);
            *mass_out = last.mass;
            return last.key;
        }
    }
};

// --- the stages ---

// The row's logits to where its blocks work; the largest, and the first that is not finite.
struct Extremes {
    u64 key;
    int32_t bad_id;
};
template <bool CLUSTER>
__device__ __forceinline__ Extremes open_row(Row<CLUSTER> &row, const float *logits) {
    float best = 0;
    int32_t at = -1, bad = INT32_MAX;
#pragma unroll 8
    for (int32_t i = row.warp_begin + row.lane(); i < row.warp_end; i += 32) {
        const float l = CLUSTER ? __ldcs(logits + i) : logits[i];
        if (CLUSTER) row.x[i - row.begin] = l;
        if (at < 0 || l > best) {
            best = l;
            at = i;
        }
        if (!isfinite(l)) bad = min(bad, i);
    }
    const u64 key = at < 0 ? 0 : key_of(best, at);
    const Slot all = row.exchange({key, static_cast<u64>(bad)}, [](Slot p, Slot q) {
        return Slot{p.a > q.a ? p.a : q.a, p.b < q.b ? p.b : q.b};
    });
    return {all.a, all.b == INT32_MAX ? -1 : static_cast<int32_t>(all.b)};
}

template <bool CLUSTER>
__device__ __forceinline__ u64 largest(Row<CLUSTER> &row) {
    u64 key = 0;
    row.for_mine([&](int32_t i, float l) {
        const u64 other = key_of(l, i);
        key = other > key ? other : key;
    });
    return row.exchange({key, 0}, [](Slot p, Slot q) { return Slot{p.a > q.a ? p.a : q.a, 0}; }).a;
}

// Bias and penalties, or what was there before.
__device__ __forceinline__ float changed(const kv8_draw_row &how, const kv8_draw_change &change,
                                         float l) {
    l = __fadd_rn(l, change.bias);
    if (change.count != 0 && how.repetition != 0)
        l = l > 0 ? __fdiv_rn(l, how.repetition) : __fmul_rn(l, how.repetition);
    if (change.count > 0) {
        l = __fsub_rn(l, __fmul_rn(how.frequency, static_cast<float>(change.count)));
        l = __fsub_rn(l, how.presence);
    }
    return isnan(l) ? -INFINITY : l;
}
template <bool CLUSTER>
__device__ __forceinline__ void change(const Row<CLUSTER> &row, bool back) {
    kv8_draw_change *const changes = row.a.changes + row.how.first_change;
    for (int32_t i = threadIdx.x; i < row.how.num_changes; i += DRAW_THREADS) {
        const int32_t id = changes[i].id;
        if (id < row.begin || id >= row.end) continue;
        float *const l = row.x + (id - row.begin);
        if (back) {
            *l = changes[i].before;
        } else {
            changes[i].before = *l;
            *l = changed(row.how, changes[i], *l);
        }
    }
    __syncthreads();
}

// The order from which on ids have more than a three-thousandth of the largest's weight.
__device__ __forceinline__ uint32_t near_order(float high, float factor) {
    return min(order_of(high), order_of(high - 8.0f / factor));
}

// The token, in the threads of the warp that has it; the others get -1.
template <bool CLUSTER>
__device__ __forceinline__ int32_t draw(Row<CLUSTER> &row, u64 best) {
    const kv8_draw_row &how = row.how;
    const float high = logit_of(best);
    if (how.factor == 0 || !isfinite(high)) {
        const int32_t id = id_of(best);
        return id >= row.warp_begin && id < row.warp_end ? id : -1;
    }
    const uint32_t top = order_of(high), near = near_order(high, how.factor);
    const auto weight = [&](int32_t, float l) { return weight_of(l, high, how.factor); };
    u64 last = 0, mass = 0;  // keys from `last` on stay
    if (how.top_k > 0) {
        const auto is_one = [&](int32_t i, float l) { return u64{weight(i, l) != 0}; };
        last = row.cut(is_one, how.top_k, near, top, &mass);
    }
    const auto kept = [&](int32_t i, float l) { return key_of(l, i) >= last ? weight(i, l) : 0; };
    if (how.top_p != 0) {
        const u64 part = __umul64hi(row.sum(kept), how.top_p);
        const u64 key = row.cut(kept, part > 0 ? part : 1, near, top, &mass);
        last = key > last ? key : last;
    }
    const auto stays = [&](int32_t i, float l) {
        const u64 w = kept(i, l);
        return w >= how.least ? w : 0;
    };
    const u64 sum = row.sum(stays);
    return row.find(stays, __umul64hi(sum, how.random));
}

// The sum of all weights, and the likeliest ids, of the model's own logits.
template <bool CLUSTER>
__device__ __forceinline__ void log_row(Row<CLUSTER> &row, float high, kv8_drawn_row *out) {
    const u64 sum = row.sum([&](int32_t, float l) { return weight_of(l, high, 1.0f); });
    if (row.rank == 0 && threadIdx.x == 0) out->sum = sum;
    if (row.how.num_tops == 0) return;
    u64 mass;
    const auto one = [](int32_t, float) { return u64{1}; };
    const u64 last = row.cut(one, row.how.num_tops, near_order(high, 1.0f), order_of(high), &mass);
    row.list([&](int32_t i, float l) { return key_of(l, i) >= last; });
    if (row.rank == 0 && threadIdx.x < row.how.num_tops) {
        const u64 key = row.board.list[threadIdx.x];
        out->tops[threadIdx.x] = {id_of(key), logit_of(key)};
    }
}

extern __shared__ float held_logits[];

template <bool CLUSTER>
__device__ __forceinline__ void draw_row(const kv8_draw_args &a) {
    __shared__ Board board;
    const uint32_t rank = blockIdx.x % Row<CLUSTER>::num_blocks();
    const uint32_t idx = blockIdx.x / Row<CLUSTER>::num_blocks();
    const kv8_draw_row how = a.rows[idx];
    float *const logits = a.logits + int64_t{how.logits_row} * a.vocab_size;
    const int32_t begin = min(static_cast<int32_t>(rank) * DRAW_WARPS * a.warp_ids, a.vocab_size);
    Row<CLUSTER> row = {a, how, board, CLUSTER ? held_logits : logits + begin, nullptr, begin};
    row.end = min(begin + DRAW_WARPS * a.warp_ids, a.vocab_size);
    row.warp_begin = min(begin + row.warp() * a.warp_ids, row.end);
    row.warp_end = min(row.warp_begin + a.warp_ids, row.end);
    row.rank = rank;
    board.mass[threadIdx.x] = 0;
    board.counts[threadIdx.x] = 0;
    if (threadIdx.x == 0) board.num_listed = 0;
    row.sync();  // others may write to this block's board from here on
    const Extremes own = open_row(row, logits);
    kv8_drawn_row *const out = a.drawn + idx;
    if (rank == 0 && threadIdx.x == 0) {
        out->bad_id = own.bad_id;
        out->bad = own.bad_id < 0 ? 0 : logits[own.bad_id];
        out->high = logit_of(own.key);
    }
    if (own.bad_id < 0) {  // else nothing can be drawn
        u64 best = own.key;
        if (how.mask >= 0) row.mask = a.masks + int64_t{how.mask} * ((a.vocab_size + 31) / 32);
        change(row, false);
        if (how.num_changes > 0 || how.mask >= 0) best = largest(row);
        const int32_t token = draw(row, best);
        row.mask = nullptr;
        __syncthreads();
        change(row, true);
        if (token >= 0 && row.lane() == 0) {
            out->token = token;
            out->logit = row.x[token - begin];
        }
        if (how.num_tops >= 0) log_row(row, logit_of(own.key), out);
    }
    row.sync();  // others may still write to this block's board
}

}  // namespace kv8
