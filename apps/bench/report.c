/* report.c - prints the rows of kv8 bench attention as a table, as CSV or as JSON, all three from
 * one list of columns.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stddef.h>

#include "bench.h"

/* What a row says, column by column. */
typedef struct cells {
    const char *shape, *phase, *q, *kv, *isa, *kernel, *math, *ceiling;
    int32_t batch, context, shared_prefix, qo_len, threads, samples;
    double us, us_min, us_max, gb_s, gflop_s, tflop_s, read_gb_s, dot_gflop_s, share, percent;
    double error;
} cells;

static cells cells_of(const bench_args *args, const bench_row *row) {
    const double flops = 2 * row->macs, us = row->us.median;
    const bool by_read =
        row->dot_gmac_s <= 0 || row->kv_bytes / row->read_gb_s > row->macs / row->dot_gmac_s;
    const double share = bench_row_share(row);
    return (cells){.shape = args->shape,
                   .phase = row->phase,
                   .q = kv8_dtype_name(args->q),
                   .kv = row->kv.name,
                   .isa = kv8_isa_name(row->isa),
                   .kernel = row->kernel,
                   .math = row->math,
                   .ceiling = by_read ? "read" : "dot",
                   .batch = row->batch,
                   .context = row->context,
                   .shared_prefix = row->shared_prefix,
                   .qo_len = row->qo_len,
                   .threads = row->threads,
                   .samples = row->us.num,
                   .us = us,
                   .us_min = row->us.least,
                   .us_max = row->us.most,
                   .gb_s = row->kv_bytes / us * 1e-3,
                   .gflop_s = flops / us * 1e-3,
                   .tflop_s = flops / us * 1e-6,
                   .read_gb_s = row->read_gb_s,
                   .dot_gflop_s = 2 * row->dot_gmac_s,
                   .share = share,
                   .percent = 100 * share,
                   .error = row->error};
}

/* Where a column stands: which machine's rows, which of the three. */
enum { CPU = 1, CUDA = 2, TABLE = 4, CSV = 8, JSON = 16, FILES = CSV | JSON, ALL = TABLE | FILES };

typedef struct column {
    const char *key;
    enum { TEXT, COUNT, REAL } kind;
    const char *heading;
    size_t offset; /* in cells */
    int where, width;
    const char *csv, *table; /* how a REAL is written */
} column;

#define CELL(member) offsetof(cells, member)
static const column columns[] = {
    {"shape", TEXT, "shape", CELL(shape), CPU | CUDA | ALL, -8, NULL, NULL},
    {"phase", TEXT, "phase", CELL(phase), CPU | CUDA | ALL, -7, NULL, NULL},
    {"q", TEXT, "q", CELL(q), CUDA | ALL, -5, NULL, NULL},
    {"kv", TEXT, "kv", CELL(kv), CPU | CUDA | ALL, -8, NULL, NULL},
    {"isa", TEXT, "isa", CELL(isa), CPU | ALL, -11, NULL, NULL},
    {"kernel", TEXT, NULL, CELL(kernel), CPU | CUDA | FILES, 0, NULL, NULL},
    {"math", TEXT, NULL, CELL(math), CPU | JSON, 0, NULL, NULL},
    {"batch", COUNT, "batch", CELL(batch), CPU | CUDA | ALL, 5, NULL, NULL},
    {"context", COUNT, "context", CELL(context), CPU | CUDA | ALL, 8, NULL, NULL},
    {"shared_prefix", COUNT, NULL, CELL(shared_prefix), CPU | FILES, 0, NULL, NULL},
    {"qo_len", COUNT, "qo_len", CELL(qo_len), CPU | CUDA | ALL, 6, NULL, NULL},
    {"threads", COUNT, "thr", CELL(threads), CPU | ALL, 3, NULL, NULL},
    {"us", REAL, "us", CELL(us), CPU | CUDA | ALL, 12, "%.3f", "%.2f"},
    {"us_min", REAL, "min", CELL(us_min), CPU | CUDA | ALL, 12, "%.3f", "%.2f"},
    {"us_max", REAL, "max", CELL(us_max), CPU | CUDA | ALL, 12, "%.3f", "%.2f"},
    {"samples", COUNT, NULL, CELL(samples), CPU | CUDA | JSON, 0, NULL, NULL},
    {"gb_s", REAL, "GB/s", CELL(gb_s), CPU | CUDA | ALL, 8, "%.3f", "%.2f"},
    {"gflop_s", REAL, "GFLOP/s", CELL(gflop_s), CPU | ALL, 9, "%.2f", "%.1f"},
    {"read_ceiling_gb_s", REAL, "read", CELL(read_gb_s), CPU | CUDA | ALL, 8, "%.2f", "%.1f"},
    {"dot_ceiling_gflop_s", REAL, "dot", CELL(dot_gflop_s), CPU | ALL, 9, "%.2f", "%.1f"},
    {"ceiling", TEXT, "limit", CELL(ceiling), CPU | ALL, 5, NULL, NULL},
    {"share", REAL, NULL, CELL(share), CPU | CUDA | FILES, 0, "%.4f", NULL},
    {NULL, REAL, "share", CELL(percent), CPU | CUDA | TABLE, 6, NULL, "%.1f%%"},
    {"tflop_s", REAL, "TFLOP/s", CELL(tflop_s), CUDA | ALL, 8, "%.2f", "%.1f"},
    {"error", REAL, "error", CELL(error), CUDA | ALL, 9, "%.3e", "%.2e"},
    {NULL, TEXT, "kernel", CELL(kernel), CPU | CUDA | TABLE, -1, NULL, NULL},
};
enum { NUM_COLUMNS = sizeof columns / sizeof columns[0] };

