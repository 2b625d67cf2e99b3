/* kv8/pages.h - the names that the calls of a paged cache share: sequences, and pages that are not
 * there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PAGES_H
#define KV8_PAGES_H

#include <kv8/status.h>

/* Names one sequence of one cache; stale handles are recognised and refused (KV8_ERR_NOT_FOUND). */
typedef int64_t kv8_seq;
#define KV8_SEQ_NONE ((kv8_seq)-1)

/* A page-table entry whose page was freed behind the window. */
#define KV8_NO_PAGE (-1)

/* Sees the tokens of a prefix, during the call. Its failure ends the list, and is its status. */
typedef kv8_status (*kv8_prefix_visitor)(void *cookie, const int32_t *token_ids,
                                         int32_t num_tokens);

#endif
