/* test_kv_setting.c - the grammar of KV settings: what a user writes becomes dtypes by layer kind
 * and side, and everything else is refused by name.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/engine.h>

#include "testing.h"

static void parses(void **state) {
    (void)state;
    static const struct {
        const char *text;
        kv8_dtype full_k, full_v, sliding_k, sliding_v;
    } cases[] = {
        {"f32", KV8_F32, KV8_F32, KV8_F32, KV8_F32},
        {"e4m3fnuz", KV8_E4M3FNUZ, KV8_E4M3FNUZ, KV8_E4M3FNUZ, KV8_E4M3FNUZ},
        {"e4m3@full", KV8_E4M3, KV8_E4M3, KV8_BF16, KV8_BF16},
        {"e5m2@sliding", KV8_BF16, KV8_BF16, KV8_E5M2, KV8_E5M2},
        {"k=int8,v=e4m3", KV8_INT8, KV8_E4M3, KV8_INT8, KV8_E4M3},
        {"k=int8,v=e4m3@full", KV8_INT8, KV8_E4M3, KV8_BF16, KV8_BF16},
        {"k=f16,v=f32@sliding", KV8_BF16, KV8_BF16, KV8_F16, KV8_F32},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kv8_kv_setting setting;
        assert_ok(kv8_kv_setting_parse(cases[i].text, &setting));
        assert_string_equal(setting.name, cases[i].text);
        assert_int_equal(setting.full_k, cases[i].full_k);
        assert_int_equal(setting.full_v, cases[i].full_v);
        assert_int_equal(setting.sliding_k, cases[i].sliding_k);
        assert_int_equal(setting.sliding_v, cases[i].sliding_v);
    }
}

static void parses_lists(void **state) {
    (void)state;
    kv8_kv_setting settings[8];
    int32_t num = 0;
    assert_ok(kv8_kv_setting_parse_list("bf16,e4m3,k=int8,v=e4m3@full", settings, 8, &num));
    assert_int_equal(num, 3);
    assert_string_equal(settings[0].name, "bf16");
    assert_string_equal(settings[1].name, "e4m3");
    assert_string_equal(settings[2].name, "k=int8,v=e4m3@full");
    assert_ok(kv8_kv_setting_parse_list("k=int8,v=e4m3,k=e4m3,v=int8,bf16", settings, 3, &num));
    assert_int_equal(num, 3);
    assert_string_equal(settings[1].name, "k=e4m3,v=int8");
    assert_int_equal(settings[1].full_v, KV8_INT8);
    assert_ok(kv8_kv_setting_parse_list("int8", settings, 1, &num));
    assert_int_equal(num, 1);
}

static void refuses(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"", "empty KV setting"},
        {"fp8", "fp8"},
        {"e4m3 ", "e4m3"},
        {"E4M3", "E4M3"},
        {"e4m3@", "\"@full\" or \"@sliding\""},
        {"e4m3@odd", "not \"@odd\""},
        {"e4m3@full@full", "@full@full"},
        {"@full", "@full"},
        {"k=int8", "needs its \"v=\""},
        {"k=int8,v=", "dtype is \"\""},
        {"k=,v=int8", "k=,v=int8"},
        {"k=int8,e4m3", "needs its \"v=\""},
        {"v=int8,k=e4m3", "v=int8,k=e4m3"},
        {"k=int8@full,v=e4m3", "k=int8@full,v=e4m3"},
        {"e4m3e4m3e4m3e4m3e4m3e4m3e4m3", "e4m3e4m3"},
        {"k=int8,v=e4m3,k=int8,v=e4m3,k=int8,v=e4m3,k=int8,v=e4m3,k=int8,v=e4m3", "limit is 63"},
    };
    kv8_kv_setting setting = {.name = "untouched"};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_refused(kv8_kv_setting_parse(cases[i].text, &setting), KV8_ERR_INVALID,
                       cases[i].part);
    assert_string_equal(setting.name, "untouched");
    kv8_kv_setting settings[2];
    int32_t num = 7;
    assert_refused(kv8_kv_setting_parse_list("bf16,", settings, 2, &num), KV8_ERR_INVALID, "empty");
    assert_refused(kv8_kv_setting_parse_list("", settings, 2, &num), KV8_ERR_INVALID, "empty");
    assert_refused(kv8_kv_setting_parse_list("bf16,,int8", settings, 2, &num), KV8_ERR_INVALID,
                   "empty");
    assert_refused(kv8_kv_setting_parse_list("bf16,int8,e4m3", settings, 2, &num), KV8_ERR_INVALID,
                   "more than 2");
    assert_refused(kv8_kv_setting_parse_list("k=int8,bf16", settings, 2, &num), KV8_ERR_INVALID,
                   "needs its");
    assert_int_equal(num, 7);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parses),
        cmocka_unit_test(parses_lists),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
