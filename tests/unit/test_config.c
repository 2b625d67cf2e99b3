/* test_config.c - config.json in both forms, and every way it may contradict itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_oss_config.h"
#include "testing.h"

/* The published 20b config in Hugging Face form, as key/value pairs so that a test can change or
 * drop one. */
typedef struct field {
    const char *key, *value; /* value NULL = left out */
} field;
enum { MAX_FIELDS = 32 };

static const field hugging_face[] = {
    {"architectures", "[\"GptOssForCausalLM\"]"},
    {"model_type", "\"gpt_oss\""},
    {"num_hidden_layers", "4"},
    {"num_local_experts", "32"},
    {"num_experts_per_tok", "4"},
    {"hidden_size", "2880"},
    {"intermediate_size", "2880"},
    {"num_attention_heads", "64"},
    {"num_key_value_heads", "8"},
    {"head_dim", "64"},
    {"vocab_size", "201088"},
    {"sliding_window", "128"},
    {"layer_types",
     "[\"sliding_attention\",\"full_attention\",\"full_attention\",\"sliding_attention\"]"},
    {"rms_norm_eps", "1e-05"},
    {"swiglu_limit", "7.0"},
    {"rope_theta", "150000"},
    {"rope_scaling",
     "{\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1.0,"
     "\"truncate\":false,\"original_max_position_embeddings\":4096}"},
    {"rope_parameters", NULL},
    {"initial_context_length", "4096"},
    {"max_position_embeddings", "131072"},
    {"attention_bias", "true"},
    {"tie_word_embeddings", "false"},
    {"hidden_act", "\"silu\""},
    {"eos_token_id", "200002"},
    {"experts_per_token", "4"},
    {"swiglu_alpha", NULL},
    {"quantization_config",
     "{\"quant_method\":\"mxfp4\",\"modules_to_not_convert\":[\"lm_head\"]}"},
};

static const field original[] = {
    {"num_hidden_layers", "24"},   {"num_experts", "32"},
    {"experts_per_token", "4"},    {"vocab_size", "201088"},
    {"hidden_size", "2880"},       {"intermediate_size", "2880"},
    {"swiglu_limit", NULL},        {"head_dim", "64"},
    {"num_attention_heads", "64"}, {"num_key_value_heads", "8"},
    {"sliding_window", "128"},     {"initial_context_length", "4096"},
    {"rope_theta", "150000.0"},    {"rope_scaling_factor", "32.0"},
    {"rope_ntk_alpha", "1.0"},     {"rope_ntk_beta", "32.0"},
};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Writes the object with up to `num_changes` keys replaced. */
static void print_config(char *text, size_t size, const field *fields, size_t count,
                         const field *changes, size_t num_changes) {
    size_t at = (size_t)snprintf(text, size, "{");
    for (size_t i = 0; i < count; i++) {
        const char *value = fields[i].value;
        for (size_t c = 0; c < num_changes; c++) {
            if (strcmp(changes[c].key, fields[i].key) == 0) value = changes[c].value;
        }
        if (value == NULL) continue;
        at += (size_t)snprintf(text + at, size - at, "%s\"%s\":%s", at > 1 ? "," : "",
                               fields[i].key, value);
    }
    at += (size_t)snprintf(text + at, size - at, "}");
    assert_true(at < size);
}

static kv8_status parse(const field *fields, size_t count, const field *changes, size_t num_changes,
                        kv8_gpt_oss_config *config) {
    char text[4096];
    print_config(text, sizeof text, fields, count, changes, num_changes);
    return kv8_gpt_oss_config_parse(config, "config.json", text, strlen(text));
}

static kv8_status parse_changed(const char *key, const char *value, kv8_gpt_oss_config *config) {
    return parse(hugging_face, COUNT(hugging_face), &(field){key, value}, 1, config);
}

