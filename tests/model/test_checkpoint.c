/* test_checkpoint.c - checkpoints on disk: every form that is accepted gives the same bits, every
 * broken one is refused by a line that names the culprit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint_files.h"
#include "model_runs.h"

/* --- a small checkpoint to break --- */

static const checkpoint_shape mini = {2, 32, 64, 2, 1, 16, 4, 2, 64, 8, 131072};
enum { MINI_TENSORS = 19 * 2 + 3 };

typedef struct mini_checkpoint {
    char path[256];
    file_tensor tensors[MINI_TENSORS + 1];
    size_t count;
} mini_checkpoint;

static mini_checkpoint create_mini(void) {
    mini_checkpoint m = {.count = 0};
    make_directory(m.path);
    write_config(m.path, &mini);
    m.count = list_tensors(&mini, m.tensors);
    assert_int_equal(m.count, MINI_TENSORS);
    uint64_t rng = 7;
    for (size_t i = 0; i < m.count; i++) {
        uint8_t *const data = malloc(m.tensors[i].bytes);
        fill_tensor(&m.tensors[i], &rng, data, m.tensors[i].bytes);
        m.tensors[i].data = data;
    }
    return m;
}

static void destroy_mini(mini_checkpoint *m) {
    for (size_t i = 0; i < MINI_TENSORS; i++) free((void *)(uintptr_t)m->tensors[i].data);
    remove_directory(m->path);
}

static file_tensor *mini_tensor(mini_checkpoint *m, const char *name) {
    for (size_t i = 0; i < m->count; i++) {
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static void write_single(const mini_checkpoint *m) {
    write_safetensors(m->path, "model.safetensors", m->tensors, m->count, 0);
}

/* Opening must fail, naming `part`, and the file or directory. */
static void refuse(const mini_checkpoint *m, kv8_status wanted, const char *part) {
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    kv8_model *model = (kv8_model *)1;
    assert_refused(kv8_model_open(&model, m->path, &options), wanted, part);
    assert_non_null(strstr(kv8_status_message(), m->path));
    assert_null(strchr(kv8_status_message(), '\n'));
    assert_null(model);
}

/* Logits of a few tokens, more than the window, for the caller to free. */
static float *run_checkpoint(const char *path, const int32_t *ids, int32_t n) {
    kv8_model *const model = open_model(path, KV8_ISA_BEST);
    float *const logits = logits_of(model, KV8_F32, 4, ids, n, 100);
    kv8_model_close(model);
    return logits;
}

static const int32_t mini_ids[20] = {1, 5,  63, 0, 7, 7,  7,  12, 33, 2,
                                     9, 60, 41, 3, 3, 18, 25, 11, 1,  50};

static void the_mini_checkpoint_is_finite(void **state) {
    (void)state;
    mini_checkpoint m = create_mini();
    write_single(&m);
    float *const logits = run_checkpoint(m.path, mini_ids, 20);
    float high = 0;
    for (size_t i = 0; i < 20 * 64; i++) {
        assert_true(isfinite(logits[i]));
        high = fmaxf(high, fabsf(logits[i]));
    }
    assert_true(high > 1e-3f);
    free(logits);
    destroy_mini(&m);
}

static void wrong_tensors_are_named(void **state) {
    (void)state;
    static const char q[] = "model.layers.1.self_attn.q_proj.weight";
    static const char blocks[] = "model.layers.0.mlp.experts.down_proj_blocks";
    mini_checkpoint m = create_mini();

    /* Misnamed: the right name is missing. */
    strcpy(mini_tensor(&m, q)->name, "model.layers.1.self_attn.qq_proj.weight");
    write_single(&m);
    refuse(&m, KV8_ERR_NOT_FOUND, "tensor \"model.layers.1.self_attn.q_proj.weight\" is missing");
    strcpy(mini_tensor(&m, "model.layers.1.self_attn.qq_proj.weight")->name, q);

    /* One more than the model has. */
    m.tensors[m.count] = *mini_tensor(&m, "model.norm.weight");
    strcpy(m.tensors[m.count++].name, "model.layers.2.input_layernorm.weight");
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID,
           "model.safetensors: unexpected tensor \"model.layers.2.input_layernorm.weight\"");
    m.count--;

    /* The right bytes under another dtype. */
    mini_tensor(&m, q)->dtype = "F16";
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID, "q_proj.weight\" has dtype F16, must be BF16");
    mini_tensor(&m, q)->dtype = "BF16";
    mini_tensor(&m, blocks)->dtype = "I8";
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID, "down_proj_blocks\" has dtype I8, must be U8");
    mini_tensor(&m, blocks)->dtype = "U8";
    mini_tensor(&m, "model.norm.weight")->dtype = "F16";
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID, "\"model.norm.weight\" has dtype F16, must be BF16 or F32");
    mini_tensor(&m, "model.norm.weight")->dtype = "BF16";

    /* The right number of values in another shape. */
    mini_tensor(&m, q)->num_dims = 1;
    mini_tensor(&m, q)->shape[0] = 32 * 32;
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID, "has shape [1024], by config.json it must be [32, 32]");
    mini_tensor(&m, q)->num_dims = 2;
    mini_tensor(&m, q)->shape[0] = 32;
    int64_t *const shape = mini_tensor(&m, blocks)->shape;
    shape[0] = 8;
    shape[1] = 16;
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID,
           "has shape [8, 16, 2, 16], by config.json it must be [4, 32, 2, 16]");
    shape[0] = 4;
    shape[1] = 32;

    /* A sink that is no number. */
    uint16_t nan[2] = {0x7fc0, 0};
    const void *const sinks = mini_tensor(&m, "model.layers.0.self_attn.sinks")->data;
    mini_tensor(&m, "model.layers.0.self_attn.sinks")->data = nan;
    write_single(&m);
    refuse(&m, KV8_ERR_INVALID, "\"model.layers.0.self_attn.sinks\": the sink of head 0 is NaN");
    mini_tensor(&m, "model.layers.0.self_attn.sinks")->data = sinks;
    destroy_mini(&m);
}

