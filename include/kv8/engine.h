/* kv8/engine.h - the step loop above a model: requests go in, tokens come out. How a cache stores,
 * how a token is drawn, which rows a step takes, and a thread that steps.
 *
 * It knows neither text nor files: a caller submits token ids, steps the engine until its requests
 * have ended, and reads what each step gave. A kv8_service does the stepping on a thread of its own
 * and takes requests from any other. No token depends on the time, nor, of a model that is
 * batch_invariant, on who else runs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ENGINE_H
#define KV8_ENGINE_H

#include <kv8/model.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- how a cache stores --- */

/* One way to store the cache: dtypes by layer kind, for K and V apart. */
typedef struct kv8_kv_setting {
    char name[64]; /* as the user wrote it */
    kv8_dtype full_k, full_v, sliding_k, sliding_v;
    /* [num_layers, 2]: K's and V's dtype of every layer, in place of the four; NULL = by kind.
     * Borrowed. */
    const kv8_dtype *layers;
} kv8_kv_setting;

/* Parses "e4m3" (all layers), "e4m3@full" or "e4m3@sliding" (the other kind stays bf16),
 * "k=int8,v=e4m3" (and "k=int8,v=e4m3@full"). */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_parse(const char *text,
                                                      kv8_kv_setting *setting_out);
/* Splits a list: "bf16,e4m3,k=int8,v=e4m3@full" has three settings. More than capacity, none, or
 * an empty one is KV8_ERR_INVALID. */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_parse_list(const char *text,
                                                           kv8_kv_setting *settings_out,
                                                           int32_t capacity, int32_t *num_out);

typedef struct kv8_kv_cache_options {
    size_t struct_size;
    int32_t max_seqs;    /* 0 = 1 */
    int32_t max_seq_len; /* tokens of one sequence, >= 1 */
    int64_t num_tokens;  /* of all sequences together; 0 = max_seqs * max_seq_len */
    /* Most tokens of a step, of all sequences together, where an engine takes the steps or there is
     * one sequence: layers with a window then have pages for the windows and a step.
     * 0 = pages for num_tokens in every layer. */
    int32_t step_tokens;
    /* [num_layers] arrays of num_kv_heads, NULL = 1: e4m3 scales (absmax / 448), used by the 8-bit
     * float dtypes only. e4m3fnuz, whose codes are worth half, takes them twice. */
    const float *const *k_scale;
    const float *const *v_scale;
    kv8_dtype scale_dtype;  /* that the scales are for: E4M3 (as NONE), E4M3FNUZ or E5M2. Scales of
                             * another format than a layer's are KV8_ERR_UNSUPPORTED, but for
                             * e4m3's in the other two. */
    int32_t share_prefixes; /* as in kv8_engine_options. 1: with step_tokens, layers with a window
                             * have pages for an eighth of num_tokens more, so that prefixes of
                             * other requests are found there too */
} kv8_kv_cache_options;
#define KV8_KV_CACHE_OPTIONS_INIT KV8_SIZED(kv8_kv_cache_options)

/* A cache for this model that stores as the setting says. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_cache_create(kv8_cache **out,
                                                             const kv8_model *model,
                                                             const kv8_kv_setting *setting,
                                                             const kv8_kv_cache_options *options);

/* The largest num_tokens, max_seqs * max_seq_len at most, with which the pages of that cache take
 * no more than `bytes`; 0 = none does. */
KV8_API KV8_NODISCARD kv8_status kv8_kv_setting_count_tokens(const kv8_model *model,
                                                             const kv8_kv_setting *setting,
                                                             const kv8_kv_cache_options *options,
                                                             uint64_t bytes, int64_t *tokens_out);

/* --- how a token is drawn --- */

/* The steps apply in the order of the fields. A 0 leaves a step out.
 *
 *   l_i    the model's logits, f32
 *   bias   l_i + bias of i
 *   repetition  of ids in the prompt or generated: l_i > 0 ? l_i / r : l_i * r
 *   frequency   of generated ids: l_i - f * times generated
 *   presence    of generated ids: l_i - p
 *   temperature  T = 0: the id of the largest l, the lowest on ties, and nothing below applies.
 *                Else every id has the weight floor(2^36 * exp((l_i - largest l) * f)), f being
 *                1 / T, at most the largest float
 *   top_k  the k largest stay, by l, then by lower id
 *   top_p  in that order, an id stays while less than floor(top_p * sum) of weight is before it;
 *          the first always stays
 *   min_p  ids of weight floor(2^36 * min_p) and more stay
 *   draw   the first id, by id, at which the running sum of weights exceeds
 *          floor(sum * u / 2^64), u the first two words of Philox4x32-10 with the key `seed` and
 *          the counter (position, 0, stream)
 *
 * Weights are whole numbers, so that their sums have no order; exp is v_exp of
 * src/base/simd/scalar.h, all else single f32 operations, each rounded. Equal logits therefore give
 * equal tokens on every machine, whatever else runs. */
