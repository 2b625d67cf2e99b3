/* test_attention_choice.c - which kernel a plan of attention on a GPU launches for a spec: on the
 * stand-in, so on every machine. What kernels compute is tested on GPUs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "attention_choice_case.h"

static void each_spec_has_its_kernel(void **state) {
    (void)state;
    stand s = open_gpu(90);
#define TAKES(change, name)                                  \
    do {                                                     \
        kv8_attention_spec spec = stand_spec();              \
        change;                                              \
        assert_string_equal(name_of(&s, &spec, NULL), name); \
    } while (0)
#define BOTH(dtype)     spec.k_dtype = spec.v_dtype = dtype
#define ONE(rows, keys) spec.max_batch = 1, spec.max_total_q = rows, spec.max_kv_len = keys
    const char *const generic = "kv8_attention_any_any_dany_generic__sm80";
    TAKES((void)0, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 15, "kv8_decode_f16_e4m3_d64_rows__sm90");
    TAKES(spec.max_batch = 15, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_batch = 15; spec.max_total_q = 30, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_total_q = 128; BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_rows16__sm90");
    TAKES(spec.max_total_q = 128; spec.batch_invariant = 1;
          BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_pairs__sm90");
    TAKES(spec.num_qo_heads = 8 * 12; spec.head_dim = 128, "kv8_decode_f16_e4m3_d128_rows16__sm90");
    TAKES(spec.num_qo_heads = 8 * 16; BOTH(KV8_BF16), "kv8_decode_bf16_bf16_d64_rows16__sm90");
    TAKES(spec.max_total_q = 65, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_total_q = 128, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_total_q = 129, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 192, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 256, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 256; spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_rows32_mask__sm90");
    /* 64 MiB of even streams. */
    TAKES(spec.max_total_q = 256; spec.max_kv_len = 1023;
          spec.has_mask = 1, "kv8_prefill_f16_e4m3_d64_rows64_options__sm90");
    TAKES(spec.max_total_q = 256; spec.max_kv_len = 1023, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 256; spec.max_kv_len = 1024, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 256; spec.max_kv_len = 512;
          spec.head_dim = 128, "kv8_decode_f16_e4m3_d128_rows32__sm90");
    TAKES(spec.max_total_q = 256; spec.max_kv_len = 511;
          spec.head_dim = 128, "kv8_prefill_f16_e4m3_d128__sm90");
    TAKES(spec.max_total_q = 256; BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_rows32__sm90");
    TAKES(spec.max_total_q = 256; spec.has_mask = 1;
          BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_rows32_mask__sm90");
    TAKES(spec.max_total_q = 256; spec.head_dim = 128;
          BOTH(KV8_INT8), "kv8_decode_f16_int8_d128_rows32__sm90");
    TAKES(spec.max_total_q = 256;
          spec.k_dtype = KV8_INT8, "kv8_decode_f16_int8_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 256; spec.v_dtype = KV8_INT8;
          spec.head_dim = 128, "kv8_decode_f16_e4m3_int8_d128_rows32__sm90");
    /* 2 MiB of a stream where they are not: of 72 on 132 blocks, and of 320. */
    TAKES(spec.max_total_q = 72; spec.max_batch = 18;
          spec.max_kv_len = 8191, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 72; spec.max_batch = 18, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 72; spec.max_batch = 18; spec.head_dim = 128;
          spec.max_kv_len = 4095, "kv8_prefill_f16_e4m3_d128__sm90");
    TAKES(spec.max_total_q = 72; spec.max_batch = 18; spec.head_dim = 128;
          spec.max_kv_len = 4096, "kv8_decode_f16_e4m3_d128_rows32__sm90");
    TAKES(spec.max_total_q = 640; spec.max_batch = 160;
          spec.max_kv_len = 4095, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 640; spec.max_batch = 160;
          spec.max_kv_len = 4096, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 160; spec.max_batch = 40; spec.max_kv_len = 4096;
          spec.num_kv_heads = 9; spec.num_qo_heads = 72, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    /* With a mask, more than a line of a token for each multiprocessor. */
    TAKES(spec.max_total_q = 132; spec.max_batch = 33, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 64; spec.max_batch = 16; spec.has_mask = 1;
          spec.head_dim = 128, "kv8_prefill_f16_e4m3_d128_options__sm90");
    TAKES(spec.max_total_q = 68; spec.max_batch = 17; spec.has_mask = 1;
          spec.head_dim = 128, "kv8_decode_f16_e4m3_d128_rows32_mask__sm90");
    TAKES(spec.max_total_q = 132; spec.max_batch = 33;
          spec.has_mask = 1, "kv8_prefill_f16_e4m3_d64_rows64_options__sm90");
    TAKES(spec.max_total_q = 136; spec.max_batch = 34, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(spec.max_total_q = 136; spec.max_batch = 34;
          spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_rows32_mask__sm90");
    TAKES(spec.max_total_q = 257, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 512, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 512;
          spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8_rows16__sm90");
    TAKES(spec.max_total_q = 513, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_total_q = 128; spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_total_q = 128; spec.has_mask = 1;
          BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_rows16__sm90");
    TAKES(ONE(2, 32768); spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_total_q = 504;
          spec.has_mask = 1, "kv8_prefill_f16_e4m3_d64_rows64_options__sm90");
    TAKES(spec.max_total_q = 512; spec.has_mask = 1;
          BOTH(KV8_E4M3FNUZ), "kv8_prefill_f16_any_d64__sm80");
    TAKES(spec.max_batch = 1, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 2, "kv8_decode_f16_e4m3_d64_cluster_rows16__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 3, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    TAKES(ONE(16, 2047); spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_wide128_mask__sm90");
    TAKES(ONE(4, 256), "kv8_decode_f16_e4m3_d64_cluster_rows16__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 4;
          spec.window_left = 127, "kv8_decode_f16_e4m3_d64_cluster_rows16__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 4; spec.window_left = 127;
          spec.causal = 0, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 5;
          spec.window_left = 127, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 8; spec.num_kv_heads = 3;
          spec.num_qo_heads = 24, "kv8_decode_f16_e4m3_d64_cluster_rows16__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 8;
          spec.page_size = 1, "kv8_decode_f16_e4m3_d64_wide64__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 9, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(ONE(16, 2047), "kv8_decode_f16_e4m3_d64_wide128__sm90");
    TAKES(ONE(16, 2048), "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(ONE(16, 2048); spec.has_mask = 1, "kv8_prefill_f16_e4m3_d64_options__sm90");
    TAKES(ONE(16, 4096); spec.window_left = 127, "kv8_prefill_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 1; spec.max_kv_len = 4096; spec.num_kv_heads = 1;
          spec.num_qo_heads = 71, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 8;
          spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_wide64_mask__sm90");
    TAKES(ONE(1, 4096); spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_wide64_mask__sm90");
    TAKES(ONE(1, 4097); spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_rows__sm90");
    TAKES(ONE(2, 8192); spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_wide64_mask__sm90");
    TAKES(ONE(2, 8192); spec.has_mask = 1; spec.num_kv_heads = 7;
          spec.num_qo_heads = 56, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 64; spec.num_qo_heads = 8; spec.has_mask = 1;
          spec.max_kv_len = 8192, "kv8_decode_f16_e4m3_d64_wide64_mask__sm90");
    TAKES(ONE(4, 8193), "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(ONE(4, 65535), "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(ONE(4, 65536), "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(ONE(4, 32767); spec.head_dim = 128, "kv8_prefill_f16_e4m3_d128__sm90");
    TAKES(ONE(4, 32768); spec.head_dim = 128, "kv8_decode_f16_e4m3_d128_rows32__sm90");
    TAKES(spec.max_batch = 1; spec.max_total_q = 4; spec.num_kv_heads = 7; spec.num_qo_heads = 56;
          spec.max_kv_len = 16385, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    TAKES(ONE(4, 65535); spec.num_kv_heads = 7; spec.num_qo_heads = 56;
          spec.head_dim = 128, "kv8_prefill_f16_e4m3_d128__sm90");
    TAKES(spec.max_batch = 7; spec.max_total_q = 28, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_batch = 8; spec.max_total_q = 32, "kv8_decode_f16_e4m3_d64_rows32__sm90");
    /* Of more clusters than 48 prefill takes all, of more than 24 wide rows and what is over 512
     * KiB for each head, read for every eight rows; of fewer what is over 16 MiB for all heads. */
    TAKES(ONE(3, 10922); BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_cluster__sm90");
    TAKES(ONE(3, 10924); BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64_rows64__sm90");
    TAKES(ONE(2, 10924); BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_cluster__sm90");
    TAKES(ONE(4, 2048); BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_cluster__sm90");
    TAKES(ONE(4, 2052); BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64__sm90");
    TAKES(ONE(6, 1024); BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_cluster__sm90");
    TAKES(ONE(7, 64); BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64__sm90");
    TAKES(ONE(8, 4096); BOTH(KV8_INT8); spec.num_kv_heads = 3;
          spec.num_qo_heads = 24, "kv8_decode_f16_int8_d64_cluster__sm90");
    TAKES(ONE(3, 64); BOTH(KV8_BF16), "kv8_decode_bf16_bf16_d64_cluster__sm90");
    TAKES(ONE(4, 64); BOTH(KV8_BF16), "kv8_prefill_bf16_bf16_d64__sm90");
    TAKES(spec.max_total_q = 256; spec.window_left = 127; spec.causal = 1;
          spec.max_kv_len = 16385, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    /* Of one warpgroup, but for few heads of few keys, and 16 bits with a head for each
     * multiprocessor. */
    TAKES(spec.max_total_q = 257; BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64_rows64__sm90");
    TAKES(spec.max_total_q = 513; BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64__sm90");
    TAKES(spec.max_total_q = 512; spec.k_dtype = KV8_INT8;
          spec.has_mask = 1, "kv8_prefill_f16_int8_e4m3_d64_rows64_options__sm90");
    TAKES(ONE(8, 8192); BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64__sm90");
    TAKES(ONE(8, 8193); BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64_rows64__sm90");
    TAKES(spec.max_batch = 3; spec.max_total_q = 24; BOTH(KV8_E5M2);
          spec.max_kv_len = 1024, "kv8_prefill_f16_e5m2_d64__sm90");
    TAKES(spec.max_batch = 4; spec.max_total_q = 32; BOTH(KV8_E5M2);
          spec.max_kv_len = 1024, "kv8_prefill_f16_e5m2_d64_rows64__sm90");
    TAKES(ONE(8, 16384); BOTH(KV8_BF16), "kv8_prefill_bf16_bf16_d64__sm90");
    TAKES(ONE(8, 16385); BOTH(KV8_BF16), "kv8_prefill_bf16_bf16_d64_rows64__sm90");
    TAKES(spec.max_batch = 16; spec.max_total_q = 128; BOTH(KV8_F16); spec.q_dtype = KV8_F16;
          spec.max_kv_len = 4095, "kv8_prefill_f16_f16_d64__sm90");
    TAKES(spec.max_batch = 16; spec.max_total_q = 128; BOTH(KV8_F16); spec.q_dtype = KV8_F16;
          spec.max_kv_len = 4096, "kv8_prefill_f16_f16_d64_rows64__sm90");
    TAKES(spec.max_batch = 17; spec.max_total_q = 136; BOTH(KV8_BF16);
          spec.max_kv_len = 64, "kv8_prefill_bf16_bf16_d64_rows64__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 1, "kv8_decode_f16_e4m3_d64_cluster__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 1;
          spec.max_kv_len = 131072, "kv8_decode_f16_e4m3_d64_rows__sm90");
    TAKES(spec.page_size = 7, "kv8_decode_f16_e4m3_d64_tokens__sm90");
    TAKES(spec.page_size = 0, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_pairs__sm90");
    TAKES(BOTH(KV8_INT8); spec.num_kv_heads = 1;
          spec.num_qo_heads = 8, "kv8_decode_f16_int8_d64_rows__sm90");
    TAKES(BOTH(KV8_BF16); spec.head_dim = 128, "kv8_decode_bf16_bf16_d128_rows__sm90");
    TAKES(BOTH(KV8_BF16); spec.q_dtype = KV8_F16, generic);
    TAKES(spec.o_dtype = KV8_E4M3, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.o_dtype = KV8_E4M3FNUZ, generic);
    TAKES(spec.window_left = 127, "kv8_decode_f16_e4m3_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_INT8), "kv8_decode_f16_int8_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_INT8);
          spec.max_batch = spec.max_total_q = 2, "kv8_decode_f16_int8_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_BF16);
          spec.max_batch = spec.max_total_q = 128, "kv8_decode_bf16_bf16_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_BF16);
          spec.max_batch = spec.max_total_q = 133, "kv8_decode_bf16_bf16_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_BF16); spec.max_batch = 133;
          spec.max_total_q = 134, "kv8_decode_bf16_bf16_d64_rows16__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_INT8);
          spec.max_batch = spec.max_total_q = 512, "kv8_decode_f16_int8_d64_window__sm90");
    TAKES(spec.window_left = 512; BOTH(KV8_INT8);
          spec.max_batch = spec.max_total_q = 512, "kv8_decode_f16_int8_d64_pairs__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_E5M2), "kv8_decode_f16_e5m2_d64_window__sm90");
    TAKES(spec.window_left = 127; BOTH(KV8_F16), "kv8_decode_f16_f16_d64_window__sm90");
    TAKES(spec.window_left = 127;
          spec.max_batch = spec.max_total_q = 512, "kv8_decode_f16_e4m3_d64_window__sm90");
    TAKES(spec.window_left = 127; spec.max_total_q = 128, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.window_left = 127; spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.window_left = 127;
          spec.max_batch = spec.max_total_q = 1, "kv8_decode_f16_e4m3_d64_cluster__sm90");
    TAKES(spec.window_left = 127; spec.max_batch = spec.max_total_q = 1;
          spec.max_kv_len = 131072, "kv8_decode_f16_e4m3_d64_window__sm90");
    TAKES(spec.window_left = 512, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    /* More requests than a warp keeps the lengths of. */
    TAKES(spec.max_batch = spec.max_total_q = 128, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 129, "kv8_decode_f16_e4m3_d64_bulk8_many__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 256; BOTH(KV8_E5M2);
          spec.has_mask = 1, "kv8_decode_f16_e5m2_d64_bulk8_many__sm90");
    TAKES(spec.max_batch = spec.max_total_q = 256;
          spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.max_batch = 256; spec.max_total_q = 512, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    /* Few keys in all. */
    TAKES(spec.max_kv_len = 1024, "kv8_decode_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_kv_len = 1025, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.max_kv_len = 1024; spec.has_mask = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.max_kv_len = 1024;
          spec.max_batch = spec.max_total_q = 512, "kv8_decode_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_kv_len = 1024; BOTH(KV8_INT8);
          spec.max_batch = spec.max_total_q = 4, "kv8_decode_f16_int8_d64_window__sm90");
    TAKES(spec.max_kv_len = 1024; BOTH(KV8_BF16);
          spec.max_batch = spec.max_total_q = 512, "kv8_decode_bf16_bf16_d64_window__sm90");
    TAKES(spec.max_kv_len = 1024; BOTH(KV8_INT8);
          spec.max_batch = spec.max_total_q = 133, "kv8_decode_f16_int8_d64_window__sm90");
    TAKES(spec.max_kv_len = 1024;
          spec.max_batch = spec.max_total_q = 1, "kv8_decode_f16_e4m3_d64_cluster__sm90");
    TAKES(spec.max_kv_len = 1024; spec.max_total_q = 128, "kv8_decode_f16_e4m3_d64_rows16__sm90");
    TAKES(spec.max_kv_len = 1024; spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.causal = 0; spec.window_right = 5, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.v_dtype = KV8_INT8, "kv8_decode_f16_e4m3_int8_d64_pairs__sm90");
    TAKES(spec.k_dtype = KV8_INT8; spec.head_dim = 128, "kv8_decode_f16_int8_e4m3_d128_rows__sm90");
    TAKES(spec.v_dtype = KV8_BF16;
          spec.q_dtype = KV8_F16, "kv8_decode_f16_e4m3_bf16_d64_rows__sm90");
    TAKES(spec.k_dtype = KV8_BF16, "kv8_decode_bf16_bf16_e4m3_d64_rows__sm90");
    TAKES(spec.v_dtype = KV8_E5M2, "kv8_prefill_f16_any_d64__sm80");
    TAKES(spec.v_dtype = KV8_INT8;
          spec.page_size = 7, "kv8_prefill_f16_e4m3_int8_d64_rows64__sm90");
    TAKES(spec.v_head_dim = 128, "kv8_prefill_f16_any_d128__sm80");
    TAKES(spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.batch_invariant = spec.max_batch = spec.max_total_q = 1,
          "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.has_mask = 1; spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8__sm90");
    TAKES(spec.v_head_dim = 128; spec.batch_invariant = 1, "kv8_prefill_f16_any_d128__sm80");
    TAKES(spec.max_total_q = 1024, "kv8_prefill_f16_e4m3_d64__sm90");
    /* Windows whose keys are one tile: of 24 queries of 8 heads, 12 of 16, 48 of 4. */
    TAKES(spec.max_total_q = 1024; spec.window_left = 129, "kv8_prefill_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_total_q = 1024; spec.window_left = 130, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_total_q = 1024; spec.window_left = 127; spec.num_qo_heads = 8 * 16;
          BOTH(KV8_INT8), "kv8_prefill_f16_int8_d64_window__sm90");
    TAKES(spec.max_total_q = 2048; spec.window_left = 112;
          spec.num_qo_heads = 8 * 4, "kv8_prefill_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_total_q = 2048; spec.window_left = 113;
          spec.num_qo_heads = 8 * 4, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_total_q = 1024; spec.window_left = 100; spec.window_right = 29;
          spec.causal = 0, "kv8_prefill_f16_e4m3_d64_window__sm90");
    TAKES(spec.max_total_q = 1024; spec.window_left = 100; spec.window_right = -1;
          spec.causal = 0, "kv8_prefill_f16_e4m3_d64__sm90");
    TAKES(spec.max_total_q = 1024; spec.window_left = 127;
          spec.batch_invariant = 1, "kv8_decode_f16_e4m3_d64_bulk8_rows16__sm90");
    TAKES(spec.max_total_q = 512; spec.window_left = 127, "kv8_prefill_f16_e4m3_d64_rows64__sm90");
    TAKES(spec.max_total_q = 1024; spec.k_dtype = KV8_BF16, "kv8_prefill_bf16_bf16_e4m3_d64__sm90");
    TAKES(spec.max_total_q = 1024;
          spec.has_key_range = 1, "kv8_prefill_f16_e4m3_d64_options__sm90");
    TAKES(spec.max_total_q = 1024;
          spec.o_dtype = KV8_E5M2, "kv8_prefill_f16_e4m3_d64_options__sm90");
    TAKES(spec.max_total_q = 1024; spec.o_dtype = KV8_E4M3FNUZ, generic);
    TAKES(spec.max_total_q = 1024; spec.has_mask = 1, "kv8_prefill_f16_e4m3_d64_options__sm90");
    TAKES(spec.q_dtype = KV8_E4M3, "kv8_prefill_e4m3_e4m3_d64__sm90");
    TAKES(spec.head_dim = 45, generic);
    TAKES(BOTH(KV8_F32), generic);
    stand_close(&s);
    s = open_gpu(80);
    TAKES((void)0, "kv8_prefill_f16_any_d64__sm80");
    TAKES(spec.q_dtype = KV8_E4M3, generic);
#undef BOTH
#undef ONE
#undef TAKES
    stand_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_spec_has_its_kernel)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
