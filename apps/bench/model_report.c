/* model_report.c - the rows of kv8 bench model as a table, and as JSON with llama-bench's fields.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "model_bench.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* --- figures --- */

typedef struct stats {
    double mean, deviation;
} stats;

static stats mean_of(const double *values, int32_t num) {
    double sum = 0, squares = 0;
    for (int32_t i = 0; i < num; i++) sum += values[i];
    const double mean = sum / num;
    for (int32_t i = 0; i < num; i++) squares += (values[i] - mean) * (values[i] - mean);
    return (stats){mean, num > 1 ? sqrt(squares / (num - 1)) : 0};
}

int32_t model_test_tokens(const test_row *row) {
    return row->num_prompt + row->num_gen;
}

model_speed model_test_speed(const test_row *row) {
    double speeds[MAX_REPETITIONS];
    for (int32_t i = 0; i < row->num; i++)
        speeds[i] = row->batch * model_test_tokens(row) * 1e9 / row->ns[i];
    const stats t = mean_of(speeds, row->num);
    return (model_speed){t.mean, t.deviation, t.mean > 0 ? t.deviation / t.mean : 0};
}

/* --- the table --- */

static const char *backend_name(const bench_session *s) {
    return s->model.device != NULL ? "CUDA" : kv8_isa_name(s->model.isa);
}

static void test_name(const test_row *row, char *out, size_t size) {
    char batch[16] = "", depth[24] = "";
    if (row->batch > 1) snprintf(batch, sizeof batch, " x %d", row->batch);
    if (row->depth > 0) snprintf(depth, sizeof depth, " @ d%d", row->depth);
    snprintf(out, size, "%s%d%s%s", row->num_prompt > 0 ? "pp" : "tg", model_test_tokens(row),
             batch, depth);
}

/* Of the speed that reading a step's bytes allows; 0 where that is not known. */
static double share_of_floor(const bench_session *s, const test_row *row) {
    if (s->read_gb_s <= 0 || row->step_bytes <= 0) return 0;
    return model_test_speed(row).mean / row->batch * row->step_bytes / (s->read_gb_s * 1e9);
}

/* Of the speed that its parts allow, each the longer of bytes and products; 0 where not known. */
static double share_of_parts(const test_row *row) {
    return model_test_speed(row).mean / row->batch * row->step_seconds;
}

static void print_shares(const bench_session *s, const test_row *rows, int32_t num) {
    printf("\nread ceiling %.0f GB/s, ", s->read_gb_s);
    if (s->product_tflop_s > 0)
        printf(
            "product ceiling %.0f TFLOP/s; decode at so much of what the bytes of its steps "
            "allow, and of what bytes or products do, the longer for each part:\n",
            s->product_tflop_s);
    else
        printf(
            "product ceiling not measured (this build has no kernel of it for the GPU); decode "
            "at so much of what the bytes of its steps allow:\n");
    for (int32_t i = 0; i < num; i++) {
        char test[48], parts[16] = "";
        test_name(&rows[i], test, sizeof test);
        if (rows[i].step_seconds > 0)
            snprintf(parts, sizeof parts, "%5.1f %%  ", 100 * share_of_parts(&rows[i]));
        if (rows[i].num_gen > 0)
            printf("%-14s %-18s %8.3f GB  %5.1f %%  %s%6.1f experts a layer\n",
                   rows[i].setting->name, test, rows[i].step_bytes * 1e-9,
                   100 * share_of_floor(s, &rows[i]), parts, rows[i].experts_read);
    }
}

/* How the steps of each test were launched, and why not as one kernel. */
static void print_paths(const test_row *rows, int32_t num) {
    printf("\nhow steps are launched:\n");
    for (int32_t i = 0; i < num; i++) {
        const kv8_step_plan *const plan = &rows[i].plan;
        const bool persists = plan->why_not_persistent == NULL;
        char test[48];
        test_name(&rows[i], test, sizeof test);
        printf("%-14s %-18s %s%s%s\n", rows[i].setting->name, test, kv8_step_path_name(plan->path),
               persists ? "" : ", not persistent: ", persists ? "" : plan->why_not_persistent);
    }
}

/* --- profiles --- */

static double busy_seconds(const test_profile *p) {
    double sum = 0;
    for (int w = 0; w < KV8_WORK_COUNT; w++) sum += p->seconds[w];
    return sum;
}

/* Shares of the GPU's time: its idle time as the test ran, the rest as the profiled steps were. */
static double share_of_work(const test_profile *p, int work) {
    const double busy = busy_seconds(p);
    return busy > 0 ? (1 - p->idle_share) * p->seconds[work] / busy : 0;
}

static void print_profiles(const test_row *rows, int32_t num) {
    printf("\nwhere the GPU's time goes, %%\n%-22s", "");
    for (int32_t i = 0; i < num; i++) {
        char test[48];
        test_name(&rows[i], test, sizeof test);
        printf(" %18s", test);
    }
    printf("\n%-22s", "KV");
    for (int32_t i = 0; i < num; i++) printf(" %18s", rows[i].setting->name);
    for (int w = 0; w < KV8_WORK_COUNT; w++) {
        printf("\n%-22s", kv8_work_name((kv8_work)w));
        for (int32_t i = 0; i < num; i++)
            printf(" %18.1f", 100 * share_of_work(&rows[i].profile, w));
    }
    printf("\n%-22s", "kinds of work, by the");
    for (int32_t i = 0; i < num; i++) printf(" %18s", kv8_step_path_name(rows[i].profile.path));
    printf("\n%-22s", "idle");
    for (int32_t i = 0; i < num; i++) printf(" %18.1f", 100 * rows[i].profile.idle_share);
    printf("\n%-22s", "host, us a step");
    for (int32_t i = 0; i < num; i++) printf(" %18.1f", rows[i].profile.host_us);
    printf("\n%-22s", "both, by the");
    for (int32_t i = 0; i < num; i++) printf(" %18s", kv8_step_path_name(rows[i].plan.path));
    printf("\n");
}

