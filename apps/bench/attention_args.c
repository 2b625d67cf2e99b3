/* attention_args.c - the options of kv8 bench attention, for the processor and for GPUs: words into
 * numbers, and everything that can be refused before the long work.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "bench.h"

static const struct {
    const char *name;
    int32_t num_qo_heads, num_kv_heads, head_dim;
} shapes[] = {
    {"gpt-oss", 64, 8, 64}, {"llama", 32, 8, 128}, {"mha", 16, 16, 64}, {"tiny", 8, 2, 64}};

/* Options as they were written. */
typedef struct words {
    const char *shape, *heads, *phase, *kv, *batch, *context, *threads, *isa, *q, *o, *math,
        *device, *plot, *sick;
    int32_t qo_len, window, page_size, pool_mib, longest, chunk, shared_prefix, left_padding,
        attention_chunk;
    float seconds;
    bool no_sink, hnd, json, csv, batch_invariant, check, bounded, tree, prepare;
} words;

/* A whole number from min to max that begins at *text; moves *text behind it. */
static bool take_number(const char **text, int32_t min, int32_t max, int32_t *out) {
    char *end = NULL;
    if (!isdigit((unsigned char)**text)) return false;
    errno = 0;
    const long long value = strtoll(*text, &end, 10);
    if (errno != 0 || value < min || value > max) return false;
    *out = (int32_t)value;
    *text = end;
    return true;
}

int bench_list(const char *option, const char *text, int32_t min, int32_t max, int32_t *values_out,
               int32_t capacity, int32_t *num_out) {
    int32_t num = 0;
    for (const char *at = text;; at++) {
        if (num == capacity) return cli_fail("--%s has more than %d values", option, capacity);
        if (!take_number(&at, min, max, &values_out[num++]) || (*at != ',' && *at != '\0'))
            return cli_fail("--%s is \"%s\", must be whole numbers from %d to %d with commas",
                            option, text, min, max);
        if (*at == '\0') break;
    }
    *num_out = num;
    return CLI_OK;
}

static int read_heads(const char *text, bench_args *out) {
    enum { MAX_HEADS = 65536, MAX_DIM = 65536 };
    const char *at = text;
    out->shape = "custom";
    if (take_number(&at, 1, MAX_HEADS, &out->num_qo_heads) && *at++ == '/' &&
        take_number(&at, 1, MAX_HEADS, &out->num_kv_heads) && *at++ == '/' &&
        take_number(&at, 1, MAX_DIM, &out->head_dim) && *at == '\0')
        return CLI_OK;
    return cli_fail("--heads is \"%s\", must be QUERY/KV/DIM, as 64/8/64, from 1 to %d", text,
                    (int)MAX_HEADS);
}

static int read_shape(const words *w, bench_args *out) {
    enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };
    const char *names[NUM_SHAPES];
    if (w->heads != NULL) return read_heads(w->heads, out);
    for (size_t i = 0; i < NUM_SHAPES; i++) names[i] = shapes[i].name;
    const int i = cli_word("shape", w->shape, names, NUM_SHAPES);
    if (i < 0) return CLI_FAILED;
    out->shape = names[i];
    out->num_qo_heads = shapes[i].num_qo_heads;
    out->num_kv_heads = shapes[i].num_kv_heads;
    out->head_dim = shapes[i].head_dim;
    return CLI_OK;
}

/* Calls take(name) for every name of a list with commas, which has one at least. */
static int each_name(const char *option, const char *text, bench_args *out,
                     int (*take)(bench_args *out, const char *name)) {
    for (const char *at = text;; at++) {
        char name[32];
        const size_t length = strcspn(at, ",");
        if (length == 0 || length >= sizeof name)
            return cli_fail("--%s is \"%s\", must be names with commas", option, text);
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        const int status = take(out, name);
        if (status != CLI_OK) return status;
        at += length;
        if (*at == '\0') return CLI_OK;
    }
}

