/* function_types.c - JSON schemas as TypeScript-like types, in the form of harmony: descriptions
 * are comment lines above, defaults comments behind.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "function_types.h"

#include <stdlib.h>
#include <string.h>

#include "schema_merge.h"

static void add_type(byte_buffer *out, const json_t *schema, const char *indent);

static bool is_nullable(const json_t *schema) {
    return json_is_true(json_object_get(schema, "nullable"));
}

/* Every line of a text as a comment. */
static void add_comment(byte_buffer *out, const json_t *text, const char *indent) {
    const char *at = json_string_value(text);
    while (at != NULL && *at != '\0') {
        const size_t length = strcspn(at, "\n");
        byte_buffer_printf(out, "%s// %.*s\n", indent, (int)length, at);
        at += length + (at[length] == '\n');
    }
}

/* Strings without an enum stand in quotes. */
static void add_default(byte_buffer *out, const json_t *schema) {
    const json_t *const value = json_object_get(schema, "default");
    if (value == NULL) return;
    byte_buffer_add_string(out, " // default: ");
    if (json_is_string(value)) {
        const char *const quote = json_object_get(schema, "enum") == NULL ? "\"" : "";
        byte_buffer_printf(out, "%s%s%s", quote, json_string_value(value), quote);
        return;
    }
    char *const text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    byte_buffer_add_string(out, text == NULL ? "" : text);
    free(text);
}

static void add_variants(byte_buffer *out, const json_t *variants, const char *indent) {
    size_t i;
    json_t *variant;
    json_array_foreach(variants, i, variant) {
        byte_buffer_printf(out, "\n%s | ", indent);
        add_type(out, variant, indent);
        if (is_nullable(variant)) byte_buffer_add_string(out, " | null");
        const json_t *const about = json_object_get(variant, "description");
        if (json_is_string(about)) byte_buffer_printf(out, " // %s", json_string_value(about));
        add_default(out, variant);
    }
    byte_buffer_printf(out, "\n%s", indent);
}

/* JSON nests at most so deep that jansson reads it; the indent of names stays within reason. */
static void add_object(byte_buffer *out, const json_t *schema, const char *indent) {
    char inner[64];
    const size_t width = strlen(indent) + 4 < sizeof inner ? strlen(indent) + 4 : strlen(indent);
    memset(inner, ' ', width);
    inner[width] = '\0';
    byte_buffer_add_string(out, "{\n");
    const char *name;
    json_t *property;
    json_object_foreach(json_object_get(schema, "properties"), name, property) {
        const json_t *const title = json_object_get(property, "title");
        add_comment(out, title, indent);
        if (json_is_string(title)) byte_buffer_printf(out, "%s//\n", indent);
        add_comment(out, json_object_get(property, "description"), indent);
        byte_buffer_printf(out, "%s%s%s: ", indent, name, schema_requires(schema, name) ? "" : "?");
        add_type(out, property, inner);
        if (is_nullable(property)) byte_buffer_add_string(out, " | null");
        byte_buffer_add_string(out, ",");
        if (json_object_get(property, "oneOf") == NULL) add_default(out, property);
        byte_buffer_add_string(out, "\n");
    }
    byte_buffer_printf(out, "%s}", indent);
}

static void add_enum(byte_buffer *out, const json_t *values) {
    size_t i;
    json_t *value;
    json_array_foreach(values, i, value) {
        char *const text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        byte_buffer_printf(out, "%s%s", i == 0 ? "" : " | ", text == NULL ? "" : text);
        free(text);
    }
}

static void add_named_type(byte_buffer *out, const json_t *schema, const char *name,
                           const char *indent) {
    const json_t *const items = json_object_get(schema, "items");
    if (strcmp(name, "object") == 0) {
        add_object(out, schema, indent);
    } else if (strcmp(name, "array") == 0) {
        if (items == NULL) byte_buffer_add_string(out, "Array<any>");
        if (items != NULL) add_type(out, items, indent);
        if (items != NULL) byte_buffer_add_string(out, "[]");
    } else if (strcmp(name, "integer") == 0) {
        byte_buffer_add_string(out, "number");
    } else if (strcmp(name, "string") == 0 || strcmp(name, "number") == 0 ||
               strcmp(name, "boolean") == 0 || strcmp(name, "null") == 0) {
        byte_buffer_add_string(out, name);
    } else {
        byte_buffer_add_string(out, "any");
    }
}

static void add_type(byte_buffer *out, const json_t *schema, const char *indent) {
    const json_t *variants = json_object_get(schema, "oneOf");
    if (variants == NULL) variants = json_object_get(schema, "anyOf");
    const json_t *const type = json_object_get(schema, "type");
    const json_t *const values = json_object_get(schema, "enum");
    if (json_is_array(variants)) {
        add_variants(out, variants, indent);
    } else if (json_array_size(values) > 0) {
        add_enum(out, values);
    } else if (json_is_array(type)) {
        size_t i;
        json_t *name;
        json_array_foreach(type, i, name) {
            if (i > 0) byte_buffer_add_string(out, " | ");
            add_named_type(out, schema, json_is_string(name) ? json_string_value(name) : "any",
                           indent);
        }
    } else {
        add_named_type(out, schema, json_is_string(type) ? json_string_value(type) : "any", indent);
    }
}

void function_types_add(byte_buffer *out, const json_t *function) {
    const char *const name = json_string_value(json_object_get(function, "name"));
    const json_t *const parameters = json_object_get(function, "parameters");
    add_comment(out, json_object_get(function, "description"), "");
    if (json_object_size(json_object_get(parameters, "properties")) == 0) {
        byte_buffer_printf(out, "type %s = () => any;\n\n", name);
        return;
    }
    byte_buffer_printf(out, "type %s = (_: ", name);
    add_type(out, parameters, "");
    byte_buffer_add_string(out, ") => any;\n\n");
}
