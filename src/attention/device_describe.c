/* device_describe.c - what a run of a plan on a GPU does, in one line of text.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "device_plan.h"

/* Pages as the cache lays them out. */
static kv8_kernel_pages usual_pages(const kv8_attention_spec *spec, kv8_dtype dtype, int64_t dim) {
    const kv8_paged paged = {.stride_head = dim,
                             .stride_slot = dim * spec->num_kv_heads,
                             .stride_page = dim * spec->num_kv_heads * spec->page_size};
    return kv8_device_pages(spec, &paged, dtype);
}

/* *beside_out: of decode beside prefill, or NULL. */
static const kv8_device_choice *choose(const kv8_attention_device_plan *plan,
                                       const kv8_attention_args *args,
                                       const kv8_device_choice **beside_out) {
    const kv8_attention_spec *const spec = &plan->spec;
    if (args == NULL) {
        const kv8_kernel_pages k = usual_pages(spec, spec->k_dtype, spec->head_dim);
        const kv8_kernel_pages v = usual_pages(spec, spec->v_dtype, spec->v_head_dim);
        *beside_out = kv8_device_choose_beside(plan, 0, spec->max_batch, &k, &v);
        return kv8_device_choose(plan, 0, spec->max_batch, &k, &v);
    }
    const kv8_kernel_pages k = kv8_device_pages(spec, args->k, spec->k_dtype);
    const kv8_kernel_pages v = kv8_device_pages(spec, args->v, spec->v_dtype);
    *beside_out = kv8_device_choose_beside(plan, kv8_needs_of_args(args), args->batch, &k, &v);
    return kv8_device_choose(plan, kv8_needs_of_args(args), args->batch, &k, &v);
}

kv8_status kv8_attention_device_describe(const kv8_attention_device_plan *plan,
                                         const kv8_attention_args *given, char *text, size_t size) {
    KV8_REQUIRE(plan);
    if (size > 0) KV8_REQUIRE(text);
    kv8_attention_inputs inputs;
    if (given != NULL) {
        KV8_TRY(kv8_attention_read_args(&inputs, given));
        if (inputs.args.k == NULL || inputs.args.v == NULL)
            return kv8_fail(KV8_ERR_INVALID, "%s is NULL", inputs.args.k == NULL ? "k" : "v");
    }
    const kv8_device_choice *beside = NULL;
    const kv8_device_choice *const choice =
        choose(plan, given == NULL ? NULL : &inputs.args, &beside);
    if (choice == NULL)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "no kernel of the plan takes these args");
    const kv8_device_choice of_run = kv8_device_choice_of_run(
        plan, choice, given == NULL ? plan->spec.max_batch : inputs.args.batch);
    const kv8_device_choice *const c = &of_run;
    const char *const gpu = kv8_device_get_info(plan->device)->name, *const name = c->variant->name;
    const uint32_t blocks = c->launch.grid[0];
    const size_t bytes = plan->layout.size;
    char rest[160] = "";
    if (beside != NULL)
        snprintf(rest, sizeof rest, ", %s beside it for requests of up to %d rows",
                 beside->variant->name, plan->decode_rows);
    switch (c->variant->way) {
        case KV8_WAY_PREFILL:
            snprintf(text, size,
                     "%s on %s: %u blocks, items of %d packed rows, longest first, split over keys "
                     "where one would outlast the rest%s, workspace %zu bytes",
                     name, gpu, blocks, c->variant->block_rows, rest, bytes);
            break;
        case KV8_WAY_WIDE:
        case KV8_WAY_CLUSTER:
            snprintf(
                text, size,
                "%s on %s: clusters of %u blocks of %d warps, one for each KV head and %d packed "
                "rows, workspace %zu bytes",
                name, gpu, blocks, c->variant->num_warps, c->variant->block_rows, bytes);
            break;
        case KV8_WAY_WINDOW:
            snprintf(text, size,
                     "%s on %s: a block of %d warps for each request and %d KV heads, %d packed "
                     "rows at once, workspace %zu bytes",
                     name, gpu, c->variant->num_warps, c->decode.heads_per_block,
                     c->variant->block_rows, bytes);
            break;
        case KV8_WAY_BULK_MANY:
        case KV8_WAY_BULK:
        case KV8_WAY_ROWS:
            if (plan->spec.batch_invariant) {
                snprintf(text, size,
                         "%s on %s: up to %u blocks of %u warps, %d KV heads and %d packed rows "
                         "each, pieces of %d keys (batch invariant), workspace %zu bytes",
                         name, gpu, blocks, c->launch.block[0] / 32, c->decode.heads_per_block,
                         c->variant->block_rows, c->decode.piece_units * (int)KV8_DECODE_TOKENS,
                         bytes);
                break;
            }
            snprintf(text, size,
                     "%s on %s: up to %u blocks of %u warps, %d KV heads and %d packed rows each, "
                     "equal ranges of all keys in steps of %d, workspace %zu bytes",
                     name, gpu, blocks, c->launch.block[0] / 32, c->decode.heads_per_block,
                     c->variant->block_rows, (int)KV8_DECODE_TOKENS, bytes);
            break;
        default:
            snprintf(text, size, "%s on %s: a block per query row and head, workspace %zu bytes",
                     name, gpu, bytes);
    }
    return KV8_OK;
}
