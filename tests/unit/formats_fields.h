/* formats_fields.h - the value that the fields of a code spell out, in double, as IEEE 754 and the
 * OCP OFP8 and MX specifications define it: what the formats tests hold the library to.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_FIELDS_H
#define KV8_FORMATS_FIELDS_H

#include <math.h>

/* (-1)^s * 2^(e - bias) * (1 + m / 2^mantissa), or the subnormal; the top exponent is like any. */
static inline double field_value(unsigned code, int exponent_bits, int mantissa_bits, int bias) {
    const unsigned m = code & ((1u << mantissa_bits) - 1u);
    const int e = (int)((code >> mantissa_bits) & ((1u << exponent_bits) - 1u));
    const double fraction = ldexp((double)m, -mantissa_bits);
    const double magnitude = e == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, e - bias);
    return (code >> (exponent_bits + mantissa_bits)) & 1u ? -magnitude : magnitude;
}

#endif
