/* choose.c - which format each layer's K and V are best stored in: single damages, the frontier of
 * mixes that follows from them, and the mixes measured as wholes.
 *
 * KL is about quadratic in small errors that do not know of one another, so single damages add up.
 * Every mix of the frontier is then found exactly, item by item: what one more item adds to a mix
 * does not depend on the mix, so a mix that is beaten stays beaten.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kv8/evaluate.h>

#include "model_impl.h"

/* The formats of a mix; bf16, the first, counts as no damage. */
static const kv8_dtype formats[] = {KV8_BF16, KV8_INT8, KV8_E4M3};
enum {
    NUM_FORMATS = sizeof formats / sizeof formats[0],
    DEFAULT_POINTS = 12,
    /* Lanes of one comparison: each holds a cache of a window. */
    LANES = 12,
    /* Neighbours of the predicted choice, with more bytes, that are measured too. */
    FALLBACKS = 3
};

/* What a format does to one item (K or V of a layer) alone, above bf16. */
typedef struct damage {
    double kl, disagree2; /* nats; the square of 1 - top1 */
    double whole_kl;      /* with bf16's own */
} damage;

typedef struct mix {
    uint64_t bytes;
    double kl, disagree2; /* predicted, above bf16 */
    kv8_dtype *layers;    /* [num_layers, 2], within choice->dtypes or a list's */
} mix;

struct kv8_choice {
    int32_t num_layers, num_items; /* items: K and V of each layer */
    damage *damages;               /* [num_items, NUM_FORMATS] */
    kv8_mix *mixes;
    int32_t num_mixes, chosen;
    kv8_dtype *dtypes; /* of mixes */
};

static void *take(size_t count, size_t size) {
    return calloc(count > 0 ? count : 1, size);
}

static kv8_status fail_memory(void) {
    return kv8_fail(KV8_ERR_NO_MEMORY, "choose: no memory");
}

/* --- comparing mixes --- */

/* What every comparison of this choice shares. */
typedef struct chooser {
    kv8_model *model;
    kv8_model_info info;
    const kv8_choose_options *options;
    uint64_t units_before, units_total;
} chooser;

/* Progress of one comparison as a part of all. */
static int forward_progress(void *cookie, const char *what, uint64_t done, uint64_t total) {
    (void)what;
    (void)total;
    const chooser *const c = cookie;
    return c->options->progress(c->options->progress_cookie, "choose", c->units_before + done,
                                c->units_total);
}

/* rows_out[num + 1]: f32, then each mix, over windows of `ids`. */
static kv8_status compare_mixes(chooser *c, const int32_t *ids, int32_t num_windows,
                                const kv8_dtype *dtypes, int32_t num, kv8_compare_row *rows_out) {
    kv8_kv_setting settings[LANES];
    memset(settings, 0, sizeof settings);
    for (int32_t i = 0; i < num; i++) {
        strcpy(settings[i].name, "mix");
        settings[i].layers = dtypes + (size_t)i * 2 * (size_t)c->info.num_layers;
    }
    kv8_compare_options compare = KV8_COMPARE_OPTIONS_INIT;
    compare.token_ids = ids;
    compare.num_windows = num_windows;
    compare.window_len = c->options->window_len;
    compare.num_tokens = (int64_t)num_windows * c->options->window_len;
    compare.k_scale = c->options->k_scale;
    compare.v_scale = c->options->v_scale;
    compare.progress = c->options->progress != NULL ? forward_progress : NULL;
    compare.progress_cookie = c;
    KV8_TRY(kv8_evaluate_compare(c->model, settings, num, &compare, rows_out));
    c->units_before += (uint64_t)(num + 1) * (uint64_t)compare.num_tokens;
    return KV8_OK;
}

/* --- single damages --- */

/* Mix 0 is bf16 everywhere; mix 1 + item * (NUM_FORMATS - 1) + f - 1 differs in one item. */
static void fill_singles(kv8_dtype *dtypes, int32_t num_items) {
    const size_t items = (size_t)num_items;
    const size_t num = 1 + items * (NUM_FORMATS - 1);
    for (size_t i = 0; i < num * items; i++) dtypes[i] = formats[0];
    for (size_t i = 1; i < num; i++)
        dtypes[i * items + (i - 1) / (NUM_FORMATS - 1)] = formats[1 + (i - 1) % (NUM_FORMATS - 1)];
}