static void check_yarn_of_gpt_oss(const kv8_gpt_oss_config *c) {
    assert_int_equal(c->rope.kind, KV8_ROPE_YARN);
    assert_true(c->rope.theta == 150000 && c->rope.factor == 32);
    assert_true(c->rope.beta_fast == 32 && c->rope.beta_slow == 1);
    assert_int_equal(c->rope.truncate, 0);
    assert_int_equal(c->rope.original_max_position, 4096);
    assert_true(c->rope.attention_factor == 0);
    assert_int_equal(c->rope.head_dim, 64);
    assert_int_equal(c->max_seq_len, 131072);
}

static void hugging_face_form_is_read(void **state) {
    (void)state;
    kv8_gpt_oss_config c;
    assert_ok(parse(hugging_face, COUNT(hugging_face), NULL, 0, &c));
    assert_int_equal(c.num_layers, 4);
    assert_int_equal(c.num_experts, 32);
    assert_int_equal(c.num_experts_per_token, 4);
    assert_int_equal(c.hidden_size, 2880);
    assert_int_equal(c.intermediate_size, 2880);
    assert_int_equal(c.vocab_size, 201088);
    assert_int_equal(c.num_qo_heads, 64);
    assert_int_equal(c.num_kv_heads, 8);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.sliding_window, 128);
    assert_true(c.rms_norm_eps == 1e-5f && c.swiglu_limit == 7.0f && c.swiglu_alpha == 1.702f);
    const int32_t slides[] = {1, 0, 0, 1};
    for (int i = 0; i < 4; i++)
        assert_int_equal(c.window_left[i], slides[i] ? c.sliding_window - 1 : -1);
    check_yarn_of_gpt_oss(&c);
    assert_int_equal(c.num_eos, 1);
    assert_int_equal(c.eos[0], 200002);
}

static void original_form_is_read(void **state) {
    (void)state;
    kv8_gpt_oss_config c;
    assert_ok(parse(original, COUNT(original), NULL, 0, &c));
    assert_int_equal(c.num_layers, 24);
    assert_int_equal(c.num_experts, 32);
    assert_int_equal(c.num_experts_per_token, 4);
    assert_true(c.rms_norm_eps == 1e-5f && c.swiglu_limit == 7.0f && c.swiglu_alpha == 1.702f);
    for (int i = 0; i < 24; i++)
        assert_int_equal(c.window_left[i], i % 2 == 0 ? c.sliding_window - 1 : -1);
    check_yarn_of_gpt_oss(&c);
    assert_int_equal(c.num_eos, 3);
    assert_int_equal(c.eos[0], 200002);
    assert_int_equal(c.eos[1], 200012);
    assert_int_equal(c.eos[2], 199999);
    /* At factor 1 the rope is plain, and one that can be made. */
    assert_ok(parse(original, COUNT(original), &(field){"rope_scaling_factor", "1.0"}, 1, &c));
    assert_int_equal(c.rope.kind, KV8_ROPE_DEFAULT);
    assert_int_equal(c.max_seq_len, 4096);
    kv8_rope *rope = NULL;
    assert_ok(kv8_rope_create(&rope, &c.rope));
    kv8_rope_destroy(rope);
    /* A cut vocabulary has none of these ids. */
    assert_ok(parse(original, COUNT(original), &(field){"vocab_size", "4096"}, 1, &c));
    assert_int_equal(c.num_eos, 0);
}

static void rope_parameters_of_transformers_5_are_read(void **state) {
    (void)state;
    kv8_gpt_oss_config c;
    field changes[] = {
        {"rope_theta", NULL},
        {"rope_scaling", NULL},
        {"initial_context_length", NULL},
        {"rope_parameters",
         "{\"rope_theta\":150000.0,\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,"
         "\"beta_slow\":1.0,\"truncate\":false,\"original_max_position_embeddings\":4096}"}};
    assert_ok(parse(hugging_face, COUNT(hugging_face), changes, COUNT(changes), &c));
    check_yarn_of_gpt_oss(&c);
    changes[3].value = "{\"rope_theta\":1e4,\"rope_type\":\"default\"}";
    assert_ok(parse(hugging_face, COUNT(hugging_face), changes, COUNT(changes), &c));
    assert_int_equal(c.rope.kind, KV8_ROPE_DEFAULT);
    assert_true(c.rope.theta == 10000);
    changes[3].value = "{\"rope_theta\":1,\"rope_type\":\"default\"}";
    assert_refused(parse(hugging_face, COUNT(hugging_face), changes, COUNT(changes), &c),
                   KV8_ERR_INVALID, "rope_parameters.rope_theta is 1, must be above 1");
    changes[3].value = "{\"rope_type\":\"default\"}";
    assert_refused(parse(hugging_face, COUNT(hugging_face), changes, COUNT(changes), &c),
                   KV8_ERR_INVALID, "rope_parameters.rope_theta is missing");
}

