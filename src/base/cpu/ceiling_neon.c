/* ceiling_neon.c - the loops of ceiling_tmpl.h on the neon rung.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ceiling.h"
#include "simd/neon.h"

#define KV8_CEILING(name) name##__neon
#include "ceiling_tmpl.h"