static double square(double x) {
    return x * x;
}

static void take_damage(kv8_choice *choice, const kv8_compare_row *row,
                        const kv8_compare_row *floor, size_t single) {
    const size_t item = (single - 1) / (NUM_FORMATS - 1), f = 1 + (single - 1) % (NUM_FORMATS - 1);
    choice->damages[item * NUM_FORMATS + f] =
        (damage){.kl = fmax(0, row->kl - floor->kl),
                 .disagree2 = fmax(0, square(1 - row->top1) - square(1 - floor->top1)),
                 .whole_kl = row->kl};
}

/* floor_out: bf16 everywhere on the text. */
static kv8_status measure_singles(kv8_choice *choice, chooser *c, kv8_compare_row *floor_out) {
    const size_t items = (size_t)choice->num_items, num = 1 + items * (NUM_FORMATS - 1);
    const int32_t windows = (int32_t)(c->options->num_tokens / c->options->window_len);
    kv8_dtype *const dtypes = take(num * items, sizeof *dtypes);
    if (dtypes == NULL) return fail_memory();
    fill_singles(dtypes, choice->num_items);
    kv8_status status = KV8_OK;
    for (size_t at = 0; at < num && status == KV8_OK; at += LANES) {
        const int32_t batch = (int32_t)kv8_min_i64((int64_t)(num - at), LANES);
        kv8_compare_row rows[LANES + 1] = {KV8_COMPARE_ROW_INIT};
        status = compare_mixes(c, c->options->token_ids, windows, dtypes + at * items, batch, rows);
        for (int32_t i = 0; status == KV8_OK && i < batch; i++) {
            if (at + (size_t)i == 0)
                *floor_out = rows[1];
            else
                take_damage(choice, &rows[1 + i], floor_out, at + (size_t)i);
        }
    }
    free(dtypes);
    return status;
}

/* --- the frontier --- */

/* Mixes that no other beats, by falling bytes; each with its dtypes. */
typedef struct mix_list {
    mix *mixes;
    kv8_dtype *dtypes;
    size_t num, capacity;
} mix_list;

static void list_free(mix_list *list) {
    free(list->mixes);
    free(list->dtypes);
}

static bool list_make(mix_list *list, size_t capacity, size_t items) {
    list->mixes = take(capacity, sizeof *list->mixes);
    list->dtypes = take(capacity * items, sizeof *list->dtypes);
    list->num = 0;
    list->capacity = capacity;
    return list->mixes != NULL && list->dtypes != NULL;
}

static uint64_t item_bytes(const kv8_model_info *info, kv8_dtype dtype) {
    const uint64_t heads = (uint64_t)info->num_kv_heads;
    const uint64_t row_scales = dtype == KV8_INT8 ? heads * sizeof(kv8_f16) : 0;
    return heads * (uint64_t)info->head_dim * kv8_dtype_size(dtype) + row_scales;
}

static double damage_of(const mix *m, kv8_budget_kind kind) {
    return kind == KV8_BUDGET_TOP1 ? m->disagree2 : m->kl;
}

static int by_kl(const void *a, const void *b) {
    const mix *const x = a, *const y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return (x->kl > y->kl) - (x->kl < y->kl);
}

static int by_disagreement(const void *a, const void *b) {
    const mix *const x = a, *const y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return (x->disagree2 > y->disagree2) - (x->disagree2 < y->disagree2);
}

