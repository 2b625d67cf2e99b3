// token_strips.cuh - strips of experts (experts_args.h) of the widths that tokens' kernels are for.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "experts_items.cuh"
#include "token_args.h"

namespace kv8 {

constexpr int STRIP_TILES = KV8_TOKEN_HIDDEN / KV8_TILE_COLS;
constexpr int STRIP_CODES = STRIP_TILES * KV8_TILE_CODE_BYTES;
constexpr int STRIP_SCALES = STRIP_TILES * KV8_TILE_SCALE_BYTES;
constexpr int STRIP_BYTES = STRIP_CODES + STRIP_SCALES + KV8_STRIP_END_BYTES;
static_assert(STRIP_BYTES == KV8_TOKEN_STAGE_BYTES, "a strip is a stage");
constexpr int GATE_UP_STRIPS = 2 * KV8_TOKEN_HIDDEN / KV8_STRIP_ROWS;
constexpr int DOWN_STRIPS = KV8_TOKEN_HIDDEN / KV8_STRIP_ROWS;

}  // namespace kv8
