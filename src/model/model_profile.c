/* model_profile.c - sums a stream's timeline by kernel and by kind of work.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_profile.h"

#include <string.h>

enum { MAX_ROWS = 256 };

struct kv8_model_profile {
    kv8_device *device;
    kv8_timeline *timeline; /* NULL: it has ended */
    kv8_profile sums;
    kv8_profile_row rows[MAX_ROWS];
    int32_t num_layers, num_experts;
    int32_t *offsets; /* page-locked [num_layers, num_experts + 1], negative before a step; NULL: by
                         kernel it is not */
    double experts_read; /* summed over layers and steps */
};

/* --- kinds --- */

const char *kv8_work_name(kv8_work work) {
    static const char *const names[KV8_WORK_COUNT] = {
        "dense", "experts",  "routing and gather", "attention",     "activations and norms",
        "head",  "sampling", "movement",           "not told apart"};
    return (int)work >= 0 && work < KV8_WORK_COUNT ? names[work] : NULL;
}

/* By the beginning of a kernel's name; the first that fits. */
static const struct {
    const char *prefix;
    kv8_work work;
} kinds[] = {
    {"kv8_linear_", KV8_WORK_DENSE},
    {"kv8_experts_gate_up_", KV8_WORK_EXPERTS},
    {"kv8_experts_down_", KV8_WORK_EXPERTS},
    {"kv8_experts_load_", KV8_WORK_MOVEMENT},
    {"kv8_experts_", KV8_WORK_ROUTING},
    {"kv8_append_", KV8_WORK_ATTENTION},
    {"kv8_decode_", KV8_WORK_ATTENTION},
    {"kv8_prefill_", KV8_WORK_ATTENTION},
    {"kv8_attention_", KV8_WORK_ATTENTION},
    {"kv8_quantize_q_", KV8_WORK_ATTENTION},
    {"kv8_q_", KV8_WORK_ATTENTION},
    {"kv8_logit_rows_", KV8_WORK_SAMPLING},
    {"kv8_observe_", KV8_WORK_ATTENTION},
    {"kv8_embed_", KV8_WORK_ROWS},
    {"kv8_gather_", KV8_WORK_ROWS},
    {"kv8_rmsnorm_", KV8_WORK_ROWS},
    {"kv8_rope_", KV8_WORK_ROWS},
    {"kv8_draw_", KV8_WORK_SAMPLING},
    {"kv8_gpt_oss_token", KV8_WORK_WHOLE},
    {"kv8_to_f16_", KV8_WORK_MOVEMENT},
    {"kv8_page_lists_", KV8_WORK_MOVEMENT},
};

kv8_work kv8_work_of_kernel(const char *name) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (strncmp(name, kinds[i].prefix, strlen(kinds[i].prefix)) == 0) return kinds[i].work;
    }
    return KV8_WORK_COUNT;
}

static kv8_work work_of(const char *scope, const char *name) {
    if (strcmp(name, "copy") == 0 || strcmp(name, "fill") == 0) return KV8_WORK_MOVEMENT;
    const kv8_work work = kv8_work_of_kernel(name);
    if (work == KV8_WORK_COUNT) return KV8_WORK_WHOLE;
    return work == KV8_WORK_DENSE && scope != NULL ? KV8_WORK_HEAD : work;
}

/* --- life --- */

kv8_status kv8_model_profile_create(kv8_model_profile **out, kv8_device *device, kv8_stream *stream,
                                    int32_t num_layers, int32_t num_experts, bool by_kernel) {
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_model_profile), "profile", &memory));
    kv8_model_profile *const p = memory;
    *p =
        (kv8_model_profile){.device = device, .num_layers = num_layers, .num_experts = num_experts};
    p->sums = (kv8_profile)KV8_PROFILE_INIT;
    kv8_status status = kv8_timeline_create(&p->timeline, device, by_kernel);
    if (status == KV8_OK && by_kernel && num_experts > 0) {
        const size_t bytes = (size_t)num_layers * ((size_t)num_experts + 1) * sizeof *p->offsets;
        status = kv8_device_alloc_host(device, bytes, &memory);
        p->offsets = status == KV8_OK ? memory : NULL;
        if (status == KV8_OK) memset(p->offsets, 0xff, bytes);
    }
    if (status != KV8_OK) {
        kv8_model_profile_destroy(p, stream);
        return status;
    }
    kv8_stream_set_timeline(stream, p->timeline);
    *out = p;
    return KV8_OK;
}

