/* schema_merge.h - one JSON schema for what several say together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_SCHEMA_MERGE_H
#define KV8_SERVER_SCHEMA_MERGE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* What "#", "#/$defs/name" and the like stand for; NULL = nothing. */
const json_t *schema_look_up(const json_t *root, const char *reference);
/* Whether the schema's "required" has the name. */
bool schema_requires(const json_t *schema, const char *name);
/* It has "allOf", or "$ref", "anyOf" or "oneOf" beside other keywords. */
bool schema_needs_merge(const json_t *schema);
/* A new schema that takes what this one does and needs no merge; NULL = `refused` says what cannot
 * be put together. */
json_t *schema_merge(const json_t *root, const json_t *schema, char refused[64]);

#endif
