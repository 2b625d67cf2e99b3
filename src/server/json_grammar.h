/* json_grammar.h - JSON schemas as grammars: every text that the grammar takes is valid under the
 * schema. What of a schema cannot be held is refused by its keyword.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_JSON_GRAMMAR_H
#define KV8_SERVER_JSON_GRAMMAR_H

#include <jansson.h>

#include "api_error.h"
#include "grammar.h"

/* A value of the schema, then `next`. `param` names the schema in errors; -1 = refused. */
int json_grammar_add(grammar *g, const json_t *schema, const char *param, int next,
                     api_error *error);
/* Any JSON object. */
int json_grammar_add_object(grammar *g, int next);

#endif
