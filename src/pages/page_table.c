/* page_table.c - page lists of a batch, in CSR or dense form, and what changed of a list.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "pages_state.h"

/* Every handle is good; the sum of the lists' lengths and the longest of them. */
static kv8_status check_batch(const kv8_pages *pages, const kv8_seq *seqs, int32_t num_seqs,
                              int64_t *num_pages_out, int64_t *longest_out) {
    if (num_seqs < 0)
        return kv8_fail(KV8_ERR_INVALID, "page table: num_seqs is %d, must be >= 0", num_seqs);
    *num_pages_out = *longest_out = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        kv8_sequence *sequence = NULL;
        KV8_TRY(kv8_sequence_find(pages, seqs[b], &sequence));
        const int64_t count = kv8_pages_for(pages, sequence->length);
        *num_pages_out += count;
        *longest_out = kv8_max_i64(*longest_out, count);
    }
    return KV8_OK;
}

void kv8_pages_last_lengths(const kv8_pages *pages, const kv8_seq *seqs, int32_t num_seqs,
                            int32_t *last_page_len_out) {
    for (int32_t b = 0; b < num_seqs; b++)
        last_page_len_out[b] = kv8_pages_last_length(pages, kv8_seq_index(seqs[b]));
}

int32_t kv8_pages_last_length(const kv8_pages *pages, int32_t idx) {
    const int32_t length = pages->sequences[idx].length;
    return length == 0 ? 0 : length - (kv8_pages_for(pages, length) - 1) * pages->page_size;
}

int32_t kv8_pages_changed_from(const kv8_pages *pages, int32_t idx, int32_t group) {
    const kv8_sequence *const sequence = &pages->sequences[idx];
    return (int32_t)kv8_min_i64(sequence->changed_from[group],
                                kv8_pages_for(pages, sequence->length));
}

void kv8_pages_mark_sent(kv8_pages *pages, int32_t idx, int32_t group) {
    pages->sequences[idx].changed_from[group] = INT32_MAX;
}

kv8_status kv8_pages_table(const kv8_pages *pages, int32_t group, const kv8_seq *seqs,
                           int32_t num_seqs, int32_t *indptr_out, int32_t *indices_out,
                           int64_t capacity, int32_t *last_page_len_out) {
    int64_t num_pages = 0, longest = 0;
    KV8_TRY(check_batch(pages, seqs, num_seqs, &num_pages, &longest));
    if (num_pages > capacity || num_pages > INT32_MAX)
        return kv8_fail(KV8_ERR_FULL, "page table: %lld entries needed, the capacity is %lld",
                        (long long)num_pages, (long long)kv8_min_i64(capacity, INT32_MAX));
    indptr_out[0] = 0;
    for (int32_t b = 0; b < num_seqs; b++) {
        const kv8_sequence *const sequence = &pages->sequences[kv8_seq_index(seqs[b])];
        const int32_t count = kv8_pages_for(pages, sequence->length);
        if (count > 0)
            memcpy(indices_out + indptr_out[b], kv8_sequence_list(pages, sequence, group),
                   (size_t)count * sizeof *indices_out);
        indptr_out[b + 1] = indptr_out[b] + count;
    }
    kv8_pages_last_lengths(pages, seqs, num_seqs, last_page_len_out);
    return KV8_OK;
}

kv8_status kv8_pages_block_table(const kv8_pages *pages, int32_t group, const kv8_seq *seqs,
                                 int32_t num_seqs, int32_t *block_table_out, int64_t stride,
                                 int32_t *seq_lens_out) {
    int64_t num_pages = 0, longest = 0;
    KV8_TRY(check_batch(pages, seqs, num_seqs, &num_pages, &longest));
    if (longest > stride)
        return kv8_fail(KV8_ERR_FULL,
                        "block table: rows of %lld entries needed, the stride is %lld",
                        (long long)longest, (long long)stride);
    for (int32_t b = 0; b < num_seqs; b++) {
        const kv8_sequence *const sequence = &pages->sequences[kv8_seq_index(seqs[b])];
        const int32_t *const list = kv8_sequence_list(pages, sequence, group);
        const int32_t count = kv8_pages_for(pages, sequence->length);
        int32_t *const row = block_table_out + (int64_t)b * stride;
        for (int64_t i = 0; i < stride; i++) row[i] = i < count ? list[i] : KV8_NO_PAGE;
        seq_lens_out[b] = sequence->length;
    }
    return KV8_OK;
}
