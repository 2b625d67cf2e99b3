// prefill_widen.cuh - the producers of a prefill block: pages in, swizzled 16-bit tiles out.
//
// Four warps; warp w brings keys 32w..32w+31 of every tile of 128. A lane owns one key's address
// and hands it round by shuffles; four lanes read one key's 64 values, 16 each, so that any page
// size and stride is the same code. Values are widened once, in registers, and stored where wgmma
// reads them: rows of 64 values (128 bytes) under the 128-byte swizzle, one such tile per 64 of
// head_dim. Keys that no row of the item may see are zeros, whatever their slots hold.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "prefill/prefill_item.cuh"
#include "ptx_sm90.cuh"

namespace kv8 {

// Four codes to two pairs of f16; int8 times its key's scale where SCALED (V: rounded to f16 like
// P; K's scales wait for the sums of the products, which are f32), and 2^-7 of it where `small`.
template <Format CODE, bool SCALED>
__device__ __forceinline__ void widen(uint32_t codes, __half2 scale, bool small, uint32_t &low,
                                      uint32_t &high) {
    if (CODE == E4M3) {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
            : "=r"(low), "=r"(high)
            : "r"(codes));
    } else if (CODE == E5M2) {  // an e5m2 is the upper half of an f16
        low = __byte_perm(codes, 0, 0x1404);
        high = __byte_perm(codes, 0, 0x3424);
    } else {
        // int8: 0x6400 | (code + 128) is the f16 1024 + code + 128, 0x4800 | .. is 2^-7 of that.
        const uint32_t shifted = codes ^ 0x80808080, base = small ? 0x48484848 : 0x64646464;
        const __half2 bias = __half2half2(__ushort_as_half(small ? 0x4880 : 0x6480));
        low = __byte_perm(shifted, base, 0x4140);
        high = __byte_perm(shifted, base, 0x4342);
        __half2 a = __hsub2(*(const __half2 *)&low, bias);
        __half2 b = __hsub2(*(const __half2 *)&high, bias);
        if (SCALED) {
            a = __hmul2(a, scale);
            b = __hmul2(b, scale);
        }
        low = *(const uint32_t *)&a;
        high = *(const uint32_t *)&b;
    }
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
// 16 bytes into shared memory without passing registers; of these `size` (0 or 16) are read, the
// rest are zeros. WIDE: what lies beside them comes into the L2, for DRAM serves half a line at the
// cost of all of it.
template <bool WIDE = false>
__device__ __forceinline__ void copy_async(uint32_t address, const uint8_t *source, uint32_t size) {
    if constexpr (WIDE)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(address),
                     "l"(source), "r"(size)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source),
                     "r"(size)
                     : "memory");
}
// The pointer of another lane.
__device__ __forceinline__ const uint8_t *pointer_of(const uint8_t *pointer, int lane) {
    return (const uint8_t *)__shfl_sync(~0u, (unsigned long long)pointer, lane);
}

// A piece is 64 values of the warp's 32 keys: four lanes hold a fourth of each key's. 8-bit codes
// land in shared memory, each lane's in a place of its own, and are widened by the lane that asked
// for them.
enum { RAW_CHUNK_BYTES = 32 * 64 };
// LOADS of a piece's four rows of eight keys at a time, as the registers allow.
template <int LOADS>
struct RawChunk {
    uint4 codes[LOADS];
};
template <int LOADS>
__device__ __forceinline__ void load_chunk(RawChunk<LOADS> &p, uint32_t raw, int first, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) p.codes[i] = load_shared(raw + 512 * (first + i) + 16 * lane);
}
// `base`: first key of the warp in a tile of 64 columns. scale: of the lane's key, int8 alone.
template <Format CODE, bool SCALED, int LOADS>
__device__ __forceinline__ void widen_chunk(const RawChunk<LOADS> &p, uint32_t base, int first,
                                            __half2 scale, bool small, int lane) {
    const int row = lane / 4;  // of eight: rows 8i + row
    const uint32_t address = base + 1024 * first + 128 * row + ((2 * (lane % 4)) ^ row) * 16;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        __half2 of_key = scale;
        if (CODE == INT8 && SCALED) of_key = __shfl_sync(~0u, scale, 8 * (first + i) + lane / 4);
        uint32_t v[8];
        widen<CODE, SCALED>(p.codes[i].x, of_key, small, v[0], v[1]);
        widen<CODE, SCALED>(p.codes[i].y, of_key, small, v[2], v[3]);
        widen<CODE, SCALED>(p.codes[i].z, of_key, small, v[4], v[5]);
        widen<CODE, SCALED>(p.codes[i].w, of_key, small, v[6], v[7]);
        store_shared(address + 1024 * i, v[0], v[1], v[2], v[3]);
        store_shared((address ^ 16) + 1024 * i, v[4], v[5], v[6], v[7]);
    }
}

}  // namespace kv8
