/* function_types.h - functions that a model may call, from JSON schemas to the TypeScript-like
 * declarations that gpt-oss was trained on.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_FUNCTION_TYPES_H
#define KV8_SERVER_FUNCTION_TYPES_H

#include <jansson.h>

#include "byte_buffer.h"

/* Adds the declaration of a function {name, description?, parameters?}. */
void function_types_add(byte_buffer *out, const json_t *function);

#endif