static void optional_keys_take_their_defaults(void **state) {
    (void)state;
    static const char *const optional[] = {
        "architectures",       "swiglu_limit",       "initial_context_length", "attention_bias",
        "tie_word_embeddings", "hidden_act",         "eos_token_id",           "experts_per_token",
        "quantization_config", "num_experts_per_tok"};
    kv8_gpt_oss_config c;
    for (size_t i = 0; i < COUNT(optional); i++) assert_ok(parse_changed(optional[i], NULL, &c));
    assert_ok(parse_changed(
        "rope_scaling",
        "{\"rope_type\":\"yarn\",\"factor\":8,\"original_max_position_embeddings\":4096}", &c));
    assert_int_equal(c.rope.truncate, 1); /* as transformers takes it */
    assert_true(c.rope.beta_fast == 32 && c.rope.beta_slow == 1 && c.rope.factor == 8);
    assert_ok(parse_changed("layer_types", NULL, &c));
    assert_int_equal(c.window_left[2], c.sliding_window - 1);
    assert_int_equal(c.window_left[3], -1);
    assert_ok(parse_changed("swiglu_limit", "null", &c));
    assert_true(c.swiglu_limit == 7.0f);
    assert_ok(parse_changed("swiglu_limit", "5", &c));
    assert_true(c.swiglu_limit == 5.0f);
}

