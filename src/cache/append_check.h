/* append_check.h - what append plans on the host and on a GPU have in common: the checks of their
 * public structs, which become structs of today's size.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_APPEND_CHECK_H
#define KV8_APPEND_CHECK_H

#include "base_impl.h"

#include <kv8/append.h>

/* Source rows are f32, bf16 or f16. */
kv8_status kv8_append_check_source(kv8_dtype src_dtype);
/* *spec_out has v_head_dim filled in. */
kv8_status kv8_append_read_spec(kv8_append_spec *spec_out, const kv8_append_spec *given);

/* The args, and the structs they point to. */
typedef struct kv8_append_inputs {
    kv8_append_args args;
    kv8_page_table pages;
    kv8_paged pool[2]; /* K, V */
} kv8_append_inputs;
/* Checks what can be checked without reading any array. */
kv8_status kv8_append_read_args(kv8_append_inputs *inputs_out, const kv8_append_spec *spec,
                                const kv8_append_args *given);

/* The pool is the caller's to write: kv8_paged is const because attention reads through it. */
static inline void *kv8_writable(const void *data) {
    return (void *)(uintptr_t)data;
}

#endif