static void end_timeline(kv8_model_profile *p, kv8_stream *stream) {
    if (p->timeline == NULL) return;
    kv8_stream_set_timeline(stream, NULL);
    kv8_timeline_destroy(p->timeline);
    p->timeline = NULL;
}

void kv8_model_profile_destroy(kv8_model_profile *p, kv8_stream *stream) {
    if (p == NULL) return;
    end_timeline(p, stream);
    kv8_device_free_host(p->device, p->offsets);
    kv8_release(NULL, p, 1, sizeof *p);
}

/* --- sums --- */

/* A kv8_timeline_visitor. */
static void add_time(void *cookie, const char *scope, const char *name, double seconds) {
    static const char counting[] = "counting";
    kv8_model_profile *const p = cookie;
    kv8_profile *const sums = &p->sums;
    if (name == NULL || (scope != NULL && strcmp(scope, counting) == 0)) {
        if (name == NULL) sums->idle_seconds += seconds;
        return;
    }
    const kv8_work work = work_of(scope, name);
    int32_t i = 0;
    while (i < sums->num_rows && (p->rows[i].work != work || strcmp(p->rows[i].name, name) != 0))
        i++;
    sums->busy_seconds += seconds;
    if (i == MAX_ROWS) return;
    if (i == sums->num_rows) p->rows[sums->num_rows++] = (kv8_profile_row){name, work, 0, 0};
    p->rows[i].num_launches++;
    p->rows[i].seconds += seconds;
}

kv8_status kv8_model_profile_count(kv8_model_profile *p, kv8_stream *stream, int32_t layer,
                                   const int32_t *offsets) {
    if (p == NULL || p->timeline == NULL || p->offsets == NULL) return KV8_OK;
    const size_t num = (size_t)p->num_experts + 1;
    kv8_stream_set_scope(stream, "counting");
    const kv8_status status =
        kv8_stream_copy(stream, p->offsets + (size_t)layer * num, offsets, num * sizeof *offsets);
    kv8_stream_set_scope(stream, NULL);
    return status;
}

static void count_experts(kv8_model_profile *p) {
    const int32_t num = p->num_experts + 1;
    int32_t *const offsets = p->offsets;
    if (offsets == NULL || offsets[0] < 0) return;
    for (int32_t layer = 0; layer < p->num_layers; layer++) {
        for (int32_t e = 0; e < p->num_experts; e++)
            p->experts_read += offsets[layer * num + e + 1] > offsets[layer * num + e];
    }
}

kv8_status kv8_model_profile_add_step(kv8_model_profile *p, kv8_stream *stream) {
    if (p == NULL || p->timeline == NULL) return KV8_OK;
    p->sums.num_steps++;
    if (!kv8_stream_times_graphs(stream) && kv8_timeline_has_room(p->timeline)) return KV8_OK;
    KV8_TRY(kv8_stream_synchronize(stream));
    KV8_TRY(kv8_timeline_read(p->timeline, add_time, p));
    count_experts(p);
    return KV8_OK;
}

kv8_status kv8_model_profile_end(kv8_model_profile *p, kv8_stream *stream, kv8_profile *out) {
    if (p->timeline == NULL) return kv8_fail(KV8_ERR_INVALID, "no profile has begun");
    kv8_status status = kv8_stream_synchronize(stream);
    if (status == KV8_OK) status = kv8_timeline_read(p->timeline, add_time, p);
    end_timeline(p, stream);
    const double counted = (double)p->sums.num_steps * p->num_layers;
    p->sums.experts_read = counted > 0 ? p->experts_read / counted : 0;
    p->sums.rows = p->rows;
    *out = p->sums;
    return status;
}
