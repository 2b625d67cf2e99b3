/* test_scale_formats.c - every form of scale file, there and back, each value by layer, head and
 * rank (K and V differ everywhere); what LightLLM checks when it loads; halves and heads swapped.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <sys/stat.h>

#include <kv8/kv8_engine.h>

#include "testing.h"

enum { LAYERS = 3, HEADS = 4, COLUMNS = 2 * HEADS };
static char folder[64], path[96];

static float scales[LAYERS][COLUMNS], amax[LAYERS][COLUMNS];

/* K: 1, 1.125, ... by layer and head; V: 32 times smaller. */
static void fill(void) {
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < COLUMNS; i++) {
            const float at = 1 + 0.125f * (float)(layer * HEADS + i % HEADS);
            scales[layer][i] = i < HEADS ? at : at / 32;
            amax[layer][i] = scales[layer][i] * 448;
        }
    }
}

static kv8_scale_data full_data(void) {
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    data.architecture = "GptOssForCausalLM";
    data.num_layers = LAYERS;
    data.num_kv_heads = HEADS;
    data.scales = &scales[0][0];
    data.amax = &amax[0][0];
    data.method = "absmax";
    data.margin = 1;
    return data;
}

static kv8_scale_file *make(void) {
    const kv8_scale_data data = full_data();
    kv8_scale_file *file = NULL;
    assert_ok(kv8_scale_file_create(&file, &data));
    return file;
}

static kv8_scale_expect expected(void) {
    kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    expect.num_layers = LAYERS;
    expect.num_kv_heads = HEADS;
    expect.architecture = "GptOssForCausalLM";
    return expect;
}

static kv8_scale_file *reopen(const char *name, kv8_scale_format format) {
    const kv8_scale_expect expect = expected();
    kv8_scale_file *file = NULL;
    assert_ok(kv8_scale_file_open(&file, name, &expect));
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    assert_ok(kv8_scale_file_get(file, &data));
    assert_int_equal(data.format, format);
    return file;
}

static void assert_values(const kv8_scale_file *file) {
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int head = 0; head < HEADS; head++) {
            assert_true(kv8_scale_file_k(file, layer)[head] == scales[layer][head]);
            assert_true(kv8_scale_file_v(file, layer)[head] == scales[layer][HEADS + head]);
        }
    }
}

