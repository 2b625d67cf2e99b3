/* row_prefetch_amx.h - loaders of K and V rows that read codes eight vectors before they widen
 * them.
 *
 * What has been widened is stored without a break, and a load waits for every older store on its
 * way whose address has the same last twelve bits. The rows of one head lie at eight places of
 * 4 KB (NHD), while the stores pass over all of it: now and then a load would wait for the row
 * before. Read into registers ahead of the stores, rows have the time of eight to come, from the
 * second level of cache too.
 *
 * Part of widen_tmpl.h, for codes of one byte: bf16 rows, which are only moved, go 2 % slower so.
 * dtype and dim are constants at every call.
 *
 * SPDX-License-Identifier: Apache-2.0 */

static const kv8_dtype T_DTYPE_bf16 = KV8_BF16, T_DTYPE_int8 = KV8_INT8;
#define T_FLOAT8(words, rule, name, dtype, mantissa, bias, max) \
    static const kv8_dtype T_DTYPE_##name = dtype;
KV8_FLOAT8_FORMATS(T_FLOAT8)
#undef T_FLOAT8

/* 64 codes to 32 units in quarters. */
V_INLINE void t_widen_vector(const kv8_dtype dtype, __m512i codes, float *out) {
    __m512i pairs[2];
    switch (dtype) {
#define T_FLOAT8(words, rule, name, which, mantissa, bias, max) \
    case which: kv8_bf16x64_##name(codes, pairs); break;
        KV8_FLOAT8_FORMATS(T_FLOAT8)
#undef T_FLOAT8
        default: kv8_bf16x64_int8(codes, pairs); break;
    }
    v_store(out, _mm512_castsi512_ps(pairs[0]));
    v_store(out + V_LANES, _mm512_castsi512_ps(pairs[1]));
}

/* Two vectors of codes to pairs of even and odd: 64 units in quarters. */
V_INLINE void t_widen_vectors(const kv8_dtype dtype, __m512i even, __m512i odd, float *out) {
    t_widen_vector(dtype, _mm512_unpacklo_epi8(even, odd), out);
    t_widen_vector(dtype, _mm512_unpackhi_epi8(even, odd), out + 2 * V_LANES);
}

/* Reads vector x of a row, here and not where the compiler would rather have it. */
V_INLINE __m512i t_take(const uint8_t *row, const int x) {
    __m512i codes = _mm512_loadu_si512(row + x * 64);
    __asm__ volatile("" : "+v"(codes));
    return codes;
}

V_INLINE void t_ring_k(const t_load *load, const kv8_dtype dtype, const int32_t dim) {
    const t_load l = *load;
    const int vectors = dim / 64; /* of a row */
    __m512i ring[T_RING];
    V_UNROLL
    for (int x = 0; x < T_RING; x++) ring[x] = t_take(l.rows[x / vectors] + l.at, x % vectors);
    float *out = l.out;
    for (int32_t i = 0; i < l.n; i += T_TICK_ROWS) {
        T_TICK(l.queue);
        /* Behind the last row: the last turn's once more. */
        const uint8_t *const *const now = l.rows + i;
        const uint8_t *const *const then = i + T_TICK_ROWS < l.n ? now + T_TICK_ROWS : now;
        V_UNROLL
        for (int j = 0; j < T_TICK_ROWS * vectors; j++) {
            const int row = j / vectors, ahead = (j + T_RING) / vectors;
            const uint8_t *const from =
                ahead < T_TICK_ROWS ? now[ahead] : then[ahead - T_TICK_ROWS];
            const __m512i codes = ring[j % T_RING];
            ring[j % T_RING] = t_take(from + l.at, j % vectors);
            t_widen_vector(dtype, codes, out + j % vectors * 2 * V_LANES);
            if (j % vectors < vectors - 1) continue;
            T_ASK_BY_K(l, i, row);
            out += l.row;
        }
    }
}

V_INLINE void t_ring_v(const t_load *load, const kv8_dtype dtype, const int32_t dim) {
    enum { TURN = T_TICK_ROWS / 2, STEPS = T_RING / 2 };
    const t_load l = *load;
    const int vectors = dim / 64;
    __m512i even[STEPS], odd[STEPS];
    V_UNROLL
    for (int x = 0; x < STEPS; x++) {
        const uint8_t *const *const from = l.rows + l.order[x / vectors];
        even[x] = t_take(*from + l.at, x % vectors);
        odd[x] = t_take(from[l.fold] + l.at, x % vectors);
    }
    float *out = l.out;
    for (int32_t u = 0; u < l.n; u += TURN) {
        T_TICK(l.queue);
        const uint8_t *const now = l.order + u, *const then = u + TURN < l.n ? now + TURN : now;
        V_UNROLL
        for (int j = 0; j < TURN * vectors; j++) {
            const int unit = j / vectors, ahead = (j + STEPS) / vectors;
            const uint8_t *const *const from =
                l.rows + (ahead < TURN ? now[ahead] : then[ahead - TURN]);
            const __m512i a = even[j % STEPS], b = odd[j % STEPS];
            even[j % STEPS] = t_take(*from + l.at, j % vectors);
            odd[j % STEPS] = t_take(from[l.fold] + l.at, j % vectors);
            t_widen_vectors(dtype, a, b, out + j % vectors * 4 * V_LANES);
            if (j % vectors < vectors - 1) continue;
            T_ASK_BY_V(l, u, unit);
            out += l.row;
        }
    }
}

#define T_LOAD_K_FIXED(D, load, dim) \
    if (T_DTYPE_##D == KV8_BF16)     \
        t_load_k_of_##D(load, dim);  \
    else                             \
        t_ring_k(load, T_DTYPE_##D, dim)
#define T_LOAD_V_FIXED(D, load, dim) \
    if (T_DTYPE_##D == KV8_BF16)     \
        t_load_v_of_##D(load, dim);  \
    else                             \
        t_ring_v(load, T_DTYPE_##D, dim)
