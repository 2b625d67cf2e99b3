// token_ring.cuh - weights and K and V on their way to one block, and how the blocks of a token
// meet.
//
// One warp copies, all others compute. The copies stand in the order of the whole token, so that
// the ring fills with what the next phase reads while the blocks wait for each other.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ptx_sm90.cuh"
#include "token_args.h"

namespace kv8 {

constexpr int COMPUTE_THREADS = 32 * KV8_TOKEN_WARPS;
constexpr int RING_STAGES = KV8_RING_STAGES;  // the including kernel's

// All computing warps of a block.
__device__ __forceinline__ void meet_warps() {
    named_barrier_sync(1, COMPUTE_THREADS);
}

// A place in the ring, of either side.
struct RingCursor {
    uint32_t ring, full, empty;  // in shared memory
    uint32_t n = 0;              // of uses

    __device__ uint32_t index() const { return n % RING_STAGES; }
    __device__ uint32_t parity() const { return n / RING_STAGES & 1; }
    __device__ uint32_t stage() const { return ring + index() * KV8_TOKEN_STAGE_BYTES; }
    __device__ uint32_t full_barrier() const { return full + index() * 8; }
};

// The computing side.
struct RingReader : RingCursor {
    __device__ uint32_t wait() const {
        barrier_wait(full_barrier(), parity());
        return stage();
    }
    // The warp has read the stage. A stage is empty after as many arrivals as there are warps; one
    // that fewer warps read gets several from each.
    template <int ARRIVALS = 1>
    __device__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty + index() * 8),
                         "n"(ARRIVALS)
                         : "memory");
        n++;
    }
};

// The copying side, one lane. Copies queue in front of the small reads of the critical path: few
// are under way at any time.
struct RingWriter : RingCursor {
    uint64_t policy;
    uint32_t in_flight;

    // The next stage, once it is empty, that `bytes` will come to.
    __device__ uint32_t take(uint32_t bytes) {
        wait();
        expect_bytes(full_barrier(), bytes);
        return stage();
    }
    // The next stage, once it is empty, for copies that a warp starts itself: fill(stage), which
    // each lane's arrival follows.
    template <class FILL>
    __device__ void fill(FILL &&fill) {
        const bool leads = threadIdx.x % 32 == 0;
        if (leads) wait();
        n = __shfl_sync(~0u, n, 0);
        fill(stage());
        asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(full_barrier()) : "memory");
        __syncwarp();
        if (leads) barrier_arrive(full_barrier());
        n++;
    }
    __device__ void copy(uint32_t to, const void *from, uint32_t bytes) const {
        copy_bulk(to, from, bytes, full_barrier(), policy);
    }
    __device__ void put(const void *from, uint32_t bytes) {
        copy(take(bytes), from, bytes);
        n++;
    }

   private:
    __device__ void wait() const {
        barrier_wait(empty + index() * 8, parity() ^ 1);
        if (n < in_flight) return;
        const uint32_t before = n - in_flight;
        barrier_wait(full + before % RING_STAGES * 8, before / RING_STAGES & 1);
    }
};

// --- all blocks ---

// Where blocks meet: some arrive, others wait until enough have. Counts rise over a launch.
struct Meeting {
    uint32_t *word;
    uint32_t expected;

    // A hint, without a fence, that what was handed on has probably come.
    __device__ void call() const {
        meet_warps();
        if (threadIdx.x == 0)
            asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
    }
    __device__ void listen() const {
        uint32_t seen;
        do {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
        } while (static_cast<int32_t>(seen - expected) < 0);
    }
    __device__ void hear() const {
        if (threadIdx.x == 0) listen();
        meet_warps();
    }

    // After everything that the block's computing warps wrote.
    __device__ void arrive() const {
        meet_warps();
        if (threadIdx.x == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
    }
    // Of one thread.
    __device__ void poll() const {
        while (static_cast<int32_t>(load_acquire(word) - expected) < 0) {
        }
    }
    __device__ void wait() const {
        if (threadIdx.x == 0) poll();
        meet_warps();
    }
};

// Words that blocks hand to each other carry in their last bit whose turn they are of, 0 and 1 by
// layers: who needs one reads it until it has come. No fence and no count stand between.
__device__ __forceinline__ void hand_word(void *to, uint32_t word, uint32_t turn) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"((word & ~1u) | turn)
                 : "memory");
}
__device__ __forceinline__ void hand(float *to, float x, uint32_t turn) {
    hand_word(to, __float_as_uint(x), turn);
}

// Neighbours of them, as one load has them.
template <int WORDS>
struct Handed {
    uint32_t w[WORDS];

    __device__ void load(const void *from) {
        static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "words of a load");
        if constexpr (WORDS == 1)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w[0]) : "l"(from));
        else if constexpr (WORDS == 2)
            asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(w[0]), "=r"(w[1])
                         : "l"(from));
        else
            asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                         : "l"(from));
    }
    __device__ bool came(uint32_t turn) const {
        uint32_t other = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) other |= w[i] ^ turn;
        return (other & 1) == 0;
    }
    __device__ float value(int i) const {
        return __uint_as_float(w[i] & ~1u);
    }
};
// Asks for h[i] at at(i), for zeros where that is NULL.
template <int N, int WORDS, class AT>
__device__ __forceinline__ void ask(Handed<WORDS> (&h)[N], uint32_t turn, AT &&at) {
#pragma unroll
    for (int i = 0; i < N; i++) {
#pragma unroll
        for (int k = 0; k < WORDS; k++) h[i].w[k] = turn;
        if (at(i) != nullptr) h[i].load(at(i));
    }
}
// Until all that was asked for is of the turn.
template <int N, int WORDS, class AT>
__device__ __forceinline__ void get(Handed<WORDS> (&h)[N], uint32_t turn, AT &&at) {
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (h[i].came(turn)) continue;
            h[i].load(at(i));
            all = false;
        }
    } while (!all);
}
template <int N, int WORDS, class AT>
__device__ __forceinline__ void take(Handed<WORDS> (&h)[N], uint32_t turn, AT &&at) {
    ask(h, turn, at);
    get(h, turn, at);
}

__device__ __forceinline__ float take(const float *from, uint32_t turn) {
    Handed<1> h[1];
    take(h, turn, [&](int) { return from; });
    return h[0].value(0);
}

// Block `idx` of `blocks` has items [begin, end) of n; n * blocks is below 2^32.
struct Share {
    int begin, end;
    __device__ Share(uint32_t n, uint32_t idx, uint32_t blocks)
        : begin(n * idx / blocks), end(n * (idx + 1) / blocks) {}
    __device__ int count() const { return end - begin; }
};

}  // namespace kv8
