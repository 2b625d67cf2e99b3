/* ceiling_args.h - the argument of the kernel in ceiling.cu, for C and CUDA.
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

#endif
