/* model_profile.h - what a GPU's steps spend their time on: a stream's timeline, its kernels told
 * apart by their names, and how many experts were read. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_MODEL_PROFILE_H
#define KV8_MODEL_PROFILE_H

#include "device_impl.h"

#include <kv8/model.h>

/* The scope in which a product is the head's. */
#define KV8_HEAD_SCOPE "head"

typedef struct kv8_model_profile kv8_model_profile;

/* Begins: the stream is timed. */
kv8_status kv8_model_profile_create(kv8_model_profile **out, kv8_device *device, kv8_stream *stream,
                                    int32_t num_layers, int32_t num_experts, bool by_kernel);
/* Of NULL too. */
void kv8_model_profile_destroy(kv8_model_profile *profile, kv8_stream *stream);
/* offsets [num_experts + 1] of a layer's rows by expert, in device memory, onto the stream; nothing
 * for NULL, and for a profile that is not by kernel. Can be captured. */
kv8_status kv8_model_profile_count(kv8_model_profile *profile, kv8_stream *stream, int32_t layer,
                                   const int32_t *offsets);
/* A step is on the stream, which is waited for when what it did is read: by kernel after each, else
 * when much has gathered, so that steps follow one another as without a profile. Nothing for NULL.
 */
kv8_status kv8_model_profile_add_step(kv8_model_profile *profile, kv8_stream *stream);
/* The stream is timed no longer. What `out` points to lives as long as the profile.
 */
kv8_status kv8_model_profile_end(kv8_model_profile *profile, kv8_stream *stream, kv8_profile *out);

/* What a kernel of this name is about: KV8_WORK_COUNT for one that no step launches. */
kv8_work kv8_work_of_kernel(const char *name);

#endif
