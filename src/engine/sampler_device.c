/* sampler_device.c - the draw of tokens on a GPU, the host's part: settings in the kernel's terms,
 * one launch, which reads them and writes what it found in page-locked memory of the host, which
 * every GPU can. What else it does is in cuda/sampler.cuh.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "sampler_device.h"

#include <string.h>

#include "device_impl.h"
#include "sampler_args.h"

/* What goes over, in host and in device memory. */
typedef struct inputs {
    uint32_t *masks;          /* [max_rows, mask_words] */
    kv8_draw_change *changes; /* [max_changes] */
} inputs;

/* A kernel, and how it is launched for one row. */
typedef struct draw_form {
    kv8_kernel kernel;
    kv8_launch launch; /* grid 0: not to be had */
    int32_t warp_ids;
} draw_form;

struct kv8_device_sampler {
    const kv8_allocator *allocator;
    kv8_device *device;
    kv8_stream *stream;
    kv8_threads *threads;
    int32_t vocab_size, max_rows, max_changes, mask_words;
    draw_form by_cluster, by_block; /* of a row */
    int32_t *change_of; /* [threads, vocab_size] idx + 1 among the row's changes; 0 between rows */
    inputs host, on_device;
    kv8_draw_row *rows;                   /* [max_rows], the host's, as drawn and tops */
    kv8_drawn_row *drawn;                 /* [max_rows] */
    int32_t *step_drawn;                  /* of kv8_step_draw */
    kv8_drawn_top (*tops)[KV8_DRAW_TOPS]; /* [max_rows] */
};

/* --- life --- */

static size_t mask_bytes(const kv8_device_sampler *s, int32_t num) {
    return (size_t)num * (size_t)s->mask_words * sizeof(uint32_t);
}

static size_t change_of_count(const kv8_device_sampler *s) {
    return (size_t)kv8_threads_count(s->threads) * (size_t)s->vocab_size;
}

static int32_t warp_ids_of(int32_t vocab_size, int32_t num_blocks) {
    const int64_t warps = (int64_t)num_blocks * KV8_DRAW_WARPS;
    return (int32_t)(kv8_ceil_div(kv8_ceil_div(vocab_size, warps), 32) * 32);
}

/* Where a cluster's shared memory holds a row. */
static kv8_status get_by_cluster(draw_form *form, kv8_device *device, int32_t vocab_size) {
    static const char name[] = "kv8_draw_cluster_f32__sm90";
    const int32_t ids = warp_ids_of(vocab_size, KV8_DRAW_BLOCKS);
    const size_t held = (size_t)ids * KV8_DRAW_WARPS * sizeof(float);
    const size_t room = kv8_device_get_info(device)->shared_bytes_per_block;
    if (!kv8_kernel_exists(device, name) || held + KV8_DRAW_STATIC_BYTES > room) return KV8_OK;
    form->warp_ids = ids;
    form->launch = (kv8_launch){.grid = {KV8_DRAW_BLOCKS},
                                .block = {KV8_DRAW_THREADS},
                                .cluster = {KV8_DRAW_BLOCKS},
                                .dynamic_bytes = held};
    return kv8_kernel_get(&form->kernel, device, name, sizeof(kv8_draw_args), held);
}
static kv8_status get_by_block(draw_form *form, kv8_device *device, int32_t vocab_size) {
    form->warp_ids = warp_ids_of(vocab_size, 1);
    form->launch = (kv8_launch){.grid = {1}, .block = {KV8_DRAW_THREADS}};
    return kv8_kernel_get(&form->kernel, device, "kv8_draw_f32__sm80", sizeof(kv8_draw_args), 0);
}

/* A row to each cluster; to each block where no cluster holds it, and where so many rows keep
 * nearly all places for blocks busy, of which nobody waits for another there. */
static const draw_form *choose_form(const kv8_device_sampler *s, int32_t num) {
    enum { BLOCKS_PER_SM = 2 };
    const int64_t places = (int64_t)BLOCKS_PER_SM * kv8_device_get_info(s->device)->num_sms;
    const bool are_busy = 8 * (int64_t)num > 7 * kv8_ceil_div(num, places) * places;
    return are_busy || s->by_cluster.launch.grid[0] == 0 ? &s->by_block : &s->by_cluster;
}

