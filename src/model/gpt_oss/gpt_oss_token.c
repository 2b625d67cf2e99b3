/* gpt_oss_token.c - a step of a token each of few sequences by one kernel (cuda/token.cu of one,
 * cuda/tokens.cu of several): which models, GPUs and caches they take, their workspaces, their
 * launches.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "gpt_oss.h"
#include "gpt_oss_device.h"

#define FORMAT(dtype, name)                                 \
    {                                                       \
        dtype, "kv8_gpt_oss_token_" name "_d64__sm90a", {   \
            "kv8_gpt_oss_tokens_" name "_d64_x4__sm90a",    \
                "kv8_gpt_oss_tokens_" name "_d64_x8__sm90a" \
        }                                                   \
    }
static const struct {
    kv8_dtype dtype;
    const char *one, *several[KV8_TOKENS_SIZES];
} formats[KV8_TOKEN_FORMATS] = {[KV8_TOKEN_BF16] = FORMAT(KV8_BF16, "bf16"),
                                [KV8_TOKEN_F16] = FORMAT(KV8_F16, "f16"),
                                [KV8_TOKEN_E4M3] = FORMAT(KV8_E4M3, "e4m3"),
                                [KV8_TOKEN_E5M2] = FORMAT(KV8_E5M2, "e5m2"),
                                [KV8_TOKEN_INT8] = FORMAT(KV8_INT8, "int8")};
#undef FORMAT
static const int32_t sizes[KV8_TOKENS_SIZES] = {4, KV8_TOKENS_MAX};

static const char *check_model(const kv8_gpt_oss_config *c, kv8_device *device) {
    const int32_t num_sms = kv8_device_get_info(device)->num_sms;
    if (!kv8_kernel_exists(device, formats[0].one)) return "there is none for this GPU";
    if (num_sms < KV8_TOKEN_MIN_BLOCKS || num_sms > KV8_TOKEN_MAX_BLOCKS)
        return "of this GPU's number of multiprocessors";
    if (c->num_layers % 2 != 0) return "of the odd number of layers";
    const bool fits =
        c->hidden_size == KV8_TOKEN_HIDDEN && c->intermediate_size == KV8_TOKEN_HIDDEN &&
        c->head_dim == KV8_TOKEN_HEAD_DIM && c->num_qo_heads == KV8_TOKEN_QO_HEADS &&
        c->num_kv_heads == KV8_TOKEN_KV_HEADS && c->num_experts_per_token == KV8_TOKEN_TOP_K &&
        c->num_experts <= KV8_TOKEN_MAX_EXPERTS && c->num_layers <= KV8_TOKEN_MAX_LAYERS &&
        c->vocab_size >= KV8_TOKEN_MIN_VOCAB;
    return fits ? NULL : "it is built for the widths of gpt-oss-20b and 120b";
}

kv8_status kv8_gpt_oss_token_create(kv8_model *model) {
    kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_token *const t = &own->device->token;
    kv8_device *const device = model->options.device;
    t->why_not = check_model(&own->config, device);
    if (t->why_not != NULL) return KV8_OK;
    for (int i = 0; i < KV8_TOKEN_FORMATS; i++) {
        KV8_TRY(kv8_kernel_get(&t->kernels[i], device, formats[i].one, sizeof t->args,
                               KV8_TOKEN_RING_BYTES));
        for (int s = 0; s < KV8_TOKENS_SIZES; s++)
            KV8_TRY(kv8_kernel_get(&t->several[s][i], device, formats[i].several[s],
                                   sizeof t->tokens,
                                   KV8_TOKENS_RING_BYTES + KV8_TOKENS_SHARED_BYTES));
    }
    return KV8_OK;
}

typedef struct workspace_array {
    void **array;
    size_t bytes;
} workspace_array;
enum { WORKSPACE_ARRAYS = 22 };

static void list_workspace(const kv8_model *model, workspace_array (*arrays)[WORKSPACE_ARRAYS]) {
    const kv8_gpt_oss *const own = model->own;
    kv8_token_args *const a = &own->device->token.args;
    kv8_tokens_args *const s = &own->device->token.tokens;
    const size_t max = KV8_TOKENS_MAX, pairs = max * KV8_TOKEN_TOP_K;
    const size_t squares = max * KV8_TOKEN_MAX_BLOCKS * sizeof *s->squares;
    const size_t blocks = (size_t)kv8_device_get_info(model->options.device)->num_sms;
    const size_t heads = KV8_TOKEN_QO_HEADS, width = heads * KV8_TOKEN_HEAD_DIM;
    const size_t kv_width = (size_t)KV8_TOKEN_KV_HEADS * KV8_TOKEN_HEAD_DIM;
    enum { HIDDEN = KV8_TOKEN_HIDDEN };
    const workspace_array all[WORKSPACE_ARRAYS] = {
        {(void **)&a->meetings, KV8_TOKEN_MEETINGS * KV8_TOKEN_MEETING_WORDS * sizeof *a->meetings},
        {(void **)&a->residual, 3 * HIDDEN * sizeof *a->residual},
        {(void **)&a->qkv, (width + 2 * kv_width) * sizeof *a->qkv},
        {(void **)&a->partials, blocks * width * sizeof *a->partials},
        {(void **)&a->partial_sums, blocks * heads * 2 * sizeof *a->partial_sums},
        {(void **)&a->attended, width * sizeof *a->attended},
        {(void **)&a->squares, blocks * sizeof *a->squares},
        {(void **)&a->router, KV8_TOKEN_MAX_EXPERTS * sizeof *a->router},
        {(void **)&a->gated, KV8_TOKEN_TOP_K * HIDDEN * sizeof *a->gated},
        {(void **)&a->draw_parts, 3 * blocks * sizeof *a->draw_parts},
        {(void **)&s->meetings, KV8_TOKEN_MEETINGS * KV8_TOKEN_MEETING_WORDS * sizeof *s->meetings},
        {(void **)&s->entering, max * HIDDEN * sizeof *s->entering},
        {(void **)&s->residual, max * HIDDEN * sizeof *s->residual},
        {(void **)&s->last, max * HIDDEN * sizeof *s->last},
        {(void **)&s->entering_squares, squares},
        {(void **)&s->squares, squares},
        {(void **)&s->last_squares, squares},
        {(void **)&s->qkv, max * (width + 2 * kv_width) * sizeof *s->qkv},
        {(void **)&s->attended, max * width / 2 * sizeof *s->attended},
        {(void **)&s->router, max * KV8_TOKEN_MAX_EXPERTS * sizeof *s->router},
        {(void **)&s->gated, pairs * HIDDEN / 2 * sizeof *s->gated},
        {(void **)&s->down, pairs * HIDDEN * sizeof *s->down},
    };
    memcpy(*arrays, all, sizeof all);
}

void kv8_gpt_oss_token_lay_out(const kv8_model *model, kv8_device_memory *memory) {
    const kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_token *const t = &own->device->token;
    if (t->why_not != NULL) return;
    workspace_array arrays[WORKSPACE_ARRAYS];
    list_workspace(model, &arrays);
    t->args.layers = kv8_device_memory_take(
        memory, KV8_PART_ACTIVATIONS, (size_t)own->config.num_layers * sizeof(kv8_token_layer));
    for (int i = 0; i < WORKSPACE_ARRAYS; i++)
        *arrays[i].array = kv8_device_memory_take(memory, KV8_PART_ACTIVATIONS, arrays[i].bytes);
}

/* The workspace as the first token finds it. */
static kv8_status clear_workspace(kv8_model *model) {
    const kv8_gpt_oss *const own = model->own;
    workspace_array arrays[WORKSPACE_ARRAYS];
    list_workspace(model, &arrays);
    for (int i = 0; i < WORKSPACE_ARRAYS; i++)
        KV8_TRY(kv8_stream_fill(model->options.stream, *arrays[i].array, 0, arrays[i].bytes));
    own->device->token.is_clear = true;
    return KV8_OK;
}

