/* attention_choice_case.h - a GPU's stand-in, and the kernel that a plan describes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ATTENTION_CHOICE_CASE_H
#define KV8_ATTENTION_CHOICE_CASE_H

#include <string.h>

#include "device_plan_case.h"

static inline stand open_gpu(int32_t sm_version) {
    stand_in_reset();
    return stand_open(sm_version, H200_SMS);
}

static inline char *text_of(const stand *s, const kv8_attention_spec *spec,
                            const kv8_attention_args *args) {
    static char text[512];
    kv8_attention_device_plan *plan = NULL;
    assert_ok(kv8_attention_device_plan_create(&plan, s->device, spec, NULL));
    assert_ok(kv8_attention_device_describe(plan, args, text, sizeof text));
    kv8_attention_device_plan_destroy(plan);
    return text;
}
static inline const char *name_of(const stand *s, const kv8_attention_spec *spec,
                                  const kv8_attention_args *args) {
    return strtok(text_of(s, spec, args), " ");
}

#endif
