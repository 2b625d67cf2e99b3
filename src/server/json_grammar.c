/* json_grammar.c - JSON schemas as grammars.
 *
 * Properties come in the schema's order, optional ones may be left out, others do not come: that is
 * a part of what the schema allows, and what models write anyway. White space is a line break with
 * up to 16 blanks or one blank, where JSON allows any, so that an answer cannot consist of it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "json_grammar.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "character_grammar.h"
#include "pattern_grammar.h"
#include "range_grammar.h"
#include "schema_merge.h"

enum { MAX_LENGTH = 1024, MAX_BLANKS = 16, MAX_NESTING = 64 };

typedef struct compiler {
    grammar *g;
    const json_t *root;
    const char *param;
    api_error *error;
    json_t *references;     /* rule by "#/..." */
    json_t *made;           /* merged schemas */
    int any, string, space; /* rules; -1 = not made yet */
    int nesting;
} compiler;

static int add_value(compiler *c, const json_t *schema, int next);

static int text(compiler *c, const char *string, int next) {
    return grammar_text(c->g, string, strlen(string), next);
}

static int refuse(compiler *c, const char *keyword) {
    api_fail(c->error, 400, "unsupported_schema", c->param, "%s: \"%.64s\" is not supported",
             c->param, keyword);
    return -1;
}

/* --- pieces --- */

/* What `one` enters, or nothing. */
static int maybe(compiler *c, int one, int next) {
    return grammar_either(c->g, one, next);
}

static int space(compiler *c, int next) {
    if (c->space < 0) {
        c->space = grammar_add_rule(c->g);
        const int end = grammar_end(c->g);
        int blanks = end;
        for (int i = 0; i < MAX_BLANKS; i++)
            blanks = maybe(c, grammar_range(c->g, ' ', ' ', blanks), end);
        const int line = grammar_range(c->g, '\n', '\n', blanks);
        grammar_set_rule(
            c->g, c->space,
            maybe(c, grammar_either(c->g, line, grammar_range(c->g, ' ', ' ', end)), end));
    }
    return grammar_call(c->g, c->space, next);
}

static int digits(compiler *c, int most, int next) {
    int more = next;
    for (int i = 1; i < most; i++) more = maybe(c, grammar_range(c->g, '0', '9', more), next);
    return grammar_range(c->g, '0', '9', more);
}

static int whole_number(compiler *c, bool may_be_negative, int next) {
    int more = next;
    for (int i = 0; i < 15; i++) more = maybe(c, grammar_range(c->g, '0', '9', more), next);
    const int magnitude = grammar_either(c->g, grammar_range(c->g, '0', '0', next),
                                         grammar_range(c->g, '1', '9', more));
    if (!may_be_negative) return magnitude;
    return maybe(c, grammar_range(c->g, '-', '-', magnitude), magnitude);
}

static int number(compiler *c, bool may_be_negative, int next) {
    const int digits_of_exponent = digits(c, 2, next);
    const int sign = maybe(
        c, grammar_either(c->g, text(c, "+", digits_of_exponent), text(c, "-", digits_of_exponent)),
        digits_of_exponent);
    const int exponent =
        maybe(c, grammar_either(c->g, text(c, "e", sign), text(c, "E", sign)), next);
    const int fraction = maybe(c, text(c, ".", digits(c, 16, exponent)), exponent);
    return whole_number(c, may_be_negative, fraction);
}

static int any_string(compiler *c, int next) {
    if (c->string < 0) {
        c->string = grammar_add_rule(c->g);
        const int loop = grammar_open(c->g);
        grammar_close(c->g, loop, character_grammar_all(c->g, loop),
                      text(c, "\"", grammar_end(c->g)));
        grammar_set_rule(c->g, c->string, text(c, "\"", loop));
    }
    return grammar_call(c->g, c->string, next);
}

/* "[" items "]", with at least `min` and at most `max` (-1: any number) of the rule's. */
static int items(compiler *c, int rule, int min, int max, int next) {
    grammar *const g = c->g;
    const int close = space(c, text(c, "]", next));
    int more = close;
    if (max < 0) { /* a loop, then the items that must be */
        more = grammar_open(g);
        const int again = space(c, text(c, ",", space(c, grammar_call(g, rule, more))));
        grammar_close(g, more, again, close);
    }
    for (int i = max < 0 ? min : max; i > 1; i--) {
        const int again = space(c, text(c, ",", space(c, grammar_call(g, rule, more))));
        more = i > min ? maybe(c, again, close) : again;
    }
    const int first = max == 0 ? close : space(c, grammar_call(g, rule, more));
    return text(c, "[", min == 0 ? maybe(c, first, close) : first);
}

