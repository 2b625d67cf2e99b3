/* ranks.c - MPI, where the build has it: sums and maxima over ranks are all that calibration needs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ranks.h"

#include <stdlib.h>

#include "cli.h"

/* What Open MPI's mpirun tells the processes it starts, and others' the same way. */
static int32_t started_ranks(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *const text = getenv(names[i]);
        if (text != NULL) return (int32_t)strtol(text, NULL, 10);
    }
    return 0;
}

#ifdef KV8_WITH_MPI
#include <mpi.h>

/* A count of elements is an int in MPI. */
enum { MOST_ELEMENTS = 1 << 28 };

int ranks_begin(ranks *ranks_out) {
    *ranks_out = (ranks){.rank = 0, .num = 1};
    if (started_ranks() == 0) return CLI_OK;
    if (MPI_Init(NULL, NULL) != MPI_SUCCESS) return cli_fail("MPI does not start");
    int rank = 0, num = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &num);
    *ranks_out = (ranks){.rank = rank, .num = num};
    return CLI_OK;
}

static int reduce(void *data, size_t num, size_t size, MPI_Datatype type, MPI_Op op) {
    for (size_t at = 0; at < num; at += MOST_ELEMENTS) {
        const size_t part = num - at < MOST_ELEMENTS ? num - at : MOST_ELEMENTS;
        if (MPI_Allreduce(MPI_IN_PLACE, (char *)data + at * size, (int)part, type, op,
                          MPI_COMM_WORLD) != MPI_SUCCESS)
            return cli_fail("MPI_Allreduce failed");
    }
    return CLI_OK;
}

int ranks_combine(const ranks *all, kv8_observer *observer) {
    if (all->num == 1) return CLI_OK;
    size_t num = 0;
    uint64_t *const sums = kv8_observer_sums(observer, &num);
    const int status = reduce(sums, num, sizeof *sums, MPI_UINT64_T, MPI_SUM);
    if (status != CLI_OK) return status;
    float *const maxima = kv8_observer_maxima(observer, &num);
    return reduce(maxima, num, sizeof *maxima, MPI_FLOAT, MPI_MAX);
}

int ranks_agree(const ranks *all, int status) {
    int worst = status;
    if (all->num > 1) MPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return worst;
}

void ranks_end(const ranks *all) {
    (void)all;
    int started = 0;
    MPI_Initialized(&started);
    if (started) MPI_Finalize();
}

#else

int ranks_begin(ranks *ranks_out) {
    *ranks_out = (ranks){.rank = 0, .num = 1};
    if (started_ranks() <= 1) return CLI_OK;
    return cli_fail("%d ranks: this program was built without MPI (package libopenmpi-dev)",
                    started_ranks());
}

int ranks_combine(const ranks *all, kv8_observer *observer) {
    (void)all;
    (void)observer;
    return CLI_OK;
}

int ranks_agree(const ranks *all, int status) {
    (void)all;
    return status;
}

void ranks_end(const ranks *all) {
    (void)all;
}

#endif
