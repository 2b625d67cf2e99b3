/* test_safetensors.c - the header parser against well-formed and hand-broken files.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"
#include "testing.h"

/* A file in memory: the length of `header`, the header, `data_bytes` zeros; it ends at a guard
 * page. */
static guarded make_file(const char *header, size_t data_bytes, size_t *size_out) {
    const size_t length = strlen(header);
    *size_out = 8 + length + data_bytes;
    const guarded file = guarded_alloc(*size_out);
    uint8_t *const bytes = file.data;
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(length >> (8 * i));
    memcpy(bytes + 8, header, length);
    memset(bytes + 8 + length, 0, data_bytes);
    return file;
}

static void refuse(const char *header, size_t data_bytes, const char *part) {
    size_t size = 0;
    const guarded file = make_file(header, data_bytes, &size);
    kv8_safetensors parsed;
    assert_refused(kv8_safetensors_parse(&parsed, "bad.safetensors", file.data, size, NULL),
                   KV8_ERR_CORRUPT, part);
    assert_non_null(strstr(kv8_status_message(), "bad.safetensors"));
    assert_null(parsed.tensors);
    assert_null(parsed.strings);
    guarded_free(file);
}

static void two_tensors_are_read_in_file_order(void **state) {
    (void)state;
    /* Listed out of order, the data at an odd address, with metadata and trailing spaces. */
    const char header[] =
        "{\"b\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[5,17]},"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,5]},"
        "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[17,21]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[17,17]}}  ";
    size_t size = 0;
    const guarded file = make_file(header, 21, &size);
    kv8_safetensors parsed;
    assert_ok(kv8_safetensors_parse(&parsed, "x", file.data, size, NULL));
    assert_int_equal(parsed.num_tensors, 4);
    const char *const names[] = {"a", "b", "empty", "scalar"};
    for (int i = 0; i < 4; i++) assert_string_equal(parsed.tensors[i].name, names[i]);
    const kv8_tensor *const b = kv8_safetensors_find(&parsed, "b");
    assert_non_null(b);
    assert_int_equal(b->type, KV8_TENSOR_BF16);
    assert_string_equal(kv8_tensor_type_name(b->type), "BF16");
    assert_int_equal(b->num_dims, 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->bytes, 12);
    assert_ptr_equal(b->data, (uint8_t *)file.data + size - 21 + 5);
    assert_string_equal(b->file, "x");
    assert_null(kv8_safetensors_find(&parsed, "c"));
    kv8_safetensors_close(&parsed);
    guarded_free(file);
}

static void an_empty_set_is_allowed(void **state) {
    (void)state;
    size_t size = 0;
    const guarded file = make_file("{}", 0, &size);
    kv8_safetensors parsed;
    assert_ok(kv8_safetensors_parse(&parsed, "x", file.data, size, NULL));
    assert_int_equal(parsed.num_tensors, 0);
    kv8_safetensors_close(&parsed);
    guarded_free(file);
}

#define ENTRY(dtype, shape, offsets) \
    "{\"t\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