static void contradictory_configs_are_refused(void **state) {
    (void)state;
    mini_checkpoint m = create_mini();
    write_single(&m);
    checkpoint_shape other = mini;
    other.vocab = 65;
    write_config(m.path, &other);
    refuse(&m, KV8_ERR_INVALID,
           "\"model.embed_tokens.weight\" has shape [64, 32], by config.json it must be [65, 32]");
    other = mini;
    other.layers = 1;
    write_config(m.path, &other);
    refuse(&m, KV8_ERR_INVALID, "unexpected tensor \"model.layers.1.");
    other = mini;
    other.layers = 3;
    write_config(m.path, &other);
    refuse(&m, KV8_ERR_NOT_FOUND, "tensor \"model.layers.2.input_layernorm.weight\" is missing");
    other = mini;
    other.hidden = 48;
    write_config(m.path, &other);
    refuse(&m, KV8_ERR_INVALID, "config.json: hidden_size is 48, must be a multiple of 32");
    write_text(m.path, "config.json", "{\"model_type\": \"gpt_oss\", ");
    refuse(&m, KV8_ERR_CORRUPT, "config.json: line 1");
    write_config(m.path, &mini);
    write_text(m.path, "generation_config.json", "{\"eos_token_id\": [1, 64]}");
    refuse(&m, KV8_ERR_INVALID, "generation_config.json: eos_token_id 64 is no id from 0 to 63");
    write_text(m.path, "generation_config.json", "{\"eos_token_id\": [1, 3]}");
    kv8_model *const model = open_model(m.path, KV8_ISA_BEST);
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    assert_int_equal(info.num_eos, 2);
    assert_int_equal(info.eos[1], 3);
    kv8_model_close(model);
    destroy_mini(&m);
}