/* {"key": value, ...} with any keys. */
static int any_members(compiler *c, int rule, int next) {
    grammar *const g = c->g;
    const int close = space(c, text(c, "}", next));
    const int more = grammar_open(g);
    const int member = any_string(c, text(c, ":", space(c, grammar_call(g, rule, more))));
    grammar_close(g, more, text(c, ",", space(c, member)), close);
    return text(c, "{", maybe(c, space(c, member), close));
}

static int any_value(compiler *c) {
    if (c->any >= 0) return c->any;
    c->any = grammar_add_rule(c->g);
    const int end = grammar_end(c->g);
    int all = grammar_either(c->g, any_string(c, end), number(c, true, end));
    all = grammar_either(c->g, all, items(c, c->any, 0, -1, end));
    all = grammar_either(c->g, all, any_members(c, c->any, end));
    all = grammar_either(c->g, all, text(c, "true", end));
    all = grammar_either(c->g, all, text(c, "false", end));
    all = grammar_either(c->g, all, text(c, "null", end));
    grammar_set_rule(c->g, c->any, all);
    return c->any;
}

/* --- schemas --- */

/* Limits of lengths; -1 = none. */
static bool read_limit(compiler *c, const json_t *schema, const char *keyword, int *limit) {
    const json_t *const given = json_object_get(schema, keyword);
    if (given == NULL) return true;
    const json_int_t value = json_integer_value(given);
    if (!json_is_integer(given) || value < 0 || value > MAX_LENGTH) {
        api_fail(c->error, 400, "unsupported_schema", c->param,
                 "%s: \"%s\" must be a whole number up to %d", c->param, keyword, MAX_LENGTH);
        return false;
    }
    *limit = (int)value;
    return true;
}

/* A string of a pattern, or of a format that says which; its lengths must be within the limits. */
static int add_pattern(compiler *c, const char *keyword, const char *pattern, int min, int max,
                       int next) {
    pattern_facts facts;
    const int entry = pattern_grammar_add(c->g, pattern, text(c, "\"", next), &facts);
    if (entry < 0) {
        api_fail(c->error, 400, "unsupported_schema", c->param, "%s: \"%s\": %s is not supported",
                 c->param, keyword, facts.refused);
        return -1;
    }
    if (facts.min < min) return refuse(c, "minLength beside a shorter pattern");
    if (max >= 0 && (facts.max < 0 || facts.max > max))
        return refuse(c, "maxLength beside a longer pattern");
    return text(c, "\"", entry);
}

static int add_length(compiler *c, int min, int max, int next) {
    const int rule = grammar_add_rule(c->g); /* one character */
    grammar_set_rule(c->g, rule, character_grammar_all(c->g, grammar_end(c->g)));
    const int close = text(c, "\"", next);
    int more = close;
    if (max < 0) {
        more = grammar_open(c->g);
        grammar_close(c->g, more, grammar_call(c->g, rule, more), close);
    }
    for (int i = max < 0 ? min : max; i > 0; i--) {
        more = grammar_call(c->g, rule, more);
        if (i > min) more = maybe(c, more, close);
    }
    return text(c, "\"", more);
}

static int add_string(compiler *c, const json_t *schema, int next) {
    int min = 0, max = -1;
    const json_t *const pattern = json_object_get(schema, "pattern");
    const char *const format = json_string_value(json_object_get(schema, "format"));
    const char *const of_format = format == NULL ? NULL : pattern_of_format(format);
    if (!read_limit(c, schema, "minLength", &min) || !read_limit(c, schema, "maxLength", &max))
        return -1;
    if (max >= 0 && max < min) return refuse(c, "maxLength");
    if (pattern != NULL && !json_is_string(pattern)) return refuse(c, "pattern");
    if (pattern != NULL && of_format != NULL) return refuse(c, "pattern with format");
    if (pattern != NULL)
        return add_pattern(c, "pattern", json_string_value(pattern), min, max, next);
    if (of_format != NULL) return add_pattern(c, "format", of_format, min, max, next);
    return min == 0 && max < 0 ? any_string(c, next) : add_length(c, min, max, next);
}

