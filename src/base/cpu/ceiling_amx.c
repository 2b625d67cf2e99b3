/* ceiling_amx.c - the rate of tdpbf16ps: 16 x 16 sums of 32 bf16 products each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <immintrin.h>
#include <stdint.h>

#include "ceiling.h"

/* As kv8_ceiling_fma, without a load; four sums, the least that keeps the unit busy, three times;
 * 12 * 8192 products per round. */
float kv8_ceiling_bf16__amx(size_t rounds) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    /* All of it is written by then: gcc 12 takes _tile_loadconfig to read 8 bytes. */
    __asm__ volatile("" ::"m"(config));
    _tile_loadconfig(&config); /* zeroes the tiles */
    for (size_t i = 0; i < 3 * rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[256];
    _tile_stored(0, sums, 64);
    _tile_release();
    return sums[0];
}
