/* run_page_lists.h - what the kernel of page tables computes, on the stand-in.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_RUN_PAGE_LISTS_H
#define KV8_RUN_PAGE_LISTS_H

#include "stand_in.h"

/* False where the launch is another kernel's. */
bool run_page_lists(const stand_in_launch *launch);

#endif
