/* kv8/kv8.h - the whole API of libkv8. The headers of libkv8_engine (checkpoints, text, model,
 * engine, evaluation) are named in kv8/kv8_engine.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_KV8_H
#define KV8_KV8_H

#include <kv8/append.h>
#include <kv8/attention.h>
#include <kv8/attention_device.h>
#include <kv8/cache.h>
#include <kv8/calibrate.h>
#include <kv8/calibrate_device.h>
#include <kv8/device.h>
#include <kv8/formats.h>
#include <kv8/machine.h>
#include <kv8/pages.h>
#include <kv8/rope.h>
#include <kv8/status.h>

#endif
