/* checkpoint_hash.c - telling checkpoints apart without reading all of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <xxhash.h>

#include "checkpoint_impl.h"

static uint64_t hash_tensor(const kv8_tensor *tensor, uint64_t seed) {
    enum { SAMPLE = 4096 };
    const size_t size = (size_t)kv8_min_i64((int64_t)tensor->bytes, SAMPLE);
    uint64_t hash = XXH3_64bits_withSeed(tensor->name, strlen(tensor->name), seed);
    const char *const type = kv8_tensor_type_name(tensor->type);
    hash = XXH3_64bits_withSeed(type, strlen(type), hash);
    hash =
        XXH3_64bits_withSeed(tensor->shape, (size_t)tensor->num_dims * sizeof *tensor->shape, hash);
    hash = XXH3_64bits_withSeed(tensor->data, size, hash);
    return XXH3_64bits_withSeed(tensor->data + tensor->bytes - size, size, hash);
}

uint64_t kv8_checkpoint_hash(const kv8_checkpoint *checkpoint) {
    uint64_t hash = 0;
    for (size_t i = 0; i < checkpoint->num_tensors; i++) {
        if (!kv8_is_kv_scale(checkpoint->by_name[i]->name))
            hash = hash_tensor(checkpoint->by_name[i], hash);
    }
    return hash == 0 ? 1 : hash;
}