static bool names_range(const json_t *schema) {
    return json_object_get(schema, "minimum") != NULL ||
           json_object_get(schema, "maximum") != NULL ||
           json_object_get(schema, "exclusiveMinimum") != NULL ||
           json_object_get(schema, "exclusiveMaximum") != NULL;
}

/* The whole numbers that a schema lets through. */
static bool read_range(compiler *c, const json_t *schema, int64_t *lo, int64_t *hi) {
    static const struct {
        const char *keyword;
        int inside;
        bool is_lower;
    } ends[] = {{"minimum", 0, true},
                {"exclusiveMinimum", 1, true},
                {"maximum", 0, false},
                {"exclusiveMaximum", -1, false}};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        const json_t *const given = json_object_get(schema, ends[i].keyword);
        const double value = json_number_value(given);
        if (given == NULL) continue;
        if (!json_is_number(given) || !(fabs(value) <= (double)RANGE_LIMIT))
            return refuse(c, ends[i].keyword) >= 0;
        const bool rounds_up = ends[i].is_lower == (ends[i].inside == 0);
        const int64_t inside = (int64_t)(rounds_up ? ceil(value) : floor(value)) + ends[i].inside;
        if (ends[i].is_lower && inside > *lo) *lo = inside;
        if (!ends[i].is_lower && inside < *hi) *hi = inside;
    }
    return *lo <= *hi || refuse(c, "maximum") >= 0;
}

static int add_integer(compiler *c, const json_t *schema, int next) {
    int64_t lo = -RANGE_LIMIT, hi = RANGE_LIMIT;
    if (!names_range(schema)) return whole_number(c, true, next);
    return read_range(c, schema, &lo, &hi) ? range_grammar_add(c->g, lo, hi, next) : -1;
}

/* One end of a range of numbers: the nearer of two keywords. */
static bool read_end(compiler *c, const json_t *schema, const char *inclusive,
                     const char *exclusive, double sign, range_end *out) {
    const char *const keywords[] = {inclusive, exclusive};
    for (int i = 0; i < 2; i++) {
        const json_t *const given = json_object_get(schema, keywords[i]);
        if (given == NULL) continue;
        range_end end = {.given = true, .value = json_number_value(given), .outside = i == 1};
        if (!json_is_number(given) || !range_grammar_write(&end))
            return refuse(c, keywords[i]) >= 0;
        const double nearer = sign * (end.value - out->value);
        if (!out->given || nearer > 0 || (nearer == 0 && end.outside)) *out = end;
    }
    return true;
}

static int add_number(compiler *c, const json_t *schema, int next) {
    range_end lo = {0}, hi = {0};
    if (!read_end(c, schema, "minimum", "exclusiveMinimum", 1, &lo) ||
        !read_end(c, schema, "maximum", "exclusiveMaximum", -1, &hi))
        return -1;
    if (!lo.given && !hi.given) return number(c, true, next);
    if (lo.given && lo.value == 0 && !lo.outside && !hi.given) return number(c, false, next);
    const int entry = range_grammar_add_decimals(c->g, &lo, &hi, next);
    return entry < 0 ? refuse(c, "maximum") : entry;
}

static int value_rule(compiler *c, const json_t *schema) {
    const int rule = grammar_add_rule(c->g);
    const int entry = add_value(c, schema, grammar_end(c->g));
    if (entry < 0) return -1;
    grammar_set_rule(c->g, rule, entry);
    return rule;
}

/* One item after the other: as many as there are schemas, no more and no fewer. */
static int add_tuple(compiler *c, const json_t *each, int next) {
    int more = space(c, text(c, "]", next));
    for (size_t i = json_array_size(each); i-- > 0;) {
        const int rule = value_rule(c, json_array_get(each, i));
        if (rule < 0) return -1;
        const int item = space(c, grammar_call(c->g, rule, more));
        more = i == 0 ? item : space(c, text(c, ",", item));
    }
    return text(c, "[", more);
}

static int add_array(compiler *c, const json_t *schema, int next) {
    int min = 0, max = -1;
    if (!read_limit(c, schema, "minItems", &min) || !read_limit(c, schema, "maxItems", &max))
        return -1;
    if (max >= 0 && max < min) return refuse(c, "maxItems");
    const json_t *const tuple = json_object_get(schema, "prefixItems");
    const int num = (int)json_array_size(tuple);
    const bool ends = max == num || json_is_false(json_object_get(schema, "items"));
    if (tuple != NULL && (min != num || !ends)) return refuse(c, "prefixItems of any number");
    if (tuple != NULL) return add_tuple(c, tuple, next);
    const json_t *const each = json_object_get(schema, "items");
    const int rule = each == NULL ? any_value(c) : value_rule(c, each);
    return rule < 0 ? -1 : items(c, rule, min, max, next);
}

