/* random_weights.h - a checkpoint that is no file: the tensors of an architecture with random
 * values of plausible size, so that a model of any shape runs without a download. Private to the
 * room.
 *
 * Tensors of a kind lie in one pool, each from another offset on: memory is that of the largest
 * tensor of each kind, and no two layers are alike.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_RANDOM_WEIGHTS_H
#define KV8_RANDOM_WEIGHTS_H

#include "checkpoint_impl.h"

enum { KV8_RANDOM_NAME = 128 };

/* Gains; matrices and biases; blocks and scales of MXFP4. */
typedef enum kv8_random_kind {
    KV8_RANDOM_ONES = 0,
    KV8_RANDOM_BF16,
    KV8_RANDOM_BLOCKS,
    KV8_RANDOM_SCALES,
    KV8_NUM_RANDOM_KINDS
} kv8_random_kind;

typedef struct kv8_random_weights {
    const kv8_allocator *allocator;
    kv8_tensor *tensors; /* [num] of capacity */
    kv8_random_kind *kinds;
    char (*names)[KV8_RANDOM_NAME];
    size_t num, capacity;
    struct {
        uint8_t *data;
        size_t bytes;
    } pools[KV8_NUM_RANDOM_KINDS];
} kv8_random_weights;

/* Room for so many tensors; on failure nothing is to be closed. */
kv8_status kv8_random_weights_open(kv8_random_weights *out, size_t capacity,
                                   const kv8_allocator *allocator);
void kv8_random_weights_close(kv8_random_weights *random);
/* One more tensor, without data yet. */
void kv8_random_weights_add(kv8_random_weights *random, const char *name, kv8_random_kind kind,
                            const int64_t *dims, int32_t num_dims);
/* Fills the pools, for rows of `width` inputs, and makes the checkpoint, which borrows them. */
kv8_status kv8_random_weights_fill(kv8_random_weights *random, const char *label, int64_t width,
                                   kv8_threads *threads, kv8_checkpoint *out);

#endif
