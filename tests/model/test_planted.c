/* test_planted.c - trouble planted in a model's heads is found, named, and mended where a scale
 * can: K's weights of a head times 2^13 or 2^-13 and its queries' the other way (attention stays as
 * it was, bit for bit), NaN in a channel, a head of zeros.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <sys/stat.h>

#include "model_runs.h"
#include "program.h"

enum { HEAD_DIM = 64, GROUP = 4, WINDOW = 384, LAYER = 3, HEAD = 1 };

static char folder[64];

static int32_t ids[WINDOW];

static void read_ids(void) {
    kv8_safetensors file;
    int32_t num = 0;
    assert_ok(kv8_safetensors_open(&file, "models/tiny-gpt-oss/golden.safetensors", NULL));
    memcpy(ids, golden(&file, "window.ids", KV8_TENSOR_I32, &num), sizeof ids);
    kv8_safetensors_close(&file);
}

/* A copy of the model to damage: its weights' bytes, and where they are. */
typedef struct patient {
    char *bytes;
    size_t size;
    kv8_safetensors file;
} patient;

static patient admit(void) {
    patient p = {0};
    p.bytes = slurp("models/tiny-gpt-oss/model.safetensors", &p.size);
    assert_ok(kv8_safetensors_parse(&p.file, "patient", (const uint8_t *)p.bytes, p.size, NULL));
    return p;
}

/* The rows of heads [head, head + num) of layer LAYER's projection, and its bias', to act on. */
typedef void (*act)(kv8_bf16 *values, size_t num, double factor);
static void operate(patient *p, char which, int32_t head, int32_t num, act what, double factor) {
    static const char *const parts[] = {"weight", "bias"};
    for (int i = 0; i < 2; i++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.self_attn.%c_proj.%s", LAYER, which, parts[i]);
        const kv8_tensor *const tensor = kv8_safetensors_find(&p->file, name);
        assert_non_null(tensor);
        assert_int_equal(tensor->type, KV8_TENSOR_BF16);
        const size_t width = tensor->num_dims == 2 ? (size_t)tensor->shape[1] : 1;
        kv8_bf16 *const values = (kv8_bf16 *)(p->bytes + (tensor->data - (uint8_t *)p->bytes));
        what(values + (size_t)head * HEAD_DIM * width, (size_t)num * HEAD_DIM * width, factor);
    }
}

static void multiply(kv8_bf16 *values, size_t num, double factor) {
    for (size_t i = 0; i < num; i++)
        values[i] = kv8_bf16_from_f32((float)((double)kv8_bf16_to_f32(values[i]) * factor));
}

/* Channel 11 of the bias: the last HEAD_DIM values are the bias' in the second call. */
static void poison(kv8_bf16 *values, size_t num, double factor) {
    (void)factor;
    if (num == HEAD_DIM) values[11].bits = 0x7fc0;
}

static kv8_model *discharge(patient *p) {
    static const char *const files[] = {"config.json", "generation_config.json"};
    char path[160];
    for (int i = 0; i < 2; i++) {
        size_t size = 0;
        char from[96];
        snprintf(from, sizeof from, "models/tiny-gpt-oss/%s", files[i]);
        char *const text = slurp(from, &size);
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        spill(path, text, size);
        free(text);
    }
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    spill(path, p->bytes, p->size);
    kv8_safetensors_close(&p->file);
    free(p->bytes);
    return open_model(folder, KV8_ISA_BEST);
}

static kv8_observer *observe(kv8_model *model) {
    kv8_observer_options options = KV8_OBSERVER_OPTIONS_INIT;
    kv8_model_observer_options(model, &options);
    options.num_qo_heads = 0;
    kv8_observer *observer = NULL;
    assert_ok(kv8_observer_create(&observer, &options));
    kv8_observe_text_options text = KV8_OBSERVE_TEXT_OPTIONS_INIT;
    text.token_ids = ids;
    text.num_tokens = WINDOW;
    text.window_len = WINDOW;
    assert_ok(kv8_evaluate_observe(model, observer, &text));
    assert_false(kv8_observer_is_on(observer));
    return observer;
}

/* KL of e4m3 at scale 1, and with the observer's scales. */
typedef struct divergence {
    double plain, fitted;
} divergence;
static divergence kl_of(kv8_model *model, const kv8_observer *observer) {
    static float scales[6][2][2];
    const float *k[6], *v[6];
    const kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    for (int32_t layer = 0; layer < 6; layer++) {
        for (int32_t i = 0; i < 4; i++) {
            kv8_fit fit = KV8_FIT_INIT;
            assert_ok(kv8_observer_fit(observer, (kv8_observed_tensor)(i / 2), layer, i % 2,
                                       &options, &fit));
            scales[layer][i / 2][i % 2] = fit.scale;
        }
        k[layer] = scales[layer][0];
        v[layer] = scales[layer][1];
    }
    kv8_kv_setting setting;
    assert_ok(kv8_kv_setting_parse("e4m3", &setting));
    kv8_compare_options compare = KV8_COMPARE_OPTIONS_INIT;
    compare.token_ids = ids;
    compare.num_tokens = WINDOW;
    compare.num_windows = 1;
    compare.window_len = WINDOW;
    kv8_compare_row rows[2][2] = {{KV8_COMPARE_ROW_INIT}, {KV8_COMPARE_ROW_INIT}};
    assert_refused(
        kv8_evaluate_compare(model, &setting, 1, &compare, &(kv8_compare_row){.struct_size = 1}),
        KV8_ERR_INVALID, "kv8_compare_row.struct_size is 1, must be 184");
    assert_ok(kv8_evaluate_compare(model, &setting, 1, &compare, rows[0]));
    compare.k_scale = k;
    compare.v_scale = v;
    assert_ok(kv8_evaluate_compare(model, &setting, 1, &compare, rows[1]));
    return (divergence){rows[0][1].kl, rows[1][1].kl};
}

