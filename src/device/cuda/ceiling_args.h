/* ceiling_args.h - the arguments of the kernels in ceiling.cu and ceiling_products.cu, for C and
 * CUDA.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_CEILING_ARGS_H
#define KV8_CEILING_ARGS_H

#include <stdint.h>

typedef struct kv8_read_ceiling_args {
    const void *data;     /* [num_words], aligned to 16 */
    uint64_t num_words;   /* of 16 bytes */
    uint32_t *result_out; /* [1]: written only if all words' xor is `unlikely`, else the loads go */
    uint32_t unlikely;
    uint32_t padding;
} kv8_read_ceiling_args;

enum { KV8_READ_CEILING_THREADS = 512, KV8_READ_CEILING_UNROLL = 8 };

typedef struct kv8_product_ceiling_args {
    float *result_out; /* [1]: as above, of the sum of all products */
    float unlikely;
    int32_t num_steps; /* of 64 along k */
} kv8_product_ceiling_args;

enum {
    KV8_PRODUCT_CEILING_THREADS = 256,
    KV8_PRODUCT_CEILING_STEP = 2 * 2 * 64 * 256 * 64 /* operations of a block's step */
};

#endif