/* Every mix of `from` with every format for `item`, of which the unbeaten go to `out`. */
static kv8_status extend_list(const kv8_choice *choice, const chooser *c, const mix_list *from,
                              size_t item, mix_list *out) {
    const size_t items = (size_t)choice->num_items, num = from->num * NUM_FORMATS;
    const kv8_budget_kind kind = c->options->budget_kind;
    mix_list all = {0};
    if (!list_make(&all, num, items) || !list_make(out, num, items)) {
        list_free(&all);
        return fail_memory();
    }
    for (size_t i = 0; i < num; i++) {
        const mix *const base = &from->mixes[i / NUM_FORMATS];
        const size_t f = i % NUM_FORMATS;
        const damage *const d = &choice->damages[item * NUM_FORMATS + f];
        kv8_dtype *const layers = all.dtypes + i * items;
        memcpy(layers, base->layers, items * sizeof *layers);
        layers[item] = formats[f];
        all.mixes[i] = (mix){base->bytes + item_bytes(&c->info, formats[f]), base->kl + d->kl,
                             base->disagree2 + d->disagree2, layers};
    }
    qsort(all.mixes, num, sizeof *all.mixes, kind == KV8_BUDGET_TOP1 ? by_disagreement : by_kl);
    double least = (double)INFINITY;
    for (size_t i = 0; i < num; i++) {
        if (!(damage_of(&all.mixes[i], kind) < least)) continue;
        least = damage_of(&all.mixes[i], kind);
        mix *const kept = &out->mixes[out->num];
        *kept = all.mixes[i];
        kept->layers = out->dtypes + out->num++ * items;
        memcpy(kept->layers, all.mixes[i].layers, items * sizeof *kept->layers);
    }
    list_free(&all);
    return KV8_OK;
}

/* bf16 everywhere ends the list, also where noise lets a smaller mix do as little damage. */
static void add_bf16(mix_list *list, const kv8_model_info *info, size_t items) {
    const uint64_t bytes = items * item_bytes(info, formats[0]);
    if (list->mixes[list->num - 1].bytes == bytes) return;
    assert(list->num < list->capacity);
    mix *const last = &list->mixes[list->num];
    *last = (mix){.bytes = bytes, .layers = list->dtypes + list->num++ * items};
    for (size_t i = 0; i < items; i++) last->layers[i] = formats[0];
}

static kv8_status find_frontier(const kv8_choice *choice, const chooser *c, mix_list *out) {
    const size_t items = (size_t)choice->num_items;
    mix_list list = {0};
    if (!list_make(&list, 1, items)) {
        list_free(&list);
        return fail_memory();
    }
    list.num = 1;
    list.mixes[0].layers = list.dtypes;
    kv8_status status = KV8_OK;
    for (size_t item = 0; item < items && status == KV8_OK; item++) {
        mix_list next = {0};
        status = extend_list(choice, c, &list, item, &next);
        list_free(&list);
        list = next;
    }
    if (status == KV8_OK) add_bf16(&list, &c->info, items);
    *out = list;
    return status;
}

/* --- which of them to measure --- */

/* Index of the mix that the prediction chooses, by rising bytes; list->num for none. */
static size_t predict(const mix_list *list, const chooser *c, const kv8_compare_row *floor) {
    const kv8_choose_options *const o = c->options;
    if (o->budget_kind == KV8_BUDGET_BYTES) {
        size_t best = list->num;
        for (size_t i = 0; i < list->num && (double)list->mixes[i].bytes <= o->budget; i++)
            best = i;
        return best;
    }
    for (size_t i = 0; i < list->num; i++) {
        const mix *const m = &list->mixes[i];
        const double disagree = sqrt(m->disagree2 + square(1 - floor->top1));
        if (o->budget_kind == KV8_BUDGET_KL ? m->kl + floor->kl <= o->budget
                                            : 1 - disagree >= o->budget)
            return i;
    }
    return list->num;
}

/* Marks about `points` of the list: both ends, an even spread of bytes, the choice and the next
 * larger. */
static void pick_points(const mix_list *list, int32_t points, size_t predicted, bool *picked) {
    const double low = (double)list->mixes[0].bytes;
    const double high = (double)list->mixes[list->num - 1].bytes;
    size_t at = 0;
    for (int32_t i = 0; i < points; i++) {
        const double wanted = low + (high - low) * i / (points - 1);
        while (at + 1 < list->num && (double)list->mixes[at].bytes < wanted) at++;
        picked[at] = true;
    }
    for (size_t i = predicted; i < list->num && i <= predicted + FALLBACKS; i++) picked[i] = true;
}

