/* test_scale_file.c - LightLLM scale files: every value lands at its layer, head and side (K and V
 * differ everywhere, so a swapped block cannot pass), and every lie is refused by name.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/scale_file.h>

#include "testing.h"

static const char per_head[] =
    "{\"version\":\"1.0\",\"architectures\":\"GptOssForCausalLM\",\"quant_type\":\"per_head\","
    "\"qmin\":-448.0,\"qmax\":448.0,\"num_layers\":2,\"num_head\":3,\"scales_shape\":[2,6],"
    "\"scales\":[[0.5,0.25,2,3,4,5],[6,7,8,9,10,1e-3]]}";
static const char per_tensor[] =
    "{\"version\":\"1.0\",\"architectures\":\"x\",\"quant_type\":\"per_tensor\",\"qmin\":-448,"
    "\"qmax\":448,\"num_layers\":2,\"num_head\":3,\"scales_shape\":[2,2],"
    "\"scales\":[[0.5,0.25],[6,7]]}";

static char path[64];

static kv8_status open_for(kv8_scale_file **out, const char *name, int32_t num_layers,
                           int32_t num_kv_heads) {
    kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    expect.num_layers = num_layers;
    expect.num_kv_heads = num_kv_heads;
    return kv8_scale_file_open(out, name, &expect);
}

static void write_bytes(const char *text, size_t size) {
    FILE *const file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* The per-head file with its first `from` replaced. */
static void write_changed(const char *from, const char *to) {
    const char *const at = strstr(per_head, from);
    assert_non_null(at);
    char text[1024];
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - per_head), per_head, to, at + strlen(from));
    write_bytes(text, strlen(text));
}

static void reads_per_head(void **state) {
    (void)state;
    write_bytes(per_head, strlen(per_head));
    kv8_scale_file *file = NULL;
    assert_ok(open_for(&file, path, 2, 3));
    static const float wanted[2][2][3] = {{{0.5f, 0.25f, 2}, {3, 4, 5}},
                                          {{6, 7, 8}, {9, 10, 1e-3f}}};
    for (int layer = 0; layer < 2; layer++) {
        assert_memory_equal(kv8_scale_file_k(file, layer), wanted[layer][0], sizeof wanted[0][0]);
        assert_memory_equal(kv8_scale_file_v(file, layer), wanted[layer][1], sizeof wanted[0][0]);
    }
    kv8_scale_file_close(file);
}

static void repeats_per_tensor_over_heads(void **state) {
    (void)state;
    write_bytes(per_tensor, strlen(per_tensor));
    kv8_scale_file *file = NULL;
    assert_ok(open_for(&file, path, 2, 3));
    for (int head = 0; head < 3; head++) {
        assert_true(kv8_scale_file_k(file, 0)[head] == 0.5f);
        assert_true(kv8_scale_file_v(file, 0)[head] == 0.25f);
        assert_true(kv8_scale_file_k(file, 1)[head] == 6.0f);
        assert_true(kv8_scale_file_v(file, 1)[head] == 7.0f);
    }
    kv8_scale_file_close(file);
    /* One scale for a tensor fits any number of heads, one head included. */
    assert_ok(open_for(&file, path, 2, 1));
    assert_true(kv8_scale_file_v(file, 0)[0] == 0.25f);
    kv8_scale_file_close(file);
}