static void broken_and_contradictory_configs_are_refused(void **state) {
    (void)state;
    const struct {
        const char *key, *value;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"model_type", "\"llama\"", KV8_ERR_UNSUPPORTED,
         "model_type is llama, supported is gpt_oss"},
        {"architectures", "[\"LlamaForCausalLM\"]", KV8_ERR_UNSUPPORTED, "LlamaForCausalLM"},
        {"architectures", "[]", KV8_ERR_UNSUPPORTED, "architectures[0]"},
        {"hidden_act", "\"gelu\"", KV8_ERR_UNSUPPORTED, "hidden_act is gelu"},
        {"attention_bias", "false", KV8_ERR_UNSUPPORTED, "attention_bias is false"},
        {"attention_bias", "1", KV8_ERR_INVALID, "attention_bias is 1, must be true or false"},
        {"tie_word_embeddings", "true", KV8_ERR_UNSUPPORTED, "tie_word_embeddings is true"},
        {"quantization_config", "{\"quant_method\":\"gptq\"}", KV8_ERR_UNSUPPORTED,
         "quantization_config.quant_method is gptq"},
        {"num_hidden_layers", NULL, KV8_ERR_INVALID, "num_hidden_layers is missing"},
        {"num_hidden_layers", "0", KV8_ERR_INVALID, "num_hidden_layers is 0, must be"},
        {"num_hidden_layers", "4.5", KV8_ERR_INVALID,
         "num_hidden_layers is 4.5, must be an integer"},
        {"num_hidden_layers", "\"4\"", KV8_ERR_INVALID, "num_hidden_layers is \"4\", must be"},
        {"num_hidden_layers", "1025", KV8_ERR_INVALID, "from 1 to 1024"},
        {"num_hidden_layers", "5", KV8_ERR_INVALID,
         "layer_types lists 4 layers, must be num_hidden_layers = 5"},
        {"layer_types", "[\"sliding_attention\",\"full_attention\",\"chunked_attention\",\"x\"]",
         KV8_ERR_UNSUPPORTED, "layer_types[2] is chunked_attention"},
        {"layer_types", "[1,2,3,4]", KV8_ERR_UNSUPPORTED, "layer_types[0]"},
        {"layer_types", "\"full_attention\"", KV8_ERR_INVALID, "layer_types"},
        {"hidden_size", "2881", KV8_ERR_INVALID, "hidden_size is 2881, must be a multiple of 32"},
        {"hidden_size", "-32", KV8_ERR_INVALID, "hidden_size is -32"},
        {"hidden_size", "9223372036854775807", KV8_ERR_INVALID,
         "hidden_size is 9223372036854775807"},
        {"intermediate_size", "48", KV8_ERR_INVALID, "intermediate_size is 48"},
        {"num_attention_heads", "63", KV8_ERR_INVALID,
         "num_attention_heads is 63, must be a multiple of num_key_value_heads = 8"},
        {"head_dim", "45", KV8_ERR_INVALID, "head_dim is 45, must be even"},
        {"head_dim", NULL, KV8_ERR_INVALID, "head_dim is missing"},
        {"head_dim", "578", KV8_ERR_INVALID, "from 2 to 576"},
        {"num_local_experts", "3", KV8_ERR_INVALID, "4 experts per token of only 3"},
        {"num_experts_per_tok", "2", KV8_ERR_INVALID,
         "num_experts_per_tok is 2, but experts_per_token is 4"},
        {"sliding_window", "null", KV8_ERR_INVALID, "sliding_window is missing"},
        {"sliding_window", "0", KV8_ERR_INVALID, "sliding_window is 0"},
        {"vocab_size", "1e3", KV8_ERR_INVALID, "vocab_size is 1000.0, must be an integer"},
        {"vocab_size", "200002", KV8_ERR_INVALID, "eos_token_id 200002 is no id from 0 to 200001"},
        {"eos_token_id", "[1,-2]", KV8_ERR_INVALID, "eos_token_id -2"},
        {"eos_token_id", "[1,2,3,4,5,6,7,8,9]", KV8_ERR_INVALID, "more than 8"},
        {"rms_norm_eps", "0", KV8_ERR_INVALID, "rms_norm_eps is 0"},
        {"rms_norm_eps", "\"x\"", KV8_ERR_INVALID, "rms_norm_eps is \"x\""},
        {"swiglu_limit", "-7", KV8_ERR_INVALID, "swiglu_limit is -7"},
        {"max_position_embeddings", "0", KV8_ERR_INVALID, "max_position_embeddings is 0"},
        {"initial_context_length", "8192", KV8_ERR_INVALID,
         "rope_scaling.original_max_position_embeddings is 4096, but initial_context_length is "
         "8192"},
        {"rope_theta", NULL, KV8_ERR_INVALID, "rope_theta is missing"},
        {"rope_theta", "1", KV8_ERR_INVALID, "rope_theta is 1, must be above 1"},
        {"rope_scaling", "[]", KV8_ERR_INVALID, "rope_scaling is no object"},
        {"rope_scaling", "{\"rope_type\":\"linear\",\"factor\":2}", KV8_ERR_UNSUPPORTED,
         "rope_scaling.rope_type is linear, supported is yarn or default"},
        {"rope_scaling", "{}", KV8_ERR_INVALID,
         "rope_scaling.rope_type is missing, must be yarn or default"},
        {"rope_scaling", "{\"rope_type\":null,\"factor\":32}", KV8_ERR_INVALID,
         "rope_scaling.rope_type is missing"},
        {"rope_scaling", "{\"rope_type\":\"default\",\"factor\":32}", KV8_ERR_INVALID,
         "rope_scaling.factor is given, but rope_type is default"},
        {"rope_scaling", "{\"rope_type\":\"yarn\"}", KV8_ERR_INVALID,
         "rope_scaling.factor is missing"},
        {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":0.5}", KV8_ERR_INVALID,
         "rope_scaling.factor is 0.5"},
        {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":2,\"beta_fast\":1,\"beta_slow\":1}",
         KV8_ERR_INVALID, "fast beta"},
        {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":2,\"mscale\":1}", KV8_ERR_UNSUPPORTED,
         "rope_scaling.mscale"},
        {"rope_parameters", "{\"rope_type\":\"yarn\"}", KV8_ERR_INVALID,
         "rope_parameters and rope_scaling are both given"},
    };
    kv8_gpt_oss_config c = {.num_layers = -7};
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_refused(parse_changed(cases[i].key, cases[i].value, &c), cases[i].status,
                       cases[i].part);
        assert_non_null(strstr(kv8_status_message(), "config.json: "));
        assert_int_equal(c.num_layers, -7); /* untouched */
    }
}

