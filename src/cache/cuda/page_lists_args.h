/* page_lists_args.h - the argument of page_lists.cu, as the host and the kernel see it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAGE_LISTS_ARGS_H
#define KV8_PAGE_LISTS_ARGS_H

#include <stdint.h>

enum {
    KV8_PAGE_LISTS_THREADS = 256,
    KV8_PAGE_LISTS_EACH = 2048 /* entries of a list for a block */
};

/* A row of a group's table: the list of a sequence, whose entries from changed_from on lie at
 * ints + changed_at; or sequence < 0: the rows from this one on, which have no pages. */
typedef struct kv8_page_row {
    int32_t group, row;
    int32_t sequence;
    int32_t begin, count; /* of its pages in page_indices */
    int32_t last_page_len;
    int32_t changed_from, changed_at;
} kv8_page_row;

typedef struct kv8_page_lists_args {
    const kv8_page_row *rows; /* one for each block of the grid's x */
    const int32_t *ints;      /* what the host sent, the rows first */
    int32_t *lists;           /* [num_groups, max_seqs, list_entries] by sequence, as last sent */
    int32_t *last_page_len;   /* [num_groups, max_seqs + 1] */
    int32_t *tables; /* [num_groups, table_entries]: page_indptr [max_seqs + 1], page_indices */
    int64_t list_entries, table_entries;
    int32_t max_seqs;
} kv8_page_lists_args;

#endif
