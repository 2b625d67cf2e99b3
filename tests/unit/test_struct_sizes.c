/* test_struct_sizes.c - the rule by which public structs grow: what an older or a newer caller
 * passes is taken, filled up to its own size, or refused; and no first published size ever changes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/kv8_engine.h>

#include "base_impl.h"
#include "testing.h"

/* A struct of two ages. */
typedef struct older {
    size_t struct_size;
    int32_t a, b;
} older;
typedef struct newer {
    size_t struct_size;
    int32_t a, b;
    double added;
} newer;
enum { newer_first_size = sizeof(older) };

static kv8_status read_it(newer *out, const void *given) {
    KV8_READ_STRUCT(newer, out, given);
    return KV8_OK;
}
static kv8_status write_it(void *given, const newer *value) {
    KV8_WRITE_STRUCT(newer, given, value);
    return KV8_OK;
}

static kv8_status write_element(void *array, size_t idx, const newer *value) {
    KV8_WRITE_ELEMENT(newer, array, idx, value);
    return KV8_OK;
}

static void an_older_struct_is_read_with_zeros(void **state) {
    (void)state;
    const older given = {sizeof given, 3, 4};
    newer out;
    memset(&out, 0xff, sizeof out);
    assert_ok(read_it(&out, &given));
    assert_int_equal(out.struct_size, sizeof out);
    assert_int_equal(out.a, 3);
    assert_int_equal(out.b, 4);
    assert_true(out.added == 0);
}

static void a_longer_struct_is_read_where_the_rest_is_zero(void **state) {
    (void)state;
    struct {
        newer known;
        uint64_t future;
    } given = {{sizeof given, 1, 2, 3}, 0};
    newer out;
    assert_ok(read_it(&out, &given));
    assert_true(out.added == 3);
    assert_int_equal(out.struct_size, sizeof out);
    given.future = 1ull << 63;
    assert_refused(read_it(&out, &given), KV8_ERR_UNSUPPORTED,
                   "byte 31 of a newer of 32 bytes is set; this library knows 24");
}

static void a_struct_of_no_size_is_refused(void **state) {
    (void)state;
    newer given = {.struct_size = sizeof(older) - 1}, out;
    assert_refused(read_it(&out, &given), KV8_ERR_INVALID, "newer.struct_size is 15");
    given.struct_size = SIZE_MAX; /* memory that nobody set */
    assert_refused(read_it(&out, &given), KV8_ERR_INVALID, "must be 16 to 65536");
    assert_refused(read_it(&out, NULL), KV8_ERR_INVALID, "read_it: newer is NULL");
    given.struct_size = 0;
    assert_refused(write_it(&given, &out), KV8_ERR_INVALID, "newer.struct_size is 0");
}

static void a_struct_is_filled_up_to_its_own_size(void **state) {
    (void)state;
    const newer value = {sizeof value, 5, 6, 7};
    struct {
        older known;
        uint64_t behind;
    } old = {{sizeof old.known, 0, 0}, 0x1234};
    assert_ok(write_it(&old, &value));
    assert_int_equal(old.known.struct_size, sizeof old.known);
    assert_int_equal(old.known.a, 5);
    assert_int_equal(old.known.b, 6);
    assert_int_equal(old.behind, 0x1234);
    struct {
        newer known;
        uint64_t future;
    } young = {{sizeof young, 0, 0, 0}, 8};
    assert_ok(write_it(&young, &value));
    assert_int_equal(young.known.struct_size, sizeof young);
    assert_true(young.known.added == 7);
    assert_int_equal(young.future, 8);
}

static void an_array_steps_by_the_size_of_its_first(void **state) {
    (void)state;
    older array[3] = {{sizeof array[0], 1, 2}};
    assert_ok(write_element(array, 1, &(newer){.a = 3, .b = 4, .added = 5}));
    assert_int_equal(array[0].a, 1);
    assert_int_equal(array[1].struct_size, sizeof array[1]);
    assert_int_equal(array[1].a, 3);
    assert_int_equal(array[1].b, 4);
    assert_int_equal(array[2].struct_size, 0);
    array[0].struct_size = 1;
    assert_refused(write_element(array, 1, &(newer){0}), KV8_ERR_INVALID,
                   "newer.struct_size is 1, must be 16");
    assert_refused(write_element(NULL, 0, &(newer){0}), KV8_ERR_INVALID, "newer is NULL");
}

/* Where pointers have 64 bits. A struct that grows keeps its line here. */
static void first_sizes_are_as_published(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t first, today;
    } structs[] = {
#define X(type, first) {#type, first, sizeof(type)},
#include "struct_sizes.inc"
#undef X
    };
    for (size_t i = 0; i < sizeof structs / sizeof structs[0]; i++) {
        if (structs[i].today < structs[i].first)
            fail_msg("%s has %zu bytes, published with %zu", structs[i].name, structs[i].today,
                     structs[i].first);
    }
    assert_int_equal(kv8_attention_spec_first_size, 88);
    assert_int_equal(kv8_attention_args_first_size, 280);
    assert_int_equal(kv8_paged_first_size, 80);
    assert_int_equal(kv8_page_table_first_size, 64);
    assert_int_equal(kv8_rope_options_first_size, 88);
    assert_int_equal(kv8_cache_layer_first_size, 40);
    assert_int_equal(kv8_cache_options_first_size, 96);
    assert_int_equal(kv8_cache_stats_first_size, 48);
    assert_int_equal(kv8_append_first_size, 96);
    assert_int_equal(kv8_append_spec_first_size, 40);
    assert_int_equal(kv8_append_args_first_size, 168);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_older_struct_is_read_with_zeros),
        cmocka_unit_test(a_longer_struct_is_read_where_the_rest_is_zero),
        cmocka_unit_test(a_struct_of_no_size_is_refused),
        cmocka_unit_test(a_struct_is_filled_up_to_its_own_size),
        cmocka_unit_test(an_array_steps_by_the_size_of_its_first),
        cmocka_unit_test(first_sizes_are_as_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