/* Are all rows drawn from all ids, without a cut? */
static bool are_uncut(const kv8_draw_row *rows, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        if (rows[i].top_k > 0 || rows[i].top_p != 0 || rows[i].least != 0) return false;
    }
    return true;
}
/* From the logits as they are, and nothing else wanted? */
static bool are_plain(const kv8_draw_row *rows, int32_t num) {
    for (int32_t i = 0; i < num; i++) {
        if (rows[i].num_changes > 0 || rows[i].mask >= 0 || rows[i].num_tops >= 0) return false;
    }
    return true;
}

static kv8_status take_memory(kv8_device_sampler *s) {
    const size_t rows = (size_t)s->max_rows;
    const struct {
        void **host, **device;
        size_t bytes;
    } arrays[] = {
        {(void **)&s->host.masks, (void **)&s->on_device.masks, mask_bytes(s, s->max_rows)},
        {(void **)&s->host.changes, (void **)&s->on_device.changes,
         (size_t)s->max_changes * sizeof *s->host.changes},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        KV8_TRY(kv8_device_alloc_host(s->device, arrays[i].bytes, arrays[i].host));
        KV8_TRY(kv8_device_alloc(s->device, arrays[i].bytes, arrays[i].device));
    }
    void *memory = NULL;
    KV8_TRY(kv8_device_alloc_host(s->device, rows * sizeof *s->rows, &memory));
    s->rows = memory;
    KV8_TRY(kv8_device_alloc_host(s->device, 3 * sizeof *s->step_drawn, &memory));
    s->step_drawn = memory;
    KV8_TRY(kv8_device_alloc_host(s->device, rows * sizeof *s->drawn, &memory));
    s->drawn = memory;
    KV8_TRY(kv8_device_alloc_host(s->device, rows * sizeof *s->tops, &memory));
    s->tops = memory;
    KV8_TRY(kv8_alloc(s->allocator, change_of_count(s), sizeof *s->change_of, "sampler's changes",
                      &memory));
    s->change_of = memory;
    return KV8_OK;
}

kv8_status kv8_device_sampler_create(kv8_device_sampler **out, kv8_device *device,
                                     kv8_stream *stream, kv8_threads *threads, int32_t vocab_size,
                                     int32_t max_rows, int32_t max_changes,
                                     const kv8_allocator *allocator) {
    *out = NULL;
    void *memory = NULL;
    KV8_TRY(kv8_alloc(allocator, 1, sizeof(kv8_device_sampler), "sampler on a GPU", &memory));
    kv8_device_sampler *const s = memory;
    s->allocator = allocator;
    s->device = device;
    s->stream = stream;
    s->threads = threads;
    s->vocab_size = vocab_size;
    s->max_rows = max_rows;
    s->max_changes = max_changes;
    s->mask_words = (vocab_size + 31) / 32;
    kv8_status status;
    KV8_TRY_GOTO(get_by_cluster(&s->by_cluster, device, vocab_size));
    KV8_TRY_GOTO(get_by_block(&s->by_block, device, vocab_size));
    KV8_TRY_GOTO(take_memory(s));
    *out = s;
    return KV8_OK;
fail:
    kv8_device_sampler_destroy(s);
    return status;
}

void kv8_device_sampler_destroy(kv8_device_sampler *s) {
    if (s == NULL) return;
    void *const host[] = {s->rows,         s->step_drawn, s->host.masks,
                          s->host.changes, s->drawn,      s->tops};
    void *const device[] = {s->on_device.masks, s->on_device.changes};
    for (size_t i = 0; i < sizeof host / sizeof host[0]; i++)
        kv8_device_free_host(s->device, host[i]);
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        kv8_device_free(s->device, device[i]);
    kv8_release(s->allocator, s->change_of, change_of_count(s), sizeof *s->change_of);
    kv8_release(s->allocator, s, 1, sizeof *s);
}

uint32_t *kv8_device_sampler_mask(const kv8_device_sampler *sampler, int32_t slot) {
    return sampler->host.masks + (size_t)slot * (size_t)sampler->mask_words;
}

/* --- a row in the kernel's terms --- */

int64_t kv8_device_sampler_changes(const kv8_device_sampler *sampler, const kv8_sampling *sampling,
                                   int32_t num_tokens) {
    const int64_t history = kv8_sampling_penalises(sampling) ? num_tokens : 0;
    return kv8_min_i64(history + sampling->num_bias, sampler->vocab_size);
}

