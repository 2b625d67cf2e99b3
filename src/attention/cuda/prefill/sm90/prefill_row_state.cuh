// prefill_row_state.cuh - the 64 packed query rows of a consumer warpgroup, whatever its
// arithmetic: their state, masks and caps, turns at the tensor cores, the join of split rows, and
// what is written.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_nonfinite.cuh"
#include "prefill_shape.cuh"

namespace kv8 {

template <class SHAPE>
struct RowState {
    enum { D = SHAPE::HEAD_DIM, NUM_O = D / 2 };
    static constexpr bool OPTIONS = SHAPE::OPTIONS;
    const kv8_kernel_args &a;
    uint32_t shared;
    int index;
    int rows_slot = 0;  // of the records of rows; Q that is fetched ahead has two
    // Per lane: rows lane/4 (slot 0) and lane/4 + 8 (slot 1) of the warp's sixteen.
    float factor[2];        // from S to log2 units
    float max_[2], sum[2];  // max_ in log2 units, or NO_MAXIMUM; P and sum are relative to it
    float o[NUM_O];

    __device__ RowState(const kv8_kernel_args &args, uint32_t base)
        : a(args), shared(base), index(__shfl_sync(~0u, threadIdx.x / 128, 0)) {}  // uniform

    // Made anew where they are asked for, which few tiles do: registers are scarce.
    static __device__ __forceinline__ int thread_of_block() {
        int i;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
        return i;
    }
    static __device__ __forceinline__ int thread() { return thread_of_block() % 128; }
    static __device__ __forceinline__ int lane() { return thread_of_block() % 32; }

    __device__ __forceinline__ int row_of(int slot) const {
        const int i = thread();
        return i / 32 * 16 + i % 32 / 4 + 8 * slot;  // of the warpgroup's 64
    }
    // Of a field of a row's record.
    __device__ __forceinline__ uint32_t row_address(int row, uint32_t field = 0) const {
        return shared + SHAPE::ROWS_AT +
               KV8_PREFILL_ROW_BYTES * (64 * (rows_slot * SHAPE::NUM_CONSUMERS + index) + row) +
               field;
    }