static void refuses_bad_files(void **state) {
    (void)state;
    static const struct {
        const char *from, *to;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"\"version\":\"1.0\",", "", KV8_ERR_CORRUPT, "\"version\" is missing"},
        {"\"1.0\"", "\"2.0\"", KV8_ERR_UNSUPPORTED, "version is \"2.0\""},
        {"\"1.0\"", "1.0", KV8_ERR_CORRUPT, "\"version\" is not a string"},
        {"\"1.0\",", "\"1.0\",\"version\":\"1.0\",", KV8_ERR_CORRUPT, "not JSON"},
        {"\"architectures\":\"GptOssForCausalLM\",", "", KV8_ERR_CORRUPT, "architectures"},
        {"per_head", "per_token", KV8_ERR_UNSUPPORTED, "per_token"},
        {"per_head", "per_tensor", KV8_ERR_INVALID, "scales_shape"},
        {"-448.0", "-127", KV8_ERR_UNSUPPORTED, "\"qmin\" is -127"},
        {"\"qmax\":448.0", "\"qmax\":57344", KV8_ERR_UNSUPPORTED, "\"qmax\" is 57344"},
        {"\"qmax\":448.0", "\"qmax\":\"448\"", KV8_ERR_CORRUPT, "qmax"},
        {"\"qmax\":448.0,", "", KV8_ERR_CORRUPT, "qmax"},
        {"\"num_layers\":2", "\"num_layers\":3", KV8_ERR_INVALID, "the model has 2"},
        {"\"num_layers\":2", "\"num_layers\":2.0", KV8_ERR_CORRUPT, "num_layers"},
        {"\"num_head\":3", "\"num_head\":6", KV8_ERR_INVALID, "\"num_head\" is 6"},
        {"[2,6]", "[2,3]", KV8_ERR_INVALID, "[2, 3]"},
        {"[2,6]", "[2,6,1]", KV8_ERR_CORRUPT, "scales_shape"},
        {"[2,6]", "[2,\"6\"]", KV8_ERR_CORRUPT, "scales_shape"},
        {"[2,6]", "12", KV8_ERR_CORRUPT, "scales_shape"},
        {"[[0.5,", "[[", KV8_ERR_CORRUPT, "\"scales\"[0] holds 5"},
        {"[[0.5,", "[[0.5,0.5,", KV8_ERR_CORRUPT, "\"scales\"[0] holds 7"},
        {",[6,7,8,9,10,1e-3]", "", KV8_ERR_CORRUPT, "has 1 rows"},
        {"[6,7,8,9,10,1e-3]", "7", KV8_ERR_CORRUPT, "\"scales\"[1]"},
        {"0.25", "0", KV8_ERR_INVALID, "\"scales\"[0][1] is 0"},
        {"0.25", "-0.25", KV8_ERR_INVALID, "\"scales\"[0][1] is -0.25"},
        {"0.25", "null", KV8_ERR_INVALID, "\"scales\"[0][1]"},
        {"0.25", "NaN", KV8_ERR_CORRUPT, "not JSON"},
        {"1e-3", "1e-60", KV8_ERR_INVALID, "\"scales\"[1][5]"}, /* 0 in f32 */
        {"1e-3", "1e300", KV8_ERR_INVALID, "\"scales\"[1][5]"}, /* infinite in f32 */
        {"\"num_head\":3", "\"num_head\":0", KV8_ERR_CORRUPT, "\"num_head\" is 0"},
        {"\"qmin\"", "\"dtype\":\"e5m2\",\"qmin\"", KV8_ERR_UNSUPPORTED, "e5m2 scales have"},
        {"\"qmin\"", "\"dtype\":\"int8\",\"qmin\"", KV8_ERR_UNSUPPORTED, "int8 scales have"},
        {"\"qmin\"", "\"amax\":[[1,2,3,4,5,6]],\"qmin\"", KV8_ERR_CORRUPT, "\"amax\" has 1 rows"},
        {"\"qmin\"", "\"layers\":[{\"k\":\"e4m3\"},{}],\"qmin\"", KV8_ERR_CORRUPT,
         "\"layers\"[0] has no string \"v\""},
        {"\"qmin\"", "\"layers\":[{\"k\":\"e9\"},{}],\"qmin\"", KV8_ERR_INVALID,
         "\"layers\"[0].\"k\""},
        {"\"qmin\"", "\"margin\":0.5,\"qmin\"", KV8_ERR_INVALID, "margin"},
        {"\"qmin\"", "\"model_hash\":\"12\",\"qmin\"", KV8_ERR_CORRUPT, "model_hash"},
        {"1e-3", "1e999", KV8_ERR_CORRUPT, "not JSON"},
        {"]]}", "]]", KV8_ERR_CORRUPT, "not JSON"},
        {"]]}", "]]} x", KV8_ERR_CORRUPT, "not JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_changed(cases[i].from, cases[i].to);
        kv8_scale_file *file = (kv8_scale_file *)path;
        assert_refused(open_for(&file, path, 2, 3), cases[i].status, cases[i].part);
        assert_null(file);
        assert_non_null(strstr(kv8_status_message(), path));
    }
}

static void refuses_what_is_no_object(void **state) {
    (void)state;
    static const char *const texts[] = {"", "[]", "3", "{", "{}", "{\"scales\":[]}", "\xff\xfe"};
    kv8_scale_file *file = NULL;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        write_bytes(texts[i], strlen(texts[i]));
        assert_refused(open_for(&file, path, 2, 3), KV8_ERR_CORRUPT, path);
    }
    /* Truncated anywhere, it is refused. */
    for (size_t size = 0; size < strlen(per_head); size++) {
        write_bytes(per_head, size);
        assert_refused(open_for(&file, path, 2, 3), KV8_ERR_CORRUPT, path);
    }
    char deep[4096];
    memset(deep, '[', sizeof deep);
    write_bytes(deep, sizeof deep);
    assert_refused(open_for(&file, path, 2, 3), KV8_ERR_CORRUPT, path);
    assert_refused(open_for(&file, "/nonexistent/s.json", 2, 3), KV8_ERR_NOT_FOUND,
                   "/nonexistent/s.json");
    assert_refused(open_for(&file, "/tmp", 2, 3), KV8_ERR_NOT_FOUND, "/tmp");
    kv8_scale_file_close(NULL);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/kv8-scales-%ld.json", (long)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_per_head),
        cmocka_unit_test(repeats_per_tensor_over_heads),
        cmocka_unit_test(refuses_bad_files),
        cmocka_unit_test(refuses_what_is_no_object),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