/* --- caches --- */

static int format_of(kv8_dtype k_dtype, kv8_dtype v_dtype) {
    for (int i = 0; i < KV8_TOKEN_FORMATS; i++) {
        if (k_dtype == formats[i].dtype && v_dtype == formats[i].dtype) return i;
    }
    return -1;
}

static bool lies_in_rows(const kv8_paged *p) {
    const bool scales_do = p->row_scale == NULL || (p->row_scale_stride_head == 1 &&
                                                    p->row_scale_stride_slot == KV8_TOKEN_KV_HEADS);
    return scales_do && p->stride_head == KV8_TOKEN_HEAD_DIM &&
           p->stride_slot == (int64_t)KV8_TOKEN_KV_HEADS * KV8_TOKEN_HEAD_DIM;
}

/* All layers in one format that a kernel takes, a token's heads side by side. */
static const char *check_layers(const kv8_cache *cache, int32_t num_layers) {
    int format = -1;
    for (int32_t i = 0; i < num_layers; i++) {
        kv8_cache_layer layer;
        kv8_paged k = KV8_PAGED_INIT, v = KV8_PAGED_INIT;
        if (kv8_cache_get_layer(cache, i, &layer) != KV8_OK ||
            kv8_cache_layer_kv(cache, i, &k, &v) != KV8_OK)
            return "the cache has fewer layers";
        const int own = format_of(layer.k_dtype, layer.v_dtype);
        if (i == 0) format = own;
        if (own < 0 || own != format)
            return "K and V are not both bf16, f16, e4m3, e5m2 or int8 in all layers";
        if (!lies_in_rows(&k) || !lies_in_rows(&v))
            return "a token's heads do not lie side by side in the pages";
    }
    return NULL;
}

