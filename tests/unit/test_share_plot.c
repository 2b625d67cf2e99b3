/* test_share_plot.c - the picture of kv8 bench attention: every bar and its figure stand inside the
 * axis, however far a row is beyond the limit (caches that fit the processor's own are).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "testing.h"

/* A row's share is what the test says. */
static double shares[4];
double bench_row_share(const bench_row *row) {
    return shares[row->context - 1];
}

static char *draw(bench_rows *rows) {
    const bench_args args = {.num_qo_heads = 8,
                             .num_kv_heads = 2,
                             .head_dim = 64,
                             .q = KV8_BF16,
                             .num_isa = 1,
                             .num_batch = 1,
                             .num_threads = 1,
                             .plot = "x.svg"};
    FILE *const file = tmpfile();
    assert_non_null(file);
    assert_int_equal(bench_plot_draw(&args, rows, file), CLI_OK);
    char *const svg = calloc(1, 1 << 18);
    assert_non_null(svg);
    rewind(file);
    assert_in_range(fread(svg, 1, (1 << 18) - 1, file), 1000, (1 << 18) - 2);
    fclose(file);
    return svg;
}

static void high_bars_keep_their_figures(void **state) {
    (void)state;
    static bench_rows rows = {.num = 4};
    static const double cases[][4] = {
        {0.2, 0.5, 0.9, 1.0}, {0.2, 1.32, 2.08, 0.5}, {0.1, 9.0, 0.3, 1.3}};
    for (int32_t i = 0; i < 4; i++)
        rows.row[i] = (bench_row){.phase = i < 2 ? "decode" : "prefill",
                                  .kv = {KV8_E4M3, KV8_E4M3, "e4m3"},
                                  .context = i + 1,
                                  .threads = 1,
                                  .us = {.median = 101 + 101 * i}};
    for (size_t c = 0; c < 3; c++) {
        memcpy(shares, cases[c], sizeof shares);
        char *const svg = draw(&rows);
        static const char *const figures[] = {">101 us<", ">202 us<", ">303 us<", ">404 us<"};
        for (size_t i = 0; i < 4; i++) {
            if (strstr(svg, figures[i]) == NULL) fail_msg("case %zu: no %s", c, figures[i]);
        }
        assert_non_null(strstr(svg, "<title>attention, 8/2/64, bf16 queries"));
        assert_non_null(strstr(svg, "1 thread</title>"));
        free(svg);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(high_bars_keep_their_figures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