static void torn_files_are_refused(void **state) {
    (void)state;
    mini_checkpoint m = create_mini();
    refuse(&m, KV8_ERR_NOT_FOUND, "no model.safetensors.index.json, model.safetensors");
    write_single(&m);
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors", m.path);
    assert_int_equal(truncate(path, 20000), 0);
    refuse(&m, KV8_ERR_CORRUPT, "model.safetensors: tensor \"");
    refuse(&m, KV8_ERR_CORRUPT, "it is truncated");
    assert_int_equal(truncate(path, 100), 0);
    refuse(&m, KV8_ERR_CORRUPT, "it is truncated");
    assert_int_equal(truncate(path, 0), 0);
    refuse(&m, KV8_ERR_CORRUPT, "the file is empty");
    write_text(m.path, "model.safetensors", "\xff\xff\xff\xff\xff\xff\xff\x7f{}");
    refuse(&m, KV8_ERR_CORRUPT, "a header of 9223372036854775807 bytes, the limit is 100000000");
    unlink(path);
    assert_int_equal(symlink("/", path), 0);
    refuse(&m, KV8_ERR_INVALID, "not a regular file");
    snprintf(path, sizeof path, "%s/config.json", m.path);
    unlink(path);
    refuse(&m, KV8_ERR_NOT_FOUND, "config.json");
    destroy_mini(&m);
}

static void shards_and_index_must_agree(void **state) {
    (void)state;
    mini_checkpoint m = create_mini();
    const size_t half = m.count / 2;
    static const char *const files[] = {"a.safetensors", "b.safetensors", "c.safetensors"};
    int file_of[MINI_TENSORS];
    for (size_t i = 0; i < m.count; i++) file_of[i] = i >= half;
    write_safetensors(m.path, files[0], m.tensors, half, 0);
    write_safetensors(m.path, files[1], m.tensors + half, m.count - half, 3);
    free(run_checkpoint(m.path, mini_ids, 2)); /* found by scanning */
    write_index(m.path, m.tensors, m.count, files, file_of);
    free(run_checkpoint(m.path, mini_ids, 2));

    file_of[3] = 1; /* lies in a */
    write_index(m.path, m.tensors, m.count, files, file_of);
    refuse(&m, KV8_ERR_CORRUPT, "into b.safetensors, which does not hold it");
    file_of[3] = 2; /* a file that is not there */
    write_index(m.path, m.tensors, m.count, files, file_of);
    refuse(&m, KV8_ERR_NOT_FOUND, "model.safetensors.index.json: ");
    refuse(&m, KV8_ERR_NOT_FOUND, "c.safetensors");
    file_of[3] = 0;
    write_index(m.path, m.tensors, m.count - 1, files, file_of);
    refuse(&m, KV8_ERR_CORRUPT, "weight_map lacks \"lm_head.weight\", which b.safetensors holds");
    const char *const outside[] = {"../a.safetensors", "b.safetensors"};
    write_index(m.path, m.tensors, m.count, outside, file_of);
    refuse(&m, KV8_ERR_CORRUPT, "is not the name of a file beside it");
    write_text(m.path, "model.safetensors.index.json", "{\"weight_map\": []}");
    refuse(&m, KV8_ERR_CORRUPT, "weight_map is missing or no object");
    write_text(m.path, "model.safetensors.index.json", "{\"weight_map\": {}}");
    refuse(&m, KV8_ERR_CORRUPT, "weight_map names 0 files");

    /* A link that leads nowhere is an index that cannot be read, not none. */
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", m.path);
    unlink(path);
    assert_int_equal(symlink("nowhere", path), 0);
    refuse(&m, KV8_ERR_NOT_FOUND, "model.safetensors.index.json: No such file");
    unlink(path);

    /* One tensor in both shards. */
    write_safetensors(m.path, files[0], m.tensors, half + 1, 0);
    write_index(m.path, m.tensors, m.count, files, file_of);
    refuse(&m, KV8_ERR_CORRUPT, m.tensors[half].name);
    refuse(&m, KV8_ERR_CORRUPT, "a.safetensors and ");
    destroy_mini(&m);
}

