/* formats_impl.h - what formats shows the rooms above: the public conversions, and for SIMD
 * kernels formats_simd.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_FORMATS_IMPL_H
#define KV8_FORMATS_IMPL_H

#include "base_impl.h"

#include <kv8/formats.h>

#endif
