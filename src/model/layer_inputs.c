/* layer_inputs.c - the residual stream that a step keeps as it enters layers: which, and where.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "model.h"

kv8_status kv8_model_check_layer_inputs(const kv8_model *model) {
    const kv8_model_options *const o = &model->options;
    const int32_t num_layers = model->info.num_layers;
    if (o->num_input_layers < 0 || (o->num_input_layers > 0 && o->input_layers == NULL))
        return kv8_fail(KV8_ERR_INVALID, "num_input_layers is %d, input_layers at %s",
                        o->num_input_layers, o->input_layers == NULL ? "NULL" : "an address");
    for (int32_t i = 0; i < o->num_input_layers; i++) {
        const int32_t layer = o->input_layers[i];
        if (layer < 0 || layer > num_layers)
            return kv8_fail(KV8_ERR_INVALID, "input_layers[%d] is %d, must be from 0 to %d", i,
                            layer, num_layers);
        if (i > 0 && layer <= o->input_layers[i - 1])
            return kv8_fail(KV8_ERR_INVALID,
                            "input_layers[%d] is %d, must be above the one before, %d", i, layer,
                            o->input_layers[i - 1]);
    }
    return KV8_OK;
}

int32_t kv8_model_most_rows(const kv8_model *model) {
    return (int32_t)kv8_max_i64(model->options.max_step_tokens, model->options.max_step_seqs);
}

kv8_status kv8_model_take_layer_inputs(kv8_model *model) {
    kv8_model_options *const o = &model->options;
    const int32_t num = o->num_input_layers;
    int32_t *list = NULL;
    if (num == 0) return KV8_OK;
    KV8_TRY(kv8_buffers_take_ints(&model->buffers, num, &list));
    memcpy(list, o->input_layers, (size_t)num * sizeof *list);
    o->input_layers = list;
    if (o->device != NULL) return KV8_OK;
    return kv8_buffers_take_floats(&model->buffers, (int64_t)num * kv8_model_most_rows(model),
                                   model->info.hidden_size, &model->layer_inputs);
}

static float *layer_input(const kv8_model *model, int32_t idx) {
    const size_t rows = (size_t)kv8_model_most_rows(model);
    return model->layer_inputs + (size_t)idx * rows * (size_t)model->info.hidden_size;
}

float *kv8_model_input_place(const kv8_model *model, int32_t layer) {
    for (int32_t i = 0; i < model->options.num_input_layers; i++)
        if (model->options.input_layers[i] == layer) return layer_input(model, i);
    return NULL;
}

const float *kv8_model_layer_input(const kv8_model *model, int32_t idx) {
    return idx < 0 || idx >= model->options.num_input_layers ? NULL : layer_input(model, idx);
}
