/* range_recorder.h - a profiler that writes down the ranges of the domain "kv8": the library that
 * NVTX_INJECTION64_PATH names, and that a test is linked with to read them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_RANGE_RECORDER_H
#define KV8_RANGE_RECORDER_H

enum { RECORDER_MAX_RANGES = 4096 };

typedef struct recorder_range {
    char words[128];
    int depth; /* ranges open around it */
} recorder_range;

/* Forgets what was written; the open ranges stay open. */
void recorder_reset(void);
/* Ranges in the order they were opened. */
int recorder_num_ranges(void);
const recorder_range *recorder_get_range(int range_idx);
/* Ranges open now; ranges ended that were not open. */
int recorder_num_open(void);
int recorder_num_extra(void);

#endif
