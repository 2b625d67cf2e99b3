/* float8.h - the floats of 8 bits, one row each: C, CUDA and the vectors of every rung make their
 * tables, loops and dispatch of this list. What a code means is kv8_<name>_decode and _encode of
 * scalar_codec.h; on a GPU kv8::format of cuda/codec.cuh.
 *
 *   X(words, rule, name, dtype, mantissa, bias, max)
 *
 * words: how vectors widen it. LOOKUP: by words of its own in simd/, 64 codes at a time too;
 *        VECTOR: by words of its own; CODE: one code after another, which every format can begin
 *        with
 * rule:  how vectors narrow it, beside mantissa bits and the exponent's bias. SIGNED: NaN is 0x7f
 *        with its sign; UNSIGNED: zero and NaN (0x80) have no sign
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FLOAT8_H
#define KV8_FLOAT8_H

#define KV8_FLOAT8_FORMATS(X)                              \
    X(LOOKUP, SIGNED, e4m3, KV8_E4M3, 3, 7, 448)           \
    X(LOOKUP, UNSIGNED, e4m3fnuz, KV8_E4M3FNUZ, 3, 8, 240) \
    X(VECTOR, SIGNED, e5m2, KV8_E5M2, 2, 15, 57344)

#endif
