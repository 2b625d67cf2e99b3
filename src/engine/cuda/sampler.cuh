// sampler.cuh - the draw of a token as kv8/engine.h defines it, one row by one block, or by a
// cluster of blocks: the body of the kernels, stage by stage.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "sampler_row.cuh"
#include "take_turn.cuh"

namespace kv8 {

// The largest logit of this thread, and its id's key among all.
struct Largest {
    float top;
    u64 key;
};

// A row's settings, on their way from the host's memory to the first block while the row is opened:
// a word each of as many threads, which then gives it to all blocks.
constexpr uint32_t HOW_WORDS = sizeof(kv8_draw_row) / 4;
struct Asked {
    uint32_t *how;  // of this block
    uint32_t word = 0;
    bool mine;
    __device__ __forceinline__ Asked(kv8_draw_row *how, const kv8_draw_row *row, uint32_t rank)
        : how(reinterpret_cast<uint32_t *>(how)), mine(rank == 0 && threadIdx.x < HOW_WORDS) {
        if (mine)
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                         : "=r"(word)
                         : "l"(reinterpret_cast<const uint32_t *>(row) + threadIdx.x));
    }
    // They have it once the blocks have met.
    template <bool CLUSTER>
    __device__ __forceinline__ void tell(const Row<CLUSTER> &row) const {
        if (!mine) return;
        for (uint32_t r = 0; r < row.num_blocks(); r++) *row.at(how + threadIdx.x, r) = word;
    }
};

// The row's logits to where its blocks work; the first that is not finite, -1 = none.
struct Opened {
    Largest largest;
    int32_t bad_id;
};
template <bool CLUSTER>
__device__ __forceinline__ Opened open_row(Row<CLUSTER> &row, const float *logits,
                                           const Asked &asked) {
    float top = -INFINITY, spoiled = 0;
    int32_t id = -1, bad = INT32_MAX;
#pragma unroll 16
    for (int32_t i = row.warp_begin + row.lane(); i < row.warp_end; i += 32) {
        const float l = CLUSTER ? __ldcs(logits + i) : logits[i];
        if (CLUSTER) row.x[i - row.begin] = l;
        spoiled = fmaf(l, 0.0f, spoiled);
        if (l > top) {
            top = l;
            id = i;
        }
    }
    if (spoiled != 0) {
        row.for_mine([&](int32_t i, float l) {
            if (!isfinite(l)) bad = min(bad, i);
        });
    }
    const u64 key = id < 0 ? 0 : key_of(top, id);
    asked.tell(row);
    const Slot all = row.exchange({key, static_cast<u64>(bad)}, [](Slot p, Slot q) {
        return Slot{p.a > q.a ? p.a : q.a, p.b < q.b ? p.b : q.b};
    });
    return {{top, all.a}, all.b == INT32_MAX ? -1 : static_cast<int32_t>(all.b)};
}

// The largest logit's key from the maxima of pieces; 0: a logit is not finite.
constexpr int HALF_PIECE = KV8_DRAW_PIECE / 2;
static_assert(HALF_PIECE == 32, "a lane has two ids of a piece");
__device__ __forceinline__ u64 key_by_maxima(Row<false> &row, const float *logits,
                                             const float *maxima, const Asked &asked) {
    const int32_t num = row.a.vocab_size / KV8_DRAW_PIECE;
    u64 key = 0;
    float spoiled = 0;
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < num; i += DRAW_THREADS) {
        const float top = maxima[i];
        spoiled = fmaf(top, 0.0f, spoiled);
        key = max(key, key_of(top, i));
    }
    asked.tell(row);
    const Slot all = row.exchange({key, spoiled != 0}, [](Slot p, Slot q) {
        return Slot{p.a > q.a ? p.a : q.a, p.b | q.b};
    });
    if (all.b != 0) return 0;
    // The first of the piece's ids that has it, which every warp looks for.
    const float top = logit_of(all.a);
    const int32_t first = id_of(all.a) * KV8_DRAW_PIECE, own = first + row.lane();
    const uint32_t low = __ballot_sync(ALL, logits[own] == top),
                   high = __ballot_sync(ALL, logits[own + HALF_PIECE] == top);
    return key_of(top, first + (low != 0 ? __ffs(low) - 1 : HALF_PIECE + __ffs(high) - 1));
}

