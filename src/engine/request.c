/* request.c - a request's own memory, and when it ends.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <stddef.h>
#include <string.h>

#include "sampler.h"

/* Copies num values to *at and moves it on. */
static void *put(char **at, const void *values, int32_t num, size_t size) {
    void *const copy = *at;
    if (num > 0) memcpy(copy, values, (size_t)num * size);
    *at += (size_t)num * size;
    return copy;
}

_Static_assert(offsetof(kv8_running, parent) <= KV8_ALIGNMENT, "one line");

static bool is_plain(const kv8_request *spec, const kv8_sampling *sampling) {
    return spec->visit == NULL && spec->mask == NULL && spec->num_logprobs == 0 &&
           spec->prompt_logprobs == 0 && spec->min_tokens == 0 && sampling->num_bias == 0 &&
           !kv8_sampling_penalises(sampling);
}

kv8_status kv8_running_create(kv8_running **out, const kv8_request *spec, const kv8_running *parent,
                              const kv8_allocator *allocator) {
    kv8_sampling sampling = KV8_SAMPLING_INIT;
    if (spec->sampling != NULL) KV8_READ_STRUCT(kv8_sampling, &sampling, spec->sampling);
    const int32_t before = parent == NULL ? 0 : parent->num_tokens;
    const int32_t num_bias = sampling.num_bias;
    const int32_t capacity = before + spec->num_tokens + spec->max_tokens;
    const size_t words = (size_t)capacity + (size_t)spec->num_stop_ids + 2 * (size_t)num_bias;
    const size_t bytes = sizeof(kv8_running) + words * 4;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, bytes, 1, "request", &memory));
    kv8_running *const running = memory;
    char *at = (char *)(running + 1);
    running->bytes = bytes;
    running->spec = *spec;
    running->is_plain = is_plain(spec, &sampling);
    running->ends_at_eos = !spec->ignore_eos;
    running->ends_at_stops = spec->num_stop_ids > 0;
    running->capacity = capacity;
    running->num_prompt = running->num_tokens = before + spec->num_tokens;
    running->parent = parent == NULL ? 0 : parent->handle;
    running->token_ids = put(&at, parent == NULL ? NULL : parent->token_ids, before, 4);
    (void)put(&at, spec->token_ids, spec->num_tokens, 4);
    at += (size_t)spec->max_tokens * 4;
    running->spec.stop_ids = put(&at, spec->stop_ids, spec->num_stop_ids, 4);
    running->sampling = sampling;
    running->sampling.bias_ids = put(&at, sampling.bias_ids, num_bias, 4);
    running->sampling.bias = put(&at, sampling.bias, num_bias, 4);
    *out = running;
    return KV8_OK;
}

void kv8_running_destroy(kv8_running *running, const kv8_allocator *allocator) {
    if (running != NULL) kv8_release(allocator, running, running->bytes, 1);
}

static bool contains(const int32_t *ids, int32_t num, int32_t id) {
    for (int32_t i = 0; i < num; i++) {
        if (ids[i] == id) return true;
    }
    return false;
}

kv8_finish kv8_running_take(kv8_running *running, int32_t token, const kv8_model_info *info) {
    running->num_tokens++;
    const kv8_request *const spec = &running->spec;
    if (running->ends_at_eos && contains(info->eos, info->num_eos, token)) return KV8_FINISH_EOS;
    if (running->ends_at_stops && contains(spec->stop_ids, spec->num_stop_ids, token))
        return KV8_FINISH_STOP;
    return running->num_tokens == running->capacity ? KV8_FINISH_LENGTH : KV8_FINISH_NONE;
}