/* "name": value, as a rule. */
static int member_rule(compiler *c, const char *name, const json_t *schema) {
    const int rule = grammar_add_rule(c->g);
    const int value = add_value(c, schema, grammar_end(c->g));
    json_t *const string = json_string(name);
    char *const key = string == NULL ? NULL : json_dumps(string, JSON_ENCODE_ANY);
    json_decref(string);
    if (value >= 0 && key != NULL)
        grammar_set_rule(c->g, rule, text(c, key, text(c, ":", space(c, value))));
    const bool good = value >= 0 && (key != NULL || api_fail_memory(c->error));
    free(key);
    return good ? rule : -1;
}

/* From the last property to the first, each in two places: after another, and as the first. */
static int add_members(compiler *c, const json_t *schema, int next) {
    const json_t *const properties = json_object_get(schema, "properties");
    const size_t num = json_object_size(properties);
    const char **const names = calloc(num, sizeof *names);
    size_t count = 0;
    const char *name;
    json_t *value;
    if (names == NULL) return api_fail_memory(c->error) ? 0 : -1;
    json_object_foreach((json_t *)(uintptr_t)properties, name, value) names[count++] = name;
    const int close = space(c, text(c, "}", next));
    int first = close, more = close;
    for (size_t i = num; i-- > 0 && first >= 0;) {
        const int rule = member_rule(c, names[i], json_object_get(properties, names[i]));
        if (rule < 0) {
            first = -1;
            break;
        }
        const int member = grammar_call(c->g, rule, more);
        const int as_first = space(c, member), as_next = text(c, ",", space(c, member));
        const bool must = schema_requires(schema, names[i]);
        first = must ? as_first : maybe(c, as_first, first);
        more = must ? as_next : maybe(c, as_next, more);
    }
    free(names);
    return first < 0 ? -1 : text(c, "{", first);
}

static int add_object(compiler *c, const json_t *schema, int next) {
    const json_t *const others = json_object_get(schema, "additionalProperties");
    size_t i;
    json_t *item;
    const json_t *const properties = json_object_get(schema, "properties");
    json_array_foreach(json_object_get(schema, "required"), i, item) {
        if (!json_is_string(item) || json_object_get(properties, json_string_value(item)) == NULL)
            return refuse(c, "required"); /* of what is no property */
    }
    if (json_object_size(properties) > 0) return add_members(c, schema, next);
    if (json_is_false(others)) return text(c, "{", space(c, text(c, "}", next)));
    const int rule = json_is_object(others) ? value_rule(c, others) : any_value(c);
    return rule < 0 ? -1 : any_members(c, rule, next);
}

static int add_type(compiler *c, const json_t *schema, const char *type, int next) {
    if (strcmp(type, "object") == 0) return add_object(c, schema, next);
    if (strcmp(type, "array") == 0) return add_array(c, schema, next);
    if (strcmp(type, "string") == 0) return add_string(c, schema, next);
    if (strcmp(type, "number") == 0) return add_number(c, schema, next);
    if (strcmp(type, "integer") == 0) return add_integer(c, schema, next);
    if (strcmp(type, "null") == 0) return text(c, "null", next);
    if (strcmp(type, "boolean") == 0)
        return grammar_either(c->g, text(c, "true", next), text(c, "false", next));
    return refuse(c, type);
}

static bool is_of_type(const json_t *value, const char *type) {
    static const char *const names[] = {"object", "array",   "string",  "integer",
                                        "number", "boolean", "boolean", "null"};
    return strcmp(names[json_typeof(value)], type) == 0 ||
           (json_is_integer(value) && strcmp(type, "number") == 0);
}

static bool takes_type(const json_t *type, const json_t *value) {
    size_t i;
    json_t *name;
    if (json_is_string(type)) return is_of_type(value, json_string_value(type));
    json_array_foreach(type, i, name) {
        if (json_is_string(name) && is_of_type(value, json_string_value(name))) return true;
    }
    return type == NULL;
}