template <bool CLUSTER>
__device__ __forceinline__ Largest largest(Row<CLUSTER> &row) {
    float top = -INFINITY;
    int32_t id = -1;
    row.for_mine([&](int32_t i, float l) {
        if (id >= 0 && !(l > top)) return;
        top = l;
        id = i;
    });
    const u64 key = id < 0 ? 0 : key_of(top, id);
    return {top, row.exchange({key, 0},
                              [](Slot p, Slot q) {
                                  return Slot{p.a > q.a ? p.a : q.a, 0};
                              })
                     .a};
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
        if (id < row.begin || id >= row.begin + DRAW_WARPS * row.a.warp_ids) continue;
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

// The token, drawn or given, in the threads of a warp; the others get -1.
template <bool CLUSTER>
__device__ __forceinline__ int32_t draw(Row<CLUSTER> &row, const Largest &best) {
    const kv8_draw_row &how = row.how;
    const float high = logit_of(best.key);
    const bool first_warp = row.rank == 0 && row.warp() == 0;
    if (how.token >= 0) return first_warp ? how.token : -1;
    if (how.factor == 0 || !isfinite(high)) return first_warp ? id_of(best.key) : -1;
    const auto weight = [&](int32_t, float l) { return weight_of(l, high, how.factor); };
    const bool has_cuts = how.top_k > 0 || how.top_p != 0 || how.least != 0;
    u64 sum = 0, last = 0;  // of all; keys from `last` on stay
    if (how.top_k == 0 && (how.top_p != 0 || !has_cuts)) sum = row.sum_weights(high, how.factor);
    typename Row<CLUSTER>::Start start = {0, order_of(high), 0};
    if (has_cuts) {
        row.count_levels(best.top, high, how.factor, 0);
        const float few = row.reach_of(how.top_k, max(how.top_k, FEW), 0);
        const uint32_t half = row.num_blocks() * DRAW_THREADS / 2;
        start.reach = max(row.reach_of(0, half, 0), few + LEVEL_REACH);
        if (few != 0) {
            const float level = high - few / how.factor;
            const Choice drawn = row.draw_few(weight, level, sum);
            if (drawn.bucket != NO_TOKEN)
                return first_warp ? static_cast<int32_t>(drawn.bucket) : -1;
            if (drawn.before != 0) {
                start.before = drawn.before;
                start.high = order_of(level) - 1;
            }
        }
    }
    bool by_weight = how.top_k == 0;
    const auto kept = [&](int32_t i, float l) { return key_of(l, i) >= last ? weight(i, l) : 0; };
    const auto mass = [&](int32_t i, float l) {
        const u64 w = kept(i, l);
        return by_weight ? w : u64{w != 0};
    };
#pragma unroll 1
    for (;; by_weight = true) {
        if (by_weight && how.top_p == 0) break;
        if (by_weight && how.top_k > 0) sum = row.sum(kept);
        const u64 limit = by_weight ? max(__umul64hi(sum, how.top_p), u64{1}) : how.top_k;
        last = max(last, row.cut(mass, limit, start, high, how.factor));
        if (by_weight) break;
    }
    const auto stays = [&](int32_t i, float l) {
        const u64 w = kept(i, l);
        return w >= how.least ? w : 0;
    };
    if (has_cuts) sum = row.sum(stays);
    return row.find(stays, __umul64hi(sum, how.random));
}

// The sum of all weights, and the likeliest ids, of the model's own logits.
template <bool CLUSTER>
__device__ __forceinline__ void log_row(Row<CLUSTER> &row, kv8_drawn_row *out,
                                        kv8_drawn_top *tops) {
    const Largest own = largest(row);
    const float high = logit_of(own.key);
    const u64 sum = row.sum_weights(high, 1.0f);
    if (row.rank == 0 && threadIdx.x == 0) out->sum = sum;
    if (row.how.num_tops == 0) return;
    row.count_levels(own.top, high, 1.0f, 1);
    const float few = row.reach_of(row.how.num_tops, LISTED, 1);
    uint32_t num = LISTED + 1;
    if (few != 0) num = row.list_few(high - few);
    if (num > LISTED) {
        const auto one = [](int32_t, float) { return u64{1}; };
        const u64 last = row.cut(one, row.how.num_tops, {0, order_of(high), 8}, high, 1.0f);
        num = row.list([&](int32_t i, float l) { return key_of(l, i) >= last; });
    }
    if (row.rank != 0) return;
    const u64 key = row.board.list[threadIdx.x];
    const u64 at = row.mass_above(key, 1, num);
    if (threadIdx.x < num && at < row.how.num_tops) tops[at] = {id_of(key), logit_of(key)};
}

extern __shared__ __align__(16) float held_logits[];

template <bool CLUSTER>
__device__ __forceinline__ void draw_row(const kv8_draw_args &a) {
    __shared__ Board board;
    __shared__ kv8_draw_row how;
    const uint32_t rank = blockIdx.x % Row<CLUSTER>::num_blocks();
    const uint32_t idx = blockIdx.x / Row<CLUSTER>::num_blocks();
    float *const logits = a.logits + int64_t{idx} * a.vocab_size;
    const Asked asked(&how, a.rows + idx, rank);
    const int32_t begin = min(static_cast<int32_t>(rank) * DRAW_WARPS * a.warp_ids, a.vocab_size);
    Row<CLUSTER> row = {a, how, board, CLUSTER ? held_logits : logits + begin, false, begin};
    row.warp_begin = min(begin + row.warp() * a.warp_ids, a.vocab_size);
    row.warp_end = min(row.warp_begin + a.warp_ids, a.vocab_size);
    row.rank = rank;
    board.mass[threadIdx.x] = 0;
    board.counts[threadIdx.x] = 0;
    if (threadIdx.x < 2 * LEVELS) {
        board.reached_here[threadIdx.x / LEVELS][threadIdx.x % LEVELS] = 0;
        board.reached[threadIdx.x / LEVELS][threadIdx.x % LEVELS] = 0;
    }
    if (threadIdx.x == 0) board.num_listed = 0;
    row.sync();  // others may write to this block's board from here on
    await_turn();
    Opened own = {{0, 0}, -1};  // threads' own largest are for cuts alone
    if constexpr (!CLUSTER) {
        const int64_t pieces = a.vocab_size / KV8_DRAW_PIECE;
        if (a.maxima != nullptr)
            own.largest.key = key_by_maxima(row, logits, a.maxima + idx * pieces, asked);
    }
    if (own.largest.key == 0) own = open_row(row, logits, asked);
    kv8_drawn_row *const out = a.drawn + idx;
    if (rank == 0 && threadIdx.x == 0) {
        out->bad_id = own.bad_id;
        out->bad = own.bad_id < 0 ? 0 : logits[own.bad_id];
        out->high = logit_of(own.largest.key);
    }
    if (own.bad_id < 0) {  // else nothing can be drawn
        Largest best = own.largest;
        row.masked = how.mask >= 0;
        change(row, false);
        if (how.num_changes > 0 || row.masked) best = largest(row);
        const int32_t token = draw(row, best);
        row.masked = false;
        __syncthreads();
        change(row, true);
        if (token >= 0 && row.lane() == 0) {
            out->token = token;
            out->logit = a.logits[int64_t{idx} * a.vocab_size + token];
        }
        if (how.num_tops >= 0) log_row(row, out, a.tops[idx]);
    }
    row.sync();  // others may still write to this block's board
}

}  // namespace kv8