static void own_form_keeps_everything(void **state) {
    (void)state;
    static const kv8_dtype mix[LAYERS][2] = {
        {KV8_BF16, KV8_INT8}, {KV8_E4M3, KV8_BF16}, {KV8_INT8, KV8_E4M3}};
    static double sqnr[LAYERS][COLUMNS], clips[LAYERS][COLUMNS];
    static float q[LAYERS][2 * HEADS];
    static uint64_t bins[LAYERS][COLUMNS][16];
    for (int i = 0; i < LAYERS * COLUMNS; i++) {
        const int layer = i / COLUMNS, column = i % COLUMNS;
        sqnr[layer][column] = i == 4 ? (double)NAN : 31.5;
        clips[layer][column] = 1.0 / 3;
        q[layer][column] = (float)(i + 1);
        bins[layer][column][i % 16] = (uint64_t)i + 1;
    }
    kv8_scale_data data = full_data();
    data.kv_dtypes = &mix[0][0];
    data.sqnr_db = &sqnr[0][0];
    data.clip_rate = &clips[0][0];
    data.q_scales = &q[0][0];
    data.num_qo_heads = 2 * HEADS;
    data.num_tokens = 4096;
    data.model_hash = 0xfedcba9876543210u;
    static uint64_t counts_of[3][LAYERS * 2 * HEADS];
    for (int i = 0; i < 3 * LAYERS * 2 * HEADS; i++) counts_of[i % 3][i / 3] = (uint64_t)i << 33;
    data.zeros = counts_of[0];
    data.nans = counts_of[1];
    data.infs = counts_of[2];
    data.histogram = &bins[0][0][0];
    data.num_bins = 16;
    data.histogram_exponent = -32;
    kv8_scale_file *file = NULL;
    assert_ok(kv8_scale_file_create(&file, &data));
    assert_ok(kv8_scale_file_write(file, path, KV8_SCALES_KV8, 0));
    kv8_scale_file_close(file);
    file = reopen(path, KV8_SCALES_KV8);
    assert_values(file);
    kv8_scale_data back = KV8_SCALE_DATA_INIT;
    assert_ok(kv8_scale_file_get(file, &back));
    assert_memory_equal(back.amax, amax, sizeof amax);
    assert_memory_equal(back.kv_dtypes, mix, sizeof mix);
    assert_memory_equal(back.q_scales, q, sizeof q);
    assert_int_equal(back.num_qo_heads, 2 * HEADS);
    assert_int_equal(back.num_tokens, 4096);
    assert_true(back.model_hash == 0xfedcba9876543210u && back.margin == 1);
    assert_string_equal(back.method, "absmax");
    assert_string_equal(back.architecture, "GptOssForCausalLM");
    assert_memory_equal(back.zeros, counts_of[0], sizeof counts_of[0]);
    assert_memory_equal(back.nans, counts_of[1], sizeof counts_of[1]);
    assert_memory_equal(back.infs, counts_of[2], sizeof counts_of[2]);
    assert_true(back.num_bins == 512 && back.histogram_exponent == -32);
    for (int i = 0; i < LAYERS * 2 * HEADS * 512; i++) {
        const int bin = i % 512, cell = i / 512;
        assert_int_equal(back.histogram[i], bin == cell % 16 ? cell + 1 : 0);
    }
    kv8_scale_file_close(file);
    json_t *const root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    assert_true(
        json_is_null(json_array_get(json_array_get(json_object_get(root, "sqnr_db"), 0), 4)));
    const json_t *const counts = json_object_get(json_object_get(root, "histogram"), "counts");
    const json_t *const column = json_array_get(json_array_get(counts, 1), 3); /* i = 11 */
    assert_int_equal(json_array_size(column), 2);
    assert_int_equal(json_integer_value(json_array_get(column, 0)), 11);
    assert_int_equal(json_integer_value(json_array_get(column, 1)), 12);
    json_decref(root);

    kv8_scale_expect other = expected();
    other.model_hash = 5;
    assert_refused(kv8_scale_file_open(&file, path, &other), KV8_ERR_INVALID, "model_hash");
    other.model_hash = 0xfedcba9876543210u;
    assert_ok(kv8_scale_file_open(&file, path, &other));
    kv8_scale_file_close(file);
    other.architecture = "LlamaForCausalLM";
    assert_refused(kv8_scale_file_open(&file, path, &other), KV8_ERR_INVALID, "architectures");
}

/* What LightLLM asserts of a kv_cache_calib.json, both kinds, on our own form as well. */
static void lightllm_would_load_it(void **state) {
    (void)state;
    static const kv8_scale_format formats[] = {KV8_SCALES_LIGHTLLM, KV8_SCALES_KV8};
    for (int per_tensor = 0; per_tensor < 2; per_tensor++) {
        static float two[LAYERS][2] = {{1.5f, 0.25f}, {2, 0.125f}, {3, 0.0625f}};
        kv8_scale_data data = full_data();
        if (per_tensor) {
            data.per_tensor = 1;
            data.scales = &two[0][0];
            data.amax = NULL;
        }
        kv8_scale_file *file = NULL;
        assert_ok(kv8_scale_file_create(&file, &data));
        for (int f = 0; f < 2; f++) {
            assert_ok(kv8_scale_file_write(file, path, formats[f], 0));
            json_t *const root = json_load_file(path, 0, NULL);
            static const char *const keys[] = {"version",  "architectures", "quant_type",
                                               "qmin",     "qmax",          "num_layers",
                                               "num_head", "scales_shape",  "scales"};
            const char *key;
            json_t *value;
            size_t at = 0;
            json_object_foreach(root, key, value) {
                if (at < 9) assert_string_equal(key, keys[at]);
                at++;
            }
            assert_true(formats[f] == KV8_SCALES_KV8 ? at > 9 : at == 9);
            assert_true(json_is_real(json_object_get(root, "qmin")));
            assert_true(json_real_value(json_object_get(root, "qmin")) == -448);
            assert_true(json_real_value(json_object_get(root, "qmax")) == 448);
            assert_string_equal(json_string_value(json_object_get(root, "architectures")),
                                "GptOssForCausalLM");
            assert_string_equal(json_string_value(json_object_get(root, "quant_type")),
                                per_tensor ? "per_tensor" : "per_head");
            assert_int_equal(json_integer_value(json_object_get(root, "num_layers")), LAYERS);
            assert_int_equal(json_integer_value(json_object_get(root, "num_head")), HEADS);
            const json_t *const shape = json_object_get(root, "scales_shape");
            const size_t columns = per_tensor ? 2 : COLUMNS;
            assert_int_equal(json_integer_value(json_array_get(shape, 0)), LAYERS);
            assert_int_equal(json_integer_value(json_array_get(shape, 1)), columns);
            const json_t *const rows = json_object_get(root, "scales");
            assert_int_equal(json_array_size(rows), LAYERS);
            for (size_t layer = 0; layer < LAYERS; layer++) {
                assert_int_equal(json_array_size(json_array_get(rows, layer)), columns);
                for (size_t i = 0; i < columns; i++) {
                    const double number =
                        json_real_value(json_array_get(json_array_get(rows, layer), i));
                    assert_true((float)number == (per_tensor ? two[layer][i] : scales[layer][i]));
                }
            }
            json_decref(root);
            kv8_scale_file *const back =
                reopen(path, f == 1 && !per_tensor ? KV8_SCALES_KV8 : KV8_SCALES_LIGHTLLM);
            if (per_tensor) {
                assert_true(kv8_scale_file_k(back, 2)[3] == 3);
                assert_true(kv8_scale_file_v(back, 2)[3] == 0.0625f);
            } else {
                assert_values(back);
            }
            kv8_scale_file_close(back);
        }
        kv8_scale_file_close(file);
    }
}

