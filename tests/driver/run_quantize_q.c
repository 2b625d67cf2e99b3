/* run_quantize_q.c - what the kernels for e4m3 of Q compute, for the GPU's own tests on the
 * stand-in: the argument block goes back into the args of the host's call, so that these tests tell
 * what the host half hands to the GPU, and in which order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/attention.h>

#include "quantize_q/quantize_q_args.h"
#include "stand_in.h"
#include "testing.h"

static const uint32_t found = 0x3f800000; /* absmax ran here, over memory that was cleared */

static void run(const stand_in_launch *launch) {
    kv8_quantize_q_kernel_args a;
    char op[16], source[8];
    assert_int_equal(launch->args_bytes, sizeof a);
    memcpy(&a, launch->args, sizeof a);
    assert_int_equal(sscanf(launch->name, "kv8_q_%15[a-z]_%7[a-z0-9]", op, source), 2);
    assert_true((int64_t)launch->grid[0] * KV8_QUANTIZE_Q_ROWS >= a.max_rows);
    assert_int_equal(launch->grid[1], a.num_kv_heads);
    const bool is_absmax = strcmp(op, "absmax") == 0;
    for (int32_t i = 0; a.q_scale != NULL && i < a.batch * a.num_kv_heads; i++) {
        assert_int_equal(a.amax[i], is_absmax ? 0 : found);
        a.amax[i] = found;
    }
    if (is_absmax) return;
    kv8_quantize_q_args args = KV8_QUANTIZE_Q_ARGS_INIT;
    args.batch = a.batch;
    args.max_rows = a.max_rows;
    args.num_kv_heads = a.num_kv_heads;
    args.num_qo_heads = a.num_kv_heads * a.group_size;
    args.head_dim = a.head_dim;
    assert_ok(kv8_dtype_from_name(source, &args.src_dtype));
    args.qo_indptr = a.qo_indptr;
    args.q = a.q;
    args.q_stride_row = a.q_stride_row;
    args.q_stride_head = a.q_stride_head;
    args.codes_out = a.codes;
    args.codes_stride_row = a.codes_stride_row;
    args.codes_stride_head = a.codes_stride_head;
    args.q_scale_out = a.q_scale;
    args.head_scale = a.head_scale;
    assert_ok(kv8_quantize_q(&args, NULL));
}

__attribute__((constructor)) static void begin(void) {
    stand_in_on_launch(run);
}