/* The values of "enum" and "const" that "type" allows, as they are written. */
static int add_literals(compiler *c, const json_t *schema, int next) {
    const json_t *const values = json_object_get(schema, "enum");
    const json_t *const constant = json_object_get(schema, "const");
    const size_t num = values != NULL ? json_array_size(values) : 1;
    int all = -1;
    if (num > MAX_LENGTH) return refuse(c, "enum of so many values");
    for (size_t i = 0; i < num; i++) {
        const json_t *const value = values != NULL ? json_array_get(values, i) : constant;
        if (constant != NULL && !json_equal(value, constant)) continue;
        if (!takes_type(json_object_get(schema, "type"), value)) continue;
        char *const written = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        if (written == NULL) return api_fail_memory(c->error) ? 0 : -1;
        const int one = text(c, written, next);
        all = all < 0 ? one : grammar_either(c->g, all, one);
        free(written);
    }
    return all < 0 ? refuse(c, "enum") : all;
}

static int add_alternatives(compiler *c, const json_t *schemas, bool are_types,
                            const json_t *schema, int next) {
    int all = -1;
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)(uintptr_t)schemas, i, item) {
        const int one = !are_types             ? add_value(c, item, next)
                        : json_is_string(item) ? add_type(c, schema, json_string_value(item), next)
                                               : refuse(c, "type");
        if (one < 0) return -1;
        all = all < 0 ? one : grammar_either(c->g, all, one);
    }
    return all < 0 ? refuse(c, are_types ? "type" : "anyOf") : all;
}

static int add_reference(compiler *c, const char *reference, int next) {
    const json_t *const known = json_object_get(c->references, reference);
    if (known != NULL) return grammar_call(c->g, (int)json_integer_value(known), next);
    const json_t *const schema = schema_look_up(c->root, reference);
    if (schema == NULL) return refuse(c, reference);
    const int rule = grammar_add_rule(c->g);
    if (json_object_set_new(c->references, reference, json_integer(rule)) != 0)
        return api_fail_memory(c->error) ? 0 : -1;
    const int entry = add_value(c, schema, grammar_end(c->g));
    if (entry < 0) return -1;
    grammar_set_rule(c->g, rule, entry);
    return grammar_call(c->g, rule, next);
}

/* Keywords that say something about values which the grammar would not hold. */
static const char *unsupported(const json_t *schema) {
    static const char *const keywords[] = {"multipleOf",
                                           "uniqueItems",
                                           "contains",
                                           "patternProperties",
                                           "propertyNames",
                                           "minProperties",
                                           "maxProperties",
                                           "not",
                                           "if",
                                           "dependentRequired",
                                           "dependentSchemas"};
    for (size_t i = 0; i < sizeof keywords / sizeof keywords[0]; i++) {
        if (json_object_get(schema, keywords[i]) != NULL) return keywords[i];
    }
    return NULL;
}

/* --- oneOf: alternatives of which no value is two --- */

enum { TYPE_OBJECT = 1, TYPE_ARRAY = 2, TYPE_STRING = 4, TYPE_NUMBER = 8, TYPE_OTHER = 16 };

/* The types that a value may have; booleans and null count as one. */
static int types_of(const json_t *schema) {
    static const char *const names[] = {"object", "array", "string", "number", "integer"};
    static const int bits[] = {TYPE_OBJECT, TYPE_ARRAY, TYPE_STRING, TYPE_NUMBER, TYPE_NUMBER};
    const json_t *const type = json_object_get(schema, "type");
    const char *const name = json_string_value(type);
    for (size_t i = 0; i < sizeof bits / sizeof bits[0] && name != NULL; i++) {
        if (strcmp(name, names[i]) == 0) return bits[i];
    }
    const bool is_other =
        name != NULL && (strcmp(name, "boolean") == 0 || strcmp(name, "null") == 0);
    return is_other ? TYPE_OTHER : -1;
}

/* Both must have a property of a constant string, and the constants differ. */
static bool are_told_apart(const json_t *a, const json_t *b) {
    const char *name;
    json_t *property;
    json_object_foreach(json_object_get(a, "properties"), name, property) {
        const json_t *const mine = json_object_get(property, "const");
        const json_t *const theirs =
            json_object_get(json_object_get(json_object_get(b, "properties"), name), "const");
        if (json_is_string(mine) && json_is_string(theirs) && !json_equal(mine, theirs) &&
            schema_requires(a, name) && schema_requires(b, name))
            return true;
    }
    return false;
}