/* The marked mixes, by falling bytes. */
static kv8_status keep_points(kv8_choice *choice, const mix_list *list, const bool *picked,
                              const kv8_compare_row *floor) {
    const size_t items = (size_t)choice->num_items;
    choice->mixes = take(list->num, sizeof *choice->mixes);
    choice->dtypes = take(list->num * items, sizeof *choice->dtypes);
    if (choice->mixes == NULL || choice->dtypes == NULL) return fail_memory();
    for (size_t i = list->num; i-- > 0;) {
        if (!picked[i]) continue;
        const mix *const m = &list->mixes[i];
        kv8_dtype *const layers = choice->dtypes + (size_t)choice->num_mixes * items;
        memcpy(layers, m->layers, items * sizeof *layers);
        kv8_mix *const kept = &choice->mixes[choice->num_mixes++];
        *kept = (kv8_mix)KV8_MIX_INIT;
        kept->bytes = (double)m->bytes;
        kept->predicted_kl = m->kl + floor->kl;
        kept->predicted_top1 = 1 - sqrt(m->disagree2 + square(1 - floor->top1));
        kept->layers = layers;
    }
    return KV8_OK;
}

/* --- measuring them --- */

/* Mean and standard error of n values given their sums. */
static void finish_mean(double sum, double sum2, int32_t n, double *mean_out, double *error_out) {
    *mean_out = sum / n;
    const double variance = n > 1 ? fmax(0, sum2 - sum * sum / n) / (n - 1) : (double)NAN;
    *error_out = sqrt(variance / n);
}

/* Window by window, for errors over windows: tokens of one window depend on one another. */
static kv8_status measure_points(kv8_choice *choice, chooser *c) {
    const size_t items = (size_t)choice->num_items;
    const int32_t windows = (int32_t)(c->options->num_held / c->options->window_len);
    for (int32_t at = 0; at < choice->num_mixes; at += LANES) {
        const int32_t batch = (int32_t)kv8_min_i64(choice->num_mixes - at, LANES);
        double kl[LANES] = {0}, kl2[LANES] = {0}, top1[LANES] = {0}, top12[LANES] = {0};
        for (int32_t w = 0; w < windows; w++) {
            kv8_compare_row rows[LANES + 1] = {KV8_COMPARE_ROW_INIT};
            KV8_TRY(compare_mixes(c, c->options->held_ids + (int64_t)w * c->options->window_len, 1,
                                  choice->dtypes + (size_t)at * items, batch, rows));
            for (int32_t i = 0; i < batch; i++) {
                kl[i] += rows[1 + i].kl;
                kl2[i] += square(rows[1 + i].kl);
                top1[i] += rows[1 + i].top1;
                top12[i] += square(rows[1 + i].top1);
                assert(rows[1 + i].bytes_per_token == choice->mixes[at + i].bytes);
            }
        }
        for (int32_t i = 0; i < batch; i++) {
            kv8_mix *const m = &choice->mixes[at + i];
            finish_mean(kl[i], kl2[i], windows, &m->kl, &m->kl_error);
            finish_mean(top1[i], top12[i], windows, &m->top1, &m->top1_error);
        }
    }
    return KV8_OK;
}

/* The fewest bytes that hold on the held text, from the predicted mix on to more bytes. */
static int32_t settle(const kv8_choice *choice, const kv8_choose_options *o,
                      double predicted_bytes) {
    for (int32_t i = choice->num_mixes; i-- > 0;) {
        const kv8_mix *const m = &choice->mixes[i];
        if (m->bytes < predicted_bytes) continue;
        if (o->budget_kind == KV8_BUDGET_BYTES) return m->bytes == predicted_bytes ? i : -1;
        if (o->budget_kind == KV8_BUDGET_KL ? m->kl <= o->budget : m->top1 >= o->budget) return i;
    }
    return -1;
}

/* --- the choice --- */

static kv8_status check_choose(const kv8_model_info *info, const kv8_choose_options *o) {
    if (o->window_len < 2 || o->window_len > info->max_seq_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "windows of %d tokens, must be at least 2 and at most the context of %d",
                        o->window_len, info->max_seq_len);
    if (o->num_tokens < o->window_len || o->num_held < o->window_len)
        return kv8_fail(KV8_ERR_INVALID,
                        "%lld tokens to measure and %lld to verify on, both must hold a window of "
                        "%d",
                        (long long)o->num_tokens, (long long)o->num_held, o->window_len);
    if (o->budget_kind < KV8_BUDGET_KL || o->budget_kind > KV8_BUDGET_BYTES || !(o->budget > 0))
        return kv8_fail(KV8_ERR_INVALID, "a budget of kind %d and %g, must be above 0",
                        (int)o->budget_kind, o->budget);
    if (o->num_points != 0 && (o->num_points < 3 || o->num_points > 1000))
        return kv8_fail(KV8_ERR_INVALID, "%d points of the frontier, must be 3 to 1000",
                        o->num_points);
    return KV8_OK;
}