/* Other files may lie beside model.safetensors, not the same tensors again. */
static void two_files_with_one_tensor_are_refused(void **state) {
    (void)state;
    mini_checkpoint m = create_mini();
    write_single(&m);
    write_safetensors(m.path, "second.safetensors", m.tensors + 3, 1, 0);
    refuse(&m, KV8_ERR_CORRUPT, m.tensors[3].name);
    refuse(&m, KV8_ERR_CORRUPT, "/model.safetensors and ");
    refuse(&m, KV8_ERR_CORRUPT, "/second.safetensors");
    write_text(m.path, "second.safetensors", "a download cut short");
    refuse(&m, KV8_ERR_CORRUPT, "/second.safetensors: ");
    strcpy(m.tensors[3].name, "another.weight");
    write_safetensors(m.path, "second.safetensors", m.tensors + 3, 1, 0);
    free(run_checkpoint(m.path, mini_ids, 2));
    destroy_mini(&m);
}

/* --- the model that ships, packed otherwise --- */

typedef struct repacked {
    kv8_safetensors source;
    char path[256];
    file_tensor *tensors;
    size_t count;
    void *fused[2 * 64]; /* owned */
    size_t num_fused;
} repacked;

static file_tensor file_tensor_of(const kv8_tensor *t) {
    file_tensor out = {.dtype = kv8_tensor_type_name(t->type),
                       .num_dims = t->num_dims,
                       .bytes = t->bytes,
                       .data = t->data};
    snprintf(out.name, sizeof out.name, "%s", t->name);
    for (int32_t d = 0; d < t->num_dims; d++) out.shape[d] = t->shape[d];
    return out;
}

static repacked open_source(void) {
    repacked r = {.count = 0};
    assert_ok(kv8_safetensors_open(&r.source, "models/tiny-gpt-oss/model.safetensors", NULL));
    make_directory(r.path);
    r.tensors = calloc(r.source.num_tensors, sizeof *r.tensors);
    for (size_t i = 0; i < r.source.num_tensors; i++)
        r.tensors[r.count++] = file_tensor_of(&r.source.tensors[i]);
    return r;
}

static void close_source(repacked *r) {
    for (size_t i = 0; i < r->num_fused; i++) free(r->fused[i]);
    free(r->tensors);
    kv8_safetensors_close(&r->source);
    remove_directory(r->path);
}

static void copy_config(const repacked *r) {
    char *text = NULL;
    size_t size = 0;
    assert_ok(kv8_file_read("models/tiny-gpt-oss/config.json", 1 << 20, &text, &size));
    write_text(r->path, "config.json", text);
    kv8_release(NULL, text, size + 1, 1);
}

/* Logits of 200 tokens must have the very bits of the model as it ships. */
static void expect_same_bits(const char *path) {
    enum { TOKENS = 200, VOCAB = 4096 };
    const int32_t n = (int32_t)test_cases(TOKENS);
    int32_t ids[TOKENS];
    for (int i = 0; i < n; i++) ids[i] = (i * 37 + 11) % 4000;
    float *const want = run_checkpoint(tiny_model, ids, n);
    float *const got = run_checkpoint(path, ids, n);
    assert_memory_equal(got, want, (size_t)n * VOCAB * sizeof *got);
    free(want);
    free(got);
}