static int take_kv(bench_args *out, const char *name) {
    if (out->num_kv == BENCH_MAX_VALUES)
        return cli_fail("--kv names more than %d formats", (int)BENCH_MAX_VALUES);
    bench_kv *const kv = &out->kv[out->num_kv++];
    char k[sizeof kv->name];
    snprintf(kv->name, sizeof kv->name, "%s", name);
    snprintf(k, sizeof k, "%.*s", (int)strcspn(name, "/"), name);
    const char *const v = name[strlen(k)] == '/' ? name + strlen(k) + 1 : k;
    if (kv8_dtype_from_name(k, &kv->k) != KV8_OK) return cli_fail_kv(k);
    return kv8_dtype_from_name(v, &kv->v) == KV8_OK ? CLI_OK : cli_fail_kv(v);
}

bool bench_isa(const char *name, kv8_isa *isa_out) {
    kv8_isa isa = KV8_ISA_SCALAR;
    while (isa < KV8_ISA_COUNT && strcmp(name, kv8_isa_name(isa)) != 0) isa++;
    *isa_out = isa;
    return isa < KV8_ISA_COUNT;
}

static int take_isa(bench_args *out, const char *name) {
    kv8_isa isa;
    if (!bench_isa(name, &isa))
        return cli_fail("--isa names \"%s\", no rung; kv8 info lists them", name);
    if (out->num_isa == KV8_ISA_COUNT) return cli_fail("--isa names too many rungs");
    const kv8_status status = kv8_machine_resolve_isa(isa, &out->isa[out->num_isa++]);
    return status == KV8_OK ? CLI_OK : cli_fail_status(status);
}

static int take_phase(bench_args *out, const char *name) {
    static const char *const names[] = {"decode", "prefill"};
    const int phase = cli_word("phase", name, names, 2);
    out->decode |= phase == 0;
    out->prefill |= phase == 1;
    return phase < 0 ? CLI_FAILED : CLI_OK;
}

static int take_math(bench_args *out, const char *name) {
    static const char *const names[] = {
        [KV8_MATH_AUTO] = "auto", [KV8_MATH_F32] = "f32", [KV8_MATH_BF16] = "bf16"};
    const int math = cli_word("math", name, names, sizeof names / sizeof names[0]);
    if (math < 0) return CLI_FAILED;
    out->math = (kv8_attention_math)math;
    return CLI_OK;
}

static int read_lists(const words *w, bench_args *out) {
    int status = each_name("phase", w->phase, out, take_phase);
    if (status == CLI_OK) status = each_name("kv", w->kv, out, take_kv);
    if (status == CLI_OK) status = take_math(out, w->math);
    if (status == CLI_OK && kv8_dtype_from_name(w->q, &out->q) != KV8_OK)
        status = cli_fail_kv(w->q);
    if (status == CLI_OK && w->o != NULL && kv8_dtype_from_name(w->o, &out->o) != KV8_OK)
        status = cli_fail_kv(w->o);
    if (status == CLI_OK)
        status =
            bench_list("batch", w->batch, 1, 4096, out->batch, BENCH_MAX_VALUES, &out->num_batch);
    if (status == CLI_OK)
        status = bench_list("context", w->context, 1, 1 << 24, out->context, BENCH_MAX_VALUES,
                            &out->num_context);
    if (status == CLI_OK)
        status = bench_list("threads", w->threads == NULL ? "0" : w->threads, 0, CLI_MAX_THREADS,
                            out->threads, BENCH_MAX_VALUES, &out->num_threads);
    if (status != CLI_OK) return status;
    if (w->isa != NULL) return each_name("isa", w->isa, out, take_isa);
    out->num_isa = 1;
    const kv8_status best = kv8_machine_isa(&out->isa[0]);
    return best == KV8_OK ? CLI_OK : cli_fail_status(best);
}

static int read_device(const words *w, bench_args *out) {
    out->cuda = strcmp(w->device, "cuda") == 0;
    if (!out->cuda && strcmp(w->device, "cpu") != 0)
        return cli_fail("--device is \"%s\", must be cpu or cuda", w->device);
    if (out->cuda && (w->isa != NULL || w->threads != NULL || w->plot != NULL ||
                      w->shared_prefix > 0 || out->math != KV8_MATH_AUTO))
        return cli_fail(
            "--isa, --math, --threads, --plot and --shared-prefix go with --device cpu");
    if (!out->cuda && (w->check || w->longest > 0))
        return cli_fail("--%s goes with --device cuda", w->check ? "check" : "longest");
    if (!out->cuda && w->chunk > 0) return cli_fail("--chunk goes with --device cuda");
    if (!out->cuda && (w->o != NULL || w->bounded || w->tree || w->prepare || w->left_padding > 0 ||
                       w->attention_chunk > 0))
        return cli_fail(
            "--o, --bounded, --tree, --prepare, --left-padding and --attention-chunk go with "
            "--device cuda");
    return CLI_OK;
}