typedef struct kv8_sampling {
    size_t struct_size;
    const int32_t *bias_ids; /* [num_bias], each once */
    const float *bias;       /* below +inf; -inf forbids an id */
    int32_t num_bias;
    float repetition_penalty; /* > 0; 1 = none */
    float frequency_penalty, presence_penalty;
    float temperature;  /* >= 0 */
    int32_t top_k;      /* >= 0 */
    float top_p, min_p; /* 0 to 1 */
    uint64_t seed;      /* equal seeds draw equal numbers */
    uint64_t stream;    /* tells requests of one seed apart */
} kv8_sampling;
#define KV8_SAMPLING_INIT KV8_SIZED(kv8_sampling)

typedef struct kv8_logprob {
    int32_t token;
    float logprob; /* ln of the probability under the model's own logits */
} kv8_logprob;
/* --- the engine --- */

typedef struct kv8_engine kv8_engine;

typedef struct kv8_engine_options {
    size_t struct_size;
    const kv8_allocator *allocator;
    int32_t max_requests;   /* at once, those at rest too; 0 = 16 */
    int32_t step_tokens;    /* most rows of a step, at most the model's; 0 = the model's */
    int32_t logit_rows;     /* rows of logits of a step, >= 1; 0 = the model's max_step_seqs, on a
                             * GPU also what takes 256 MiB */
    float *logits;          /* [logit_rows, vocab_size] to work in; NULL = the engine's own */
    int32_t max_waiting;    /* requests beyond max_requests that wait for their turn */
    int32_t share_prefixes; /* 1: a prompt's pages are taken from any request, running or ended,
                             * that began with the same tokens */
    int64_t patience_ns;    /* of waiting that one level of priority is worth; 0 = one second */
    int32_t paced;          /* 1: a step takes so many tokens of prompts that beside one prompt 32
                             * or more who decode wait less than twice as long as without, by the
                             * times of the steps before; beside several, or fewer, longer */
} kv8_engine_options;
#define KV8_ENGINE_OPTIONS_INIT KV8_SIZED(kv8_engine_options)

/* Model and cache are borrowed; the engine makes and destroys its own sequences in the cache. One
 * thread at a time per engine, and per model. *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_create(kv8_engine **out, kv8_model *model,
                                                   kv8_cache *cache,
                                                   const kv8_engine_options *options);
/* Its requests' sequences go with it. */
KV8_API void kv8_engine_destroy(kv8_engine *engine);

/* Sees rows of logits [num_rows, vocab_size] of a request; row i is what follows token first + i.
 * Valid during the call. */
typedef void (*kv8_logits_visitor)(void *cookie, int32_t first, int32_t num_rows,
                                   const float *logits);

/* Sets bit i % 32 of words[i / 32] for every id i that may come next; words [(vocab_size + 31) /
 * 32] are 0 before. Called once before each draw, by one thread at a time for one request, by
 * several for several. */
typedef void (*kv8_token_mask)(void *cookie, uint32_t *words);