static kv8_fit fit_of(const kv8_observer *observer, kv8_observed_tensor tensor, int32_t layer,
                      int32_t head) {
    const kv8_fit_options options = KV8_FIT_OPTIONS_INIT;
    kv8_fit fit = KV8_FIT_INIT;
    assert_ok(kv8_observer_fit(observer, tensor, layer, head, &options, &fit));
    return fit;
}

/* The planted head has these warnings, every other none. */
static void assert_only(const kv8_observer *observer, kv8_observed_tensor tensor,
                        uint32_t warnings) {
    for (int32_t layer = 0; layer < 6; layer++) {
        for (int kv = 0; kv < 2; kv++) {
            for (int32_t head = 0; head < 2; head++) {
                const kv8_fit fit = fit_of(observer, (kv8_observed_tensor)kv, layer, head);
                const bool planted =
                    layer == LAYER && head == HEAD && (kv8_observed_tensor)kv == tensor;
                if (fit.warnings != (planted ? warnings : 0))
                    fail_msg("layer %d %s head %d: warnings %x", layer, kv ? "V" : "K", head,
                             fit.warnings);
            }
        }
    }
}

static void scaled_heads_are_found_and_mended(void **state) {
    (void)state;
    kv8_model *const sound = open_model(tiny_model, KV8_ISA_BEST);
    kv8_observer *const sound_rows = observe(sound);
    assert_only(sound_rows, KV8_OBSERVED_K, 0);
    const divergence sound_kl = kl_of(sound, sound_rows);
    static const struct {
        double factor;
        uint32_t warning;
    } cases[] = {{8192, KV8_FIT_CLIPS_AT_1}, {1.0 / 8192, KV8_FIT_FADES_AT_1}};
    for (int i = 0; i < 2; i++) {
        patient p = admit();
        operate(&p, 'k', HEAD, 1, multiply, cases[i].factor);
        operate(&p, 'q', HEAD * GROUP, GROUP, multiply, 1 / cases[i].factor);
        kv8_model *const model = discharge(&p);
        kv8_observer *const rows = observe(model);
        assert_only(rows, KV8_OBSERVED_K, cases[i].warning);
        assert_true(fit_of(rows, KV8_OBSERVED_K, LAYER, HEAD).amax ==
                    fit_of(sound_rows, KV8_OBSERVED_K, LAYER, HEAD).amax * (float)cases[i].factor);
        const divergence kl = kl_of(model, rows);
        if (!(fabs(kl.fitted - sound_kl.fitted) <= 0.1 * sound_kl.fitted) ||
            !(kl.plain > 3 * sound_kl.plain))
            fail_msg("K * %g: KL %g, at scale 1 %g; undamaged %g and %g", cases[i].factor,
                     kl.fitted, kl.plain, sound_kl.fitted, sound_kl.plain);
        kv8_observer_destroy(rows);
        kv8_model_close(model);
    }
    kv8_observer_destroy(sound_rows);
    kv8_model_close(sound);
}

static void nan_and_zeros_are_named(void **state) {
    (void)state;
    patient p = admit();
    operate(&p, 'v', HEAD, 1, poison, 0);
    kv8_model *model = discharge(&p);
    kv8_observer *rows = observe(model);
    kv8_fit fit = fit_of(rows, KV8_OBSERVED_V, LAYER, HEAD);
    assert_int_equal(fit.warnings, KV8_FIT_HAS_NAN);
    assert_int_equal(fit.channel, 11);
    for (int32_t layer = 0; layer <= LAYER; layer++) { /* what lies below is sound */
        assert_int_equal(fit_of(rows, KV8_OBSERVED_K, layer, HEAD).warnings, 0);
        assert_int_equal(fit_of(rows, KV8_OBSERVED_V, layer, 1 - HEAD).warnings, 0);
    }
    kv8_observer_destroy(rows);
    kv8_model_close(model);

    p = admit();
    operate(&p, 'v', HEAD, 1, multiply, 0);
    model = discharge(&p);
    rows = observe(model);
    assert_only(rows, KV8_OBSERVED_V, KV8_FIT_ALL_ZERO);
    fit = fit_of(rows, KV8_OBSERVED_V, LAYER, HEAD);
    assert_true(fit.scale == 1 && fit.amax == 0);
    kv8_observer_destroy(rows);
    kv8_model_close(model);
}

int main(void) {
    snprintf(folder, sizeof folder, "/tmp/kv8-planted-XXXXXX");
    if (mkdtemp(folder) == NULL) return 1;
    read_ids();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scaled_heads_are_found_and_mended),
        cmocka_unit_test(nan_and_zeros_are_named),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    static const char *const files[] = {"config.json", "generation_config.json",
                                        "model.safetensors"};
    for (int i = 0; i < 3; i++) {
        char path[160];
        snprintf(path, sizeof path, "%s/%s", folder, files[i]);
        unlink(path);
    }
    rmdir(folder);
    return failed;
}