const char *kv8_gpt_oss_why_not_tokens(const kv8_model *model, kv8_device *device,
                                       const kv8_cache *cache) {
    const kv8_gpt_oss *const own = model->own;
    const char *const why = check_model(&own->config, device);
    kv8_cache_shape shape;
    kv8_cache_get_shape(cache, &shape);
    if (why != NULL) return why;
    if (shape.page_size % KV8_TOKEN_GRANULE != 0) return "a page is no multiple of 16 tokens";
    return check_layers(cache, own->config.num_layers);
}

/* --- a step --- */

static kv8_token_layer layer_of(const kv8_model *model, int32_t idx, int format) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_device *const d = own->device;
    const kv8_gpt_oss_device_layer *const l = &d->layers[idx];
    const kv8_device_attention *const set = model->on_device->attention;
    const kv8_layer_place *const place = &set->layers[idx];
    const kv8_page_table *const table = &place->own.pages;
    const int64_t size = (int64_t)kv8_dtype_size(formats[format].dtype);
    uint64_t *const counters = place->own.counters;
    return (kv8_token_layer){
        .attention_norm = (const uint16_t *)l->attention_norm,
        .mlp_norm = (const uint16_t *)l->mlp_norm,
        .qkv = (const uint16_t *)l->qkv,
        .qkv_bias = (const uint16_t *)l->qkv_bias,
        .o = (const uint16_t *)l->o,
        .o_bias = (const uint16_t *)l->o_bias,
        .router = (const uint16_t *)l->router,
        .router_bias = (const uint16_t *)l->router_bias,
        .gate_up = l->gate_up,
        .down = l->down,
        .sinks = model->options.without_sinks
                     ? NULL
                     : d->sinks + (size_t)idx * (size_t)own->config.num_qo_heads,
        .k = (uint8_t *)(uintptr_t)place->k.data,
        .v = (uint8_t *)(uintptr_t)place->v.data,
        .k_rows = (uint8_t *)(uintptr_t)place->k.row_scale,
        .v_rows = (uint8_t *)(uintptr_t)place->v.row_scale,
        .k_scale = place->own.k_scale,
        .v_scale = place->own.v_scale,
        .k_counters = counters,
        .v_counters = counters == NULL ? NULL : counters + 2 * KV8_TOKEN_KV_HEADS,
        .k_stride_page = place->k.stride_page * size,
        .v_stride_page = place->v.stride_page * size,
        .page_indptr = table->page_indptr,
        .page_indices = table->page_indices,
        .window_left = set->kinds[place->kind].window_left,
        .window = set->kinds[place->kind].window_left >= 0};
}

/* Layers as the kernel reads them, for the plans of the moment. */
static kv8_status write_layers(kv8_model *model, int format) {
    const kv8_gpt_oss *const own = model->own;
    kv8_gpt_oss_token *const t = &own->device->token;
    const kv8_device_attention *const set = model->on_device->attention;
    kv8_stream *const stream = model->options.stream;
    if (!t->is_clear) KV8_TRY(clear_workspace(model));
    if (t->set == set && t->version == set->version) return KV8_OK;
    kv8_token_layer layers[KV8_TOKEN_MAX_LAYERS];
    for (int32_t i = 0; i < own->config.num_layers; i++) layers[i] = layer_of(model, i, format);
    t->set = NULL;
    KV8_TRY(kv8_stream_copy(stream, t->args.layers, layers,
                            (size_t)own->config.num_layers * sizeof *layers));
    KV8_TRY(kv8_stream_synchronize(stream));
    t->set = set;
    t->version = set->version;
    return KV8_OK;
}

/* One token. */
static kv8_status run_token(kv8_model *model, int32_t token_id, int format,
                            const kv8_step_draw *draw) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    kv8_gpt_oss_device *const d = own->device;
    kv8_token_args args = d->token.args;
    args.embedding = (const uint16_t *)d->embedding;
    args.final_norm = (const uint16_t *)d->final_norm;
    args.head = (const uint16_t *)d->head;
    args.inv_freq = d->inv_freq;
    args.logits = model->on_device->logits;
    args.num_layers = c->num_layers;
    args.num_experts = c->num_experts;
    args.vocab_size = c->vocab_size;
    args.page_size = model->on_device->attention->shape.page_size;
    args.token_id = token_id;
    args.position = model->positions[0];
    args.eps = c->rms_norm_eps;
    args.alpha = c->swiglu_alpha;
    args.limit = c->swiglu_limit;
    args.rope_factor = d->rope_factor;
    if (draw != NULL) {
        args.drawn = draw->drawn;
        args.draw_random = draw->random;
        args.draw_factor = draw->factor;
    }
    const kv8_launch launch = {
        .grid = {(uint32_t)kv8_device_get_info(model->options.device)->num_sms},
        .block = {KV8_TOKEN_THREADS},
        .dynamic_bytes = KV8_TOKEN_RING_BYTES,
        .cooperative = true};
    return kv8_kernel_launch(&d->token.kernels[format], model->options.stream, &launch, &args);
}