static int read_sick(const words *w, bench_args *out) {
    static const char *const names[NUM_SICK] = {"none", "nan-q", "nan-k", "nan-v", "scales"};
    if (w->sick == NULL) return CLI_OK;
    const int sick = cli_word("sick", w->sick, names, NUM_SICK);
    if (sick < 0) return CLI_FAILED;
    if (sick == SICK_SCALES && !out->cuda) return cli_fail("--sick scales goes with --device cuda");
    out->sick = (bench_sick)sick;
    return CLI_OK;
}

/* What each says alone and together they contradict. */
static int check_together(const words *w, const bench_args *args) {
    if (w->csv && w->json) return cli_fail("--csv and --json: one of them");
    if (w->check && (w->tree || (w->o != NULL && kv8_dtype_size(args->o) == 1)))
        return cli_fail("--check goes without --tree, and --o of 8 bits");
    if ((w->qo_len > 0 || w->chunk > 0) && !args->prefill)
        return cli_fail("--%s goes with --phase prefill", w->chunk > 0 ? "chunk" : "qo-len");
    for (int32_t c = 0; c < args->num_context; c++) {
        if (args->shared_prefix > args->context[c])
            return cli_fail("--shared-prefix is %d, --context has only %d keys",
                            args->shared_prefix, args->context[c]);
    }
    return args->plot == NULL ? CLI_OK : bench_plot_check(args);
}

static int read_words(const words *w, bench_args *out) {
    enum { DEFAULT_QO_LEN = 512 };
    *out = (bench_args){.window = w->window,
                        .page_size = w->page_size,
                        .pool_mib = w->pool_mib,
                        .qo_len = w->qo_len > 0 ? w->qo_len : DEFAULT_QO_LEN,
                        .shared_prefix = w->shared_prefix,
                        .longest = w->longest,
                        .chunk = w->chunk,
                        .left_padding = w->left_padding,
                        .attention_chunk = w->attention_chunk,
                        .bounded = w->bounded,
                        .tree = w->tree,
                        .prepare = w->prepare,
                        .seconds = w->seconds,
                        .plot = w->plot,
                        .check = w->check,
                        .no_sink = w->no_sink,
                        .hnd = w->hnd,
                        .batch_invariant = w->batch_invariant,
                        .csv = w->csv,
                        .json = w->json};
    int status = read_shape(w, out);
    if (status == CLI_OK) status = read_lists(w, out);
    if (status == CLI_OK) status = read_device(w, out);
    if (status == CLI_OK) status = read_sick(w, out);
    if (status == CLI_OK) status = check_together(w, out);
    return status == CLI_OK ? -1 : status;
}

