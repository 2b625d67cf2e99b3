/* device_ops.c - the set of kernels on one device. Their launches are device_rows.c and
 * device_linear.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device_ops.h"

#include "device_ops_state.h"
#include "rowwise_args.h"

/* --- the set --- */

static kv8_status get_kernels(kv8_device_ops *ops, kv8_device *device) {
    const struct {
        kv8_kernel *kernel;
        const char *name;
        size_t args_bytes;
    } wanted[] = {
        {&ops->embed, "kv8_embed_bf16__sm80", sizeof(kv8_embed_args)},
        {&ops->gather, "kv8_gather_rows__sm80", sizeof(kv8_gather_args)},
        {&ops->rmsnorm, "kv8_rmsnorm_f32__sm80", sizeof(kv8_rmsnorm_args)},
        {&ops->rope_angles, "kv8_rope_angles__sm80", sizeof(kv8_rope_angles_args)},
        {&ops->rope_bf16, "kv8_rope_bf16__sm80", sizeof(kv8_rope_args)},
        {&ops->rope_f32, "kv8_rope_f32__sm80", sizeof(kv8_rope_args)},
        {&ops->to_f16, "kv8_to_f16_bf16__sm80", sizeof(kv8_to_f16_args)},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        KV8_TRY(kv8_kernel_get(wanted[i].kernel, device, wanted[i].name, wanted[i].args_bytes, 0));
    return kv8_linear_kernels_get(&ops->linear, device);
}

kv8_status kv8_device_ops_create(kv8_device_ops **out, kv8_device *device) {
    KV8_REQUIRE(out);
    *out = NULL;
    KV8_REQUIRE(device);
    void *memory = NULL;
    KV8_TRY(kv8_alloc(NULL, 1, sizeof(kv8_device_ops), "kernels of the model", &memory));
    kv8_device_ops *const ops = memory;
    ops->device = device;
    kv8_status status;
    KV8_TRY_GOTO(get_kernels(ops, device));
    *out = ops;
    return KV8_OK;
fail:
    kv8_device_ops_destroy(ops);
    return status;
}

void kv8_device_ops_fix_order(kv8_device_ops *ops) {
    ops->has_fixed_order = true;
}

void kv8_device_ops_destroy(kv8_device_ops *ops) {
    if (ops == NULL) return;
    kv8_release(NULL, ops, 1, sizeof *ops);
}
