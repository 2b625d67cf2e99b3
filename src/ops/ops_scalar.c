/* ops_scalar.c - the kernel set at width 1: what every other rung is compared with.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "../base/simd/scalar.h"
#include "../formats/formats_simd.h"
#include "mxfp4_table.h"
#include "ops_kernels.h"

enum { W_ROWS = 4 };

static void w_widen_mxfp4(const uint8_t *block, uint8_t scale, v_f32 *out) {
    float table[16];
    memcpy(table, kv8_mxfp4_bits[scale], sizeof table);
    for (int i = 0; i < KV8_MXFP4_BLOCK_BYTES; i++) {
        out[2 * i] = table[block[i] & 15];
        out[2 * i + 1] = table[block[i] >> 4];
    }
}
static inline void w_reduce(const v_f32 acc[W_ROWS], float *sums) {
    for (int r = 0; r < W_ROWS; r++) sums[r] = acc[r];
}
static inline void w_even_odd(v_f32 a, v_f32 b, v_f32 *even, v_f32 *odd) {
    *even = a;
    *odd = b;
}

#define W_OWN_ORDER         0
#define w_to_own_order(x)   (x)
#define w_from_own_order(x) (x)
#include "cpu/matmul_tmpl.h"
#include "cpu/rowwise_tmpl.h"

const kv8_ops_kernels kv8_ops_kernels_scalar = {
    .matmul = matmul_tile,
    .rmsnorm = rmsnorm_row,
    .swiglu = swiglu_values,
    .axpy = axpy_values,
};