static void foreign_and_torn_texts_are_refused(void **state) {
    (void)state;
    const struct {
        const char *text;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"", KV8_ERR_CORRUPT, "config.json: line 1"},
        {"[]", KV8_ERR_CORRUPT, "its root is no object"},
        {"{}", KV8_ERR_INVALID, "neither the Hugging Face form"},
        {"{\"a\":1,}", KV8_ERR_CORRUPT, "line 1"},
        {"{\"model_type\":\"gpt_oss\",\"model_type\":\"x\"}", KV8_ERR_CORRUPT, "duplicate"}};
    kv8_gpt_oss_config c;
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_refused(
            kv8_gpt_oss_config_parse(&c, "config.json", cases[i].text, strlen(cases[i].text)),
            cases[i].status, cases[i].part);
    char text[4096];
    print_config(text, sizeof text, hugging_face, COUNT(hugging_face), NULL, 0);
    for (size_t cut = 0; cut < strlen(text); cut++)
        assert_int_equal(kv8_gpt_oss_config_parse(&c, "config.json", text, cut), KV8_ERR_CORRUPT);
}

static void generation_config_replaces_eos(void **state) {
    (void)state;
    kv8_gpt_oss_config c;
    assert_ok(parse(hugging_face, COUNT(hugging_face), NULL, 0, &c));
    const char many[] = "{\"bos_token_id\":199998,\"eos_token_id\":[200002,199999,200012]}";
    assert_ok(kv8_gpt_oss_generation_parse(&c, "g", many, strlen(many)));
    assert_int_equal(c.num_eos, 3);
    assert_int_equal(c.eos[2], 200012);
    const char none[] = "{\"do_sample\":true}";
    assert_ok(kv8_gpt_oss_generation_parse(&c, "g", none, strlen(none)));
    assert_int_equal(c.num_eos, 3);
    const char bad[] = "{\"eos_token_id\":[201088]}";
    assert_refused(kv8_gpt_oss_generation_parse(&c, "g", bad, strlen(bad)), KV8_ERR_INVALID,
                   "g: eos_token_id 201088 is no id from 0 to 201087");
}

static void the_shipped_model_is_read(void **state) {
    (void)state;
    kv8_gpt_oss_config c;
    assert_ok(kv8_gpt_oss_config_read(&c, "models/tiny-gpt-oss"));
    assert_int_equal(c.num_layers, 6);
    assert_int_equal(c.vocab_size, 4096);
    assert_int_equal(c.num_eos, 3);
    assert_int_equal(c.eos[1], 4081);
    assert_refused(kv8_gpt_oss_config_read(&c, "/nonexistent"), KV8_ERR_NOT_FOUND,
                   "/nonexistent/config.json");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hugging_face_form_is_read),
        cmocka_unit_test(original_form_is_read),
        cmocka_unit_test(rope_parameters_of_transformers_5_are_read),
        cmocka_unit_test(optional_keys_take_their_defaults),
        cmocka_unit_test(broken_and_contradictory_configs_are_refused),
        cmocka_unit_test(foreign_and_torn_texts_are_refused),
        cmocka_unit_test(generation_config_replaces_eos),
        cmocka_unit_test(the_shipped_model_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
