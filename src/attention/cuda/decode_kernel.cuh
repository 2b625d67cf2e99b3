// decode_kernel.cuh - the launch around the walkers: shares of the line, pieces, joining.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "decode.cuh"

namespace kv8 {

// What the line keeps of a request: its streams begin at unit `start`; a unit is one granule of one
// stream.
struct __align__(16) Record {
    int start, qo_begin, qo_len, kv_len, first_page;
};

struct Line {
    const Record *records;  // [batch + 1]
    int total;
    int num_blocks;     // blocks that get a share
    int share, larger;  // units of a share; the first `larger` shares have one more

    __device__ void cut(int blocks) {
        num_blocks = blocks;
        share = total / blocks;
        larger = total - share * blocks;
    }
    __device__ int begin(int block) const { return block * share + min(block, larger); }
    // The block whose share holds a unit.
    __device__ int owner(int unit) const {
        const int rest = unit - larger * (share + 1);
        return rest < 0 ? unit / (share + 1) : larger + rest / share;
    }
};

template <class C>
__device__ int row_tiles(const kv8_decode_args &a, int qo_len) {
    return (qo_len * a.group_size + C::ROWS - 1) / C::ROWS;
}

__device__ inline Record load_record(const kv8_decode_args &a, int b) {
    Record r;
    r.qo_begin = __ldg(a.qo_indptr + b);
    r.qo_len = __ldg(a.qo_indptr + b + 1) - r.qo_begin;
    r.first_page = 0;
    if (a.page_indptr != nullptr) {
        r.first_page = __ldg(a.page_indptr + b);
        const int pages = __ldg(a.page_indptr + b + 1) - r.first_page;
        const int last = __ldg(a.last_page_len + b);
        r.kv_len = pages == 0 ? 0 : (pages - 1) * a.page_size + last;
    } else {
        r.kv_len = __ldg(a.seq_lens + b);
    }
    return r;
}
__device__ inline Request to_request(const kv8_decode_args &a, const Record &r, int b) {
    return make_request(a, b, r.qo_begin, r.qo_len, r.kv_len, r.first_page);
}

// Every request's record, with exclusive prefix sums of the units. Returns the number of streams.
template <class C>
__device__ int lay_line(const kv8_decode_args &a, Record *records) {
    __shared__ int2 warp_sums[32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int head_blocks = a.num_kv_heads / a.heads_per_block;
    int2 carry = {0, 0};  // units, streams
    for (int base = 0; base < a.batch; base += C::THREADS) {
        const int b = base + thread;
        int2 sum = {0, 0};
        int units = 0;
        Record r;
        if (b < a.batch) {
            r = load_record(a, b);
            sum.y = row_tiles<C>(a, r.qo_len) * head_blocks;
            sum.x = units = granules_of(request_keys(a, to_request(a, r, b))) * sum.y;
        }
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int2 left = {__shfl_up_sync(~0u, sum.x, d), __shfl_up_sync(~0u, sum.y, d)};
            if (lane >= d) sum.x += left.x, sum.y += left.y;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        r.start = carry.x + sum.x - units;
        for (int w = 0; w < C::WARPS && base + w * 32 < a.batch; w++) {
            if (w < warp) r.start += warp_sums[w].x;
            carry.x += warp_sums[w].x, carry.y += warp_sums[w].y;
        }
        if (b < a.batch) records[b] = r;
        if (base + C::THREADS < a.batch) __syncthreads();
    }
    if (thread == 0) records[a.batch].start = carry.x;
    __syncthreads();
    return carry.y;
}

// How many blocks take part: no more than there is work for, and where streams are few a multiple
// of them, so that even streams are cut evenly.
__device__ inline int blocks_for(const kv8_decode_args &a, int total, int streams) {
    const int blocks = min(int(gridDim.x), max(divide(total + a.min_units - 1, a.by_min_units), 1));
    if (streams > blocks) return blocks;
    const int even = blocks / streams * streams;
    return even * 8 >= blocks * 7 ? even : blocks;
}

template <class C>
__device__ Piece find_piece(const kv8_decode_args &a, const Line &line, int unit, int end) {
    int low = 0, high = a.batch - 1;  // the last request that starts at or before the unit
    while (low < high) {
        const int mid = (low + high + 1) / 2;
        if (line.records[mid].start <= unit)
            low = mid;
        else
            high = mid - 1;
    }
    Piece p;
    p.request = to_request(a, line.records[low], low);
    const int start = line.records[low].start;
    const KeyRange keys = request_keys(a, p.request);
    const int granules = granules_of(keys), begin = keys.begin / TOKENS;
    const int head_blocks = a.num_kv_heads / a.heads_per_block;
    const int index = (unit - start) / granules;
    const int tile = divide(index, a.by_head_blocks);
    p.head_begin = (index - tile * head_blocks) * a.heads_per_block;
    p.row_begin = tile * C::ROWS;
    p.num_rows = min(C::ROWS, p.request.qo_len * a.group_size - p.row_begin);
    // Tiles of all requests before this one: at most (qo_begin * group_size) / ROWS + request.
    p.stream = (p.request.qo_begin * a.group_size / C::ROWS + low + tile) * head_blocks +
               (index - tile * head_blocks);
    p.stream_begin = start + index * granules;
    p.stream_end = p.stream_begin + granules;
    p.granule_begin = begin + unit - p.stream_begin;
    p.granule_end = begin + min(end, p.stream_end) - p.stream_begin;
    return p;
}

// Results move in the order of MMA fragments. Item i of a block's heads: fragment i / 32 (head,
// then m-tile, then n-tile) of lane i % 32: two rows (x, y) at two dims, as {x d, y d, x d', y d'}.
template <class C>
struct Item {
    int head, row, dim, slot_row;  // head of the block; the first row and dim of each pair
    __device__ explicit Item(int i) {
        const int lane = i % 32, fragment = i / 32 % C::FRAGMENTS;
        head = i / 32 / C::FRAGMENTS;
        row = fragment % C::NT * 8 + lane % 4 * 2;
        dim = C::V::dim(fragment / C::NT, lane / 4);
        slot_row = head * C::ROWS + row;
    }
};

// What two rows have come to, relative to their maxima, in base 2.
struct Part {
    float4 o;
    float2 max, sum;
};
__device__ inline Part no_part() {
    return {{0, 0, 0, 0}, {NO_KEY, NO_KEY}, {0, 0}};
}
__device__ inline void add_weighted(float4 &into, const float4 &from, float2 w) {
    into.x += from.x * w.x;
    into.y += from.y * w.y;
    into.z += from.z * w.x;
    into.w += from.w * w.y;
}

// What the end of a row needs, in base 2.
struct RowEnd {
    float sink, v_scale;
};
__device__ inline RowEnd load_row_end(const kv8_decode_args &a, const Request &r, int head,
                                      int row) {
    constexpr float LOG2E = 1.4426950408889634f;
    const int qo_head = head * a.group_size + row - divide(row, a.by_group) * a.group_size;
    return {a.sink_logit == nullptr ? -INFINITY : __ldg(a.sink_logit + qo_head) * LOG2E,
            a.v_scale == nullptr ? 1.0f
                                 : __ldg(a.v_scale + r.index * a.v_scale_stride_batch +
                                         head * a.v_scale_stride_head)};
}

__device__ inline void store2(const kv8_decode_args &a, int64_t at, float x, float y) {
    if (a.o_dtype == 1) {  // f32
        float *const o = static_cast<float *>(a.o) + at;
        o[0] = x, o[1] = y;
        return;
    }
    uint16_t *const o = static_cast<uint16_t *>(a.o) + at;
    const uint32_t both = a.o_dtype == BF16 ? pack_bf16(x, y) : pack_f16(x, y);
    o[0] = uint16_t(both), o[1] = uint16_t(both >> 16);
}

// The end of a row at two dims: the sink joins the denominator, once; lse never has it.
__device__ inline void finish(const kv8_decode_args &a, const Request &r, int head, int row,
                              int dim, const RowEnd &end, float x, float y, float max, float sum) {
    constexpr float LN2 = 0.6931471805599453f;
    const int token = divide(row, a.by_group),
              qo_head = head * a.group_size + row - token * a.group_size;
    const int64_t q_row = r.qo_begin + token;
    const float top = fmaxf(max, end.sink);
    const float weight = exp2_fast(max - top);
    const float denominator = sum * weight + exp2_fast(end.sink - top);
    const bool empty = sum == 0 || end.sink == INFINITY;
    const float f = weight / denominator * end.v_scale;
    store2(a, q_row * a.o_stride_row + qo_head * a.o_stride_head + dim, empty ? 0.0f : x * f,
           empty ? 0.0f : y * f);
    if (a.lse != nullptr && dim == 0)
        a.lse[q_row * a.num_qo_heads + qo_head] = sum == 0 ? -INFINITY : (max + log2f(sum)) * LN2;
}
// One stored element.
template <Format F>
__device__ inline float widen_one(const uint8_t *row, int d) {
    if constexpr (F == BF16)
        return __bfloat162float(reinterpret_cast<const __nv_bfloat16 *>(row)[d]);
    else if constexpr (F == F16)
        return __half2float(reinterpret_cast<const __half *>(row)[d]);
    else if constexpr (F == E5M2)
        return __half2float(__ushort_as_half(static_cast<unsigned short>(row[d] << 8)));
    else if constexpr (F == INT8)
        return static_cast<float>(static_cast<int8_t>(row[d]));
    else
        return 0;  // e4m3 has no infinity, and its NaN needs no second look
}

// The sum of one row and dim came out NaN while its weights are numbers. That is right where a NaN
// or infinities of both signs are visible; but a product of 0, a weight too small for f16 or the
// rest of a split one, and an infinity is NaN too, where the sum is infinite. Looks at every
// visible value again.
template <class C>
__device__ __noinline__ float look_again(const kv8_decode_args &a, const Request &r, int head,
                                         int row, int dim) {
    const int token = divide(row, a.by_group);
    const KeyRange keys = visible_keys(a, r, token);
    const uint16_t *const q = static_cast<const uint16_t *>(a.q) +
                              (r.qo_begin + token) * a.q_stride_row +
                              (head * a.group_size + row - token * a.group_size) * a.q_stride_head;
    const auto row_scale = [&](const kv8_decode_pages &p, int64_t page, int slot) {
        return C::F == INT8
                   ? __half2float(__ushort_as_half(
                         p.row_scale[page * p.scale_stride_page + slot * p.scale_stride_slot +
                                     head * p.scale_stride_head]))
                   : 1.0f;
    };
    float sum = 0;
    for (int key = keys.begin; key < keys.end; key++) {
        const int64_t bit = int64_t(token) * r.kv_len + key;
        if (a.mask_bits != nullptr &&
            !(a.mask_bits[a.mask_indptr[r.index] + bit / 8] >> (bit % 8) & 1))
            continue;
        const int index = key / a.page_size, slot = key - index * a.page_size;
        const int64_t page = r.pages[index];
        const uint8_t *const v =
            a.v.data + page * a.v.stride_page + slot * a.v.stride_slot + head * a.v.stride_head;
        const float value = widen_one<C::F>(v, dim) * row_scale(a.v, page, slot);
        if (isfinite(value)) continue;
        sum += value;  // two signs make NaN, and NaN stays
        if (a.soft_cap > 0) continue;
        const uint8_t *const k =
            a.k.data + page * a.k.stride_page + slot * a.k.stride_slot + head * a.k.stride_head;
        float score = 0;  // of -inf: weight 0 of an infinity
        for (int d = 0; d < C::DIM; d++)
            score +=
                widen_one<C::F>(k, d) * (a.q_dtype == BF16 ? __uint_as_float(uint32_t(q[d]) << 16)
                                                           : __half2float(__ushort_as_half(q[d])));
        if (score * a.score_scale * row_scale(a.k, page, slot) == -INFINITY) return NAN;
    }
    return sum == 0 ? NAN : sum;
}

template <class C>
__device__ float sure(const kv8_decode_args &a, const Request &r, int head, int row, int dim,
                      float x, float sum) {
    if (C::F == E4M3 || !isnan(x) || isnan(sum)) return x;
    return look_again<C>(a, r, head, row, dim);
}

template <class C>
__device__ void finish_item(const kv8_decode_args &a, const Piece &p, const Item<C> &item,
                            const RowEnd *ends, const Part &part) {
    const int head = p.head_begin + item.head, row = p.row_begin + item.row;
    if (item.row < p.num_rows)
        finish(a, p.request, head, row, item.dim, ends[item.slot_row],
               sure<C>(a, p.request, head, row, item.dim, part.o.x, part.sum.x),
               sure<C>(a, p.request, head, row, item.dim + 1, part.o.z, part.sum.x), part.max.x,
               part.sum.x);
    if (item.row + 1 < p.num_rows)
        finish(a, p.request, head, row + 1, item.dim, ends[item.slot_row + 1],
               sure<C>(a, p.request, head, row + 1, item.dim, part.o.y, part.sum.y),
               sure<C>(a, p.request, head, row + 1, item.dim + 1, part.o.w, part.sum.y), part.max.y,
               part.sum.y);
}

// A warp's result to shared memory.
template <class C>
__device__ void leave_result(uint8_t *to, State<C> &state) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    float4 *const o = reinterpret_cast<float4 *>(to);
    float *const maxima = reinterpret_cast<float *>(to + C::FRAGMENTS * 512);
#pragma unroll
    for (int nt = 0; nt < C::NT; nt++) {
#pragma unroll
        for (int t = 0; t < C::DIM / 16; t++) {
            const float(&x)[4] = state.o[t][nt];
            o[(t * C::NT + nt) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int col = 0; col < 2; col++) {
            float sum = state.sum[nt][col];
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
            if (g != 0) continue;
            maxima[nt * 8 + 2 * c + col] = state.max[nt][col];
            maxima[C::ROWS + nt * 8 + 2 * c + col] = sum;
        }
    }
}

// The joined result of the block's slices.
template <class C>
__device__ Part join_slices(const kv8_decode_args &a, const uint8_t *rings, const Item<C> &item,
                            int i) {
    Part part = no_part();
    const uint8_t *const first = rings + item.head * C::WARP_BYTES;
    const int step = a.heads_per_block * C::WARP_BYTES, slices = C::WARPS / a.heads_per_block;
    const uint8_t *const maxima = first + C::FRAGMENTS * 512 + item.row * 4;
    const uint8_t *const o = first + i % (C::FRAGMENTS * 32) * 16;
#pragma unroll 4
    for (int s = 0; s < slices; s++) {
        const float2 m = *reinterpret_cast<const float2 *>(maxima + s * step);
        part.max.x = fmaxf(part.max.x, m.x), part.max.y = fmaxf(part.max.y, m.y);
    }
#pragma unroll 4
    for (int s = 0; s < slices; s++) {
        const float2 m = *reinterpret_cast<const float2 *>(maxima + s * step);
        const float2 sum = *reinterpret_cast<const float2 *>(maxima + s * step + C::ROWS * 4);
        const float2 w = {exp2_fast(m.x - part.max.x), exp2_fast(m.y - part.max.y)};
        part.sum.x += sum.x * w.x, part.sum.y += sum.y * w.y;
        add_weighted(part.o, *reinterpret_cast<const float4 *>(o + s * step), w);
    }
    return part;
}

// Where a stream's pieces lie among the blocks.
struct Pieces {
    int first, count;
    bool first_is_second;  // the first piece is its block's second partial
};

// Sets `into` to the join of all.
template <int N>
__device__ inline void join_parts(Part &into, const Part (&parts)[N]) {
    float2 top = into.max;
#pragma unroll
    for (int n = 0; n < N; n++)
        top.x = fmaxf(top.x, parts[n].max.x), top.y = fmaxf(top.y, parts[n].max.y);
    Part all = {{0, 0, 0, 0}, top, {0, 0}};
#pragma unroll
    for (int n = -1; n < N; n++) {
        const Part &part = n < 0 ? into : parts[n];
        const float2 w = {exp2_fast(part.max.x - top.x), exp2_fast(part.max.y - top.y)};
        all.sum.x += part.sum.x * w.x, all.sum.y += part.sum.y * w.y;
        add_weighted(all.o, part.o, w);
    }
    into = all;
}

// Joins the partials of a stream, in key order. Where there are threads to spare, groups of them
// share the pieces, and `scratch` takes what they come to.
template <class C>
__device__ void join_pieces(const kv8_decode_args &a, const Piece &p, const Pieces &pieces,
                            const RowEnd *ends, Part *scratch) {
    constexpr int BATCH = 4;  // loads to wait for at once
    const int slot_rows = a.heads_per_block * C::ROWS,
              items = a.heads_per_block * C::FRAGMENTS * 32;
    const int groups = max(C::THREADS / items, 1), group = groups == 1 ? 0 : threadIdx.x / items;
    const int share = (pieces.count + groups - 1) / groups;  // pieces of a group
    const int begin = group * share, end = min(begin + share, pieces.count);
    for (int i = threadIdx.x - group * items; i < items; i += C::THREADS) {
        const Item<C> item(i);
        Part part = no_part();
        for (int first = begin; first < end; first += BATCH) {
            Part parts[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int n = first + k;
                parts[k] = no_part();
                if (n >= end) continue;
                const int64_t slot =
                    int64_t(pieces.first + n) * 2 + (n == 0 && pieces.first_is_second);
                parts[k].o =
                    __ldcg(reinterpret_cast<const float4 *>(a.partials) + slot * items + i);
                const float4 m = __ldcg(reinterpret_cast<const float4 *>(
                    a.partial_sums + (slot * slot_rows + item.slot_row) * 2));
                parts[k].max = {m.x, m.z}, parts[k].sum = {m.y, m.w};
            }
            join_parts(part, parts);
        }
        if (groups == 1)
            finish_item(a, p, item, ends, part);
        else if (group < groups)
            scratch[group * items + i] = part;
    }
    if (groups == 1) return;
    __syncthreads();
    if (threadIdx.x >= items) return;
    Part part = scratch[threadIdx.x];
    for (int n = 1; n < groups; n++) {
        const Part parts[1] = {scratch[n * items + threadIdx.x]};
        join_parts(part, parts);
    }
    finish_item(a, p, Item<C>(threadIdx.x), ends, part);
}

// After the walkers of a piece: joins the slices, then finishes the stream or leaves a partial and,
// when it is the stream's last, joins them all.
template <class C>
__device__ void close_piece(const kv8_decode_args &a, const Piece &p, const Pieces &pieces,
                            uint8_t *rings, const RowEnd *ends) {
    __shared__ bool is_last;
    const int slot_rows = a.heads_per_block * C::ROWS,
              items = a.heads_per_block * C::FRAGMENTS * 32;
    const int64_t slot =
        blockIdx.x * 2 + (int(blockIdx.x) == pieces.first && pieces.first_is_second);
    for (int i = threadIdx.x; i < items; i += C::THREADS) {
        const Item<C> item(i);
        const Part part = join_slices<C>(a, rings, item, i);
        if (pieces.count == 1) {
            finish_item(a, p, item, ends, part);
            continue;
        }
        __stcg(reinterpret_cast<float4 *>(a.partials) + slot * items + i, part.o);
        if (item.dim == 0)
            __stcg(
                reinterpret_cast<float4 *>(a.partial_sums + (slot * slot_rows + item.slot_row) * 2),
                make_float4(part.max.x, part.sum.x, part.max.y, part.sum.y));
    }
    __syncthreads();
    if (pieces.count == 1) return;
    if (threadIdx.x == 0) {
        uint32_t before;  // what the barrier has shown this thread comes before its arrival
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                     : "=r"(before)
                     : "l"(a.arrivals + p.stream)
                     : "memory");
        is_last = before == uint32_t(pieces.count - 1);
        if (is_last) a.arrivals[p.stream] = 0;  // ready for the next launch
    }
    __syncthreads();
    if (is_last) join_pieces<C>(a, p, pieces, ends, reinterpret_cast<Part *>(rings));
    __syncthreads();  // shared memory is free again
}

// Requests with rows but no visible key: o = 0, lse = -inf.
__device__ inline void finish_empty(const kv8_decode_args &a, const Record *records) {
    for (int b = blockIdx.x; b < a.batch; b += gridDim.x) {
        if (records[b + 1].start != records[b].start) continue;
        const Request r = to_request(a, records[b], b);
        const int pairs = a.v_head_dim / 2;
        for (int64_t i = threadIdx.x; i < int64_t(r.qo_len) * a.num_qo_heads * pairs;
             i += blockDim.x) {
            const int dim = int(i % pairs) * 2, head = int(i / pairs % a.num_kv_heads);
            const int row = int(i / pairs / a.num_kv_heads);
            finish(a, r, head, row, dim, load_row_end(a, r, head, row), 0, 0, NO_KEY, 0);
        }
    }
}

template <class C>
__device__ __forceinline__ void decode_body(const kv8_decode_args &a) {
    extern __shared__ __align__(1024) uint8_t rings[];
    __shared__ RowEnd ends[C::WARPS * C::ROWS];
    __shared__ Pieces pieces;
    __shared__ Piece piece;
    Record *const records = reinterpret_cast<Record *>(rings + C::RING_BYTES);
    const int streams = lay_line<C>(a, records);
    Line line = {records, records[a.batch].start};
    line.cut(blocks_for(a, line.total, streams));
    if (int(blockIdx.x) < line.num_blocks) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int in_block = warp % a.heads_per_block, slice = warp / a.heads_per_block;
        int unit = line.begin(blockIdx.x);
        const int end = line.begin(blockIdx.x + 1);
        while (unit < end) {
            if (threadIdx.x == 0) piece = find_piece<C>(a, line, unit, end);
            __syncthreads();
            unit += piece.granule_end - piece.granule_begin;  // the next one is read after all ends
            uint8_t *const ring = rings + warp * C::WARP_BYTES;
            State<C> state;
#pragma unroll
            for (int nt = 0; nt < C::NT; nt++) {
#pragma unroll
                for (int col = 0; col < 2; col++)
                    state.max[nt][col] = NO_KEY, state.sum[nt][col] = 0;
#pragma unroll
                for (int t = 0; t < C::DIM / 16; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) state.o[t][nt][i] = 0;
            }
            const int head = piece.head_begin + in_block;
            Walker<C> walker(a, piece, smem_address(ring), head, slice,
                             C::WARPS / a.heads_per_block);
            walker.run(state, [&] {  // while the first copies are on their way
                if (slice == 0 && lane < piece.num_rows)
                    ends[in_block * C::ROWS + lane] =
                        load_row_end(a, piece.request, head, piece.row_begin + lane);
                if (threadIdx.x != C::THREADS - 1) return;
                pieces.first = line.owner(piece.stream_begin);
                pieces.count = line.owner(piece.stream_end - 1) - pieces.first + 1;
                pieces.first_is_second = line.begin(pieces.first) < piece.stream_begin;
            });
            leave_result<C>(ring, state);
            __syncthreads();
            close_piece<C>(a, piece, pieces, rings, ends);
        }
    }
    finish_empty(a, records);
}

}  // namespace kv8

#define KV8_DECODE_DEFINE(name, format, head_dim, warps, stages, whole, ring_bytes)  \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                      \
        name(const __grid_constant__ kv8_decode_args a) {                            \
        using config = kv8::DecodeConfig<format, head_dim, 1, warps, stages, whole>; \
        static_assert(config::RING_BYTES == ring_bytes);                             \
        kv8::decode_body<config>(a);                                                 \
    }