bool kv8_device_sampler_takes(const kv8_device_sampler *sampler, int32_t num, int64_t num_changes) {
    return num <= sampler->max_rows && num_changes <= sampler->max_changes;
}

/* A row's changes while they are listed. */
typedef struct change_list {
    kv8_draw_change *changes;
    int32_t *change_of, num;
} change_list;

/* The row's entry for an id. */
static kv8_draw_change *change_of(change_list *list, int32_t id) {
    if (list->change_of[id] == 0) {
        list->changes[list->num] = (kv8_draw_change){.id = id};
        list->change_of[id] = ++list->num;
    }
    return &list->changes[list->change_of[id] - 1];
}

static void list_changes(change_list *list, const kv8_draw *draw) {
    const kv8_sampling *const sampling = draw->sampling;
    const kv8_history *const history = &draw->history;
    for (int32_t i = 0; i < sampling->num_bias; i++)
        change_of(list, sampling->bias_ids[i])->bias += sampling->bias[i];
    const int32_t num = kv8_sampling_penalises(sampling) ? history->num_tokens : 0;
    for (int32_t i = 0; i < num; i++) {
        kv8_draw_change *const change = change_of(list, history->token_ids[i]);
        if (i < history->num_prompt)
            change->count = KV8_SEEN_IN_PROMPT;
        else
            change->count = change->count == KV8_SEEN_IN_PROMPT ? 1 : change->count + 1;
    }
    for (int32_t i = 0; i < list->num; i++) list->change_of[list->changes[i].id] = 0;
}

static kv8_draw_row row_of(const kv8_draw *draw) {
    const kv8_sampling *const s = draw->sampling;
    return (kv8_draw_row){.random = kv8_sampling_random(s, draw->history.num_tokens),
                          .top_p = kv8_sampling_top_p(s),
                          .least = kv8_sampling_least(s),
                          .factor = kv8_sampling_factor(s),
                          .repetition = s->repetition_penalty,
                          .frequency = s->frequency_penalty,
                          .presence = s->presence_penalty,
                          .top_k = s->top_k,
                          .mask = draw->mask,
                          .token = draw->token,
                          .num_tops = draw->num_logprobs > 0 ? draw->num_logprobs : -1};
}

/* --- a run --- */

typedef struct listing {
    const kv8_device_sampler *sampler;
    const kv8_draw *draws;
} listing;

static void list_row(void *cookie, size_t idx, int32_t thread_idx) {
    const listing *const l = cookie;
    const kv8_device_sampler *const s = l->sampler;
    kv8_draw_row *const row = &s->rows[idx];
    change_list list = {s->host.changes + row->first_change,
                        s->change_of + (size_t)thread_idx * (size_t)s->vocab_size, 0};
    list_changes(&list, &l->draws[idx]);
    row->num_changes = list.num;
}

/* The rows' changes, one row's behind another's; how many. Each row has room for all that it may
 * have until they are closed up. */
static int32_t list_all_changes(kv8_device_sampler *s, const kv8_draw *draws, int32_t num) {
    enum { MIN_PARALLEL = 1 << 14 }; /* changes that one thread lists sooner than others wake */
    listing l = {s, draws};
    int64_t room = 0;
    for (int32_t i = 0; i < num; i++) {
        s->rows[i].first_change = (int32_t)room;
        room += kv8_device_sampler_changes(s, draws[i].sampling, draws[i].history.num_tokens);
    }
    if (room > 0)
        kv8_threads_run(room < MIN_PARALLEL ? NULL : s->threads, (size_t)num, list_row, &l);
    int32_t end = 0;
    for (int32_t i = 0; i < num && room > 0; i++) {
        kv8_draw_row *const row = &s->rows[i];
        memmove(s->host.changes + end, s->host.changes + row->first_change,
                (size_t)row->num_changes * sizeof *s->host.changes);
        row->first_change = end;
        end += row->num_changes;
    }
    return end;
}