/* Returns -1 to go on, or the exit status. */
static int parse_words(words *w, int argc, char **argv) {
    const cli_option options[] = {
        {"shape", "NAME", "gpt-oss 64/8/64, llama 32/8/128, mha 16/16/64, tiny 8/2/64", CLI_TEXT,
         &w->shape},
        {"heads", "Q/KV/D", "query heads, KV heads and head_dim instead of a named shape", CLI_TEXT,
         &w->heads},
        {"phase", "LIST", "decode,prefill (both)", CLI_TEXT, &w->phase},
        {"kv", "LIST", "formats of the cache, or K's/V's as int8/e4m3 (e4m3,int8,bf16)", CLI_TEXT,
         &w->kv},
        {"q", "FORMAT", "format of the queries (bf16)", CLI_TEXT, &w->q},
        {"o", "FORMAT", "on cuda: format of the output (that of the queries)", CLI_TEXT, &w->o},
        {"math", "NAME", "auto, f32 or bf16: what to multiply in (auto)", CLI_TEXT, &w->math},
        {"batch", "LIST", "requests of a run (1)", CLI_TEXT, &w->batch},
        {"context", "LIST", "keys of a request (8192)", CLI_TEXT, &w->context},
        {"shared-prefix", "N", "the requests of a run share their first N keys (0)", CLI_INT,
         &w->shared_prefix, 0, 1 << 24},
        {"qo-len", "N", "query tokens of a prefill (512)", CLI_INT, &w->qo_len, 1, 1 << 20},
        {"window", "W", "a query sees itself and W keys before it (-1: all)", CLI_INT, &w->window,
         -1, 1 << 24},
        {"left-padding", "N", "on cuda: no query sees the first N keys (0)", CLI_INT,
         &w->left_padding, 0, 1 << 24},
        {"attention-chunk", "N", "on cuda: a query sees keys of its own N positions (0: all)",
         CLI_INT, &w->attention_chunk, 0, 1 << 24},
        {"tree", NULL, "on cuda: a tree mask over a request's last keys, its queries'", CLI_FLAG,
         &w->tree},
        {"prepare", NULL, "on cuda: every run is prepared, as where lengths change before each",
         CLI_FLAG, &w->prepare},
        {"bounded", NULL, "on cuda: page ids are held to the pool's size", CLI_FLAG, &w->bounded},
        {"page-size", "N", "tokens of a page (16)", CLI_INT, &w->page_size, 1, 1 << 16},
        {"hnd", NULL, "pages [kv_head, slot, dim] instead of [slot, kv_head, dim]", CLI_FLAG,
         &w->hnd},
        {"no-sink", NULL, "without sink logits", CLI_FLAG, &w->no_sink},
        {"batch-invariant", NULL, "with the batch_invariant option", CLI_FLAG, &w->batch_invariant},
        {"threads", "LIST", "thread counts; 0 = all processors (0)", CLI_TEXT, &w->threads},
        {"device", "NAME", "cpu, or cuda: on the first GPU, in captured graphs (cpu)", CLI_TEXT,
         &w->device},
        {"longest", "N", "on cuda: the first request has N keys, the others --context (0: no)",
         CLI_INT, &w->longest, 0, 1 << 24},
        {"chunk", "N", "on cuda: the first request has N query tokens, the others --qo-len (0: no)",
         CLI_INT, &w->chunk, 0, 1 << 20},
        {"sick", "NAME", "a NaN: nan-q, nan-k, nan-v; on cuda V's int8 scales 1000: scales (none)",
         CLI_TEXT, &w->sick},
        {"check", NULL, "on cuda: the error of six query rows of each run against f64", CLI_FLAG,
         &w->check},
        {"isa", "LIST", "rungs (the best of this machine)", CLI_TEXT, &w->isa},
        {"pool", "MIB", "other caches read before one is read again (512)", CLI_INT, &w->pool_mib,
         0, 1 << 20},
        {"seconds", "S", "time spent on a row, at least five runs (0.5)", CLI_FLOAT, &w->seconds, 0,
         1000},
        {"plot", "FILE", "draw shares and times as .svg or .png (needs gnuplot)", CLI_OUTPUT,
         &w->plot},
        {"json", NULL, "print one JSON object", CLI_FLAG, &w->json},
        {"csv", NULL, "print comma-separated values", CLI_FLAG, &w->csv},
    };
    const cli_command command = {
        .usage = "kv8 bench attention [options]",
        .about =
            "Times attention on random paged caches, cold, and beside it what this machine can\n"
            "do at most: reading memory, and multiply-adds of the same kind. LIST is values with\n"
            "commas; every combination is a row.",
        .options = options,
        .num_options = sizeof options / sizeof options[0],
    };
    return cli_parse(&command, argc, argv, NULL);
}

int bench_args_parse(bench_args *args, int argc, char **argv) {
    words w = {.shape = "gpt-oss",
               .phase = "decode,prefill",
               .kv = "e4m3,int8,bf16",
               .q = "bf16",
               .math = "auto",
               .batch = "1",
               .context = "8192",
               .device = "cpu",
               .window = -1,
               .page_size = 16,
               .pool_mib = 512,
               .seconds = 0.5f};
    const int status = parse_words(&w, argc, argv);
    return status >= 0 ? status : read_words(&w, args);
}
