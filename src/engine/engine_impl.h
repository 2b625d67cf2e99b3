/* engine_impl.h - what engine shows beside its public headers: the draw of tokens on a GPU, to
 * those who time it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ENGINE_IMPL_H
#define KV8_ENGINE_IMPL_H

#include "sampler_device.h"

#endif
