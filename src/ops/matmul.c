/* matmul.c - cuts matrix products into tiles and hands them to the threads. Knows shapes; the
 * arithmetic is in cpu/matmul_tmpl.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ops_kernels.h"

const kv8_ops_kernels *kv8_ops_kernels_get(kv8_isa isa) {
    /* Rungs ascend within an architecture, so the last own table at or below isa is the best. */
    const kv8_ops_kernels *best = &kv8_ops_kernels_scalar;
#define KV8_OPS_KERNELS(rung_isa, rung) \
    if ((rung_isa) <= isa) best = &kv8_ops_kernels_##rung;
#include "ops_kernels.inc"
#undef KV8_OPS_KERNELS
    return best;
}

enum {
    MAX_JOBS = 256, /* per round of threads: the task index of each lies on the stack */
    TILE_X = 96,    /* activations per tile: with 2880 columns 1.1 MB, half an L2 cache */
    /* Products per task: 3 us at the FMA rate, 25 us of weights; where enough tasks remain for
     * every thread four times that, because a task's first weights come from memory unannounced. */
    MIN_TILE_MACS = 1 << 17,
    MAX_TILE_MACS = 1 << 19,
    TASKS_PER_THREAD = 4,
};

/* How one job is cut: equal tiles, so that the last is not a crumb. */
typedef struct job_cut {
    int64_t tile_rows, tile_x;
    int64_t num_row_tiles, num_x_tiles;
} job_cut;

static job_cut cut_job(const kv8_matmul_job *job, int64_t tile_macs) {
    job_cut cut = {0};
    if (job->num_rows == 0 || job->w.rows == 0) return cut;
    const int64_t x_tiles = kv8_ceil_div(job->num_rows, TILE_X);
    cut.tile_x = kv8_ceil_div(kv8_ceil_div(job->num_rows, x_tiles), KV8_MATMUL_X) * KV8_MATMUL_X;
    const int64_t macs_per_row = kv8_max_i64(1, job->w.cols) * cut.tile_x;
    cut.tile_rows =
        kv8_ceil_div(kv8_ceil_div(tile_macs, macs_per_row), KV8_MATMUL_ROWS) * KV8_MATMUL_ROWS;
    cut.num_row_tiles = kv8_ceil_div(job->w.rows, cut.tile_rows);
    cut.num_x_tiles = kv8_ceil_div(job->num_rows, cut.tile_x);
    return cut;
}

typedef struct matmul_round {
    const kv8_matmul_job *jobs;
    size_t num_jobs;
    int64_t tile_macs;
    size_t task_indptr[MAX_JOBS + 1];
    kv8_matmul_kernel kernel;
} matmul_round;

/* The job that owns a task: the last whose first task is not beyond it. */
static size_t find_job(const matmul_round *round, size_t task) {
    size_t low = 0, high = round->num_jobs;
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (round->task_indptr[middle] <= task) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Neighbouring tasks share activations, which stay in the second-level cache. */
static void run_task(void *cookie, size_t index, int32_t thread_idx) {
    (void)thread_idx;
    const matmul_round *const round = cookie;
    const size_t job_idx = find_job(round, index);
    const kv8_matmul_job *const job = &round->jobs[job_idx];
    const job_cut cut = cut_job(job, round->tile_macs);
    const int64_t task = (int64_t)(index - round->task_indptr[job_idx]);
    const int64_t row = task % cut.num_row_tiles * cut.tile_rows;
    const int64_t x = task / cut.num_row_tiles * cut.tile_x;
    const kv8_matmul_tile tile = {
        .row_begin = row,
        .row_end = kv8_min_i64(row + cut.tile_rows, job->w.rows),
        .x_begin = x,
        .x_end = kv8_min_i64(x + cut.tile_x, job->num_rows),
    };
    round->kernel(job, &tile);
}

/* Less work than this is done by the caller: 20 us, when waking a thread takes 5 on an idle machine
 * and a time slice on a busy one. Unit: a product at the FMA rate; a weight costs four more, for
 * reading and widening it. */
enum { ALONE_WORK = 1 << 21, WEIGHT_WORK = 4 };

static void run_round(kv8_threads *threads, matmul_round *round) {
    double work = 0, macs = 0;
    for (size_t i = 0; i < round->num_jobs; i++) {
        const kv8_matmul_job *const job = &round->jobs[i];
        const double weights = (double)job->w.rows * (double)job->w.cols;
        if (job->num_rows > 0) work += weights * (double)(job->num_rows + WEIGHT_WORK);
        macs += weights * (double)job->num_rows;
    }
    const double share = macs / (TASKS_PER_THREAD * kv8_threads_count(threads));
    round->tile_macs = share < MIN_TILE_MACS   ? MIN_TILE_MACS
                       : share > MAX_TILE_MACS ? MAX_TILE_MACS
                                               : (int64_t)share;
    for (size_t i = 0; i < round->num_jobs; i++) {
        const job_cut cut = cut_job(&round->jobs[i], round->tile_macs);
        round->task_indptr[i + 1] =
            round->task_indptr[i] + (size_t)(cut.num_row_tiles * cut.num_x_tiles);
    }
    kv8_threads_run(work < ALONE_WORK ? NULL : threads, round->task_indptr[round->num_jobs],
                    run_task, round);
}

void kv8_matmul_run(kv8_isa isa, kv8_threads *threads, const kv8_matmul_job *jobs,
                    size_t num_jobs) {
    matmul_round round = {.kernel = kv8_ops_kernels_get(isa)->matmul};
    for (size_t done = 0; done < num_jobs; done += round.num_jobs) {
        round.jobs = jobs + done;
        round.num_jobs = num_jobs - done < MAX_JOBS ? num_jobs - done : MAX_JOBS;
        run_round(threads, &round);
    }
}
