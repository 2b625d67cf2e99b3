/* json_fields.c - typed, bounded fields of a JSON object.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "json_fields.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

/* jansson reports a refused allocation as whatever the parser missed then ("string or '}'
 * expected"), or not at all; errno tells, as malloc sets it. */
kv8_status kv8_json_parse(json_t **out, const char *file, const char *text, size_t size) {
    json_error_t error;
    errno = 0;
    *out = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    if (*out != NULL) return KV8_OK;
    if (errno == ENOMEM)
        return kv8_fail(KV8_ERR_NO_MEMORY, "%s: no memory to parse %zu bytes of JSON", file, size);
    return kv8_fail(KV8_ERR_CORRUPT, "%s: line %d, byte %d: not JSON: %s", file, error.line,
                    error.position, error.text);
}

kv8_status kv8_json_parse_object(json_t **out, const char *file, const char *text, size_t size) {
    json_t *root = NULL;
    *out = NULL;
    KV8_TRY(kv8_json_parse(&root, file, text, size));
    if (!json_is_object(root)) {
        json_decref(root);
        return kv8_fail(KV8_ERR_CORRUPT, "%s: its root is no object", file);
    }
    *out = root;
    return KV8_OK;
}

const json_t *kv8_json_get(const kv8_json_fields *fields, const char *key) {
    const json_t *const value = json_object_get(fields->object, key);
    return json_is_null(value) ? NULL : value;
}

static kv8_status fail_missing(const kv8_json_fields *fields, const char *key) {
    return kv8_fail(KV8_ERR_INVALID, "%s: %s%s is missing", fields->file, fields->prefix, key);
}

/* "KEY is VALUE, must be ..." with the value as the file spells it, cut short. */
static kv8_status fail_value(const kv8_json_fields *fields, const char *key, const json_t *value,
                             const char *wanted) {
    char *const text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    kv8_fail(KV8_ERR_INVALID, "%s: %s%s is %.80s, must be %s", fields->file, fields->prefix, key,
             text == NULL ? "?" : text, wanted);
    free(text);
    return KV8_ERR_INVALID;
}

kv8_status kv8_json_int_or(const kv8_json_fields *fields, const char *key, int64_t low,
                           int64_t high, int32_t *out) {
    const json_t *const value = kv8_json_get(fields, key);
    if (value == NULL) return KV8_OK;
    const json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < low || number > high) {
        char wanted[80];
        snprintf(wanted, sizeof wanted, "an integer from %" PRId64 " to %" PRId64, low, high);
        return fail_value(fields, key, value, wanted);
    }
    *out = (int32_t)number;
    return KV8_OK;
}

kv8_status kv8_json_int(const kv8_json_fields *fields, const char *key, int64_t low, int64_t high,
                        int32_t *out) {
    if (kv8_json_get(fields, key) == NULL) return fail_missing(fields, key);
    return kv8_json_int_or(fields, key, low, high, out);
}

kv8_status kv8_json_real_or(const kv8_json_fields *fields, const char *key, double low, double high,
                            double *out) {
    const json_t *const value = kv8_json_get(fields, key);
    if (value == NULL) return KV8_OK;
    const double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= low && number <= high)) {
        char wanted[80];
        snprintf(wanted, sizeof wanted, "a number from %g to %g", low, high);
        return fail_value(fields, key, value, wanted);
    }
    *out = number;
    return KV8_OK;
}

kv8_status kv8_json_real(const kv8_json_fields *fields, const char *key, double low, double high,
                         double *out) {
    if (kv8_json_get(fields, key) == NULL) return fail_missing(fields, key);
    return kv8_json_real_or(fields, key, low, high, out);
}

kv8_status kv8_json_bool_or(const kv8_json_fields *fields, const char *key, bool *out) {
    const json_t *const value = kv8_json_get(fields, key);
    if (value == NULL) return KV8_OK;
    if (!json_is_boolean(value)) return fail_value(fields, key, value, "true or false");
    *out = json_is_true(value);
    return KV8_OK;
}

kv8_status kv8_json_string_or(const kv8_json_fields *fields, const char *key, const char **out) {
    const json_t *const value = kv8_json_get(fields, key);
    if (value == NULL) return KV8_OK;
    if (!json_is_string(value)) return fail_value(fields, key, value, "a string");
    *out = json_string_value(value);
    return KV8_OK;
}