static kv8_status choose(kv8_choice *choice, chooser *c) {
    const kv8_choose_options *const o = c->options;
    const int32_t points = o->num_points > 0 ? o->num_points : DEFAULT_POINTS;
    const uint64_t singles = 1 + (uint64_t)choice->num_items * (NUM_FORMATS - 1);
    c->units_total = (singles + 1 + singles / LANES) * (uint64_t)o->num_tokens +
                     ((uint64_t)points + 2) * (uint64_t)o->num_held;
    kv8_compare_row floor = KV8_COMPARE_ROW_INIT;
    KV8_TRY(measure_singles(choice, c, &floor));
    mix_list list = {0};
    kv8_status status = find_frontier(choice, c, &list);
    bool *const picked = take(list.num, sizeof *picked);
    double predicted_bytes = (double)INFINITY;
    if (status == KV8_OK && picked == NULL) status = fail_memory();
    if (status == KV8_OK) {
        const size_t predicted = predict(&list, c, &floor);
        if (predicted < list.num) predicted_bytes = (double)list.mixes[predicted].bytes;
        pick_points(&list, points, predicted, picked);
        status = keep_points(choice, &list, picked, &floor);
    }
    free(picked);
    list_free(&list);
    if (status == KV8_OK) status = measure_points(choice, c);
    if (status == KV8_OK) choice->chosen = settle(choice, o, predicted_bytes);
    return status;
}

kv8_status kv8_evaluate_choose(kv8_choice **out, kv8_model *model,
                               const kv8_choose_options *options) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(model, options);
    KV8_TAKE_STRUCT(kv8_choose_options, options);
    chooser c = {.model = model, .info = *kv8_model_facts(model), .options = options};
    KV8_TRY(check_choose(&c.info, options));
    kv8_choice *const choice = take(1, sizeof *choice);
    if (choice == NULL) return fail_memory();
    choice->num_layers = c.info.num_layers;
    choice->num_items = 2 * c.info.num_layers;
    choice->chosen = -1;
    choice->damages = take((size_t)choice->num_items * NUM_FORMATS, sizeof *choice->damages);
    const kv8_status status = choice->damages == NULL ? fail_memory() : choose(choice, &c);
    if (status != KV8_OK) {
        kv8_choice_destroy(choice);
        return status;
    }
    *out = choice;
    return KV8_OK;
}

void kv8_choice_destroy(kv8_choice *choice) {
    if (choice == NULL) return;
    free(choice->damages);
    free(choice->mixes);
    free(choice->dtypes);
    free(choice);
}

int32_t kv8_choice_num_mixes(const kv8_choice *choice) {
    return choice->num_mixes;
}

kv8_status kv8_choice_get_mix(const kv8_choice *choice, int32_t idx, kv8_mix *mix_out) {
    KV8_REQUIRE(choice, mix_out);
    if (idx < 0 || idx >= choice->num_mixes)
        return kv8_fail(KV8_ERR_INVALID, "mix %d of %d", idx, choice->num_mixes);
    KV8_WRITE_STRUCT(kv8_mix, mix_out, &choice->mixes[idx]);
    return KV8_OK;
}

int32_t kv8_choice_chosen(const kv8_choice *choice) {
    return choice->chosen;
}

double kv8_choice_damage(const kv8_choice *choice, int32_t layer, int kv, kv8_dtype dtype) {
    for (size_t f = 1; f < NUM_FORMATS; f++) {
        if (formats[f] == dtype && layer >= 0 && layer < choice->num_layers && (kv == 0 || kv == 1))
            return choice->damages[(size_t)(2 * layer + kv) * NUM_FORMATS + f].whole_kl;
    }
    return (double)NAN;
}