    template <int N>
    __device__ __forceinline__ void cap_scores(float (&s)[N]) const {
        const float inverse = __frcp_rn(a.soft_cap);
        float cap_factor[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(cap_factor[slot])
                         : "r"(row_address(row_of(slot))));
            cap_factor[slot] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            s[i] = a.soft_cap * tanh_of_exponent(2 * LOG2E * (s[i] * cap_factor[i / 2 % 2]));
    }
    // s: sums of 2N keys from `first` on.
    template <int N>
    __device__ __forceinline__ void mask_scores(float (&s)[N], int first) const {
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            int begin, end;
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(begin), "=r"(end)
                         : "r"(row_address(row_of(slot), offsetof(RowRecord, begin))));
            // What P is 0 of: FP8's factor may be negative.
            const float hidden = SHAPE::FP8 ? copysignf(INFINITY, -factor[slot]) : -INFINITY;
            begin -= first + lane() % 4 * 2;
            end -= first + lane() % 4 * 2;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const int key = i / 2 * 8 + i % 2, at = i / 2 * 4 + 2 * slot + i % 2;
                if (key < begin || key >= end) s[at] = hidden;
            }
        }
    }
    // By a warp: the keys that all of its rows may see, of runs in which rows have ranges.
    __device__ __forceinline__ KeyRange keys_of_all_rows() const {
        int begin, end;
        asm volatile(
            "ld.shared.v2.u32 {%0, %1}, [%2];"
            : "=r"(begin), "=r"(end)
            : "r"(row_address(thread() / 32 * 16 + lane() % 16, offsetof(RowRecord, begin))));
        return {__reduce_max_sync(~0u, begin), __reduce_min_sync(~0u, end)};
    }
    // Keys that a mask hides; of the four lanes that have a row each looks 32 keys up. s: as above.
    template <int N>
    __device__ __forceinline__ void hide_by_mask(float (&s)[N], const kv8_prefill_item &item,
                                                 int first) const {
        constexpr int WORDS = N / 16;
        const ItemView v = view_item(a, item);
        const RequestKeys keys(a, item);
        uint32_t own[2];
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = min(64 * index + row_of(slot), v.num_rows - 1);
            const int query = query_of(a, v.row_begin + row);
            own[slot] = mask_word(keys.mask, keys.kv_len, query, first + lane() % WORDS * 32);
        }
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const float hidden = SHAPE::FP8 ? copysignf(INFINITY, -factor[slot]) : -INFINITY;
#pragma unroll
            for (int word = 0; word < WORDS; word++) {
                const uint32_t mine = __shfl_sync(~0u, own[slot], word, WORDS) >> (lane() % 4 * 2);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (!(mine >> (i / 2 * 8 + i % 2) & 1))
                        s[16 * word + i / 2 * 4 + 2 * slot + i % 2] = hidden;
            }
        }
    }
    // Keys of pages that are not there, in items that have some. s: as above.
    template <int N>
    __device__ __forceinline__ void hide_missing(float (&s)[N], const kv8_prefill_item &item,
                                                 int first) const {
#pragma unroll
        for (int word = 0; word < N / 16; word++) {
            const int key = first + 32 * word + lane();
            const bool seen = key >= item.seen_from && key < item.seen_to;
            const bool missing =
                seen && !page_exists(a, a.table[item.pages_at + divide(key, a.by_page)]);
            const uint32_t mine = __ballot_sync(~0u, missing) >> (lane() % 4 * 2);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int at = 16 * word + i;
                const float hidden =
                    SHAPE::FP8 ? copysignf(INFINITY, -factor[i / 2 % 2]) : -INFINITY;
                if (mine >> (i / 4 * 8 + i % 2) & 1) s[at] = hidden;
            }
        }
    }
    // The tensor cores go from warpgroup to warpgroup; without turns all would compute products at
    // one time and softmax at another.
    // The warpgroup's index; head_dim 128 has no register to keep it in.
    __device__ __forceinline__ int turn() const {
        return D == 128 ? thread_of_block() / 128 : index;
    }
    static __device__ __forceinline__ void wait_turn(int turn) {
        named_barrier_sync(TURN_BARRIER + turn, 256);
    }
    // On to the next of those that have rows; a warpgroup that is alone has the next turn too.
    static __device__ __forceinline__ void pass_turn(int turn, int busy) {
        named_barrier_arrive(TURN_BARRIER + (turn + 1 < busy ? turn + 1 : 0), 256);
    }
    // Warpgroups that have rows of an item: the first ones.
    static __device__ __forceinline__ int busy_warpgroups(const ItemView &v) {
        return min((v.num_rows + 63) / 64, SHAPE::NUM_CONSUMERS);
    }

    // Where the partial results of a split's warpgroup lie, by its slot.
    __device__ __forceinline__ int64_t partial_of(int slot) const {
        return SHAPE::NUM_CONSUMERS * (int64_t)slot + index;
    }
    __device__ __forceinline__ void store_partial(int64_t at, bool cleared = false) const {
        const int thread = this->thread();
        float *const to = a.prefill.partials + at * (64 * D) + thread;
        float2 *const sums = (float2 *)a.prefill.partial_sums + at * 256 + thread;
#pragma unroll
        for (int i = 0; i < NUM_O; i++) to[128 * i] = o[i];
#pragma unroll
        for (int slot = 0; slot < 2; slot++)
            sums[128 * slot] =
                make_float2(max_[slot], copysignf(sum[slot], cleared ? -1.0f : 1.0f));
    }
    // Counts the warpgroup, whose results are stored, at a slot's counter; true for the last of
    // `expected`, who learns whether any has `cleared`.
    __device__ __forceinline__ bool arrive_last(int slot, int expected, bool &cleared) const {
        const int thread = this->thread();
        const uint32_t flag = row_address(0, offsetof(RowRecord, top));
        __threadfence();
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);
        if (thread == 0) {
            uint32_t *const arrivals = a.prefill.arrivals + partial_of(slot);
            const uint32_t before = atomicAdd(arrivals, cleared ? 0x10001 : 1);
            if ((before & 0xffff) + 1 == (uint32_t)expected) *arrivals = 0;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
        }
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);
        uint32_t before;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);  // the word is the row's again
        cleared = cleared || before >> 16 != 0;
        __threadfence();
        return (before & 0xffff) + 1 == (uint32_t)expected;
    }
    // The state becomes that of `count` partial results, every step-th from a slot on.
    __device__ __forceinline__ void combine_partials(int slot_from, int step, int count) {
        const int thread = this->thread();
#pragma unroll
        for (int i = 0; i < NUM_O; i++) o[i] = 0;
        max_[0] = max_[1] = -INFINITY;
        sum[0] = sum[1] = 0;
        for (int n = 0; n < count; n++) {
            const int64_t at = partial_of(slot_from + n * step);
            float keep[2], add[2];
#pragma unroll
            for (int slot = 0; slot < 2; slot++) {
                const float2 other =
                    __ldcg((const float2 *)a.prefill.partial_sums + at * 256 + thread + 128 * slot);
                const float top = max_nan(max_[slot], other.x);
                const float base = top == -INFINITY ? 0.0f : top;
                keep[slot] = exp2_fast(max_[slot] - base);
                add[slot] = exp2_fast(other.x - base);
                max_[slot] = top;
                sum[slot] = sum[slot] * keep[slot] + other.y * add[slot];
            }
#pragma unroll
            for (int i = 0; i < NUM_O; i++)
                o[i] =
                    o[i] * keep[i / 2 % 2] +
                    __ldcg(a.prefill.partials + at * (64 * D) + thread + 128 * i) * add[i / 2 % 2];
        }
    }
    // Leaves this split and returns whether it was the last; then the state is all splits', and
    // `cleared` says whether any of them has V without values that were not finite. Many splits are
    // combined in groups first, each into its first one's place, and then those. Counters: of all
    // splits the first slot's, of a group its second one's.
    __device__ __forceinline__ bool join(const kv8_prefill_item &item, bool &cleared) {
        const int num = item.num_splits, group = num > 16 ? 8 : num > 8 ? 4 : num;
        int first = item.split;
        for (int step = 1;; step = group) {
            const bool is_top = step == group || group == num;
            const int base = is_top ? 0 : first / group * group;
            const int count = is_top ? (num + step - 1) / step : min(group, num - base);
            store_partial(partial_of(item.slot + first));
            if (count > 1) {
                const int counter = item.slot + (is_top ? 0 : base + 1);
                if (!arrive_last(counter, count, cleared)) return false;
                combine_partials(item.slot + base, step, count);
            }
            if (is_top) return true;
            first = base;
        }
    }

    __device__ __forceinline__ bool sees_none(const ItemView &v, int query) const {
        return row_begin<OPTIONS>(a, v, query) >= row_end<OPTIONS>(a, v, query);
    }
    // How a row ends, of its maximum and sum: what O is divided by, and whether its results are 0
    // by definition, whatever V holds.
    struct RowEnd {
        float total;
        bool is_empty;
        __device__ __forceinline__ float weight(float v_scale) const {
            return is_empty ? 0.0f : v_scale / total;
        }
    };
    __device__ __forceinline__ RowEnd end_of(const ItemView &v, const RowPlace &place, float top,
                                             float total, float sink) const {
        const bool is_empty =
            (top == -INFINITY && total == 0) || sink == INFINITY || sees_none(v, place.query);
        if (a.sink_logit != nullptr) total += exp2_fast(sink * LOG2E - top);
        return {total, is_empty};
    }
    // Of the head of a row of the item; -INFINITY: none, or no such row.
    __device__ __forceinline__ float sink_of_row(const ItemView &v, int row) const {
        if (a.sink_logit == nullptr || row >= v.num_rows) return -INFINITY;
        return a.sink_logit[place_of(a, v, row).head];
    }
    __device__ __forceinline__ float sink_of(const ItemView &v, int slot) const {
        return sink_of_row(v, 64 * index + row_of(slot));
    }
    // `cleared`: V was without values that are not finite, of keys that only some rows see. Returns
    // bits of the warp's rows for note_broken().
    __device__ __forceinline__ uint32_t finish(const kv8_prefill_item &item, const ItemView &v,
                                               bool cleared) {
        // Loads that nothing waits for yet.
        const float v_scale = v_scale_of<OPTIONS>(a, v), sinks[2] = {sink_of(v, 0), sink_of(v, 1)};
#pragma unroll
        for (int slot = 0; slot < 2; slot++) sum[slot] = quad_sum(sum[slot]);
        if (item.slot >= 0 && !join(item, cleared)) return 0;
        uint32_t finite = 0;  // bits of the warp's rows whose sums and V's weights are numbers
        bool broken = cleared;
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            const int row = 64 * index + row_of(slot);
            bool here = row < v.num_rows;
            if (here) {
                const RowPlace place = place_of(a, v, row);
                const RowEnd end = end_of(v, place, max_[slot], sum[slot], sinks[slot]);
                if (end.is_empty) clear_row(slot);
                store_row(slot, place.o, end.weight(v_scale));
                if (a.lse != nullptr && lane() % 4 == 0) store_lse(v, place, max_[slot], sum[slot]);
                here = !end.is_empty && !isnan(end.total);
            }
            if (has_infinities(SHAPE::FV) || SHAPE::FV == INT8)
                broken = broken || (here && holds_nan(slot));
            finite |= row_bits(here, slot);
        }
        return __any_sync(~0u, broken) ? finite : 0;
    }
    // Bits of the warp's rows of a slot, of which each has four lanes.
    static __device__ __forceinline__ uint32_t row_bits(bool here, int slot) {
        const uint32_t lanes = __ballot_sync(~0u, here);
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) bits |= (lanes >> (4 * i) & 1) << (8 * slot + i);
        return bits;
    }
    // Splits that run at one time share the join: once all have arrived each ends some of the
    // warpgroup's rows, units of eight, or of four where splits are many. Nobody waits for long: a
    // split whose time is up leaves its units to the last that arrives. Of a word of arrivals the
    // lower half are units that were left; to the rest all splits together add ROUND.
    enum : uint32_t { ARRIVAL = 1 << 16, ROUND = ARRIVAL * 128, MOST_LOOKS = 128 };
    // Splits of a row that one lane takes, of more two; and whose loads are under way at once.
    enum { LANE_SPLITS = 8, SPLITS_AT_ONCE = SHAPE::FP8 && D == 128 ? 4 : 8 };
    // Lanes to which a row's splits fall in turn.
    static __device__ __forceinline__ uint32_t lanes_of_row(const kv8_prefill_item &item) {
        return item.num_splits > LANE_SPLITS ? 2 : 1;
    }
    // By one thread, behind a barrier of its warpgroup, which has stored its partial results: bits
    // of the units that are the split's to end, when all results are there.
    __device__ __forceinline__ uint32_t share_rows(const kv8_prefill_item &item) const {
        uint32_t *const arrivals = a.prefill.arrivals + partial_of(item.slot);
        const uint32_t num = item.num_splits, split = item.split;
        const uint32_t add = split == 0 ? ROUND - (num - 1) * ARRIVAL : (uint32_t)ARRIVAL;
        const uint32_t before = add_acq_rel(arrivals, add);
        uint32_t mine = 0;
        for (uint32_t unit = split; unit < 8 * lanes_of_row(item); unit += num) mine |= 1u << unit;
        if (((before + add) ^ before) & ROUND) {  // the last
            const uint32_t left = before % ARRIVAL;
            if (left != 0) atomicAnd(arrivals, ~left);
            return mine | left;
        }
        if (mine == 0) return 0;
#pragma unroll 1
        for (int look = 0; look < MOST_LOOKS; look++)
            if ((load_acquire(arrivals) ^ before) & ROUND) return mine;
        if (!((atomicOr(arrivals, mine) ^ before) & ROUND)) return 0;
        atomicAnd(arrivals, ~mine);
        __threadfence();
        return mine;
    }
    // A row's state of several splits: of a lane's four columns of a warp's sixteen, and of every
    // fourth sixteen behind it.
    struct JoinedRow {
        float top, total, x[D / 16];
        bool cleared;
        // Makes sums relative to a maximum that is not below theirs; returns its finite stand-in.
        __device__ __forceinline__ float raise(float new_top) {
            const float base = new_top == -INFINITY ? 0.0f : new_top, keep = exp2_fast(top - base);
            total *= keep;
#pragma unroll
            for (int i = 0; i < D / 16; i++) x[i] *= keep;
            top = new_top;
            return base;
        }
    };
    // Row `row` of the warpgroup, of all splits.
    __device__ __forceinline__ void join_row(const kv8_prefill_item &item, int row,
                                             JoinedRow &r) const {
        const int lanes = lanes_of_row(item), num = item.num_splits, slot = row / 8 % 2;
        const int of_row = row / 16 * 32 + row % 8 * 4 + lane() % 4;
        const int part_at = 128 * (thread() / 32 * 8 + 2 * slot) + of_row;
        r.top = -INFINITY, r.total = 0;
#pragma unroll
        for (int i = 0; i < D / 16; i++) r.x[i] = 0;
#pragma unroll 1
        for (int from = lane() * lanes / 32; from < num; from += lanes * SPLITS_AT_ONCE) {
            float2 sums[SPLITS_AT_ONCE];
            float parts[SPLITS_AT_ONCE][D / 16];
#pragma unroll
            for (int n = 0; n < SPLITS_AT_ONCE; n++) {
                const int split = from + lanes * n;
                const int64_t at = partial_of(item.slot + split);
                const float *const part = a.prefill.partials + at * (64 * D) + part_at;
                sums[n] = make_float2(-INFINITY, 0);
                if (split < num)
                    sums[n] = __ldcg((const float2 *)a.prefill.partial_sums + at * 256 +
                                     128 * slot + of_row);
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    const int column = 32 * (i / 4) + i % 4 / 2 * 4 + i % 2;
                    parts[n][i] = split < num ? __ldcg(part + 128 * column) : 0.0f;
                }
            }
            float top = r.top;
#pragma unroll
            for (int n = 0; n < SPLITS_AT_ONCE; n++) top = max_nan(top, sums[n].x);
            const float base = r.raise(top);
#pragma unroll
            for (int n = 0; n < SPLITS_AT_ONCE; n++) {
                const float weight = exp2_fast(sums[n].x - base);
                r.total += fabsf(sums[n].y) * weight;
                r.cleared = r.cleared || signbit(sums[n].y);
#pragma unroll
                for (int i = 0; i < D / 16; i++) r.x[i] += parts[n][i] * weight;
            }
        }
        if (lanes == 1) return;
        r.raise(max_nan(r.top, __shfl_xor_sync(~0u, r.top, 16)));
        r.total += __shfl_xor_sync(~0u, r.total, 16);
        r.cleared = __any_sync(~0u, r.cleared);
