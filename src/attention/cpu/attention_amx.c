/* attention_amx.c - the attention kernel in bf16 math with both products on AMX tiles.
 *
 * The pairs that attention_tmpl.h lays out for vdpbf16ps are what tdpbf16ps reads: A is 16 rows of
 * 16 pairs, B 16 pairs of 16 columns, C 16 x 16 sums in f32; one tdpbf16ps is 8192 products in 16
 * cycles. That leaves softmax and widening, the template's, as the bound. Subnormal bf16 inputs
 * count as 0 (no FP8 or int8 code is one). Q, K and V enter exactly; P is rounded to bf16.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pairs_avx512.h"

enum { T_SIDE = 16 }; /* rows, columns and pairs of a tile */

/* The operand of ldtilecfg: palette 1; per tile its bytes per row and its rows. */
typedef struct t_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} t_config;

/* Tiles 0-3 are C, 4-5 A, 6-7 B; C and A have `rows` rows. */
static inline void t_configure(int32_t rows) {
    t_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = T_SIDE * sizeof(float);
        config.rows[tile] = (uint8_t)(tile < 6 ? rows : T_SIDE);
    }
    _tile_loadconfig(&config);
}

/* One operand of t_product: its corner and its row stride in bytes. */
typedef struct t_matrix {
    float *at;
    size_t row;
} t_matrix;
static inline float *t_at(t_matrix m, int64_t row, int64_t column) {
    return m.at + row * (int64_t)(m.row / sizeof(float)) + column;
}

/* 2 * T_SIDE rows by 2 * T_SIDE columns: four sums from four loads. */
static inline void t_block_2x2(t_matrix a, t_matrix b, t_matrix c, int32_t chunks) {
    _tile_loadd(0, t_at(c, 0, 0), c.row);
    _tile_loadd(1, t_at(c, 0, T_SIDE), c.row);
    _tile_loadd(2, t_at(c, T_SIDE, 0), c.row);
    _tile_loadd(3, t_at(c, T_SIDE, T_SIDE), c.row);
    for (int32_t k = 0; k < chunks; k++) {
        _tile_loadd(6, t_at(b, k * T_SIDE, 0), b.row);
        _tile_loadd(4, t_at(a, 0, k * T_SIDE), a.row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, t_at(b, k * T_SIDE, T_SIDE), b.row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, t_at(a, T_SIDE, k * T_SIDE), a.row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, t_at(c, 0, 0), c.row);
    _tile_stored(1, t_at(c, 0, T_SIDE), c.row);
    _tile_stored(2, t_at(c, T_SIDE, 0), c.row);
    _tile_stored(3, t_at(c, T_SIDE, T_SIDE), c.row);
}

/* The configured rows by 2 * T_SIDE columns. */
static inline void t_block_1x2(t_matrix a, t_matrix b, t_matrix c, int32_t chunks) {
    _tile_loadd(0, t_at(c, 0, 0), c.row);
    _tile_loadd(1, t_at(c, 0, T_SIDE), c.row);
    for (int32_t k = 0; k < chunks; k++) {
        _tile_loadd(4, t_at(a, 0, k * T_SIDE), a.row);
        _tile_loadd(6, t_at(b, k * T_SIDE, 0), b.row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, t_at(b, k * T_SIDE, T_SIDE), b.row);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, t_at(c, 0, 0), c.row);
    _tile_stored(1, t_at(c, 0, T_SIDE), c.row);
}

/* The configured rows by T_SIDE columns. */
static inline void t_block_1x1(t_matrix a, t_matrix b, t_matrix c, int32_t chunks) {
    _tile_loadd(0, t_at(c, 0, 0), c.row);
    for (int32_t k = 0; k < chunks; k++) {
        _tile_loadd(4, t_at(a, 0, k * T_SIDE), a.row);
        _tile_loadd(6, t_at(b, k * T_SIDE, 0), b.row);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, t_at(c, 0, 0), c.row);
}

/* c[r][..] = keep[r] * c[r][..], or 0 when keep is NULL. */
static void t_begin_sums(float *c, int64_t c_row, const float *keep, int32_t rows, int32_t vecs) {
    for (int32_t r = 0; r < rows; r++) {
        const v_f32 factor = v_set1(keep == NULL ? 0.0f : keep[r]);
        for (int32_t v = 0; v < vecs; v++) {
            float *const at = c + r * c_row + v * V_LANES;
            v_store(at, keep == NULL ? factor : v_mul(factor, v_load(at)));
        }
    }
}

/* The template's product; a and b hold zeros from `units` up to a multiple of T_SIDE. */
static void t_product(const float *a, int64_t a_row, const float *b, int64_t b_row, float *c,
                      int64_t c_row, int32_t units, const float *keep, int32_t rows, int32_t vecs) {
    t_begin_sums(c, c_row, keep, rows, vecs);
    const int32_t chunks = (units + T_SIDE - 1) / T_SIDE;
    const t_matrix left = {(float *)(uintptr_t)a, (size_t)a_row * sizeof *a};
    const t_matrix right = {(float *)(uintptr_t)b, (size_t)b_row * sizeof *b};
    const t_matrix sums = {c, (size_t)c_row * sizeof *c};
    int32_t configured = 0;
    for (int32_t r = 0; r < rows;) {
        const int32_t n = rows - r >= 2 * T_SIDE ? 2 * T_SIDE
                          : rows - r < T_SIDE    ? rows - r
                                                 : T_SIDE;
        const int32_t tile_rows = n < T_SIDE ? n : T_SIDE;
        if (configured != tile_rows) t_configure(configured = tile_rows);
        const t_matrix from = {t_at(left, r, 0), left.row};
        for (int32_t v = 0; v < vecs;) {
            const t_matrix panel = {t_at(right, 0, v * T_SIDE), right.row};
            const t_matrix to = {t_at(sums, r, v * T_SIDE), sums.row};
            const t_matrix below = {t_at(to, T_SIDE, 0), to.row};
            const t_matrix from_below = {t_at(from, T_SIDE, 0), from.row};
            if (v + 2 <= vecs) {
                if (n == 2 * T_SIDE)
                    t_block_2x2(from, panel, to, chunks);
                else
                    t_block_1x2(from, panel, to, chunks);
                v += 2;
            } else {
                t_block_1x1(from, panel, to, chunks);
                if (n == 2 * T_SIDE) t_block_1x1(from_below, panel, below, chunks);
                v += 1;
            }
        }
        r += n;
    }
    _tile_release();
}

#define T_NAME        kv8_attention_bf16_any_dany_pany__amx
#define T_OWN_PRODUCT 1
#define T_V_KEYS      (2 * T_SIDE)
#include "attention_tmpl.h"