static bool is_in(const column *c, const bench_args *args, int where) {
    return (c->where & (args->cuda ? CUDA : CPU)) != 0 && (c->where & where) != 0;
}

static const void *cell_at(const column *c, const cells *row) {
    return (const char *)row + c->offset;
}

/* The cell's text; a NaN, a number that was not measured, as `nothing`. */
static void write_cell(const column *c, const cells *row, const char *real, const char *nothing,
                       char *out, size_t size) {
    const void *const cell = cell_at(c, row);
    if (c->kind == TEXT) {
        snprintf(out, size, "%s", *(const char *const *)cell);
    } else if (c->kind == COUNT) {
        snprintf(out, size, "%d", *(const int32_t *)cell);
    } else if (isnan(*(const double *)cell)) {
        snprintf(out, size, "%s", nothing);
    } else {
        snprintf(out, size, real, *(const double *)cell);
    }
}

/* --- the three --- */

static void print_table(const bench_args *args, const bench_rows *rows) {
    for (int32_t i = -1; i < rows->num; i++) { /* -1: the headings */
        const cells row = i < 0 ? (cells){0} : cells_of(args, &rows->row[i]);
        for (int c = 0; c < NUM_COLUMNS; c++) {
            char text[128];
            if (!is_in(&columns[c], args, TABLE)) continue;
            if (i >= 0) write_cell(&columns[c], &row, columns[c].table, "-", text, sizeof text);
            printf("%*s ", columns[c].width, i < 0 ? columns[c].heading : text);
        }
        printf("\n");
    }
    if (args->shared_prefix > 0)
        printf("The requests of a run share their first %d keys. ", args->shared_prefix);
    printf(
        "GB/s counts every visible byte of K and V once, FLOP/s both products over visible keys; "
        "read%s: what the %s does at most; share is of the nearer limit.\n",
        args->cuda ? "" : " and dot", args->cuda ? "GPU" : "machine");
}

static void print_csv(const bench_args *args, const bench_rows *rows) {
    for (int32_t i = -1; i < rows->num; i++) { /* -1: the header */
        const cells row = i < 0 ? (cells){0} : cells_of(args, &rows->row[i]);
        const char *comma = "";
        for (int c = 0; c < NUM_COLUMNS; c++) {
            char text[128];
            if (!is_in(&columns[c], args, CSV)) continue;
            if (i >= 0) write_cell(&columns[c], &row, columns[c].csv, "", text, sizeof text);
            printf("%s%s", comma, i < 0 ? columns[c].key : text);
            comma = ",";
        }
        printf("\n");
    }
}

static json_t *cell_json(const column *c, const cells *row) {
    const void *const cell = cell_at(c, row);
    switch (c->kind) {
        case TEXT: return json_string(*(const char *const *)cell);
        case COUNT: return json_integer(*(const int32_t *)cell);
        case REAL: return cli_json_number(*(const double *)cell);
    }
    return NULL;
}

static json_t *row_json(const bench_args *args, const bench_row *of) {
    const cells row = cells_of(args, of);
    json_t *const object = json_object();
    for (int c = 0; c < NUM_COLUMNS; c++) {
        if (is_in(&columns[c], args, JSON))
            json_object_set_new(object, columns[c].key, cell_json(&columns[c], &row));
    }
    return object;
}

static int print_json(const bench_args *args, const bench_rows *rows) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < rows->num; i++)
        json_array_append_new(list, row_json(args, &rows->row[i]));
    return cli_write_json(json_pack("{s:s, s:s, s:o}", "version", kv8_version(), "device",
                                    rows->device, "rows", list),
                          stdout, "stdout");
}

int bench_report(const bench_args *args, const bench_rows *rows) {
    int status = CLI_OK;
    if (args->json) {
        status = print_json(args, rows);
    } else if (args->csv) {
        print_csv(args, rows);
    } else {
        print_table(args, rows);
    }
    return status == CLI_OK ? cli_finish_stdout() : status;
}
