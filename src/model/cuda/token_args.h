/* token_args.h - the arguments of the kernels that compute one whole token of gpt-oss, or a token
 * each of a few sequences, for C and CUDA. Every pointer is the device's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_TOKEN_ARGS_H
#define KV8_TOKEN_ARGS_H

#include <stdint.h>

/* What the kernels are built for: the shape of gpt-oss-20b and 120b. */
enum {
    KV8_TOKEN_HIDDEN = 2880, /* and the intermediate size of an expert */
    KV8_TOKEN_HEAD_DIM = 64,
    KV8_TOKEN_QO_HEADS = 64,
    KV8_TOKEN_KV_HEADS = 8,
    KV8_TOKEN_TOP_K = 4,
    KV8_TOKEN_MAX_EXPERTS = 128,
    KV8_TOKEN_MAX_LAYERS = 40,
    KV8_TOKEN_MIN_BLOCKS = 96, /* and the most: of them, one a multiprocessor */
    KV8_TOKEN_MAX_BLOCKS = 160,
    KV8_TOKEN_GRANULE = 16,     /* keys; a page holds whole granules */
    KV8_TOKEN_FEW_GRANULES = 9, /* a window of 128 keys, which need not begin with a granule */
    KV8_TOKEN_MIN_VOCAB = 8 * KV8_TOKEN_MAX_BLOCKS, /* a block has two stages of the head */

    KV8_TOKEN_WARPS = 8, /* that compute; of four more one copies, the others route or end */
    KV8_TOKEN_THREADS = 32 * KV8_TOKEN_WARPS + 128,
    KV8_TOKEN_STAGES = 8,
    KV8_TOKEN_STAGE_BYTES = 24576,
    KV8_TOKEN_RING_BYTES = KV8_TOKEN_STAGES * KV8_TOKEN_STAGE_BYTES,

    /* Of several tokens, each of another sequence; layers are an even number. */
    KV8_TOKENS_MAX = 8,
    KV8_TOKENS_WINDOWS = 2, /* that layers see, at most */
    KV8_TOKENS_STAGES = 6,
    KV8_TOKENS_RING_BYTES = KV8_TOKENS_STAGES * KV8_TOKEN_STAGE_BYTES,
    KV8_TOKENS_SHARED_BYTES = 84480 /* beside the ring */
};

/* One layer: its weights (those of experts as experts_args.h has them), and where the cache keeps
 * its K and V. */
typedef struct kv8_token_layer {
    const uint16_t *attention_norm, *mlp_norm; /* bf16 */
    const uint16_t *qkv, *o, *router;          /* f16 */
    const uint16_t *qkv_bias, *o_bias, *router_bias;
    const uint8_t *gate_up, *down;
    const float *sinks;                        /* [qo heads]; NULL = none */
    uint8_t *k, *v;                            /* [page, slot, kv head, dim] */
    uint8_t *k_rows, *v_rows;                  /* of int8: f16 scales [page, slot, kv head] */
    const float *k_scale, *v_scale;            /* [kv heads]; NULL = 1 */
    uint64_t *k_counters, *v_counters;         /* [kv heads, 2]: clips, NaN; NULL = not counted */
    int64_t k_stride_page, v_stride_page;      /* bytes */
    const int32_t *page_indptr, *page_indices; /* of the sequences */
    int32_t window_left;                       /* -1 = all */
    int32_t window;                            /* which of the model's: 0 or 1 */
} kv8_token_layer;

/* Words that blocks meet at, 128 bytes apart. */
enum { KV8_TOKEN_MEETINGS = 10, KV8_TOKEN_MEETING_WORDS = 32 };

typedef struct kv8_token_args {
    kv8_token_layer *layers;
    const uint16_t *embedding, *final_norm; /* bf16 */
    const uint16_t *head;                   /* f16 */
    const float *inv_freq;                  /* [head_dim / 2] */
    float *logits;                          /* [vocab_size] */
    int32_t *drawn; /* the host's: a token, the first id whose logit is not finite, that logit's
                       bits; NULL: none is drawn */
    /* Workspace, all 0 before the first token. */
    uint32_t *meetings;  /* [KV8_TOKEN_MEETINGS * KV8_TOKEN_MEETING_WORDS] */
    float *residual;     /* [3, hidden]: after attention; after the experts, two parts */
    float *qkv;          /* [qkv rows] */
    float *partials;     /* [blocks, qo heads, head dim] */
    float *partial_sums; /* [blocks, qo heads, 2]: maximum (log2), sum */
    float *attended;     /* [qo heads * head dim] */
    float *squares;      /* [blocks]: of the residual after attention */
    int64_t *router;     /* [num_experts]: sums over all layers, and how many there are of */
    uint16_t *gated;     /* f16 [top_k, hidden] */
    unsigned long long *draw_parts; /* [3 * blocks] */
    uint64_t draw_random;
    int32_t num_layers, num_experts, vocab_size, page_size;
    int32_t token_id, position;
    float eps, alpha, limit, rope_factor, draw_factor;
    int32_t padding;
} kv8_token_args;

/* Of tokens; arrays of workspace are all 0 before the first launch, but those of partials. */
typedef struct kv8_tokens_args {
    kv8_token_layer *layers;
    const uint16_t *embedding, *final_norm; /* bf16 */
    const uint16_t *head;                   /* f16 */
    const float *inv_freq;                  /* [head_dim / 2] */
    float *logits;                          /* [num_tokens, vocab_size] */
    uint32_t *meetings;                     /* [KV8_TOKEN_MEETINGS * KV8_TOKEN_MEETING_WORDS] */
    float *entering;         /* [max, hidden]: the residual stream that a layer begins with */
    float *residual;         /* [max, hidden]: after attention */
    float *last;             /* [max, hidden]: after all layers */
    float *entering_squares; /* [max, blocks]: sums of a block's rows */
    float *squares;          /* [max, blocks]: after attention */
    float *last_squares;     /* [max, blocks] */
    float *qkv;              /* [max, qkv rows] */
    float *partials;         /* [blocks, qo heads, head dim] */
    float *partial_sums;     /* [blocks, qo heads, 2]: maximum (log2), sum */
    uint32_t *attended;      /* f16 [max, qo heads * head dim] */
    int64_t *router;         /* [max, KV8_TOKEN_MAX_EXPERTS]: as of one token */
    uint32_t *gated;         /* f16 [max, top_k, hidden] */
    float *down;             /* [max, top_k, hidden]: weighted */
    int32_t num_layers, num_experts, vocab_size, page_size, num_tokens;
    float eps, alpha, limit, rope_factor;
    int32_t token_ids[KV8_TOKENS_MAX], positions[KV8_TOKENS_MAX];
    /* By window: the first of the blocks that attend for a token, and behind the last token's. */
    uint8_t first_block[KV8_TOKENS_WINDOWS][KV8_TOKENS_MAX + 1];
    int32_t window_left[KV8_TOKENS_WINDOWS];
} kv8_tokens_args;

#endif
