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

static const dtype_facts facts[KV8_DTYPE_COUNT] = {
    [KV8_DTYPE_NONE] = {"none", 0, 0},
    [KV8_F32] = {"f32", 4, FLT_MAX},
    [KV8_BF16] = {"bf16", 2, 255 * 0x1p120f},
    [KV8_F16] = {"f16", 2, 65504},
    [KV8_E4M3] = {"e4m3", 1, 448},
    [KV8_E4M3FNUZ] = {"e4m3fnuz", 1, 240},
    [KV8_E5M2] = {"e5m2", 1, 57344},
    [KV8_INT8] = {"int8", 1, 127},
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
    return kv8_fail(KV8_ERR_INVALID,
                    "dtype is \"%s\", must be f32, bf16, f16, e4m3, e4m3fnuz, e5m2 or int8", name);
}
