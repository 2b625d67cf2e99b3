/* answer_grammar.h - what an answer may be when a request says so: JSON of a schema in the final
 * channel or the arguments of calls, inside the channels of a chat, whose reasoning stays free.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_ANSWER_GRAMMAR_H
#define KV8_SERVER_ANSWER_GRAMMAR_H

#include <jansson.h>

#include "api_error.h"
#include "constraint.h"

typedef struct answer_shape {
    bool is_chat;         /* channels, as harmony has them; else the JSON alone */
    const json_t *schema; /* of the answer; NULL = text, or any object */
    bool any_object;
    const char *param;  /* that gave the schema */
    json_t *functions;  /* {name: {name, parameters, strict}} that may be called; NULL = none */
    const char *forced; /* one that is called already, but for its arguments; "" = but for its
                         * name too; NULL = none */
} answer_shape;

/* Whether there is something to hold. */
bool answer_shape_is_held(const answer_shape *shape);
bool answer_grammar_build(constraint **out, const vocabulary *v, const answer_shape *shape,
                          api_error *error);

#endif
