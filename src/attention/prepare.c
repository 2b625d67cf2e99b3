/* prepare.c - what is the same for every run over one batch: its arrays checked, its shared keys
 * found, its work cut. It lies in the workspace, behind a head that says for what it was made.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "plan.h"

static kv8_attention_index index_of(const kv8_attention_args *args) {
    const kv8_page_table *const t = args->pages;
    kv8_attention_index index;
    memset(&index, 0, sizeof index); /* compared by its bytes */
    const void *const arrays[] = {args->qo_indptr,   args->qo_lens,    args->mask_bits,
                                  args->mask_indptr, args->key_begin,  args->key_end,
                                  t->page_indices,   t->last_page_len, t->seq_lens};
    memcpy(index.arrays, arrays, sizeof arrays);
    index.arrays[9] = t->page_indptr != NULL   ? t->page_indptr
                      : t->block_table != NULL ? t->block_table
                                               : t->kv_indptr;
    index.block_table_stride = t->block_table_stride;
    index.batch = args->batch;
    return index;
}

static kv8_status check_workspace(const void *workspace) {
    if (workspace != NULL && (uintptr_t)workspace % KV8_ALIGNMENT == 0) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "workspace is %p, must be aligned to %d", workspace,
                    (int)KV8_ALIGNMENT);
}

kv8_status kv8_attention_prepare(const kv8_attention_plan *plan, const kv8_attention_args *given,
                                 void *workspace) {
    KV8_REQUIRE(plan, given);
    kv8_attention_inputs inputs;
    KV8_TRY(kv8_attention_read_args(&inputs, given));
    const kv8_attention_args *const args = &inputs.args;
    if (args->batch == 0) return KV8_OK;
    KV8_TRY(check_workspace(workspace));
    kv8_attention_prepared *const head = workspace;
    head->mark = 0;
    KV8_TRY(kv8_attention_check_batch(&plan->spec, args, &head->last_page));
    uint8_t *const bytes = workspace;
    const kv8_attention_cascade cascade =
        kv8_attention_cascade_find(plan, args, bytes + plan->cascade_at);
    head->cut = kv8_attention_cut(plan, args, &cascade,
                                  (kv8_attention_item *)(void *)(bytes + plan->items_at),
                                  (kv8_attention_join *)(void *)(bytes + plan->joins_at));
    head->num_prefixes = cascade.num_prefixes;
    head->num_shared_rows = cascade.num_rows;
    head->spec = plan->spec;
    head->num_threads = plan->num_threads;
    head->index = index_of(args);
    head->mark = KV8_PREPARED;
    return KV8_OK;
}

kv8_status kv8_attention_find_prepared(const kv8_attention_plan *plan,
                                       const kv8_attention_args *args, const void *workspace,
                                       const kv8_attention_prepared **out) {
    KV8_TRY(check_workspace(workspace));
    const kv8_attention_prepared *const head = workspace;
    if (head->mark != KV8_PREPARED)
        return kv8_fail(KV8_ERR_INVALID, "workspace %p was not prepared", workspace);
    if (memcmp(&head->spec, &plan->spec, sizeof plan->spec) != 0 ||
        head->num_threads != plan->num_threads)
        return kv8_fail(KV8_ERR_INVALID,
                        "workspace %p was prepared by a plan of another spec or number of threads",
                        workspace);
    if (args->pages == NULL) return kv8_fail(KV8_ERR_INVALID, "pages is NULL");
    const kv8_attention_index index = index_of(args);
    if (memcmp(&head->index, &index, sizeof index) != 0)
        return kv8_fail(KV8_ERR_INVALID,
                        "workspace %p was prepared for another batch: other lengths, tables or "
                        "masks",
                        workspace);
    *out = head;
    return KV8_OK;
}

kv8_attention_cascade kv8_attention_cascade_of(const kv8_attention_plan *plan,
                                               const kv8_attention_prepared *prepared) {
    uint8_t *const bytes = (uint8_t *)(uintptr_t)prepared;
    kv8_attention_cascade cascade = kv8_attention_cascade_at(plan, bytes + plan->cascade_at);
    cascade.num_prefixes = prepared->num_prefixes;
    cascade.num_rows = prepared->num_shared_rows;
    return cascade;
}
