/* run_page_lists.c - page tables from lists that stay, as cuda/page_lists.cu makes them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "run_page_lists.h"

#include <string.h>

#include "page_lists_args.h"
#include "testing.h"

static void run_row(const kv8_page_lists_args *a, const kv8_page_row *row, int64_t reach) {
    int32_t *const indptr = a->tables + row->group * a->table_entries;
    int32_t *const last_page_len = a->last_page_len + row->group * (a->max_seqs + 1);
    int32_t *const indices = indptr + a->max_seqs + 1;
    if (row->sequence < 0) {
        for (int32_t b = row->row; b <= a->max_seqs; b++) indptr[b] = row->begin;
        for (int32_t b = row->row; b <= a->max_seqs; b++) last_page_len[b] = 0;
        return;
    }
    assert_in_range(row->sequence, 0, a->max_seqs - 1);
    assert_true(row->count <= a->list_entries && row->count <= reach);
    int32_t *const list =
        a->lists + ((int64_t)row->group * a->max_seqs + row->sequence) * a->list_entries;
    indptr[row->row] = row->begin;
    last_page_len[row->row] = row->last_page_len;
    for (int32_t i = row->changed_from; i < row->count; i++)
        list[i] = a->ints[row->changed_at + i - row->changed_from];
    memcpy(indices + row->begin, list, (size_t)row->count * sizeof *list);
}

bool run_page_lists(const stand_in_launch *launch) {
    if (strcmp(launch->name, "kv8_page_lists__sm80") != 0) return false;
    const kv8_page_lists_args *const args = launch->args;
    for (uint32_t i = 0; i < launch->grid[0]; i++)
        run_row(args, &args->rows[i], (int64_t)launch->grid[1] * KV8_PAGE_LISTS_EACH);
    return true;
}
