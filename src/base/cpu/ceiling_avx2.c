/* ceiling_avx2.c - the loops of ceiling_tmpl.h on the avx2 rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ceiling.h"
#include "simd/avx2.h"

#define KV8_CEILING(name) name##__avx2
#include "ceiling_tmpl.h"