typedef struct kv8_request {
    size_t struct_size;
    const int32_t *token_ids; /* [num_tokens], at least one; copied, as all arrays are */
    int32_t num_tokens;
    int32_t max_tokens;           /* to generate; 0 = the request ends when its tokens are in */
    const kv8_sampling *sampling; /* NULL = greedy */
    const int32_t *stop_ids;      /* end the request, besides the model's end-of-text ids */
    int32_t num_stop_ids;
    int32_t ignore_eos;       /* 1: the model's ids do not end it */
    int32_t num_logprobs;     /* n >= 1: events have the token's logprob and the n likeliest */
    int32_t max_chunk;        /* most tokens of this request in one step; 0 = what the step holds */
    int32_t hold;             /* 1: ended, it rests with its tokens and pages until cancelled */
    uint64_t parent;          /* a request at rest, whose tokens come before these; its pages are
                               * shared. 0 = none */
    kv8_logits_visitor visit; /* sees the logits of all its rows; NULL = nobody */
    void *visit_cookie;
    int32_t priority;        /* lower goes first; 0 = usual */
    int32_t min_tokens;      /* generated before an id that would end the request can be drawn */
    uint64_t deadline_ns;    /* after submission: a request that has not begun by then expires;
                              * 0 = it waits as long as it takes */
    uint64_t cache_salt;     /* pages are shared among requests of one salt alone */
    int32_t prompt_logprobs; /* n >= 1: events have the logprobs of prompt tokens, and the n
                              * likeliest in place of each; no page of the prompt is then taken
                              * from others */
    kv8_token_mask mask;     /* NULL = every id may come */
    void *mask_cookie;
    void *user; /* handed back in events */
} kv8_request;
#define KV8_REQUEST_INIT KV8_SIZED(kv8_request)

/* Ids are 1, 2, ..: the order of submission. KV8_ERR_FULL when max_requests + max_waiting are
 * alive, or when the cache has no sequence left for a child; KV8_ERR_INVALID names what could not
 * run even alone: an id, a length, more pages than there are. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_submit(kv8_engine *engine, const kv8_request *request,
                                                   uint64_t *id_out);
/* Ends a request, or one at rest, and gives its pages back. There is no event. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_cancel(kv8_engine *engine, uint64_t id);

typedef enum kv8_finish {
    KV8_FINISH_NONE = 0, /* goes on */
    KV8_FINISH_EOS,      /* an end-of-text id of the model */
    KV8_FINISH_STOP,     /* one of stop_ids */
    KV8_FINISH_LENGTH,   /* max_tokens */
    KV8_FINISH_FAILED,   /* logits that are not finite, a mask without an id, a step that failed;
                          * `message` says which */
    KV8_FINISH_EXPIRED,  /* deadline_ns came before it began */
    KV8_FINISH_CANCELLED /* by kv8_service_cancel or kv8_service_stop */
} kv8_finish;

/* What a step did for one request. Borrowed until the engine's next call. */
typedef struct kv8_event {
    uint64_t request;
    int32_t num_taken;    /* of its tokens in this step */
    int32_t num_computed; /* of its tokens so far: what the cache holds */
    int32_t token;        /* generated in this step, stop ids included; -1 = none */
    kv8_finish finish;
    const char *message;    /* FAILED */
    float logprob;          /* with num_logprobs */
    const kv8_logprob *top; /* [num_logprobs] */
    void *user;             /* of the request */
    int32_t num_cached;     /* tokens of its prompt that were found in other requests' pages */
    /* With prompt_logprobs: of tokens prompt_first .. prompt_first + num_prompt_logprobs - 1. The
     * first token of all has none: nothing comes before it. */
    int32_t prompt_first, num_prompt_logprobs;
    const float *prompt_logprob;   /* [num_prompt_logprobs] */
    const kv8_logprob *prompt_top; /* [num_prompt_logprobs, prompt_logprobs] */
    uint64_t step_ns;              /* since this step began; 0 = the request was in none */
} kv8_event;