/* Rows to where the kernel reads them; as many masks and changes over as they name. */
static kv8_status send(kv8_device_sampler *s, const kv8_draw *draws, int32_t num) {
    int32_t num_masks = 0;
    for (int32_t i = 0; i < num; i++) {
        s->rows[i] = row_of(&draws[i]);
        num_masks = draws[i].mask >= num_masks ? draws[i].mask + 1 : num_masks;
    }
    const int32_t num_changes = list_all_changes(s, draws, num);
    if (num_masks > 0)
        KV8_TRY(kv8_stream_copy(s->stream, s->on_device.masks, s->host.masks,
                                mask_bytes(s, num_masks)));
    if (num_changes == 0) return KV8_OK;
    return kv8_stream_copy(s->stream, s->on_device.changes, s->host.changes,
                           (size_t)num_changes * sizeof *s->host.changes);
}

_Static_assert((int)KV8_DRAW_PIECE == (int)KV8_MAXIMUM_IDS, "maxima as the model has them");
/* Maxima spare a block the first of two looks at a row's logits, so that of plain rows any number
 * takes blocks; rows that are cut need that look. */
static kv8_status launch(kv8_device_sampler *s, float *logits, const float *maxima, int32_t num) {
    const bool by_maxima = maxima != NULL && are_uncut(s->rows, num);
    const draw_form *const form =
        by_maxima && are_plain(s->rows, num) ? &s->by_block : choose_form(s, num);
    const kv8_draw_args args = {.logits = logits,
                                .maxima = by_maxima ? maxima : NULL,
                                .rows = s->rows,
                                .changes = s->on_device.changes,
                                .masks = s->on_device.masks,
                                .drawn = s->drawn,
                                .tops = s->tops,
                                .vocab_size = s->vocab_size,
                                .warp_ids = form->warp_ids};
    kv8_launch launch = form->launch;
    launch.overlaps_previous = true;
    launch.grid[0] *= (uint32_t)num;
    return kv8_kernel_launch(&form->kernel, s->stream, &launch, &args);
}

static kv8_drawn take_row(const kv8_device_sampler *s, int32_t idx, const kv8_draw *draw,
                          kv8_logprob *tops) {
    const kv8_drawn_row *const row = &s->drawn[idx];
    const kv8_drawn_top *const found = s->tops[idx];
    kv8_drawn drawn = {.token = row->token, .bad_id = row->bad_id, .bad = row->bad};
    if (draw->num_logprobs == 0 || row->bad_id >= 0) return drawn;
    const float lse = kv8_sampler_lse(row->high, row->sum);
    drawn.logprob = row->logit - lse;
    for (int32_t i = 0; i < draw->num_logprobs; i++)
        tops[i] = (kv8_logprob){found[i].id, found[i].logit - lse};
    return drawn;
}

kv8_status kv8_device_sampler_begin(kv8_device_sampler *s, float *logits, const float *maxima,
                                    const kv8_draw *draws, int32_t num) {
    KV8_TRY(send(s, draws, num));
    return launch(s, logits, maxima, num);
}

kv8_status kv8_device_sampler_end(kv8_device_sampler *s, const kv8_draw *draws, int32_t num,
                                  kv8_drawn *drawn_out, kv8_logprob *tops_out,
                                  int32_t tops_stride) {
    KV8_TRY(kv8_stream_synchronize(s->stream));
    for (int32_t i = 0; i < num; i++)
        drawn_out[i] = take_row(s, i, &draws[i], tops_out + (size_t)i * (size_t)tops_stride);
    return KV8_OK;
}

/* --- a draw of the step --- */

bool kv8_device_sampler_simplify(const kv8_device_sampler *s, const kv8_draw *draw,
                                 kv8_step_draw *out) {
    const kv8_draw_row row = row_of(draw);
    if (!are_uncut(&row, 1) || !are_plain(&row, 1) || row.token >= 0 ||
        draw->sampling->num_bias > 0 || kv8_sampling_penalises(draw->sampling))
        return false;
    *out = (kv8_step_draw){row.random, row.factor, s->step_drawn};
    return true;
}

kv8_status kv8_device_sampler_take(const kv8_device_sampler *s, kv8_drawn *drawn_out) {
    KV8_TRY(kv8_stream_synchronize(s->stream));
    *drawn_out = (kv8_drawn){.token = s->step_drawn[0], .bad_id = s->step_drawn[1]};
    memcpy(&drawn_out->bad, &s->step_drawn[2], sizeof drawn_out->bad);
    return KV8_OK;
}
