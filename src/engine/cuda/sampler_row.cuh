// sampler_row.cuh - a row of logits that a block has, or a cluster of blocks in their shared
// memory: sums over it, the id that a sum reaches, cuts, and the draw from few ids.
//
// A warp has ids that follow one another, and warps and blocks follow one another too. Whatever is
// summed is a whole number, so that no order shows. Blocks meet in exchange(), which gives all of
// them every block's part; where one must decide, the first block does and tells the others.
//
// A cut looks for the logit at which it falls: mass is counted in buckets of the logits' order,
// from those near the largest on, then in buckets of one bucket, until so few ids are left that
// each is held against all others, or all that are left are equal.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"
#include "sampler_args.h"
#include "sampler_numbers.cuh"

namespace kv8 {

constexpr uint32_t ALL = 0xffffffffu;
constexpr int DRAW_THREADS = KV8_DRAW_THREADS, DRAW_WARPS = KV8_DRAW_WARPS;
constexpr int BUCKETS = DRAW_THREADS, LISTED = DRAW_THREADS; /* one a thread */
constexpr uint32_t NO_BUCKET = ALL, NO_TOKEN = ALL;
constexpr int LEVELS = 32;
constexpr float LEVEL_REACH = 0.5f;
constexpr uint32_t FEW = LISTED / 2;

struct Slot {
    u64 a, b;
};
// What the first block decided of a cut.
struct Choice {
    u64 before;       // mass above the bucket, or of all that was looked at
    u64 mass;         // of the bucket; of a list: all that stays
    u64 key;          // of a list: the last that stays
    uint32_t bucket;  // NO_BUCKET: below what was looked at; of a draw: the token
    uint32_t count;   // ids in it
};
struct Board {
    Slot slots[2][KV8_DRAW_BLOCKS];  // a part from every block, of two exchanges in turn
    Slot warps[DRAW_WARPS];
    u64 mass[BUCKETS], list[LISTED], found[DRAW_WARPS];
    uint32_t counts[BUCKETS], num_listed, listed_from;
    // How many threads have a logit that reaches each level: of this block, of all; of the draw's
    // logits, of the model's own.
    uint32_t reached_here[2][LEVELS], reached[2][LEVELS];
    Choice choice;
};

template <bool CLUSTER>
struct Row {
    const kv8_draw_args &a;
    const kv8_draw_row &how;
    Board &board;
    float *x;     // of this block's ids, from `begin` on
    bool masked;  // now
    int32_t begin, warp_begin, warp_end;
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

    __device__ __forceinline__ float logit(int32_t id) const {
        const uint32_t *const mask = a.masks + int64_t{how.mask} * ((a.vocab_size + 31) / 32);
        return !masked || (mask[id / 32] >> id % 32 & 1) != 0 ? x[id - begin] : -INFINITY;
    }
    // what(id, logit) for this thread's ids; some logits are on their way at once.
    template <typename WHAT>
    __device__ __forceinline__ void for_mine(const WHAT &what) const {
        if (!CLUSTER && !masked) {
            for_mine_ahead(what);
            return;
        }
        constexpr int AT_ONCE = 4;
        for (int32_t i = warp_begin + lane(); i < warp_end; i += 32 * AT_ONCE) {
            float l[AT_ONCE];
            if (masked) {
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    l[k] = i + 32 * k < warp_end ? logit(i + 32 * k) : 0;
            } else {
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++)
                    l[k] = i + 32 * k < warp_end ? x[i + 32 * k - begin] : 0;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (i + 32 * k < warp_end) what(i + 32 * k, l[k]);
            }
        }
    }
    // The same from memory: the next are on their way meanwhile.
    template <typename WHAT>
    __device__ __forceinline__ void for_mine_ahead(const WHAT &what) const {
        constexpr int AT_ONCE = 8;
        float next[AT_ONCE];
        const auto load = [&](int32_t first) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                next[k] = first + 32 * k < warp_end ? x[first + 32 * k - begin] : 0;
        };
        load(warp_begin + lane());
#pragma unroll 1
        for (int32_t i = warp_begin + lane(); i < warp_end; i += 32 * AT_ONCE) {
            float l[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) l[k] = next[k];
            load(i + 32 * AT_ONCE);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (i + 32 * k < warp_end) what(i + 32 * k, l[k]);
            }
        }
    }

    // what(logits) for this thread's ids, eight at once, as -inf where there are none; from memory
    // the next are on their way meanwhile.
    template <typename WHAT>
    __device__ __forceinline__ void for_eights(const WHAT &what) const {
        constexpr int AT_ONCE = 8, STEP = 32 * AT_ONCE;
        float next[AT_ONCE];
        const auto load = [&](int32_t first) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                next[k] = first + 32 * k < warp_end ? x[first + 32 * k - begin] : -INFINITY;
        };
        if (!CLUSTER) load(warp_begin + lane());
