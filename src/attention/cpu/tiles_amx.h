/* tiles_amx.h - what the kernels on AMX tiles share: a tile's shape, the lanes of few rows, and the
 * order in which 64 columns come out of interleaved codes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TILES_AMX_H
#define KV8_TILES_AMX_H

#include <float.h>

#include "simd/avx512.h"

#include "simd/unroll.h"

enum { T_SIDE = 16 }; /* rows, and columns of 4 bytes, of a tile */

/* The operand of ldtilecfg: palette 1; per tile its bytes per row and its rows. */
typedef struct t_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} t_config;

/* All of the config is written by then: gcc 12 takes _tile_loadconfig to read 8 bytes of it. */
static inline void t_load_config(const t_config *config) {
    __asm__ volatile("" ::"m"(*config));
    _tile_loadconfig(config);
}

/* Lane f * 16 / fold + row takes value f of `fold`. */
static inline __m512i t_spread_from(int32_t fold) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(fold)), 4);
}
#define T_KEY_LANES(fold, per_key) \
    _mm512_permutexvar_ps(t_spread_from(fold), v_load_n(per_key, fold))

/* While all scores are -inf any finite shift does: their weights are 0. */
static inline v_f32 t_finite(v_f32 max) {
    return v_select_lt(max, v_set1(-FLT_MAX), v_set1(0.0f), max);
}

/* The maximum that lanes keep: any where their sum is no number, which no score changes; without
 * one, NaN scores alone would be searched for it in every tile. */
static inline v_f32 t_kept_max(v_f32 max, v_f32 sum) {
    return _mm512_mask_mov_ps(max, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), v_set1(0.0f));
}

/* t_turn_quarters works on the first `end` columns of a row, 64 by 64: quarter L of vector x
 * becomes quarter x of vector L. Interleaving codes does so, and this turns it back; or the other
 * way round.
 */
static inline void t_turn_quarters(float *row, int32_t end) {
    for (int32_t d = 0; d < end; d += 4 * T_SIDE) {
        v_f32 x[4], half[4];
        V_UNROLL
        for (int i = 0; i < 4; i++) x[i] = v_load(row + d + i * T_SIDE);
        half[0] = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
        half[1] = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
        half[2] = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
        half[3] = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
        v_store(row + d, _mm512_shuffle_f32x4(half[0], half[2], 0x88));
        v_store(row + d + T_SIDE, _mm512_shuffle_f32x4(half[0], half[2], 0xdd));
        v_store(row + d + 2 * T_SIDE, _mm512_shuffle_f32x4(half[1], half[3], 0x88));
        v_store(row + d + 3 * T_SIDE, _mm512_shuffle_f32x4(half[1], half[3], 0xdd));
    }
}

#endif