/* A file whose V scales stand before K's, and one whose layers are shifted. */
static void swapped_halves_are_caught(void **state) {
    (void)state;
    kv8_scale_data data = full_data();
    static float swapped[LAYERS][COLUMNS];
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < COLUMNS; i++) swapped[layer][i] = scales[layer][(i + HEADS) % COLUMNS];
    }
    data.scales = &swapped[0][0];
    kv8_scale_file *file = NULL;
    assert_refused(kv8_scale_file_create(&file, &data), KV8_ERR_INVALID,
                   "\"scales\"[0][0] is 0.03125, its amax of 448 asks for 1");
    memcpy(swapped, scales, sizeof scales);
    memcpy(swapped[1], scales[2], sizeof scales[1]);
    assert_refused(kv8_scale_file_create(&file, &data), KV8_ERR_INVALID, "\"scales\"[1][1]");
    /* The next power of two is a scale's due too. */
    memcpy(swapped, scales, sizeof scales);
    swapped[2][1] = 4; /* of 2.125 */
    assert_ok(kv8_scale_file_create(&file, &data));
    kv8_scale_file_close(file);
    swapped[2][1] = 8;
    assert_refused(kv8_scale_file_create(&file, &data), KV8_ERR_INVALID, "\"scales\"[2][1]");
}

/* Any number of ranks gets exactly its heads, of K and of V. */
static void splits_by_rank(void **state) {
    (void)state;
    kv8_scale_file *const file = make();
    for (int32_t num_ranks = 1; num_ranks <= 16; num_ranks *= 2) {
        for (int32_t rank = 0; rank < num_ranks; rank++) {
            kv8_rank_heads heads;
            kv8_scale_file *part = NULL;
            assert_ok(kv8_rank_heads_get(HEADS, num_ranks, rank, &heads));
            assert_ok(kv8_scale_file_split(&part, file, heads.first, heads.num));
            const int32_t num = num_ranks <= HEADS ? HEADS / num_ranks : 1;
            const int32_t first = num_ranks <= HEADS ? rank * num : rank / (num_ranks / HEADS);
            for (int layer = 0; layer < LAYERS; layer++) {
                for (int32_t i = 0; i < num; i++) {
                    assert_true(kv8_scale_file_k(part, layer)[i] == scales[layer][first + i]);
                    assert_true(kv8_scale_file_v(part, layer)[i] ==
                                scales[layer][HEADS + first + i]);
                }
            }
            kv8_scale_data data = KV8_SCALE_DATA_INIT;
            assert_ok(kv8_scale_file_get(part, &data));
            assert_int_equal(data.num_kv_heads, num);
            assert_true(data.amax[num] == amax[0][HEADS + first]);
            kv8_scale_file_close(part);
        }
    }
    kv8_scale_file *none = NULL;
    assert_refused(kv8_scale_file_split(&none, file, 3, 2), KV8_ERR_INVALID, "heads 3 to 4");
    assert_null(none);
    kv8_scale_file_close(file);
}

