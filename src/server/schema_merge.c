/* schema_merge.c - schemas put together keyword by keyword; alternatives are put together with the
 * rest one by one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "schema_merge.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DEPTH = 32 };

typedef struct merger {
    const json_t *root;
    char *refused; /* [64] */
    int depth;
} merger;

static const char *const variants[] = {"anyOf", "oneOf"};

static json_t *refuse(merger *m, const char *what) {
    if (m->refused[0] == '\0') snprintf(m->refused, 64, "%.60s", what);
    return NULL;
}

bool schema_requires(const json_t *schema, const char *name) {
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(schema, "required"), i, item) {
        if (json_is_string(item) && strcmp(json_string_value(item), name) == 0) return true;
    }
    return false;
}

const json_t *schema_look_up(const json_t *root, const char *reference) {
    const json_t *at = root;
    if (reference[0] != '#') return NULL;
    const char *from = reference + 1;
    while (*from == '/' && at != NULL) {
        char name[128];
        const size_t length = strcspn(++from, "/");
        if (length >= sizeof name) return NULL;
        memcpy(name, from, length);
        name[length] = '\0';
        at = json_object_get(at, name);
        from += length;
    }
    return *from == '\0' ? at : NULL;
}

/* Keywords that say nothing about values. */
static bool is_note(const char *keyword) {
    static const char *const notes[] = {"title",     "description", "default",      "examples",
                                        "example",   "$schema",     "$id",          "$comment",
                                        "$defs",     "definitions", "deprecated",   "readOnly",
                                        "writeOnly", "$anchor",     "discriminator"};
    for (size_t i = 0; i < sizeof notes / sizeof notes[0]; i++) {
        if (strcmp(keyword, notes[i]) == 0) return true;
    }
    return false;
}

static size_t num_keywords(const json_t *schema) {
    size_t num = 0;
    const char *keyword;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)schema, keyword, value) num += !is_note(keyword);
    return num;
}

bool schema_needs_merge(const json_t *schema) {
    if (json_object_get(schema, "allOf") != NULL) return true;
    const bool leads_on = json_object_get(schema, "$ref") != NULL ||
                          json_object_get(schema, "anyOf") != NULL ||
                          json_object_get(schema, "oneOf") != NULL;
    return leads_on && num_keywords(schema) > 1;
}

/* --- keywords --- */

static json_t *combine(merger *m, const json_t *a, const json_t *b);
static json_t *merge(merger *m, const json_t *schema);

/* The greater (sign 1) or the smaller. */
static json_t *nearer(const json_t *a, const json_t *b, int sign) {
    const bool first = sign * (json_number_value(a) - json_number_value(b)) >= 0;
    return json_incref((json_t *)(uintptr_t)(first ? a : b));
}

static bool holds(const json_t *list, const json_t *value) {
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)list, i, item) {
        if (json_equal(item, value)) return true;
    }
    return false;
}

static json_t *united(const json_t *a, const json_t *b) {
    json_t *const all = json_copy((json_t *)(uintptr_t)a);
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)b, i, item) {
        if (!holds(a, item)) json_array_append(all, item);
    }
    return all;
}

static json_t *common(merger *m, const json_t *a, const json_t *b, const char *keyword) {
    json_t *const both = json_array();
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)a, i, item) {
        if (holds(b, item)) json_array_append(both, item);
    }
    if (json_array_size(both) > 0) return both;
    json_decref(both);
    return refuse(m, keyword);
}

/* A name, or a list of names, as a list in which a number is also a whole number. */
static json_t *types_of(const json_t *type) {
    json_t *const list = json_is_array(type) ? json_copy((json_t *)(uintptr_t)type) : json_array();
    json_t *const whole = json_string("integer"), *const number = json_string("number");
    if (json_is_string(type)) json_array_append(list, (json_t *)(uintptr_t)type);
    if (holds(list, number) && !holds(list, whole)) json_array_append(list, whole);
    json_decref(number);
    json_decref(whole);
    return list;
}

