/* ranks.h - the processes of one mpirun, or the one process there is.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef CALIBRATE_RANKS_H
#define CALIBRATE_RANKS_H

#include <kv8/calibrate.h>

typedef struct ranks {
    int32_t rank, num;
} ranks;

/* Joins the others where mpirun started this process; in a program built without MPI that is an
 * error. Otherwise one rank. */
int ranks_begin(ranks *ranks_out);
/* Every rank's observer becomes that of all; collective. */
int ranks_combine(const ranks *all, kv8_observer *observer);
/* CLI_OK where it is so on every rank, else CLI_FAILED: nobody waits for one that gave up. */
int ranks_agree(const ranks *all, int status);
void ranks_end(const ranks *all);

#endif