static void headers_that_lie_are_refused(void **state) {
    (void)state;
    const struct {
        const char *header;
        size_t data_bytes;
        const char *part;
    } cases[] = {
        {"[]", 0, "no JSON object"},
        {"{", 0, "header: line 1, byte"},
        {"{\"t\":1}", 0, "\"t\": its entry is no object"},
        {"{\"t\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"t\": dtype is missing"},
        {"{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "\"t\": shape is missing"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "\"t\": data_offsets is not"},
        {ENTRY("BF17", "[1]", "[0,2]"), 2, "\"t\": unknown dtype \"BF17\""},
        {ENTRY("U8", "[1.0]", "[0,1]"), 1, "\"t\": shape[0] is not an integer"},
        {ENTRY("U8", "[-1]", "[0,1]"), 1, "\"t\": shape[0]"},
        {ENTRY("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions, the limit is 8"},
        {ENTRY("U8", "[4294967296,4294967296]", "[0,1]"), 1, "overflows at shape[1]"},
        {ENTRY("F64", "[4611686018427387904]", "[0,0]"), 0, "overflows at shape[0]"},
        {ENTRY("U8", "[99999999999999999999]", "[0,1]"), 1, "header: line 1, byte"},
        {ENTRY("F4", "[3]", "[0,2]"), 2, "no whole number of bytes"},
        {ENTRY("U8", "[1]", "[0]"), 1, "data_offsets is not [begin, end]"},
        {ENTRY("U8", "[1]", "[0,1,2]"), 1, "data_offsets is not [begin, end]"},
        {ENTRY("U8", "[1]", "[0,1.5]"), 1, "data_offsets[1] is not an integer"},
        {ENTRY("U8", "[1]", "[-1,0]"), 1, "data_offsets[0] is not an integer"},
        {ENTRY("U8", "[1]", "[1,0]"), 1, "run backwards"},
        {ENTRY("U8", "[9]", "[0,9]"), 8, "ends at byte 9, but the file holds only 8"},
        {ENTRY("U8", "[2]", "[0,1]"), 1, "span 1 bytes, its shape of U8 needs 2"},
        {ENTRY("BF16", "[2]", "[0,2]"), 2, "span 2 bytes, its shape of BF16 needs 4"},
        {ENTRY("U8", "[1]", "[1,2]"), 2, "a gap of 1 bytes before its data"},
        {ENTRY("U8", "[1]", "[0,1]"), 3, "2 bytes behind the last tensor"},
        {"{}", 1, "1 bytes behind the last tensor"},
        {"{\"__metadata__\":1}", 0, "__metadata__ is no object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ \"a\" is no string"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"u\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "\"u\": its data begins at byte 1 and overlaps \"t\""},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1, "overlaps"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
         3, "\"u\": a gap of 1 bytes"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, "duplicate object key"},
        {"{\"t\\u0000\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
         "header: line 1, byte"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuse(cases[i].header, cases[i].data_bytes, cases[i].part);
}

static void lengths_that_lie_are_refused(void **state) {
    (void)state;
    const struct {
        uint64_t length;
        size_t size; /* of the file */
        const char *part;
    } cases[] = {{0, 7, "no room for the header's length"},
                 {0, 8, "no JSON object"},
                 {3, 10, "a header of 3 bytes in a file of 10: it is truncated"},
                 {100000001, 64, "a header of 100000001 bytes, the limit is 100000000"},
                 {UINT64_MAX, 64, "the limit is 100000000"},
                 {UINT64_MAX - 7, 64, "the limit is 100000000"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const guarded file = guarded_alloc(cases[i].size);
        for (size_t b = 0; b < cases[i].size; b++)
            ((uint8_t *)file.data)[b] = b < 8 ? (uint8_t)(cases[i].length >> (8 * b)) : ' ';
        kv8_safetensors parsed;
        assert_refused(kv8_safetensors_parse(&parsed, "bad", file.data, cases[i].size, NULL),
                       KV8_ERR_CORRUPT, cases[i].part);
        guarded_free(file);
    }
}

/* Every prefix of a valid file is refused, none reads past its end. */
static void every_truncation_is_refused(void **state) {
    (void)state;
    const char header[] = ENTRY("BF16", "[2,4]", "[0,16]");
    size_t size = 0;
    const guarded whole = make_file(header, 16, &size);
    for (size_t cut = 0; cut < size; cut++) {
        const guarded file = guarded_alloc(cut);
        memcpy(file.data, whole.data, cut);
        kv8_safetensors parsed;
        assert_int_equal(kv8_safetensors_parse(&parsed, "cut", file.data, cut, NULL),
                         KV8_ERR_CORRUPT);
        guarded_free(file);
    }
    guarded_free(whole);
}

static void allocation_failures_leak_nothing(void **state) {
    (void)state;
    size_t size = 0;
    const guarded file = make_file(ENTRY("U8", "[1]", "[0,1]"), 1, &size);
    for (int64_t at = 0; at < 3; at++) {
        failing_heap heap = {.fail_at = at};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_safetensors parsed;
        const kv8_status status = kv8_safetensors_parse(&parsed, "x", file.data, size, &allocator);
        assert_int_equal(status, at < 2 ? KV8_ERR_NO_MEMORY : KV8_OK);
        if (status == KV8_OK) kv8_safetensors_close(&parsed);
        assert_int_equal(heap.live, 0);
    }
    guarded_free(file);
}

static void a_missing_file_is_not_found(void **state) {
    (void)state;
    kv8_safetensors parsed;
    assert_refused(kv8_safetensors_open(&parsed, "/nonexistent/x.safetensors", NULL),
                   KV8_ERR_NOT_FOUND, "/nonexistent/x.safetensors");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_tensors_are_read_in_file_order),
        cmocka_unit_test(an_empty_set_is_allowed),
        cmocka_unit_test(headers_that_lie_are_refused),
        cmocka_unit_test(lengths_that_lie_are_refused),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(allocation_failures_leak_nothing),
        cmocka_unit_test(a_missing_file_is_not_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
