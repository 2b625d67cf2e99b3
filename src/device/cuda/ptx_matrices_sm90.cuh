// ptx_matrices_sm90.cuh - matrices that a warp has in its registers, into shared memory and out of
// it.
//
// SPDX-License-Identifier: Apache-2.0
#ifndef KV8_PTX_MATRICES_SM90_CUH
#define KV8_PTX_MATRICES_SM90_CUH

#include <stdint.h>

namespace kv8 {

// Four matrices of 8 x 8 16-bit words; a lane's address is that of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t x, uint32_t y, uint32_t z,
                                               uint32_t w) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
// The same, transposed: rows in shared memory are columns of what lanes have.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address,
                                                          const uint32_t (&m)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
        : "memory");
}
// And back.
__device__ __forceinline__ void load_matrices_transposed(uint32_t &x, uint32_t &y, uint32_t &z,
                                                         uint32_t &w, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(address)
                 : "memory");
}

}  // namespace kv8

#endif
