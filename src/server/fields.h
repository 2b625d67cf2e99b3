/* fields.h - typed fields of a JSON object from outside. A field that is absent or null leaves the
 * value at its default; one of another type or out of range is an error that names it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_FIELDS_H
#define KV8_SERVER_FIELDS_H

#include <stdint.h>

#include "api_error.h"

typedef struct fields {
    const json_t *object;
    const char *within; /* "messages[0]." before names in errors, or "" */
    api_error *error;
} fields;

/* The field, or NULL when it is absent or null. */
json_t *field_any(const fields *f, const char *name);
/* Each returns false with the error set. */
bool field_bool(const fields *f, const char *name, bool *value);
bool field_int(const fields *f, const char *name, int64_t min, int64_t max, int64_t *value);
bool field_int32(const fields *f, const char *name, int32_t min, int32_t max, int32_t *value);
bool field_float(const fields *f, const char *name, double min, double max, float *value);
/* Borrowed from the object; U+0000 is refused. */
bool field_string(const fields *f, const char *name, const char **value);
bool field_array(const fields *f, const char *name, json_t **value);
bool field_object(const fields *f, const char *name, json_t **value);
/* Fields that are not computed pass as null, false or an empty array, which ask for nothing. */
bool field_refuse(const fields *f, const char *const *names, size_t num);
/* "must be a string, is a number", and so on. */
bool field_fail_type(const fields *f, const char *name, const char *wanted);
bool field_fail(const fields *f, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