/* One number for K and V of a rank: the largest of them. */
static void sglang_there_and_back(void **state) {
    (void)state;
    kv8_scale_file *const file = make();
    for (int32_t num_ranks = 1; num_ranks <= 8; num_ranks *= 2) {
        assert_ok(kv8_scale_file_write(file, path, KV8_SCALES_SGLANG, num_ranks));
        json_t *const root = json_load_file(path, 0, NULL);
        const json_t *const cache = json_object_get(root, "kv_cache");
        assert_string_equal(json_string_value(json_object_get(root, "model_type")), "gpt_oss");
        assert_string_equal(json_string_value(json_object_get(cache, "dtype")), "float8_e4m3fn");
        assert_int_equal(json_object_size(json_object_get(cache, "scaling_factor")), num_ranks);
        json_decref(root);
        kv8_scale_file *const back = reopen(path, KV8_SCALES_SGLANG);
        for (int layer = 0; layer < LAYERS; layer++) {
            for (int head = 0; head < HEADS; head++) {
                const int num = num_ranks < HEADS ? HEADS / num_ranks : 1;
                const float wanted = scales[layer][head / num * num + num - 1];
                assert_true(kv8_scale_file_k(back, layer)[head] == wanted);
                assert_true(kv8_scale_file_v(back, layer)[head] == wanted);
            }
        }
        kv8_scale_file_close(back);
    }
    assert_refused(kv8_scale_file_write(file, path, KV8_SCALES_SGLANG, 3), KV8_ERR_INVALID,
                   "3 ranks");
    assert_refused(kv8_scale_file_write(file, path, KV8_SCALES_KV8, 2), KV8_ERR_INVALID, "2 ranks");
    kv8_scale_file_close(file);
}

static void write_text(const char *text) {
    FILE *const out = fopen(path, "wb");
    assert_non_null(out);
    assert_true(fputs(text, out) >= 0);
    assert_int_equal(fclose(out), 0);
}

static void refuses_what_sglang_takes(void **state) {
    (void)state;
    static const struct {
        const char *type, *dtype, *factors;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"llama", "float8_e4m3fn", "{\"0\":{\"0\":1,\"1\":1,\"2\":1}}", KV8_ERR_INVALID,
         "the model is \"gpt_oss\""},
        {"gpt_oss", "float8_e5m2", "{\"0\":{\"0\":1,\"1\":1,\"2\":1}}", KV8_ERR_UNSUPPORTED,
         "float8_e5m2"},
        {"gpt_oss", "float8_e4m3fn", "{\"0\":{\"0\":1,\"1\":1}}", KV8_ERR_INVALID,
         "scales of 2 layers"},
        {"gpt_oss", "float8_e4m3fn", "{\"0\":{\"0\":1,\"1\":1,\"7\":1}}", KV8_ERR_CORRUPT,
         "\"0\".\"2\" is missing"},
        {"gpt_oss", "float8_e4m3fn", "{\"0\":{\"0\":1,\"1\":1,\"2\":0}}", KV8_ERR_INVALID,
         "\"0\".\"2\" is 0"},
        {"gpt_oss", "float8_e4m3fn", "{\"1\":{\"0\":1,\"1\":1,\"2\":1}}", KV8_ERR_CORRUPT,
         "rank 0 0 layers"},
        {"gpt_oss", "float8_e4m3fn", "{\"0\":{\"0\":1,\"1\":1,\"2\":1},\"1\":{\"0\":1,\"1\":1}}",
         KV8_ERR_CORRUPT, "\"1\" has 2 layers"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "{\"model_type\":\"%s\",\"kv_cache\":{\"dtype\":\"%s\",\"scaling_factor\":%s}}",
                 cases[i].type, cases[i].dtype, cases[i].factors);
        write_text(text);
        const kv8_scale_expect expect = expected();
        kv8_scale_file *file = NULL;
        assert_refused(kv8_scale_file_open(&file, path, &expect), cases[i].status, cases[i].part);
        assert_non_null(strstr(kv8_status_message(), path));
        assert_null(file);
    }
}