#pragma unroll 1
        for (int32_t i = warp_begin + lane(); i < warp_end; i += STEP) {
            float l[AT_ONCE];
            if (CLUSTER) load(i);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) l[k] = next[k];
            if (!CLUSTER) load(i + STEP);
            what(l);
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
    // Of weight_of() the same.
    __device__ __forceinline__ u64 sum_weights(float high, float factor) {
        if (masked) return sum([&](int32_t, float l) { return weight_of(l, high, factor); });
        u64 mine = 0;
        for_eights([&](const float(&l)[8]) { mine += weight_of_all(l, high, factor); });
        return exchange({mine, 0}, [](Slot p, Slot q) { return Slot{p.a + q.a, 0}; }).a;
    }
    // The sum of m over this warp's threads up to this one.
    static __device__ __forceinline__ u64 sum_of_lanes(u64 m) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(ALL, m, step);
            if (lane() >= step) m += other;
        }
        return m;
    }
    // Of the warp's threads the first up to which the sum of parts exceeds `target`, which loses
    // what is before it; none: -1, and target loses all.
    static __device__ __forceinline__ int32_t find_lane(u64 part, u64 &target) {
        const u64 up_to = sum_of_lanes(part);
        const uint32_t beyond = __ballot_sync(ALL, up_to > target);
        const int owner = beyond != 0 ? __ffs(beyond) - 1 : 31;
        target -= __shfl_sync(ALL, beyond != 0 ? up_to - part : up_to, owner);
        return beyond != 0 ? owner : -1;
    }
    // The first id at which the running sum exceeds `target`, below the sum that sum() has just
    // given: in the threads of one warp of all, the others get -1. By all threads.
    template <typename VALUE>
    __device__ __forceinline__ int32_t find(const VALUE &value, u64 target) const {
        const u64 of_block = lane() < num_blocks() ? board.slots[turn][lane()].a : 0;
        if (find_lane(of_block, target) != static_cast<int32_t>(rank)) return -1;
        // All warps share out the ids of the warp that it is among, each thread some in a row.
        const int32_t idx = find_lane(lane() < DRAW_WARPS ? board.warps[lane()].a : 0, target);
        const int32_t first = min(begin + idx * a.warp_ids, a.vocab_size);
        const int32_t end = min(first + a.warp_ids, a.vocab_size);
        const int32_t each = (end - first + DRAW_THREADS - 1) / DRAW_THREADS;
        const int32_t own = first + static_cast<int32_t>(threadIdx.x) * each;
        u64 part = 0;
#pragma unroll 1
        for (int32_t i = own; i < min(own + each, end); i++) part += value(i, logit(i));
        const u64 up_to = sum_of_lanes(part);
        if (lane() == 31) board.found[warp()] = up_to;
        __syncthreads();
        if (find_lane(lane() < DRAW_WARPS ? board.found[lane()] : 0, target) != warp()) return -1;
        int32_t at = __shfl_sync(ALL, own, find_lane(part, target));
        for (;; at += 32) {
            const int32_t i = at + lane();
            const int32_t found = find_lane(i < end ? value(i, logit(i)) : 0, target);
            if (found >= 0) return at + found;
        }
    }

    // --- cuts ---

    // The sums of m over this block's threads up to this one, and over all.
    __device__ __forceinline__ Slot sum_up_to(u64 m) const {
        m = sum_of_lanes(m);
        if (lane() == 31) board.warps[warp()].a = m;
        __syncthreads();
        u64 all = 0;
        for (int w = 0; w < DRAW_WARPS; w++) {
            if (w == warp()) m += all;
            all += board.warps[w].a;
        }
        __syncthreads();
        return {m, all};
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
    // To a bucket of this block, by halves: shared memory adds 32 bits at once.
    __device__ __forceinline__ void add_mass(uint32_t bucket, u64 mass) const {
        uint32_t *const halves = reinterpret_cast<uint32_t *>(&board.mass[bucket]);
        const uint32_t low = static_cast<uint32_t>(mass);
        const uint32_t carry = atomicAdd(halves, low) > ~low;
        const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
        if (high != 0) atomicAdd(halves + 1, high);
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
            add_mass((order - low) >> shift, mass);
            atomicAdd(&board.counts[(order - low) >> shift], 1);
        });
        sync();
        const uint32_t bucket = BUCKETS - 1 - threadIdx.x;
        if (rank == 0) {
            u64 mass = 0;
            uint32_t count = 0;
#pragma unroll 4
            for (uint32_t r = 0; r < num_blocks(); r++) {
                mass += *at(&board.mass[bucket], r);
                count += *at(&board.counts[bucket], r);
            }
            const u64 up_to = before + sum_up_to(mass).a;
            if (up_to >= limit && up_to - mass < limit)
                board.choice = {up_to - mass, mass, 0, bucket, count};
            else if (threadIdx.x == DRAW_THREADS - 1 && up_to < limit)
                board.choice = {up_to, 0, 0, NO_BUCKET, 0};
        }
        const Choice choice = tell();
        board.mass[bucket] = 0;
        board.counts[bucket] = 0;
        __syncthreads();
        return choice;
    }
    // Those that `takes` says to the first block's list, in any order; there, how many: more than
    // LISTED are no list.
    template <typename TAKES>
    __device__ __forceinline__ uint32_t list(const TAKES &takes) {
        for_mine([&](int32_t i, float l) {
            if (!takes(i, l)) return;
            const uint32_t to = atomicAdd(&board.num_listed, 1);
            if (to < LISTED) board.list[to] = key_of(l, i);
        });
        __syncthreads();
        if (rank != 0) {
            const uint32_t num = board.num_listed;
            if (threadIdx.x == 0) board.listed_from = atomicAdd(at(&board.num_listed, 0), num);
            __syncthreads();
            const uint32_t to = board.listed_from + threadIdx.x;
            if (threadIdx.x < num && to < LISTED) *at(&board.list[to], 0) = board.list[threadIdx.x];
        }
        sync();
        const uint32_t num = board.num_listed;
        __syncthreads();
        if (threadIdx.x == 0) board.num_listed = 0;
        return num;
    }
    // Of a list of the first block, whose ids have each thread's `mass`: that of the larger keys.
    __device__ __forceinline__ u64 mass_above(u64 key, u64 mass, uint32_t num) const {
        board.mass[threadIdx.x] = mass;
        __syncthreads();
        u64 above = 0;
#pragma unroll 4
        for (uint32_t i = 0; i < (threadIdx.x < num ? num : 0); i++)
            above += board.list[i] > key ? board.mass[i] : 0;
        __syncthreads();
        board.mass[threadIdx.x] = 0;
        return above;
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
            const u64 above = before + mass_above(key, mass, num);
            if (above < limit && above + mass >= limit)
                board.choice = {before, above + mass, key, 0, num};
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
    // Where a cut begins: ids above order `high` have `before` of mass; `reach`: the logits of the
    // first strip, as the logarithm of the largest weight over theirs.
    struct Start {
        u64 before;
        uint32_t high;
        float reach;
    };
    // The ids that stay when, by falling logit and rising id, those go before which `limit` or more
    // of mass stands: all with this key or a larger one. Ids are looked at in strips of falling
    // weight, so that the many unlikely ones are counted only if they must.
    template <typename VALUE>
    __device__ __forceinline__ u64 cut(const VALUE &value, u64 limit, const Start &start,
                                       float largest, float factor) {
        float reach = start.reach;
        uint32_t high = start.high, low = min(high, order_of(largest - reach / factor));
        u64 before = start.before;
        for (;;) {
            const int shift = max(0, 32 - __clz(high - low) - (31 - __clz(BUCKETS)));
            const Choice in = count_buckets(value, low, high, shift, before, limit);
            before = in.before;
            if (in.bucket == NO_BUCKET) {
                if (low == 0) return 0;  // all stay
                reach += 2;
                high = low - 1;
                low = reach > 26 ? 0 : min(high, order_of(largest - reach / factor));
                continue;
            }
            low += in.bucket << shift;
            high = min(high, low + (1u << shift) - 1);
            if (in.count > LISTED && low < high) continue;
            return in.count <= LISTED ? cut_list(value, low, high, before, limit).key
                                      : cut_equals(value, low, in, limit).key;
        }
    }

    // --- few ids ---

    // Counts how many threads' largest logit, `top`, reaches each level below `high`: most ids that
    // reach a high level are the largest of their thread. `whose`: of board.reached.
    __device__ __forceinline__ void count_levels(float top, float high, float factor,
                                                 int whose) const {
        const float step = LEVEL_REACH / factor;
        uint32_t mine = 0;
#pragma unroll
        for (int i = 0; i < LEVELS; i++) {
            const uint32_t here = __popc(__ballot_sync(ALL, top >= high - step * (i + 1)));
            if (lane() == i) mine = here;
        }
        if (mine != 0) atomicAdd(&board.reached_here[whose][lane()], mine);
        __syncthreads();
        if (warp() < num_blocks())
            atomicAdd(at(&board.reached[whose][lane()], warp()), board.reached_here[whose][lane()]);
        sync();
    }
    // The reach of the first level that `least` threads reach, or (0) of the last that no more than
    // `most` do; 0: of none.
    __device__ __forceinline__ float reach_of(uint32_t least, uint32_t most, int whose) const {
        const uint32_t all = board.reached[whose][lane()];
        const uint32_t good = __ballot_sync(ALL, all >= least && all <= most);
        return LEVEL_REACH * (least > 0 ? __ffs(good) : 32 - __clz(good));
    }
    // The ids that reach `level` to the first block's list; how many.
    __device__ __forceinline__ uint32_t list_few(float level) {
        const uint32_t num = list([&](int32_t, float l) { return l >= level; });
        if (rank == 0 && threadIdx.x == 0) board.choice.count = num;
        return tell().count;
    }
    // Cuts and draws from the first block's list of the `num` ids that reach `level`; where ids
    // that are not listed may stay the choice is NO_TOKEN, and the mass of those that are. `sum`:
    // what top_p is a part of, if there is no top_k.
    template <typename VALUE>
    __device__ __forceinline__ void draw_from_list(const VALUE &weight, float level, u64 sum,
                                                   uint32_t num) const {
        const bool has = threadIdx.x < num;
        const u64 key = has ? board.list[threadIdx.x] : 0;
        u64 mass = has ? weight(id_of(key), logit_of(key)) : 0;
        const u64 above = mass_above(key, mass, num);
        bool all = false;
        if (how.top_k > 0) {
            const u64 ones = mass_above(key, mass != 0, num);
            if (__syncthreads_count(mass != 0) < how.top_k) return;
            if (ones >= how.top_k) mass = 0;
            all = true;
        }
        if (how.top_p != 0) {
            const u64 listed = sum_up_to(mass).b;
            const u64 part = max(__umul64hi(how.top_k > 0 ? listed : sum, how.top_p), u64{1});
            if (listed < part) {
                if (threadIdx.x == 0) board.choice.before = listed;
                return;
            }
            if (above >= part) mass = 0;
            all = true;
        }
        if (mass < how.least) mass = 0;
        const u64 below = weight(0, level);  // no more, but for the rounding of exp
        if (!all && how.least <= below + (below >> 12) + 1) return;
        const u64 order = key & ALL;  // larger for a lower id
        if (has) board.list[threadIdx.x] = order;
        const u64 up_to = mass_above(order, mass, num) + mass;
        const u64 target = __umul64hi(sum_up_to(mass).b, how.random);
        if (up_to > target && up_to - mass <= target)
            board.choice.bucket = static_cast<uint32_t>(id_of(key));
    }
    // The token where the cuts leave none but ids that reach `level`; else NO_TOKEN, and before:
    // the mass of those that do, 0 = unknown.
    template <typename VALUE>
    __device__ __forceinline__ Choice draw_few(const VALUE &weight, float level, u64 sum) {
        const uint32_t num = list([&](int32_t, float l) { return l >= level; });
        if (rank == 0) {
            if (threadIdx.x == 0) board.choice = {0, 0, 0, NO_TOKEN, num};
            __syncthreads();
            if (num <= LISTED) draw_from_list(weight, level, sum, num);
        }
        return tell();
    }
};

}  // namespace kv8