/* What a reference stands for. */
static const json_t *follow(const compiler *c, const json_t *schema) {
    for (int i = 0; i < MAX_NESTING; i++) {
        const json_t *const reference = json_object_get(schema, "$ref");
        if (!json_is_string(reference)) break;
        schema = schema_look_up(c->root, json_string_value(reference));
    }
    return schema;
}

static bool are_disjoint(const compiler *c, const json_t *schemas) {
    for (size_t i = 0; i < json_array_size(schemas); i++) {
        for (size_t k = 0; k < i; k++) {
            const json_t *const a = follow(c, json_array_get(schemas, i));
            const json_t *const b = follow(c, json_array_get(schemas, k));
            if ((types_of(a) & types_of(b)) != 0 && !are_told_apart(a, b)) return false;
        }
    }
    return true;
}

/* "allOf", and "$ref", "anyOf" and "oneOf" beside other keywords, as one schema without them. */
static int add_merged(compiler *c, const json_t *schema, int next) {
    char refused[64];
    json_t *const merged = schema_merge(c->root, schema, refused);
    if (merged == NULL) return refuse(c, refused);
    if (json_array_append_new(c->made, merged) != 0) return api_fail_memory(c->error) ? 0 : -1;
    return add_value(c, merged, next);
}

static int add_schema(compiler *c, const json_t *schema, int next) {
    const char *const keyword = unsupported(schema);
    if (keyword != NULL) return refuse(c, keyword);
    if (schema_needs_merge(schema)) return add_merged(c, schema, next);
    const json_t *const reference = json_object_get(schema, "$ref");
    const json_t *const constant = json_object_get(schema, "const");
    const json_t *const values = json_object_get(schema, "enum");
    const json_t *const one_of = json_object_get(schema, "oneOf");
    const json_t *const variants = one_of != NULL ? one_of : json_object_get(schema, "anyOf");
    const json_t *const type = json_object_get(schema, "type");
    const bool names_values = values != NULL || constant != NULL;
    const bool is_text = json_object_get(schema, "pattern") != NULL;
    if (one_of != NULL && !are_disjoint(c, one_of))
        return refuse(c, "oneOf of what one value may be twice");
    if (names_range(schema) && (type == NULL || names_values)) return refuse(c, "minimum, maximum");
    if (is_text && names_values) return refuse(c, "pattern with enum or const");
    if (json_is_string(reference)) return add_reference(c, json_string_value(reference), next);
    if (variants != NULL) return add_alternatives(c, variants, false, schema, next);
    if (names_values) return add_literals(c, schema, next);
    if (json_is_array(type)) return add_alternatives(c, type, true, schema, next);
    if (json_is_string(type)) return add_type(c, schema, json_string_value(type), next);
    if (json_object_get(schema, "properties") != NULL) return add_object(c, schema, next);
    if (is_text) return add_string(c, schema, next);
    return grammar_call(c->g, any_value(c), next);
}

static int add_value(compiler *c, const json_t *schema, int next) {
    if (json_is_true(schema)) return grammar_call(c->g, any_value(c), next);
    if (!json_is_object(schema)) return refuse(c, "a schema that is no object");
    if (c->nesting == MAX_NESTING) return refuse(c, "schemas nested so deeply");
    c->nesting++;
    const int entry = add_schema(c, schema, next);
    c->nesting--;
    return entry;
}

int json_grammar_add(grammar *g, const json_t *schema, const char *param, int next,
                     api_error *error) {
    compiler c = {.g = g,
                  .root = schema,
                  .param = param,
                  .error = error,
                  .references = json_object(),
                  .made = json_array(),
                  .any = -1,
                  .string = -1,
                  .space = -1};
    const int entry = add_value(&c, schema, next);
    json_decref(c.references);
    json_decref(c.made);
    if (entry >= 0 && grammar_is_broken(g)) {
        api_fail(error, 400, "unsupported_schema", param, "%s is too large", param);
        return -1;
    }
    if (entry >= 0 && grammar_begin(g, entry) == 0) {
        api_fail(error, 400, "unsupported_schema", param, "%s: no value begins so", param);
        return -1;
    }
    return entry;
}

int json_grammar_add_object(grammar *g, int next) {
    compiler c = {.g = g, .any = -1, .string = -1, .space = -1};
    return any_members(&c, any_value(&c), next);
}