/* Both safetensors forms as files of their own. */
static void tensors_there_and_back(void **state) {
    (void)state;
    char name[128];
    snprintf(name, sizeof name, "%s/scales.safetensors", folder);
    kv8_scale_file *const file = make();
    assert_ok(kv8_scale_file_write(file, name, KV8_SCALES_COMPRESSED_TENSORS, 0));
    kv8_scale_file *back = reopen(name, KV8_SCALES_COMPRESSED_TENSORS);
    assert_values(back);
    kv8_scale_file_close(back);
    assert_ok(kv8_scale_file_write(file, name, KV8_SCALES_MODELOPT, 0));
    back = reopen(name, KV8_SCALES_MODELOPT);
    for (int layer = 0; layer < LAYERS; layer++) {
        assert_true(kv8_scale_file_k(back, layer)[1] == scales[layer][HEADS - 1]);
        assert_true(kv8_scale_file_v(back, layer)[1] == scales[layer][COLUMNS - 1]);
    }
    kv8_scale_expect more = expected();
    more.num_layers = LAYERS + 1;
    kv8_scale_file *none = NULL;
    assert_refused(kv8_scale_file_open(&none, name, &more), KV8_ERR_INVALID, "scales of 3 layers");
    kv8_scale_file_close(back);
    kv8_scale_file_close(file);
    unlink(name);
}

/* A safetensors file of given header and data. */
static void write_tensors(const char *name, const char *header, const void *data, size_t size) {
    FILE *const out = fopen(name, "wb");
    const uint64_t length = strlen(header);
    assert_non_null(out);
    assert_int_equal(fwrite(&length, 1, 8, out), 8);
    assert_int_equal(fwrite(header, 1, length, out), length);
    assert_int_equal(fwrite(data, 1, size, out), size);
    assert_int_equal(fclose(out), 0);
}

static void refuses_tensors_by_name(void **state) {
    (void)state;
#define ONE(name, from)                \
    "\"model.layers.0.self_attn." name \
    "\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[" from "]}"
    static const struct {
        const char *header;
        float data[3];
        size_t size;
        kv8_status status;
        const char *part;
    } cases[] = {
        {"{" ONE("k_scale", "0,4") "}",
         {1},
         4,
         KV8_ERR_CORRUPT,
         "layers.0.self_attn.v_scale is missing"},
        {"{" ONE("k_scale", "0,4") "," ONE("v_scale", "4,8") "}",
         {1, 0},
         8,
         KV8_ERR_INVALID,
         "v_scale\"[0] is 0"},
        {"{" ONE("k_scale", "0,4") "," ONE("v_scale", "4,8") "}",
         {1, -1},
         8,
         KV8_ERR_INVALID,
         "v_scale\"[0] is -1"},
        {"{" ONE("k_scale", "0,4") "," ONE("k_proj.k_scale", "4,8") "}",
         {1, 1},
         8,
         KV8_ERR_INVALID,
         "both self_attn.k_scale and"},
        {"{" ONE("k_scale", "0,4") "," ONE("v_scale", "4,8") "," ONE("k_zero_point", "8,12") "}",
         {1, 1, 1},
         12,
         KV8_ERR_UNSUPPORTED,
         "k_zero_point\" is not 0"},
        {"{" ONE("weight", "0,4") "}", {1}, 4, KV8_ERR_NOT_FOUND, "no tensor"},
    };
    char name[128];
    snprintf(name, sizeof name, "%s/bad.safetensors", folder);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_tensors(name, cases[i].header, cases[i].data, cases[i].size);
        kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
        kv8_scale_file *file = NULL;
        assert_refused(kv8_scale_file_open(&file, name, &expect), cases[i].status, cases[i].part);
        assert_non_null(strstr(kv8_status_message(), name));
    }
    unlink(name);
}

static void link_into(const char *directory, const char *name) {
    char from[256], to[256], here[512];
    assert_non_null(getcwd(here, sizeof here));
    assert_true(snprintf(from, sizeof from, "models/tiny-gpt-oss/%s", name) > 0);
    char whole[1024];
    snprintf(whole, sizeof whole, "%s/%s", here, from);
    snprintf(to, sizeof to, "%s/%s", directory, name);
    assert_int_equal(symlink(whole, to), 0);
}