/* One step: of every running request the token it generated last, then tokens of prompts under way,
 * and then requests that wait and find room, all by priority and submission, as the step has room.
 * When pages run out, the last of that order gives its own back and waits; it keeps its tokens, and
 * they are read again. *num_events_out requests have an event; 0 = nothing was left to do. On
 * failure no request has changed; KV8_ERR_FULL: requests at rest hold what the others need. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_step(kv8_engine *engine, int32_t *num_events_out);
KV8_API const kv8_event *kv8_engine_event(const kv8_engine *engine, int32_t event_idx);

/* Since create, and now. */
typedef struct kv8_engine_stats {
    size_t struct_size;
    int32_t num_running, num_waiting, num_resting; /* requests; preempted ones wait */
    int32_t pages_total, pages_used, pages_shared; /* of all groups; used: a sequence holds it;
                                                    * shared: several do */
    uint64_t num_steps, num_preemptions;
    uint64_t prefix_queries, prefix_hits; /* prompt tokens looked for in other requests' pages, and
                                           * found there */
    uint64_t prompt_tokens, generated_tokens; /* taken from prompts, found ones not counted;
                                               * drawn */
    /* Of all steps; a service's model_ns on a GPU has the telling of events in it. */
    uint64_t schedule_ns, model_ns, sample_ns;
    uint64_t kv_clips, kv_nans; /* of the cache's counters, all layers and heads */
    uint64_t read_bytes; /* weights and KV that the steps had to read, each once a step; experts as
                          * many as choices by chance come to */
} kv8_engine_stats;
#define KV8_ENGINE_STATS_INIT KV8_SIZED(kv8_engine_stats)
/* *stats_out begins as KV8_ENGINE_STATS_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_get_stats(const kv8_engine *engine,
                                                      kv8_engine_stats *stats_out);

/* Where the pool's pages are held: those of all groups in turn, cut into cells of equal size. */
enum { KV8_PAGE_CELLS = 240 };
typedef struct kv8_page_map {
    size_t struct_size;
    int32_t num_cells; /* at most as many as there are pages */
    int32_t pages[KV8_PAGE_CELLS], used[KV8_PAGE_CELLS], shared[KV8_PAGE_CELLS]; /* of each cell */
} kv8_page_map;
#define KV8_PAGE_MAP_INIT KV8_SIZED(kv8_page_map)
/* *map_out begins as KV8_PAGE_MAP_INIT. */
KV8_API KV8_NODISCARD kv8_status kv8_engine_get_page_map(const kv8_engine *engine,
                                                         kv8_page_map *map_out);

/* --- the service: a thread that steps an engine --- */

typedef struct kv8_service kv8_service;

typedef struct kv8_service_options {
    size_t struct_size;
    const kv8_allocator *allocator;
    /* Every event, on the service's thread, those of one request in order; *event is valid during
     * the call. It may submit, cancel and read stats, and must not wait: a GPU computes the next
     * step meanwhile, but no other, and the host none. */
    void (*on_event)(void *cookie, const kv8_event *event);
    void *cookie;
} kv8_service_options;
#define KV8_SERVICE_OPTIONS_INIT KV8_SIZED(kv8_service_options)

/* The engine is the service's until stop: nobody else calls it, its model or its cache, but for
 * what kv8_service_call does on its thread, which takes signals as those of a pool do
 * (kv8/machine.h). *out is NULL on failure. */
KV8_API KV8_NODISCARD kv8_status kv8_service_start(kv8_service **out, kv8_engine *engine,
                                                   const kv8_service_options *options);
/* Cancels what is left, with events, and ends the thread. Of no other call at the same time, nor
 * from on_event. NULL is fine. */
KV8_API void kv8_service_stop(kv8_service *service);

/* The calls below are for any thread. */

/* As kv8_engine_submit, without `hold` and `parent`, which are KV8_ERR_UNSUPPORTED. A request that
 * was taken gets exactly one event whose finish is not NONE, its last; that may be told before this
 * returns. KV8_ERR_CANCELLED when the service drains. */
KV8_API KV8_NODISCARD kv8_status kv8_service_submit(kv8_service *service,
                                                    const kv8_request *request, uint64_t *id_out);
/* Ends a request after the step under way, with KV8_FINISH_CANCELLED, unless that step ends it.
 * KV8_ERR_NOT_FOUND when it has ended. */
KV8_API KV8_NODISCARD kv8_status kv8_service_cancel(kv8_service *service, uint64_t id);
/* As kv8_engine_get_stats, of the last step that has ended: it waits for none. What is asked for
 * behind an event has that event in it. While steps run, kv_clips and kv_nans are up to a second
 * old, and so is the map. */
KV8_API KV8_NODISCARD kv8_status kv8_service_get_stats(kv8_service *service,
                                                       kv8_engine_stats *stats_out);
KV8_API KV8_NODISCARD kv8_status kv8_service_get_page_map(kv8_service *service,
                                                          kv8_page_map *map_out);
/* Has `call` run on the service's thread after the step under way, before the next, and returns
 * when it has: between steps the engine's model may be given an observer, say. From on_event it is
 * KV8_ERR_INVALID. */
KV8_API KV8_NODISCARD kv8_status kv8_service_call(kv8_service *service, void (*call)(void *cookie),
                                                  void *cookie);
/* Takes no more requests and returns when those it has have ended. Not from on_event. NULL is
 * fine. */
KV8_API void kv8_service_drain(kv8_service *service);

#ifdef __cplusplus
}
#endif
#endif