static json_t *common_types(merger *m, const json_t *a, const json_t *b) {
    json_t *const mine = types_of(a), *const theirs = types_of(b);
    json_t *const both = common(m, mine, theirs, "allOf of different types");
    json_decref(mine);
    json_decref(theirs);
    if (json_array_size(both) != 1) return both;
    json_t *const one = json_incref(json_array_get(both, 0));
    json_decref(both);
    return one;
}

/* The properties of both; a name of both has to satisfy both. */
static json_t *common_properties(merger *m, const json_t *a, const json_t *b) {
    json_t *const all = json_copy((json_t *)(uintptr_t)a);
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)b, name, value) {
        const json_t *const mine = json_object_get(a, name);
        json_t *const both = mine == NULL ? json_incref(value) : combine(m, mine, value);
        if (both == NULL) {
            json_decref(all);
            return NULL;
        }
        json_object_set_new(all, name, both);
    }
    return all;
}

typedef enum rule { SAME, GREATER, SMALLER, UNION, COMMON, TYPES, PROPERTIES, SCHEMA } rule;

static rule rule_of(const char *keyword) {
    static const struct {
        const char *keyword;
        rule rule;
    } rules[] = {{"minimum", GREATER},   {"exclusiveMinimum", GREATER},
                 {"minLength", GREATER}, {"minItems", GREATER},
                 {"maximum", SMALLER},   {"exclusiveMaximum", SMALLER},
                 {"maxLength", SMALLER}, {"maxItems", SMALLER},
                 {"required", UNION},    {"enum", COMMON},
                 {"type", TYPES},        {"properties", PROPERTIES},
                 {"items", SCHEMA},      {"additionalProperties", SCHEMA}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (strcmp(keyword, rules[i].keyword) == 0) return rules[i].rule;
    }
    return SAME;
}

static json_t *both_values(merger *m, const char *keyword, const json_t *a, const json_t *b) {
    if (json_equal(a, b)) return json_incref((json_t *)(uintptr_t)a);
    switch (rule_of(keyword)) {
        case GREATER: return nearer(a, b, 1);
        case SMALLER: return nearer(a, b, -1);
        case UNION: return united(a, b);
        case COMMON: return common(m, a, b, "allOf of different enum");
        case TYPES: return common_types(m, a, b);
        case PROPERTIES: return common_properties(m, a, b);
        case SCHEMA: return combine(m, a, b);
        case SAME: break;
    }
    char what[64];
    snprintf(what, sizeof what, "allOf of different %.30s", keyword);
    return refuse(m, what);
}

/* Properties that the other side's additionalProperties keep out, or say more of. */
static json_t *keep_out(merger *m, json_t *properties, const json_t *by) {
    const json_t *const others = json_object_get(by, "additionalProperties");
    const json_t *const known = json_object_get(by, "properties");
    json_t *const kept = json_object();
    const char *name;
    json_t *value;
    json_object_foreach(properties, name, value) {
        const bool free_one =
            others == NULL || json_is_true(others) || json_object_get(known, name) != NULL;
        if (!free_one && json_is_false(others)) continue;
        json_t *const both = free_one ? json_incref(value) : combine(m, value, others);
        if (both != NULL) json_object_set_new(kept, name, both);
    }
    json_decref(properties);
    return kept;
}

/* Neither has alternatives. */
static json_t *combine_plain(merger *m, const json_t *a, const json_t *b) {
    json_t *const all = json_copy((json_t *)(uintptr_t)a);
    const char *keyword;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)b, keyword, value) {
        const json_t *const mine = json_object_get(a, keyword);
        if (is_note(keyword)) continue;
        json_t *const both =
            mine == NULL ? json_incref(value) : both_values(m, keyword, mine, value);
        if (both == NULL) {
            json_decref(all);
            return NULL;
        }
        json_object_set_new(all, keyword, both);
    }
    json_t *properties = json_object_get(all, "properties");
    if (properties == NULL) return all;
    properties = keep_out(m, keep_out(m, json_incref(properties), a), b);
    json_object_set_new(all, "properties", properties);
    if (m->refused[0] == '\0') return all;
    json_decref(all);
    return NULL;
}

