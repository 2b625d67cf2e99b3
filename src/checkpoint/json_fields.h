/* json_fields.h - reading typed, bounded fields of a JSON object, each failure one line that names
 * file, key, value and limit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_JSON_FIELDS_H
#define KV8_JSON_FIELDS_H

#include <jansson.h>

#include "base_impl.h"

/* An object of a file; `prefix` ("rope_scaling.") goes before its keys in messages. */
typedef struct kv8_json_fields {
    const char *file, *prefix;
    const json_t *object;
} kv8_json_fields;

/* Parses a whole text, no key twice; the caller drops it with json_decref. Text that is no JSON is
 * KV8_ERR_CORRUPT with its line and byte, memory that ran out KV8_ERR_NO_MEMORY. */
kv8_status kv8_json_parse(json_t **out, const char *file, const char *text, size_t size);
/* The same; the root must be an object. */
kv8_status kv8_json_parse_object(json_t **out, const char *file, const char *text, size_t size);

/* NULL when the key is absent or null. */
const json_t *kv8_json_get(const kv8_json_fields *fields, const char *key);

/* A required field. */
kv8_status kv8_json_int(const kv8_json_fields *fields, const char *key, int64_t low, int64_t high,
                        int32_t *out);
kv8_status kv8_json_real(const kv8_json_fields *fields, const char *key, double low, double high,
                         double *out);
/* An optional one: *out keeps its value when the key is absent or null. */
kv8_status kv8_json_int_or(const kv8_json_fields *fields, const char *key, int64_t low,
                           int64_t high, int32_t *out);
kv8_status kv8_json_real_or(const kv8_json_fields *fields, const char *key, double low, double high,
                            double *out);
kv8_status kv8_json_bool_or(const kv8_json_fields *fields, const char *key, bool *out);
/* Borrowed from the object. */
kv8_status kv8_json_string_or(const kv8_json_fields *fields, const char *key, const char **out);

#endif
