/* quantize_q.h - what e4m3 of Q on the host and on a GPU have in common: the checks of its args.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_QUANTIZE_Q_H
#define KV8_QUANTIZE_Q_H

#include "base_impl.h"

#include <kv8/attention.h>

/* Checks args of today's size without reading any array. */
kv8_status kv8_quantize_q_check(const kv8_quantize_q_args *args);
kv8_status kv8_quantize_q_check_source(kv8_dtype src_dtype);

#endif