/* A checkpoint gains a shard and an index, opens as before, and gives the scales back. */
static void into_a_checkpoint(void **state) {
    (void)state;
    enum { TINY_LAYERS = 6, TINY_HEADS = 2 };
    char directory[96], index[160], shard[160];
    snprintf(directory, sizeof directory, "%s/model", folder);
    assert_int_equal(mkdir(directory, 0700), 0);
    link_into(directory, "config.json");
    link_into(directory, "generation_config.json");
    link_into(directory, "model.safetensors");
    static float tiny[TINY_LAYERS][2 * TINY_HEADS];
    for (int i = 0; i < TINY_LAYERS * 4; i++) tiny[i / 4][i % 4] = 0.01f * (float)(i + 1);
    kv8_scale_data data = KV8_SCALE_DATA_INIT;
    data.num_layers = TINY_LAYERS;
    data.num_kv_heads = TINY_HEADS;
    data.scales = &tiny[0][0];
    kv8_scale_file *file = NULL;
    assert_ok(kv8_scale_file_create(&file, &data));
    assert_ok(kv8_scale_file_write(file, directory, KV8_SCALES_COMPRESSED_TENSORS, 0));
    assert_refused(kv8_scale_file_write(file, directory, KV8_SCALES_COMPRESSED_TENSORS, 0),
                   KV8_ERR_INVALID, "is there already");
    kv8_scale_file_close(file);

    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, directory, &options));
    kv8_model_close(model);
    kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    expect.num_layers = TINY_LAYERS;
    expect.num_kv_heads = TINY_HEADS;
    assert_ok(kv8_scale_file_open(&file, directory, &expect));
    for (int layer = 0; layer < TINY_LAYERS; layer++) {
        assert_memory_equal(kv8_scale_file_k(file, layer), tiny[layer], 2 * sizeof(float));
        assert_memory_equal(kv8_scale_file_v(file, layer), tiny[layer] + 2, 2 * sizeof(float));
    }
    /* A second form beside the first: the index is written anew, the reader refuses both. */
    snprintf(shard, sizeof shard, "%s/model-kv-scales.safetensors", directory);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", directory);
    json_t *const root = json_load_file(index, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(json_object_get(root, "weight_map"),
                                                          "model.layers.5.self_attn.v_scale")),
                        "model-kv-scales.safetensors");
    assert_string_equal(
        json_string_value(json_object_get(json_object_get(root, "weight_map"), "lm_head.weight")),
        "model.safetensors");
    json_decref(root);
    kv8_scale_file_close(file);
    static const char *const names[] = {"config.json", "generation_config.json",
                                        "model.safetensors"};
    for (size_t i = 0; i < 3; i++) {
        char name[160];
        snprintf(name, sizeof name, "%s/%s", directory, names[i]);
        struct stat info;
        assert_int_equal(lstat(name, &info), 0);
        assert_true(S_ISLNK(info.st_mode)); /* untouched */
        unlink(name);
    }
    unlink(shard);
    unlink(index);
    assert_int_equal(rmdir(directory), 0); /* nothing else was left there */
}

static void refuses_to_write(void **state) {
    (void)state;
    kv8_scale_data data = full_data();
    data.dtype = KV8_E5M2;
    data.amax = NULL;
    kv8_scale_file *file = NULL;
    assert_ok(kv8_scale_file_create(&file, &data));
    assert_refused(kv8_scale_file_write(file, path, KV8_SCALES_LIGHTLLM, 0), KV8_ERR_UNSUPPORTED,
                   "these are of e5m2");
    assert_ok(kv8_scale_file_write(file, path, KV8_SCALES_KV8, 0));
    kv8_scale_file_close(file);
    const kv8_scale_expect expect = expected();
    assert_ok(kv8_scale_file_open(&file, path, &expect));
    assert_ok(kv8_scale_file_get(file, &data));
    assert_int_equal(data.dtype, KV8_E5M2);
    assert_refused(kv8_scale_file_write(file, "/nonexistent/x.json", KV8_SCALES_KV8, 0), KV8_ERR_IO,
                   "/nonexistent/x.json");
    kv8_scale_file_close(file);
    data.dtype = KV8_INT8;
    assert_refused(kv8_scale_file_create(&file, &data), KV8_ERR_UNSUPPORTED, "int8");
}

int main(void) {
    snprintf(folder, sizeof folder, "/tmp/kv8-scales-XXXXXX");
    if (mkdtemp(folder) == NULL) return 1;
    snprintf(path, sizeof path, "%s/s.json", folder);
    fill();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(own_form_keeps_everything), cmocka_unit_test(lightllm_would_load_it),
        cmocka_unit_test(swapped_halves_are_caught), cmocka_unit_test(splits_by_rank),
        cmocka_unit_test(sglang_there_and_back),     cmocka_unit_test(refuses_what_sglang_takes),
        cmocka_unit_test(tensors_there_and_back),    cmocka_unit_test(refuses_tensors_by_name),
        cmocka_unit_test(into_a_checkpoint),         cmocka_unit_test(refuses_to_write),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    rmdir(folder);
    return failed;
}
