/* kv8/kv8_engine.h - the whole API of libkv8_engine, and with it libkv8's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_KV8_ENGINE_H
#define KV8_KV8_ENGINE_H

#include <kv8/engine.h>
#include <kv8/evaluate.h>
#include <kv8/harmony.h>
#include <kv8/kv8.h>
#include <kv8/model.h>
#include <kv8/scale_file.h>
#include <kv8/simulate.h>
#include <kv8/tokenizer.h>

#endif