/* --- schemas --- */

/* A schema without references and allOf at its top. */
static json_t *flatten(merger *m, const json_t *schema) {
    if (json_is_true(schema)) return json_object();
    if (!json_is_object(schema)) return refuse(m, "allOf of what is no schema");
    if (schema_needs_merge(schema)) return merge(m, schema);
    const char *const reference = json_string_value(json_object_get(schema, "$ref"));
    if (reference == NULL) return json_incref((json_t *)(uintptr_t)schema);
    const json_t *const meant = schema_look_up(m->root, reference);
    if (meant == NULL) return refuse(m, reference);
    if (++m->depth > MAX_DEPTH) return refuse(m, "references in a circle");
    json_t *const flat = flatten(m, meant);
    m->depth--;
    return flat;
}

/* Each alternative with what stands before and behind, of which one is NULL. */
static json_t *combine_each(merger *m, const char *kind, const json_t *before,
                            const json_t *alternatives, const json_t *behind) {
    json_t *const list = json_array();
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)alternatives, i, item) {
        json_t *const both = before == NULL ? combine(m, item, behind) : combine(m, before, item);
        if (both != NULL) json_array_append_new(list, both);
    }
    if (m->refused[0] == '\0') return json_pack("{s:o}", kind, list);
    json_decref(list);
    return NULL;
}

static json_t *combine_flat(merger *m, const json_t *a, const json_t *b) {
    for (int i = 0; i < 2; i++) {
        const json_t *const mine = json_object_get(a, variants[i]);
        const json_t *const theirs = json_object_get(b, variants[i]);
        if (mine != NULL) return combine_each(m, variants[i], NULL, mine, b);
        if (theirs != NULL) return combine_each(m, variants[i], a, theirs, NULL);
    }
    return combine_plain(m, a, b);
}

/* What takes what both take. */
static json_t *combine(merger *m, const json_t *a, const json_t *b) {
    if (json_is_false(a) || json_is_false(b)) return json_false();
    if (++m->depth > MAX_DEPTH) return refuse(m, "schemas nested so deeply");
    json_t *const mine = flatten(m, a), *const theirs = flatten(m, b);
    json_t *const both = mine == NULL || theirs == NULL ? NULL : combine_flat(m, mine, theirs);
    json_decref(mine);
    json_decref(theirs);
    m->depth--;
    return both;
}

/* What is put together with the rest of a schema, one after the other. */
static json_t *taken_part(const json_t *schema, int idx) {
    const json_t *const list = json_object_get(schema, "allOf");
    const int num = (int)json_array_size(list);
    static const char *const others[] = {"$ref", "anyOf", "oneOf"};
    if (idx < num) return json_incref(json_array_get(list, (size_t)idx));
    for (int i = 0; i < 3; i++) {
        json_t *const value = json_object_get(schema, others[i]);
        if (value != NULL && idx-- == num) return json_pack("{s:O}", others[i], value);
    }
    return NULL;
}

static json_t *merge(merger *m, const json_t *schema) {
    json_t *all = json_copy((json_t *)(uintptr_t)schema);
    static const char *const taken[] = {"allOf", "$ref", "anyOf", "oneOf"};
    for (int i = 0; i < 4; i++) json_object_del(all, taken[i]);
    json_t *part = taken_part(schema, 0);
    for (int i = 1; part != NULL && all != NULL; i++) {
        json_t *const both = combine(m, all, part);
        json_decref(all);
        json_decref(part);
        all = both;
        part = taken_part(schema, i);
    }
    json_decref(part);
    return all;
}

json_t *schema_merge(const json_t *root, const json_t *schema, char refused[64]) {
    merger m = {.root = root, .refused = refused};
    refused[0] = '\0';
    json_t *const all = merge(&m, schema);
    if (all == NULL) refuse(&m, "allOf: no memory");
    return all;
}
