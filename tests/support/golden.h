/* golden.h - reading a golden safetensors file without the library's own reader, so that a fault in
 * that cannot hide.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TEST_GOLDEN_H
#define KV8_TEST_GOLDEN_H

#include "program.h"

typedef struct golden {
    char *bytes;
    size_t size;
    json_t *header;
} golden;

static inline golden golden_open(const char *path) {
    golden g = {0};
    g.bytes = slurp(path, &g.size);
    uint64_t header_size = 0;
    memcpy(&header_size, g.bytes, 8);
    g.header = json_loadb(g.bytes + 8, header_size, 0, NULL);
    assert_non_null(g.header);
    return g;
}

/* Borrowed data of one tensor and its number of 4-byte elements. */
static inline const void *golden_get(const golden *g, const char *name, size_t *num_out) {
    uint64_t header_size = 0;
    memcpy(&header_size, g->bytes, 8);
    const json_t *const offsets = json_object_get(json_object_get(g->header, name), "data_offsets");
    assert_int_equal(json_array_size(offsets), 2);
    const size_t begin = (size_t)json_integer_value(json_array_get(offsets, 0));
    const size_t end = (size_t)json_integer_value(json_array_get(offsets, 1));
    *num_out = (end - begin) / 4;
    return g->bytes + 8 + header_size + begin;
}

static inline void golden_close(golden *g) {
    json_decref(g->header);
    free(g->bytes);
}

#endif
