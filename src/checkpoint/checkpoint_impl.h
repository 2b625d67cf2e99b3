/* checkpoint_impl.h - what checkpoint shows the rooms above: the safetensors files of a directory
 * as one set of named tensors, and the fields of a JSON object.
 *
 * The files are those that model.safetensors.index.json names; without an index,
 * model.safetensors, and then no other *.safetensors file beside it may hold one of its tensors;
 * without that, every *.safetensors file. Knows files and names; never what a tensor is for.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CHECKPOINT_IMPL_H
#define KV8_CHECKPOINT_IMPL_H

#include "json_fields.h"
#include "safetensors.h"

typedef struct kv8_checkpoint {
    const kv8_allocator *allocator;
    kv8_safetensors *files; /* by name */
    size_t num_files, files_capacity;
    const kv8_tensor **by_name; /* all tensors, sorted */
    size_t num_tensors;
} kv8_checkpoint;

/* On failure *out is empty and needs no close. */
kv8_status kv8_checkpoint_open(kv8_checkpoint *out, const char *directory,
                               const kv8_allocator *allocator);
/* The same of tensors that lie in memory, whose data are borrowed; `label` takes a file's place. */
kv8_status kv8_checkpoint_of(kv8_checkpoint *out, const char *label, const kv8_tensor *tensors,
                             size_t num_tensors, const kv8_allocator *allocator);
void kv8_checkpoint_close(kv8_checkpoint *checkpoint);
/* Index into by_name, or -1. */
int64_t kv8_checkpoint_find(const kv8_checkpoint *checkpoint, const char *name);

/* Of every tensor's name, type, shape and first and last 4 KiB, but for K's and V's scales, in the
 * order of names. Not 0. */
uint64_t kv8_checkpoint_hash(const kv8_checkpoint *checkpoint);

/* The name is one that kv8/scale_file.h reads a K or V scale from. */
bool kv8_is_kv_scale(const char *tensor_name);

/* "directory/name", malloc'ed; NULL when out of memory. */
char *kv8_path_join(const char *directory, const char *name);

#endif