/* Granules of keys that a token sees, as KeySplits of cuda/token_keys.cuh counts them. */
static int32_t count_granules(int32_t position, int32_t window_left) {
    const int32_t begin = window_left < 0 || position < window_left ? 0 : position - window_left;
    return (int32_t)kv8_ceil_div(position + 1, KV8_TOKEN_GRANULE) - begin / KV8_TOKEN_GRANULE;
}

/* A block for each KV head of every token, and what is left by their keys: who has few takes no
 * more. */
static void share_blocks(kv8_tokens_args *a, int window, int32_t blocks) {
    int64_t keys[KV8_TOKENS_MAX], all = 0;
    for (int32_t t = 0; t < a->num_tokens; t++) {
        keys[t] = count_granules(a->positions[t], a->window_left[window]);
        if (keys[t] <= KV8_TOKEN_FEW_GRANULES) keys[t] = 0;
        all += keys[t];
    }
    const int32_t left = blocks - a->num_tokens * KV8_TOKEN_KV_HEADS;
    int64_t before = 0;
    for (int32_t t = 0; t <= a->num_tokens; t++) {
        const int64_t shared = all == 0 ? 0 : left * before / all;
        a->first_block[window][t] = (uint8_t)(t * KV8_TOKEN_KV_HEADS + shared);
        if (t < a->num_tokens) before += keys[t];
    }
}

/* A token each of several sequences. */
static kv8_status run_tokens(kv8_model *model, const kv8_step *step, int format) {
    const kv8_gpt_oss *const own = model->own;
    const kv8_gpt_oss_config *const c = &own->config;
    kv8_gpt_oss_device *const d = own->device;
    const int32_t blocks = kv8_device_get_info(model->options.device)->num_sms;
    kv8_tokens_args args = d->token.tokens;
    args.layers = d->token.args.layers;
    args.partials = d->token.args.partials;
    args.partial_sums = d->token.args.partial_sums;
    args.embedding = (const uint16_t *)d->embedding;
    args.final_norm = (const uint16_t *)d->final_norm;
    args.head = (const uint16_t *)d->head;
    args.inv_freq = d->inv_freq;
    args.logits = model->on_device->logits;
    args.num_layers = c->num_layers;
    args.num_experts = c->num_experts;
    args.vocab_size = c->vocab_size;
    args.page_size = model->on_device->attention->shape.page_size;
    args.num_tokens = step->num_seqs;
    args.eps = c->rms_norm_eps;
    args.alpha = c->swiglu_alpha;
    args.limit = c->swiglu_limit;
    args.rope_factor = d->rope_factor;
    args.window_left[0] = -1;
    args.window_left[1] = c->sliding_window - 1;
    memcpy(args.token_ids, step->token_ids, (size_t)step->num_seqs * sizeof *args.token_ids);
    memcpy(args.positions, model->positions, (size_t)step->num_seqs * sizeof *args.positions);
    for (int w = 0; w < KV8_TOKENS_WINDOWS; w++) share_blocks(&args, w, blocks);
    int size = 0;
    while (sizes[size] < step->num_seqs) size++;
    const kv8_launch launch = {.grid = {(uint32_t)blocks},
                               .block = {KV8_TOKEN_THREADS},
                               .dynamic_bytes = KV8_TOKENS_RING_BYTES + KV8_TOKENS_SHARED_BYTES,
                               .cooperative = true};
    return kv8_kernel_launch(&d->token.several[size][format], model->options.stream, &launch,
                             &args);
}

kv8_status kv8_gpt_oss_tokens_run(kv8_model *model, const kv8_step *step,
                                  const kv8_step_draw *draw) {
    KV8_RANGE("persistent");
    const kv8_cache_layer *const stored = &model->on_device->attention->kinds[0].stored;
    const int format = format_of(stored->k_dtype, stored->v_dtype);
    KV8_TRY(write_layers(model, format));
    return step->num_seqs == 1 ? run_token(model, step->token_ids[0], format, draw)
                               : run_tokens(model, step, format);
}