/* blocks, scales and all else in three shards whose data begin at odd addresses. */
static void shards_at_odd_alignment_give_the_same_bits(void **state) {
    (void)state;
    repacked r = open_source();
    copy_config(&r);
    static const char *const files[] = {"model-00000-of-00002.safetensors",
                                        "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors"};
    int *const file_of = calloc(r.count, sizeof *file_of);
    file_tensor *const part = calloc(r.count, sizeof *part);
    for (int f = 0; f < 3; f++) {
        size_t count = 0;
        for (size_t i = 0; i < r.count; i++) {
            const bool blocks = strstr(r.tensors[i].name, "_blocks") != NULL;
            const bool scales = strstr(r.tensors[i].name, "_scales") != NULL;
            file_of[i] = blocks ? 0 : scales ? 1 : 2;
            if (file_of[i] == f) part[count++] = r.tensors[i];
        }
        /* The header's own length varies: two pads, of which one makes the data odd. */
        write_safetensors(r.path, files[f], part, count, 0);
        char path[512];
        snprintf(path, sizeof path, "%s/%s", r.path, files[f]);
        kv8_safetensors file;
        assert_ok(kv8_safetensors_open(&file, path, NULL));
        const bool even = (uintptr_t)file.tensors[0].data % 2 == 0;
        kv8_safetensors_close(&file);
        if (even) write_safetensors(r.path, files[f], part, count, 1);
    }
    expect_same_bits(r.path); /* without an index */
    write_index(r.path, r.tensors, r.count, files, file_of);
    expect_same_bits(r.path);
    kv8_model *const model = open_model(r.path, KV8_ISA_BEST);
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    assert_int_equal(info.num_files, 3);
    assert_int_equal(info.num_tensors, 117);
    kv8_model_close(model);
    free(file_of);
    free(part);
    close_source(&r);
}

/* The original names of what follows "model.layers.N.". */
static const char *const renamed[][2] = {
    {"input_layernorm.weight", "attn.norm.scale"},
    {"self_attn.sinks", "attn.sinks"},
    {"self_attn.o_proj.weight", "attn.out.weight"},
    {"self_attn.o_proj.bias", "attn.out.bias"},
    {"post_attention_layernorm.weight", "mlp.norm.scale"},
    {"mlp.router.weight", "mlp.gate.weight"},
    {"mlp.router.bias", "mlp.gate.bias"},
    {"mlp.experts.gate_up_proj_blocks", "mlp.mlp1_weight.blocks"},
    {"mlp.experts.gate_up_proj_scales", "mlp.mlp1_weight.scales"},
    {"mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias"},
    {"mlp.experts.down_proj_blocks", "mlp.mlp2_weight.blocks"},
    {"mlp.experts.down_proj_scales", "mlp.mlp2_weight.scales"},
    {"mlp.experts.down_proj_bias", "mlp.mlp2_bias"},
};

static void add_original_layer(repacked *r, int layer, file_tensor *out, size_t *count) {
    char name[96];
    for (size_t i = 0; i < sizeof renamed / sizeof renamed[0]; i++) {
        snprintf(name, sizeof name, "model.layers.%d.%s", layer, renamed[i][0]);
        const kv8_tensor *const tensor = kv8_safetensors_find(&r->source, name);
        assert_non_null(tensor);
        out[*count] = file_tensor_of(tensor);
        snprintf(out[(*count)++].name, sizeof out->name, "block.%d.%s", layer, renamed[i][1]);
    }
    for (int bias = 0; bias < 2; bias++) { /* q, k and v one after another */
        const char *const tail = bias ? "bias" : "weight";
        file_tensor fused = {.dtype = "BF16"};
        uint8_t *data = NULL;
        for (int which = 0; which < 3; which++) {
            snprintf(name, sizeof name, "model.layers.%d.self_attn.%c_proj.%s", layer, "qkv"[which],
                     tail);
            const kv8_tensor *const tensor = kv8_safetensors_find(&r->source, name);
            assert_non_null(tensor);
            data = realloc(data, fused.bytes + tensor->bytes);
            assert_non_null(data);
            memcpy(data + fused.bytes, tensor->data, tensor->bytes);
            fused.bytes += tensor->bytes;
            fused.num_dims = tensor->num_dims;
            fused.shape[0] += tensor->shape[0];
            fused.shape[1] = tensor->shape[1];
        }
        snprintf(fused.name, sizeof fused.name, "block.%d.attn.qkv.%s", layer, tail);
        fused.data = data;
        r->fused[r->num_fused++] = data;
        out[(*count)++] = fused;
    }
}