static void print_table(const bench_session *s, const model_args *args, const test_row *rows,
                        int32_t num) {
    printf("| %-24s | %10s | %10s | %-11s | %7s | %-14s | %-16s | %20s | %6s |\n", "model", "size",
           "params", "backend", "threads", "kv", "test", "t/s", "cv");
    printf(
        "| %.24s | ---------: | ---------: | ----------- | ------: | %.14s | %.16s | %.19s: | "
        "-----: |\n",
        "------------------------", "--------------", "----------------", "-------------------");
    for (int32_t i = 0; i < num; i++) {
        char test[48], size[32], params[32], speed[48];
        const model_speed t = model_test_speed(&rows[i]);
        test_name(&rows[i], test, sizeof test);
        snprintf(size, sizeof size, "%.2f MiB", (double)s->model.info.bytes / 1048576.0);
        snprintf(params, sizeof params, "%.2f M", (double)s->model.info.num_parameters / 1e6);
        snprintf(speed, sizeof speed, "%.2f +- %.2f", t.mean, t.deviation);
        printf("| %-24s | %10s | %10s | %-11s | %7d | %-14s | %-16s | %20s | %4.1f %% |\n",
               args->model, size, params, backend_name(s), kv8_threads_count(s->model.threads),
               rows[i].setting->name, test, speed, 100 * t.variation);
    }
    if (s->read_gb_s > 0) print_shares(s, rows, num);
    if (s->model.device != NULL) print_paths(rows, num);
    if (args->profile) print_profiles(rows, num);
}

/* --- JSON --- */

static json_t *profile_json(const test_profile *p) {
    if (p->kernels == NULL) return NULL;
    json_t *const shares = json_object();
    for (int w = 0; w < KV8_WORK_COUNT; w++)
        json_object_set_new(shares, kv8_work_name((kv8_work)w), json_real(share_of_work(p, w)));
    json_object_set_new(shares, "idle", json_real(p->idle_share));
    return json_pack("{s:s, s:o, s:f, s:O}", "path", kv8_step_path_name(p->path), "share", shares,
                     "host_us", p->host_us, "kernel_seconds", p->kernels);
}

static json_t *samples_json(const test_row *row, bool speeds) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < row->num; i++) {
        json_t *const value =
            speeds ? json_real(row->batch * model_test_tokens(row) * 1e9 / row->ns[i])
                   : json_integer((json_int_t)row->ns[i]);
        json_array_append_new(list, value);
    }
    return list;
}

static json_t *test_json(const bench_session *s, const model_args *args, const test_row *row) {
    const stats ns = mean_of(row->ns, row->num);
    const model_speed speed = model_test_speed(row);
    char test_time[32] = "";
    const time_t now = time(NULL);
    strftime(test_time, sizeof test_time, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    return json_pack(
        "{s:s, s:s, s:o, s:s, s:I, s:I, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:I, s:i, s:i, s:i, "
        "s:s, "
        "s:I, s:I,"
        " s:f, s:f, s:f, s:o, s:o, s:f, s:f, s:f, s:f, s:s*, s:s*, s:o*}",
        "version", kv8_version(), "backends", backend_name(s), "model_filename",
        cli_json_text(args->model), "model_type", s->model.info.architecture, "model_size",
        (json_int_t)s->model.info.bytes, "model_n_params", (json_int_t)s->model.info.num_parameters,
        "n_batch", (int)args->chunk, "n_ubatch", (int)args->chunk, "n_parallel", (int)row->batch,
        "n_threads", (int)kv8_threads_count(s->model.threads), "kv", row->setting->name, "type_k",
        kv8_dtype_name(row->setting->full_k), "type_v", kv8_dtype_name(row->setting->full_v),
        "kv_bytes_per_token", (json_int_t)row->bytes_per_token, "n_prompt", (int)row->num_prompt,
        "n_gen", (int)row->num_gen, "n_depth", (int)row->depth, "test_time", test_time, "avg_ns",
        (json_int_t)ns.mean, "stddev_ns", (json_int_t)ns.deviation, "avg_ts", speed.mean,
        "stddev_ts", speed.deviation, "cv", speed.variation, "samples_ns", samples_json(row, false),
        "samples_ts", samples_json(row, true), "step_bytes", row->step_bytes, "share_of_floor",
        share_of_floor(s, row), "share_of_parts", share_of_parts(row), "experts_per_layer",
        row->experts_read, "path",
        s->model.device == NULL ? NULL : kv8_step_path_name(row->plan.path), "why_not_persistent",
        row->plan.why_not_persistent, "profile", profile_json(&row->profile));
}

int model_report(const bench_session *s, const model_args *args, const test_row *rows,
                 int32_t num) {
    if (!args->json) {
        print_table(s, args, rows, num);
        return cli_finish_stdout();
    }
    json_t *const list = json_array();
    for (int32_t i = 0; i < num; i++) json_array_append_new(list, test_json(s, args, &rows[i]));
    const int status =
        cli_write_json(json_pack("{s:s, s:f, s:f, s:b, s:o}", "version", kv8_version(), "read_gb_s",
                                 s->read_gb_s, "product_tflop_s", s->product_tflop_s,
                                 "batch_invariant", (int)args->batch_invariant, "rows", list),
                       stdout, "stdout");
    return status == CLI_OK ? cli_finish_stdout() : status;
}
