/* ceiling_avx512.c - the loops of ceiling_tmpl.h on the avx512 rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ceiling.h"
#include "simd/avx512.h"

#define KV8_CEILING(name) name##__avx512
#include "ceiling_tmpl.h"
