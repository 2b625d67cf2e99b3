/* append_check.c - the public structs of append plans, checked and brought to today's size.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "append_check.h"

#include "cache_state.h"

kv8_status kv8_append_check_source(kv8_dtype src_dtype) {
    if (src_dtype == KV8_F32 || src_dtype == KV8_BF16 || src_dtype == KV8_F16) return KV8_OK;
    return kv8_fail(KV8_ERR_UNSUPPORTED, "append: src_dtype is %s, must be f32, bf16 or f16",
                    kv8_dtype_name(src_dtype));
}

kv8_status kv8_append_read_spec(kv8_append_spec *spec, const kv8_append_spec *given) {
    KV8_READ_STRUCT(kv8_append_spec, spec, given);
    KV8_TRY(kv8_append_check_source(spec->src_dtype));
    if (kv8_dtype_size(spec->k_dtype) == 0 || kv8_dtype_size(spec->v_dtype) == 0)
        return kv8_fail(KV8_ERR_INVALID, "append: k_dtype is %d, v_dtype %d, must be 1 to %d",
                        (int)spec->k_dtype, (int)spec->v_dtype, (int)KV8_DTYPE_COUNT - 1);
    if (spec->num_kv_heads < 1 || spec->page_size < 1)
        return kv8_fail(KV8_ERR_INVALID, "append: num_kv_heads is %d, page_size %d, must be >= 1",
                        spec->num_kv_heads, spec->page_size);
    if (spec->k_head_dim < 1 || spec->k_head_dim > KV8_MAX_ROW_VALUES || spec->v_head_dim < 0 ||
        spec->v_head_dim > KV8_MAX_ROW_VALUES)
        return kv8_fail(KV8_ERR_INVALID, "append: k_head_dim is %d, v_head_dim %d, must be 1 to %d",
                        spec->k_head_dim, spec->v_head_dim, (int)KV8_MAX_ROW_VALUES);
    if (spec->v_head_dim == 0) spec->v_head_dim = spec->k_head_dim;
    return KV8_OK;
}

/* --- args --- */

static kv8_status check_table(const kv8_append_args *args, const kv8_page_table *pages) {
    if (pages->kv_indptr != NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "append: pages.kv_indptr is set; rows without pages go by slot_mapping");
    if ((pages->page_indptr != NULL) == (pages->block_table != NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: page_indptr and block_table are both %s",
                        pages->page_indptr != NULL ? "set" : "NULL");
    const bool csr = pages->page_indptr != NULL;
    const char *const missing = args->indptr == NULL                  ? "indptr"
                                : csr && pages->page_indices == NULL  ? "page_indices"
                                : csr && pages->last_page_len == NULL ? "last_page_len"
                                : !csr && pages->seq_lens == NULL     ? "seq_lens"
                                                                      : NULL;
    if (missing != NULL) return kv8_fail(KV8_ERR_INVALID, "append: %s is NULL", missing);
    return KV8_OK;
}

static kv8_status check_pool(const kv8_paged *pool, kv8_dtype dtype, const char *name) {
    const kv8_row_format format = kv8_row_format_of(dtype, 1);
    if (pool->data == NULL) return kv8_fail(KV8_ERR_INVALID, "append: %s_pages.data is NULL", name);
    if (format.scale != KV8_SCALE_NONE && pool->row_scale == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: %s_pages.row_scale is NULL", name);
    if (pool->num_pages < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: %s_pages.num_pages is %lld, must be >= 0", name,
                        (long long)pool->num_pages);
    return KV8_OK;
}

kv8_status kv8_append_read_args(kv8_append_inputs *in, const kv8_append_spec *spec,
                                const kv8_append_args *given) {
    kv8_append_args *const args = &in->args;
    KV8_READ_STRUCT(kv8_append_args, args, given);
    if (args->batch < 0 || args->max_rows < 0)
        return kv8_fail(KV8_ERR_INVALID, "append: batch is %d, max_rows %d, must be >= 0",
                        args->batch, args->max_rows);
    if ((args->pages != NULL) == (args->slot_mapping != NULL))
        return kv8_fail(KV8_ERR_INVALID, "append: pages and slot_mapping are both %s",
                        args->pages != NULL ? "set" : "NULL");
    if (args->slot_mapping == NULL && args->batch == 0) args->max_rows = 0;
    if (args->max_rows == 0) return KV8_OK;
    in->pages = (kv8_page_table)KV8_PAGE_TABLE_INIT;
    if (args->pages != NULL) {
        KV8_READ_STRUCT(kv8_page_table, &in->pages, args->pages);
        KV8_TRY(check_table(args, &in->pages));
    }
    if (args->k == NULL || args->v == NULL)
        return kv8_fail(KV8_ERR_INVALID, "append: %s is NULL", args->k == NULL ? "k" : "v");
    KV8_READ_STRUCT(kv8_paged, &in->pool[KV8_K], args->k_pages);
    KV8_READ_STRUCT(kv8_paged, &in->pool[KV8_V], args->v_pages);
    KV8_TRY(check_pool(&in->pool[KV8_K], spec->k_dtype, "k"));
    KV8_TRY(check_pool(&in->pool[KV8_V], spec->v_dtype, "v"));
    if (args->interleaved != 0 && args->interleaved != 1)
        return kv8_fail(KV8_ERR_INVALID, "append: interleaved is %d, must be 0 or 1",
                        args->interleaved);
    if (args->cos_sin != NULL && spec->k_head_dim % 2 != 0)
        return kv8_fail(KV8_ERR_INVALID, "append: k_head_dim is %d, must be even to be rotated",
                        spec->k_head_dim);
    return KV8_OK;
}
