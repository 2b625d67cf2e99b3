/* test_draw_maxima.c - of many rows the sampler gets the maxima that the head's product leaves, of
 * few none, whichever graph a step replays; on the stand-in driver.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <unistd.h>

#include "engine_impl.h"
#include "linear_args.h"
#include "sampler_args.h"
#include "stand_in.h"
#include "testing.h"

enum { MOST = 200, FEW = 8, VOCAB = 66 * 512, GENERATED = 8 };

/* Of the last step: what the head's product left, if its kernel does, and the sampler was given. */
static const float *left, *drawn_from;
static int32_t num_rows;

static void watch(const stand_in_launch *launch) {
    if (strstr(launch->name, "_maxima__") != NULL)
        left = ((const kv8_linear_pairs_args *)launch->args)->product.maxima;
    if (strncmp(launch->name, "kv8_draw_", 9) != 0) return;
    const kv8_draw_args *const args = launch->args;
    const uint32_t blocks = launch->cluster[0] == 0 ? 1 : launch->cluster[0];
    num_rows = (int32_t)(launch->grid[0] / blocks);
    drawn_from = args->maxima;
    for (int32_t i = 0; i < num_rows; i++)
        args->drawn[i] = (kv8_drawn_row){.token = 1, .bad_id = -1};
}

static kv8_model *open_model(kv8_device *device, kv8_stream *stream, kv8_step_path path) {
    char file_name[] = "/tmp/kv8_test_maxima.XXXXXX", name[64];
    const int fd = mkstemp(file_name);
    FILE *const file = fd < 0 ? NULL : fdopen(fd, "w");
    assert_non_null(file);
    fprintf(file,
            "{\"architectures\": [\"GptOssForCausalLM\"], \"model_type\": \"gpt_oss\", "
            "\"num_hidden_layers\": 2, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, "
            "\"hidden_size\": 64, \"intermediate_size\": 64, \"num_attention_heads\": 2, "
            "\"num_key_value_heads\": 1, \"head_dim\": 64, \"vocab_size\": %d, "
            "\"sliding_window\": 128, \"max_position_embeddings\": 256, "
            "\"rms_norm_eps\": 1e-05, \"swiglu_limit\": 7.0, \"hidden_act\": \"silu\", "
            "\"attention_bias\": true, \"tie_word_embeddings\": false, \"rope_theta\": 150000, "
            "\"quantization_config\": {\"quant_method\": \"mxfp4\"}, \"eos_token_id\": [0]}",
            (int)VOCAB);
    fclose(file);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.device = device;
    options.stream = stream;
    options.path = path;
    options.max_step_tokens = options.max_step_seqs = MOST;
    snprintf(name, sizeof name, KV8_RANDOM_PREFIX "%s", file_name);
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, name, &options));
    remove(file_name);
    return model;
}

/* So many requests of a token, whose ids go to `ids_out`. */
static void submit(kv8_engine *engine, int num, uint64_t *ids_out) {
    static const int32_t token = 3;
    kv8_request request = KV8_REQUEST_INIT;
    request.token_ids = &token;
    request.num_tokens = 1;
    request.max_tokens = GENERATED;
    request.ignore_eos = 1;
    for (int i = 0; i < num; i++) assert_ok(kv8_engine_submit(engine, &request, &ids_out[i]));
}

static void check_step(kv8_engine *engine, int32_t rows) {
    int32_t num_events = 0;
    drawn_from = NULL;
    assert_ok(kv8_engine_step(engine, &num_events));
    assert_int_equal(num_events, rows);
    assert_int_equal(num_rows, rows);
    if (rows == FEW) {
        assert_null(drawn_from);
    } else {
        assert_non_null(drawn_from);
        assert_ptr_equal(drawn_from, left);
    }
}

static void check_path(kv8_step_path path, int32_t many) {
    kv8_device *device = NULL;
    kv8_stream *stream = NULL;
    kv8_cache *cache = NULL;
    kv8_engine *engine = NULL;
    kv8_kv_setting setting;
    uint64_t ids[MOST];
    stand_in_reset();
    assert_ok(kv8_device_open(&device, 0));
    assert_ok(kv8_stream_create(&stream, device));
    kv8_model *const model = open_model(device, stream, path);
    kv8_kv_cache_options cache_options = KV8_KV_CACHE_OPTIONS_INIT;
    cache_options.max_seqs = MOST;
    cache_options.max_seq_len = 64;
    cache_options.num_tokens = MOST * 64;
    cache_options.step_tokens = MOST;
    assert_ok(kv8_kv_setting_parse("e4m3", &setting));
    assert_ok(kv8_kv_setting_cache_create(&cache, model, &setting, &cache_options));
    kv8_engine_options options = KV8_ENGINE_OPTIONS_INIT;
    options.max_requests = MOST;
    assert_ok(kv8_engine_create(&engine, model, cache, &options));
    stand_in_on_launch(watch);
    left = NULL;
    for (int round = 0; round < 2; round++) {
        submit(engine, round == 0 ? many : many - FEW, round == 0 ? ids : ids + FEW);
        check_step(engine, many);
        for (int k = FEW; k < many; k++) assert_ok(kv8_engine_cancel(engine, ids[k]));
        check_step(engine, FEW);
    }
    stand_in_on_launch(NULL);
    kv8_engine_destroy(engine);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
    kv8_stream_destroy(stream);
    kv8_device_close(device);
}

/* Tall tiles of up to 128 rows, and tiles of more. */
static void many_rows_have_maxima(void **state) {
    (void)state;
    static const int32_t rows[] = {100, MOST};
    for (int i = 0; i < 2; i++) {
        check_path(KV8_PATH_GRAPH, rows[i]);
        check_path(KV8_PATH_EAGER, rows[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(many_rows_have_maxima)};
    return cmocka_run_group_tests_name("draw_maxima", tests, NULL, NULL);
}