#pragma unroll
        for (int i = 0; i < D / 16; i++) r.x[i] += __shfl_xor_sync(~0u, r.x[i], 16);
    }
    // finish() of an item whose splits run together, by all of them.
    __device__ __forceinline__ uint32_t finish_together(const kv8_prefill_item &item,
                                                        const ItemView &v, bool cleared) {
        const float v_scale = v_scale_of<OPTIONS>(a, v);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) sum[slot] = quad_sum(sum[slot]);
        store_partial(partial_of(item.slot + item.split), cleared);
        const uint32_t word = row_address(0, offsetof(RowRecord, top));
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);
        if (thread() == 0) {
            store_shared(finite_word(0), 0), store_shared(finite_word(1), 0);
            store_shared(word, share_rows(item));
        }
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);
        const int warp = thread() / 32, rows = 8 / lanes_of_row(item);
#pragma unroll 1
        for (uint32_t units = load_word(word); units != 0; units &= units - 1) {
            const int first = (__ffs(units) - 1) * rows, own = first + lane() / 4 % rows;
            JoinedRow r;
            r.cleared = cleared;
            join_row(item, own, r);
            const int row = 64 * index + own;
            bool here = row < v.num_rows, broken = r.cleared;
            if (here) {
                const RowPlace place = place_of(a, v, row);
                const RowEnd end = end_of(v, place, r.top, r.total, sink_of_row(v, row));
#pragma unroll
                for (int i = 0; i < D / 64; i++) {
                    float(&x)[4] = *(float(*)[4])(r.x + 4 * i);
                    if (end.is_empty) x[0] = x[1] = x[2] = x[3] = 0;
                    if (lane() < 4 * rows)
                        store_part(place.o + 16 * (4 * i + warp), end.weight(v_scale), x);
                }
                if (a.lse != nullptr && warp == 0 && lane() % 4 == 0 && lane() < 4 * rows)
                    store_lse(v, place, r.top, r.total);
                here = !end.is_empty && !isnan(end.total);
            }
            if (has_infinities(SHAPE::FV) || SHAPE::FV == INT8)
#pragma unroll
                for (int i = 0; i < D / 16; i++) broken = broken || (here && isnan(r.x[i]));
            const uint32_t bits = row_bits(here, 0) & ((1u << rows) - 1);
            if (__any_sync(~0u, broken) && elected())
                or_shared(finite_word(first / 32), bits << (first % 32));
        }
        named_barrier_sync(WARPGROUP_BARRIER + index, 128);
        return load_word(finite_word(warp / 2)) >> (warp % 2 * 16) & 0xffff;
    }
    // Bits of rows by whichever warp ends them, of half the warpgroup's.
    __device__ __forceinline__ uint32_t finite_word(int half) const {
        return row_address(1 + half, offsetof(RowRecord, top));
    }
    // Of an item whose rows see no key.
    __device__ __forceinline__ void write_empty(const ItemView &v) const {
        const int row = 64 * index + thread() / 2;
        if (row >= v.num_rows) return;
        const RowPlace place = place_of(a, v, row);
#pragma unroll 1
        for (int d = thread() % 2; d < D; d += 2) store_one<OPTIONS>(a, place.o + d, 0.0f);
        if (a.lse != nullptr) a.lse[place.lse] = -INFINITY;
    }
    __device__ __forceinline__ void clear_row(int slot) {
#pragma unroll
        for (int i = 0; i < D / 8; i++) o[4 * i + 2 * slot] = o[4 * i + 2 * slot + 1] = 0;
    }
    __device__ __forceinline__ bool holds_nan(int slot) const {
        bool nan = false;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            nan = nan || isnan(o[4 * i + 2 * slot]) || isnan(o[4 * i + 2 * slot + 1]);
        return nan;
    }
    // The sink has no part in it.
    __device__ __forceinline__ void store_lse(const ItemView &v, const RowPlace &place, float top,
                                              float total) const {
        const bool none = (top == -INFINITY && total == 0) || sees_none(v, place.query);
        a.lse[place.lse] = none ? -INFINITY : (top + __log2f(total)) * a.lse_scale;
    }
    __device__ __forceinline__ void store_row(int slot, int64_t at, float weight) {
        if (SHAPE::FP8)
            store_runs(slot, at, weight);
        else
            store_own(slot, at, weight);
    }
    // wgmma's own columns: a lane has two neighbours of every eight. Without options, 128
    // dimensions have loops of their own: by store_pairs, K of int8 with V of e4m3 takes 4 %
    // longer.
    __device__ __forceinline__ void store_own(int slot, int64_t at, float weight) {
        at += lane() % 4 * 2;
        if (D == 64 || OPTIONS) {
            store_pairs<OPTIONS, D / 8>(a, at, weight, D / 8, [&](int i, int j) -> float & {
                return o[4 * i + 2 * slot + j];
            });
            return;
        }
        if (a.o_dtype != KV8_F32 && a.prefill.o_aligned) {  // as a rule
            uint16_t *const to = (uint16_t *)a.o + at;
            const bool bf16 = a.o_dtype == BF16;
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                const float x = o[4 * i + 2 * slot] * weight, y = o[4 * i + 2 * slot + 1] * weight;
                *(uint32_t *)(to + 8 * i) = bf16 ? pack<true>(x, y) : pack<false>(x, y);
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            store_pair(a, at + 8 * i, o[4 * i + 2 * slot] * weight,
                       o[4 * i + 2 * slot + 1] * weight);
    }
    // FP8: column 16m + 8e + r of the product is dimension 16m + 2r + e, so that a lane has four
    // neighbours of every 16.
    __device__ __forceinline__ void store_runs(int slot, int64_t at, float weight) const {
        at += lane() % 4 * 4;
#pragma unroll
        for (int m = 0; m < D / 16; m++) {
            const float *const even = o + 8 * m + 2 * slot, *const odd = even + 4;
            const float x[4] = {even[0] * weight, odd[0] * weight, even[1] * weight,
                                odd[1] * weight};
            store_four(at + 16 * m, x);
        }
    }
    // What a lane has of sixteen columns of a row.
    __device__ __forceinline__ void store_part(int64_t at, float weight, float (&x)[4]) const {
        if (SHAPE::FP8) {
            const float run[4] = {x[0] * weight, x[2] * weight, x[1] * weight, x[3] * weight};
            store_four(at + lane() % 4 * 4, run);
        } else {
            store_pairs<OPTIONS, 2>(a, at + lane() % 4 * 2, weight, 2,
                                    [&](int i, int j) -> float & { return x[2 * i + j]; });
        }
    }
    __device__ __forceinline__ void store_four(int64_t at, const float (&x)[4]) const {
        if (!a.prefill.o_aligned) {
#pragma unroll
            for (int i = 0; i < 4; i++) store_one<OPTIONS>(a, at + i, x[i]);
        } else if (a.o_dtype == KV8_F32) {
            *(float4 *)((float *)a.o + at) = make_float4(x[0], x[1], x[2], x[3]);
        } else if (OPTIONS && !is_wide(a.o_dtype)) {
            *(uint32_t *)((uint8_t *)a.o + at) =
                pack_codes(a.o_dtype, x[0], x[1]) | pack_codes(a.o_dtype, x[2], x[3]) << 16;
        } else {
            const bool bf16 = a.o_dtype == BF16;
            *(uint2 *)((uint16_t *)a.o + at) =
                make_uint2(bf16 ? pack<true>(x[0], x[1]) : pack<false>(x[0], x[1]),
                           bf16 ? pack<true>(x[2], x[3]) : pack<false>(x[2], x[3]));
        }
    }
};

}  // namespace kv8
