/* bench_attention.c - kv8 bench attention: attention on random paged caches, cold, beside what the
 * machine can do at most. Walks over formats, batches and contexts; a machine measures the rows of
 * each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "bench.h"

static int walk(const bench_machine *machine, const bench_args *args, bench_rows *rows) {
    cli_progress progress;
    cli_progress_begin(&progress);
    int status = CLI_OK;
    const int32_t per_kv = args->num_batch * args->num_context, total = args->num_kv * per_kv;
    for (int32_t i = 0; status == CLI_OK && i < total; i++) {
        const bench_row row = {.kv = args->kv[i / per_kv],
                               .batch = args->batch[i % per_kv / args->num_context],
                               .context = args->context[i % args->num_context],
                               .shared_prefix = args->shared_prefix,
                               .error = (double)NAN};
        cli_progress_show(&progress, row.kv.name, (uint64_t)i, (uint64_t)total);
        status = machine->measure(machine->self, &row, rows);
    }
    cli_progress_end(&progress);
    return status;
}

static int open_plot(const bench_args *args, cli_output *plot) {
    if (args->plot == NULL) return CLI_OK;
    const int status = cli_plot_check();
    return status == CLI_OK ? cli_output_open(plot, args->plot) : status;
}

static int draw_plot(const bench_args *args, const bench_rows *rows, cli_output *plot) {
    const int status = bench_plot_draw(args, rows, plot->file);
    return status == CLI_OK ? cli_output_commit(plot) : status;
}

int bench_attention(int argc, char **argv) {
    bench_args args;
    int status = bench_args_parse(&args, argc, argv);
    if (status >= 0) return status;
    cli_catch_interrupt();
    static bench_rows rows; /* large */
    cli_output plot = {0};
    bench_machine machine = {0};
    status = open_plot(&args, &plot);
    if (status == CLI_OK)
        status = args.cuda ? bench_cuda_open(&machine, &args) : bench_cpu_open(&machine, &args);
    rows.device = machine.name;
    if (status == CLI_OK) status = walk(&machine, &args, &rows);
    if (status == CLI_OK) status = bench_report(&args, &rows);
    if (status == CLI_OK && args.plot != NULL) status = draw_plot(&args, &rows, &plot);
    if (machine.close != NULL) machine.close(machine.self);
    cli_output_abort(&plot);
    return status;
}
