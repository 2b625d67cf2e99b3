/* dtype.c - names, sizes and ranges of the element types.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <float.h>
#include <string.h>

#include "formats_impl.h"

typedef struct dtype_facts {
    const char *name;
    size_t size;
    float max;
} dtype_facts;

static const dtype_facts facts[KV8_DTYPE_COUNT] = {[KV8_DTYPE_NONE] = {"none", 0, 0},
                                                   [KV8_F32] = {"f32", 4, FLT_MAX},
                                                   [KV8_BF16] = {"bf16", 2, 255 * 0x1p120f},
                                                   [KV8_F16] = {"f16", 2, 65504},
                                                   [KV8_INT8] = {"int8", 1, 127},
#define FLOAT8(words, rule, name, dtype, mantissa, bias, max) [dtype] = {#name, 1, max},
                                                   KV8_FLOAT8_FORMATS(FLOAT8)
#undef FLOAT8
};

static const dtype_facts *facts_of(kv8_dtype dtype) {
    const bool known = (int)dtype > 0 && dtype < KV8_DTYPE_COUNT;
    return &facts[known ? dtype : KV8_DTYPE_NONE];
}

const char *kv8_dtype_name(kv8_dtype dtype) {
    return facts_of(dtype)->name;
}

size_t kv8_dtype_size(kv8_dtype dtype) {
    return facts_of(dtype)->size;
}

float kv8_dtype_max(kv8_dtype dtype) {
    return facts_of(dtype)->max;
}

kv8_status kv8_dtype_from_name(const char *name, kv8_dtype *dtype_out) {
    KV8_REQUIRE(name, dtype_out);
    for (int dtype = KV8_DTYPE_NONE + 1; dtype < KV8_DTYPE_COUNT; dtype++) {
        if (strcmp(name, facts[dtype].name) != 0) continue;
        *dtype_out = (kv8_dtype)dtype;
        return KV8_OK;
    }
    char names[16 * KV8_DTYPE_COUNT] = ""; /* a name and what stands before it are shorter */
    for (int dtype = KV8_DTYPE_NONE + 1; dtype < KV8_DTYPE_COUNT; dtype++) {
        if (dtype > KV8_DTYPE_NONE + 1) strcat(names, dtype == KV8_DTYPE_COUNT - 1 ? " or " : ", ");
        strcat(names, facts[dtype].name);
    }
    return kv8_fail(KV8_ERR_INVALID, "dtype is \"%s\", must be %s", name, names);
}