static void original_names_give_the_same_bits(void **state) {
    (void)state;
    static const char *const whole[][2] = {{"model.embed_tokens.weight", "embedding.weight"},
                                           {"lm_head.weight", "unembedding.weight"},
                                           {"model.norm.weight", "norm.scale"}};
    repacked r = open_source();
    file_tensor *const out = calloc(r.count, sizeof *out);
    size_t count = 0;
    for (size_t i = 0; i < 3; i++) {
        out[count] = file_tensor_of(kv8_safetensors_find(&r.source, whole[i][0]));
        snprintf(out[count++].name, sizeof out->name, "%s", whole[i][1]);
    }
    for (int layer = 0; layer < 6; layer++) add_original_layer(&r, layer, out, &count);
    write_safetensors(r.path, "model--00001-of-00002.safetensors", out, count / 2, 1);
    write_safetensors(r.path, "model--00002-of-00002.safetensors", out + count / 2,
                      count - count / 2, 0);
    write_text(r.path, "config.json",
               "{\"num_hidden_layers\":6,\"num_experts\":8,\"experts_per_token\":4,"
               "\"vocab_size\":4096,\"hidden_size\":256,\"intermediate_size\":256,"
               "\"swiglu_limit\":7.0,\"head_dim\":64,\"num_attention_heads\":8,"
               "\"num_key_value_heads\":2,\"sliding_window\":128,\"initial_context_length\":4096,"
               "\"rope_theta\":150000.0,\"rope_scaling_factor\":32.0,\"rope_ntk_alpha\":1.0,"
               "\"rope_ntk_beta\":32.0}");
    expect_same_bits(r.path);
    out[count - 1].shape[0]--; /* a fused bias one row short */
    out[count - 1].bytes -= 2;
    write_safetensors(r.path, "model--00002-of-00002.safetensors", out + count / 2,
                      count - count / 2, 0);
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    kv8_model *model = NULL;
    assert_refused(kv8_model_open(&model, r.path, &options), KV8_ERR_INVALID,
                   "\"block.5.attn.qkv.bias\" has shape [767], by config.json it must be [768]");
    free(out);
    close_source(&r);
}

/* --- the list of tensors --- */

typedef struct tally {
    int count;
    uint64_t bytes;
} tally;

static int tally_tensor(void *cookie, const kv8_tensor_info *tensor) {
    tally *const t = cookie;
    t->count++;
    t->bytes += tensor->bytes;
    return t->count == 50;
}

static void tensors_are_visited_until_told_to_stop(void **state) {
    (void)state;
    kv8_model *const model = open_model(tiny_model, KV8_ISA_BEST);
    tally t = {0};
    kv8_model_visit_tensors(model, tally_tensor, &t);
    assert_int_equal(t.count, 50);
    t = (tally){.count = 1000};
    kv8_model_visit_tensors(model, tally_tensor, &t);
    assert_int_equal(t.count, 1117);
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    assert_int_equal(t.bytes, info.bytes);
    kv8_model_close(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mini_checkpoint_is_finite),
        cmocka_unit_test(wrong_tensors_are_named),
        cmocka_unit_test(contradictory_configs_are_refused),
        cmocka_unit_test(torn_files_are_refused),
        cmocka_unit_test(shards_and_index_must_agree),
        cmocka_unit_test(two_files_with_one_tensor_are_refused),
        cmocka_unit_test(shards_at_odd_alignment_give_the_same_bits),
        cmocka_unit_test(original_names_give_the_same_bits),
        cmocka_unit_test(tensors_are_visited_until_told_to_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
