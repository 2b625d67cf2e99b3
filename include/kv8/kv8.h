/* kv8/kv8.h - the whole public API.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_KV8_H
#define KV8_KV8_H

#include <kv8/attention.h>
#include <kv8/attention_device.h>
#include <kv8/cache.h>
#include <kv8/calibrate.h>
#include <kv8/device.h>
#include <kv8/evaluate.h>
#include <kv8/formats.h>
#include <kv8/harmony.h>
#include <kv8/machine.h>
#include <kv8/model.h>
#include <kv8/status.h>
#include <kv8/tokenizer.h>

#endif
