/* fields.c - typed fields of a JSON object from outside.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

json_t *field_any(const fields *f, const char *name) {
    json_t *const value = json_object_get(f->object, name);
    return json_is_null(value) ? NULL : value;
}

bool field_fail(const fields *f, const char *name, const char *format, ...) {
    char param[64], message[400];
    snprintf(param, sizeof param, "%s%s", f->within, name);
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return api_fail_value(f->error, param, "%s %s", param, message);
}

static const char *type_name(const json_t *value) {
    static const char *const names[] = {"an object", "an array", "a string", "a whole number",
                                        "a number",  "true",     "false",    "null"};
    return value == NULL ? "absent" : names[json_typeof(value)];
}

bool field_fail_type(const fields *f, const char *name, const char *wanted) {
    return field_fail(f, name, "must be %s, is %s", wanted, type_name(field_any(f, name)));
}

bool field_bool(const fields *f, const char *name, bool *value) {
    const json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    if (!json_is_boolean(given)) return field_fail_type(f, name, "true or false");
    *value = json_is_true(given);
    return true;
}

bool field_int(const fields *f, const char *name, int64_t min, int64_t max, int64_t *value) {
    const json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    json_int_t number = json_integer_value(given);
    if (json_is_real(given)) { /* 16.0 is a whole number too */
        const double real = json_real_value(given);
        if (!(real >= -9e15 && real <= 9e15) || real != (double)(int64_t)real)
            return field_fail(f, name, "is %.10g, must be a whole number", real);
        number = (json_int_t)real;
    } else if (!json_is_integer(given)) {
        return field_fail_type(f, name, "a whole number");
    }
    if (number < min || number > max)
        return field_fail(f, name, "is %lld, must be from %lld to %lld", (long long)number,
                          (long long)min, (long long)max);
    *value = number;
    return true;
}

bool field_int32(const fields *f, const char *name, int32_t min, int32_t max, int32_t *value) {
    int64_t wide = *value;
    if (!field_int(f, name, min, max, &wide)) return false;
    *value = (int32_t)wide;
    return true;
}

bool field_float(const fields *f, const char *name, double min, double max, float *value) {
    const json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    if (!json_is_number(given)) return field_fail_type(f, name, "a number");
    const double number = json_number_value(given);
    if (!(number >= min && number <= max))
        return field_fail(f, name, "is %.10g, must be from %.10g to %.10g", number, min, max);
    *value = (float)number;
    return true;
}

bool field_string(const fields *f, const char *name, const char **value) {
    const json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    if (!json_is_string(given)) return field_fail_type(f, name, "a string");
    if (strlen(json_string_value(given)) != json_string_length(given))
        return field_fail(f, name, "holds the character U+0000");
    *value = json_string_value(given);
    return true;
}

bool field_array(const fields *f, const char *name, json_t **value) {
    json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    if (!json_is_array(given)) return field_fail_type(f, name, "an array");
    *value = given;
    return true;
}

bool field_object(const fields *f, const char *name, json_t **value) {
    json_t *const given = field_any(f, name);
    if (given == NULL) return true;
    if (!json_is_object(given)) return field_fail_type(f, name, "an object");
    *value = given;
    return true;
}

bool field_refuse(const fields *f, const char *const *names, size_t num) {
    for (size_t i = 0; i < num; i++) {
        const json_t *const given = field_any(f, names[i]);
        const bool asks = given != NULL && !json_is_false(given) &&
                          !(json_is_array(given) && json_array_size(given) == 0);
        if (asks) return field_fail(f, names[i], "is not supported");
    }
    return true;
}
