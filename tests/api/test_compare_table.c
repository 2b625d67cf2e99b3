/* test_compare_table.c - the table of models/tiny-gpt-oss/README.md, which transformers computed
 * by emulation, through the command line: six windows of 4096 held-out tokens, e4m3 also with the
 * scales of golden.safetensors' calibration as a LightLLM file. Long.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "golden.h"
#include "program.h"

#define MODEL "models/tiny-gpt-oss"

enum { NUM_LAYERS = 6, NUM_HEADS = 2 };

static char out_path[64], err_path[64], scales_path[64];

typedef struct wanted {
    const char *kv;
    double kl, top1;
    double dloss; /* NaN = not in the table */
} wanted;

/* KL within 10 % relative, top-1 within 0.004; the losses, whose difference is a small one of
 * large numbers, within 0.002. */
static void check_row(const json_t *row, const wanted *want) {
    const double kl = json_number_value(json_object_get(row, "kl"));
    const double top1 = json_number_value(json_object_get(row, "top1"));
    const double dloss = json_number_value(json_object_get(row, "dloss"));
    assert_string_equal(json_string_value(json_object_get(row, "kv")), want->kv);
    print_message("%-6s KL %.3e (%.3e)  top-1 %.4f (%.4f)  dloss %+.4f (%+.4f)\n", want->kv, kl,
                  want->kl, top1, want->top1, dloss, want->dloss);
    if (!(fabs(kl / want->kl - 1) <= 0.1)) fail_msg("%s: KL %g, table %g", want->kv, kl, want->kl);
    if (!(fabs(top1 - want->top1) <= 0.004))
        fail_msg("%s: top-1 %g, table %g", want->kv, top1, want->top1);
    if (!isnan(want->dloss) && !(fabs(dloss - want->dloss) <= 0.002))
        fail_msg("%s: dloss %g, table %g", want->kv, dloss, want->dloss);
}

static void compare_with_table(const char *scales, const char *kv, const wanted *want, size_t num) {
    /* One thread: test programs already run side by side. */
    const char *const args[] = {"compare",   MODEL,
                                "--text",    MODEL "/held.txt",
                                "--greedy",  "0",
                                "--recall",  "0",
                                "--threads", "1",
                                "--json",    "--kv",
                                kv,          scales == NULL ? NULL : "--scales",
                                scales,      NULL};
    program_result result = program_run(args, out_path, err_path, 0);
    json_t *const root = program_json(&result);
    const json_t *const rows = json_object_get(root, "rows");
    assert_int_equal(json_array_size(rows), num + 1);
    const double loss = json_number_value(json_object_get(json_array_get(rows, 0), "loss"));
    print_message("f32 loss %.4f\n", loss);
    for (size_t i = 0; i < num; i++) check_row(json_array_get(rows, i + 1), &want[i]);
    json_decref(root);
    program_free(&result);
}

static void without_scales(void **state) {
    (void)state;
    static const wanted table[] = {
        {"bf16", 8.64e-5, 0.9972, 0.0001},
        {"e4m3", 4.26e-3, 0.9697, 0.0018},
        {"e5m2", 1.51e-2, 0.9390, 0.0119},
        {"int8", 3.48e-4, 0.9922, (double)NAN},
    };
    compare_with_table(NULL, "bf16,e4m3,e5m2,int8", table, 4);
}

/* absmax / 448 of every layer, K's heads then V's; one value for all heads when not per_head. */
static void write_scales(bool per_head) {
    golden g = golden_open(MODEL "/golden.safetensors");
    size_t num = 0;
    const float *const absmax = golden_get(&g, "calibration.absmax", &num); /* [layer, 2, head] */
    assert_int_equal(num, NUM_LAYERS * 2 * NUM_HEADS);
    json_t *const scales = json_array();
    for (int layer = 0; layer < NUM_LAYERS; layer++) {
        json_t *const row = json_array();
        for (int side = 0; side < 2; side++) {
            const float *const heads = absmax + (layer * 2 + side) * NUM_HEADS;
            const double most = fmax((double)heads[0], (double)heads[1]);
            for (int head = 0; head < (per_head ? NUM_HEADS : 1); head++)
                json_array_append_new(row,
                                      json_real((per_head ? (double)heads[head] : most) / 448));
        }
        json_array_append_new(scales, row);
    }
    golden_close(&g);
    json_t *const root = json_pack(
        "{s:s, s:s, s:s, s:f, s:f, s:i, s:i, s:[i, i], s:o}", "version", "1.0", "architectures",
        "GptOssForCausalLM", "quant_type", per_head ? "per_head" : "per_tensor", "qmin", -448.0,
        "qmax", 448.0, "num_layers", NUM_LAYERS, "num_head", NUM_HEADS, "scales_shape", NUM_LAYERS,
        per_head ? 2 * NUM_HEADS : 2, "scales", scales);
    assert_int_equal(json_dump_file(root, scales_path, 0), 0);
    json_decref(root);
}

static void with_scales(void **state) {
    (void)state;
    static const wanted per_tensor = {"e4m3", 4.20e-3, 0.9685, 0.0025};
    static const wanted per_head = {"e4m3", 4.24e-3, 0.9700, 0.0039};
    write_scales(false);
    compare_with_table(scales_path, "e4m3", &per_tensor, 1);
    write_scales(true);
    compare_with_table(scales_path, "e4m3", &per_head, 1);
}

int main(void) {
    snprintf(out_path, sizeof out_path, "/tmp/kv8-table-%ld.out", (long)getpid());
    snprintf(err_path, sizeof err_path, "/tmp/kv8-table-%ld.err", (long)getpid());
    snprintf(scales_path, sizeof scales_path, "/tmp/kv8-table-%ld.json", (long)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_scales),
        cmocka_unit_test(with_scales),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(out_path);
    unlink(err_path);
    unlink(scales_path);
    return failed;
}
