/* test_null_pointers.c - the rule of kv8/status.h for NULL, over every call of the public headers:
 * a call that can fail refuses a pointer that it needs and names it; the others take NULL and do
 * nothing. Each pointer is left out in turn, the others point at zeroed memory that is nothing yet:
 * a call looks at what was not given before it looks at what was.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/append.h>
#include <kv8/kv8.h>
#include <kv8/kv8_engine.h>

#include "testing.h"

static uint64_t nothing_yet[8192];
#define P             ((void *)nothing_yet)
#define REFUSED(call) assert_refused(call, KV8_ERR_INVALID, " is NULL")

static void call_nothing(void *cookie) {
    (void)cookie;
}

static void machine_calls(void **state) {
    (void)state;
    REFUSED(kv8_machine_isa(NULL));
    REFUSED(kv8_machine_resolve_isa(KV8_ISA_BEST, NULL));
    REFUSED(kv8_threads_create(NULL, 1));
    REFUSED(kv8_machine_measure_ceilings(NULL, KV8_ISA_SCALAR, NULL));
}

static void formats_calls(void **state) {
    (void)state;
    REFUSED(kv8_dtype_from_name(NULL, P));
    REFUSED(kv8_dtype_from_name(P, NULL));
    REFUSED(kv8_widen(KV8_ISA_SCALAR, KV8_BF16, NULL, 1, P));
    REFUSED(kv8_widen(KV8_ISA_SCALAR, KV8_BF16, P, 1, NULL));
    REFUSED(kv8_narrow(KV8_ISA_SCALAR, KV8_BF16, NULL, 1, 1.0f, P, NULL));
    REFUSED(kv8_narrow(KV8_ISA_SCALAR, KV8_BF16, P, 1, 1.0f, NULL, NULL));
    REFUSED(kv8_narrow_int8(KV8_ISA_SCALAR, NULL, 1, P, P, NULL));
    REFUSED(kv8_narrow_int8(KV8_ISA_SCALAR, P, 1, NULL, P, NULL));
    REFUSED(kv8_narrow_int8(KV8_ISA_SCALAR, P, 1, P, NULL, NULL));
    REFUSED(kv8_mxfp4_widen(KV8_ISA_SCALAR, NULL, P, 1, P));
    REFUSED(kv8_mxfp4_widen(KV8_ISA_SCALAR, P, NULL, 1, P));
    REFUSED(kv8_mxfp4_widen(KV8_ISA_SCALAR, P, P, 1, NULL));
    REFUSED(kv8_mxfp4_narrow(NULL, 1, P, P));
    REFUSED(kv8_mxfp4_narrow(P, 1, NULL, P));
    REFUSED(kv8_mxfp4_narrow(P, 1, P, NULL));
}

static void rope_calls(void **state) {
    (void)state;
    REFUSED(kv8_rope_create(NULL, P));
    REFUSED(kv8_rope_create(P, NULL));
}

static void device_calls(void **state) {
    (void)state;
    REFUSED(kv8_device_count(NULL));
    REFUSED(kv8_device_open(NULL, 0));
    REFUSED(kv8_device_measure_ceilings(NULL, 4096, P));
    REFUSED(kv8_device_measure_ceilings(P, 4096, NULL));
    REFUSED(kv8_device_measure_products(NULL, P));
    REFUSED(kv8_device_measure_products(P, NULL));
    REFUSED(kv8_device_alloc(NULL, 1, P));
    REFUSED(kv8_device_alloc(P, 1, NULL));
    REFUSED(kv8_device_alloc_host(NULL, 1, P));
    REFUSED(kv8_device_alloc_host(P, 1, NULL));
    REFUSED(kv8_stream_create(NULL, P));
    REFUSED(kv8_stream_create(P, NULL));
    REFUSED(kv8_stream_wrap(NULL, P, NULL));
    REFUSED(kv8_stream_wrap(P, NULL, NULL));
    REFUSED(kv8_stream_copy(NULL, P, P, 1));
    REFUSED(kv8_stream_copy(P, NULL, P, 1));
    REFUSED(kv8_stream_copy(P, P, NULL, 1));
    REFUSED(kv8_stream_fill(NULL, P, 0, 1));
    REFUSED(kv8_stream_fill(P, NULL, 0, 1));
    REFUSED(kv8_stream_synchronize(NULL));
    REFUSED(kv8_event_create(NULL, P));
    REFUSED(kv8_event_create(P, NULL));
    REFUSED(kv8_event_record(NULL, P));
    REFUSED(kv8_event_record(P, NULL));
    REFUSED(kv8_stream_wait(NULL, P));
    REFUSED(kv8_stream_wait(P, NULL));
    REFUSED(kv8_event_elapsed(NULL, P, P));
    REFUSED(kv8_event_elapsed(P, NULL, P));
    REFUSED(kv8_event_elapsed(P, P, NULL));
    REFUSED(kv8_stream_capture_begin(NULL));
    REFUSED(kv8_stream_capture_end(NULL, P));
    REFUSED(kv8_stream_capture_end(P, NULL));
    REFUSED(kv8_graph_launch(NULL, P));
    REFUSED(kv8_graph_launch(P, NULL));
}

static void append_calls(void **state) {
    (void)state;
    REFUSED(kv8_append_plan_create(NULL, P, NULL, NULL));
    REFUSED(kv8_append_plan_create(P, NULL, NULL, NULL));
    REFUSED(kv8_append_run(NULL, P));
    REFUSED(kv8_append_run(P, NULL));
    REFUSED(kv8_append_device_plan_create(NULL, P, P));
    REFUSED(kv8_append_device_plan_create(P, NULL, P));
    REFUSED(kv8_append_device_plan_create(P, P, NULL));
    REFUSED(kv8_append_device_run(NULL, P, P));
    REFUSED(kv8_append_device_run(P, NULL, P));
    REFUSED(kv8_append_device_run(P, P, NULL));
}

static void cache_calls(void **state) {
    (void)state;
    REFUSED(kv8_cache_create(NULL, P));
    REFUSED(kv8_cache_create(P, NULL));
    REFUSED(kv8_cache_seq_create(NULL, P));
    REFUSED(kv8_cache_seq_create(P, NULL));
    REFUSED(kv8_cache_seq_fork(NULL, KV8_SEQ_NONE, P));
    REFUSED(kv8_cache_seq_fork(P, KV8_SEQ_NONE, NULL));
    REFUSED(kv8_cache_seq_destroy(NULL, KV8_SEQ_NONE));
    REFUSED(kv8_cache_seq_length(NULL, KV8_SEQ_NONE, P));
    REFUSED(kv8_cache_seq_length(P, KV8_SEQ_NONE, NULL));
    REFUSED(kv8_cache_seq_set_scales(NULL, KV8_SEQ_NONE, 0, NULL, NULL));
    REFUSED(kv8_cache_extend(NULL, KV8_SEQ_NONE, 1, NULL));
    REFUSED(kv8_cache_truncate(NULL, KV8_SEQ_NONE, 0));
    REFUSED(kv8_cache_append(NULL, 0, P));
    REFUSED(kv8_cache_append(P, 0, NULL));
    REFUSED(kv8_cache_get_counters(NULL, 0, 0, P));
    REFUSED(kv8_cache_get_counters(P, 0, 0, NULL));
    REFUSED(kv8_cache_reset_counters(NULL));
    REFUSED(kv8_cache_layer_kv(NULL, 0, P, P));
    REFUSED(kv8_cache_layer_kv(P, 0, NULL, P));
    REFUSED(kv8_cache_layer_kv(P, 0, P, NULL));
    REFUSED(kv8_cache_page_table(NULL, 0, P, 1, P, P, 1, P));
    REFUSED(kv8_cache_page_table(P, 0, NULL, 1, P, P, 1, P));
    REFUSED(kv8_cache_page_table(P, 0, P, 1, NULL, P, 1, P));
    REFUSED(kv8_cache_page_table(P, 0, P, 1, P, NULL, 1, P));
    REFUSED(kv8_cache_page_table(P, 0, P, 1, P, P, 1, NULL));
    REFUSED(kv8_cache_block_table(NULL, 0, P, 1, P, 1, P));
    REFUSED(kv8_cache_block_table(P, 0, NULL, 1, P, 1, P));
    REFUSED(kv8_cache_block_table(P, 0, P, 1, NULL, 1, P));
    REFUSED(kv8_cache_block_table(P, 0, P, 1, P, 1, NULL));
    REFUSED(kv8_cache_scales(NULL, 0, P, 1, P, P));
    REFUSED(kv8_cache_scales(P, 0, NULL, 1, P, P));
    REFUSED(kv8_cache_scales(P, 0, P, 1, NULL, P));
    REFUSED(kv8_cache_scales(P, 0, P, 1, P, NULL));
    REFUSED(kv8_cache_read(NULL, 0, KV8_SEQ_NONE, 0, 1, NULL, NULL));
    REFUSED(kv8_cache_page_table_device(NULL, 0, P, 1, P));
    REFUSED(kv8_cache_page_table_device(P, 0, NULL, 1, P));
    REFUSED(kv8_cache_page_table_device(P, 0, P, 1, NULL));
    REFUSED(kv8_cache_scales_device(NULL, 0, P, 1, P, P));
    REFUSED(kv8_cache_scales_device(P, 0, NULL, 1, P, P));
    REFUSED(kv8_cache_scales_device(P, 0, P, 1, NULL, P));
    REFUSED(kv8_cache_scales_device(P, 0, P, 1, P, NULL));
    REFUSED(kv8_cache_publish(NULL, KV8_SEQ_NONE));
    REFUSED(kv8_cache_prefix_match(NULL, P, 1, P, P));
    REFUSED(kv8_cache_prefix_match(P, NULL, 1, P, P));
    REFUSED(kv8_cache_prefix_match(P, P, 1, NULL, P));
    REFUSED(kv8_cache_prefix_match(P, P, 1, P, NULL));
    REFUSED(kv8_cache_prefix_hold(NULL, P, 1, P, P));
    REFUSED(kv8_cache_prefix_hold(P, NULL, 1, P, P));
    REFUSED(kv8_cache_prefix_hold(P, P, 1, NULL, P));
    REFUSED(kv8_cache_prefix_hold(P, P, 1, P, NULL));
    REFUSED(kv8_cache_list_prefixes(NULL, P, P));
    REFUSED(kv8_cache_list_prefixes(P, NULL, P));
    REFUSED(kv8_cache_get_stats(NULL, P));
    REFUSED(kv8_cache_get_stats(P, NULL));
    REFUSED(kv8_cache_save(NULL, KV8_SEQ_NONE, P));
    REFUSED(kv8_cache_save(P, KV8_SEQ_NONE, NULL));
    REFUSED(kv8_cache_load(NULL, P, P));
    REFUSED(kv8_cache_load(P, NULL, P));
    REFUSED(kv8_cache_load(P, P, NULL));
}

static void attention_calls(void **state) {
    (void)state;
    REFUSED(kv8_attention_plan_create(NULL, P, NULL, NULL));
    REFUSED(kv8_attention_plan_create(P, NULL, NULL, NULL));
    REFUSED(kv8_attention_prepare(NULL, P, P));
    REFUSED(kv8_attention_prepare(P, NULL, P));
    REFUSED(kv8_attention_run(NULL, P, P));
    REFUSED(kv8_attention_run(P, NULL, P));
    REFUSED(kv8_attention_describe(NULL, P, P, P, 1));
    REFUSED(kv8_attention_describe(P, P, P, NULL, 1));
    REFUSED(kv8_attention_reference(NULL, P, P, NULL));
    REFUSED(kv8_attention_reference(P, NULL, P, NULL));
    REFUSED(kv8_attention_reference(P, P, NULL, NULL));
}

static void attention_device_calls(void **state) {
    (void)state;
    REFUSED(kv8_attention_device_plan_create(NULL, P, P, NULL));
    REFUSED(kv8_attention_device_plan_create(P, NULL, P, NULL));
    REFUSED(kv8_attention_device_plan_create(P, P, NULL, NULL));
    REFUSED(kv8_attention_device_workspace_init(NULL, P, P));
    REFUSED(kv8_attention_device_workspace_init(P, NULL, P));
    REFUSED(kv8_attention_device_workspace_init(P, P, NULL));
    REFUSED(kv8_attention_device_describe(NULL, P, P, 1));
    REFUSED(kv8_attention_device_describe(P, P, NULL, 1));
    REFUSED(kv8_attention_device_prepare(NULL, P, P, P));
    REFUSED(kv8_attention_device_prepare(P, NULL, P, P));
    REFUSED(kv8_attention_device_prepare(P, P, NULL, P));
    REFUSED(kv8_attention_device_prepare(P, P, P, NULL));
    REFUSED(kv8_attention_device_run(NULL, P, P, P));
    REFUSED(kv8_attention_device_run(P, NULL, P, P));
    REFUSED(kv8_attention_device_run(P, P, NULL, P));
    REFUSED(kv8_attention_device_run(P, P, P, NULL));
}

static void calibrate_calls(void **state) {
    (void)state;
    REFUSED(kv8_rank_heads_get(8, 1, 0, NULL));
    REFUSED(kv8_observer_create(NULL, P));
    REFUSED(kv8_observer_create(P, NULL));
    REFUSED(kv8_observer_add(NULL, 0, P));
    REFUSED(kv8_observer_add(P, 0, NULL));
    REFUSED(kv8_observer_merge(NULL, P));
    REFUSED(kv8_observer_merge(P, NULL));
    REFUSED(kv8_observer_get_options(NULL, P));
    REFUSED(kv8_observer_get_options(P, NULL));
    REFUSED(kv8_observer_get(NULL, KV8_OBSERVED_K, 0, 0, P));
    REFUSED(kv8_observer_get(P, KV8_OBSERVED_K, 0, 0, NULL));
    REFUSED(kv8_observer_fit(NULL, KV8_OBSERVED_K, 0, 0, P, P));
    REFUSED(kv8_observer_fit(P, KV8_OBSERVED_K, 0, 0, NULL, P));
    REFUSED(kv8_observer_fit(P, KV8_OBSERVED_K, 0, 0, P, NULL));
}

static void tokenizer_calls(void **state) {
    (void)state;
    REFUSED(kv8_tokenizer_open(NULL, P));
    REFUSED(kv8_tokenizer_open(P, NULL));
    REFUSED(kv8_tokenizer_parse(NULL, P, 1, P));
    REFUSED(kv8_tokenizer_parse(P, NULL, 1, P));
    REFUSED(kv8_tokenizer_parse(P, P, 1, NULL));
    REFUSED(kv8_tokenizer_encode(NULL, P, 1, KV8_SPECIAL_AS_TEXT, P, P));
    REFUSED(kv8_tokenizer_encode(P, NULL, 1, KV8_SPECIAL_AS_TEXT, P, P));
    REFUSED(kv8_tokenizer_encode(P, P, 1, KV8_SPECIAL_AS_TEXT, NULL, P));
    REFUSED(kv8_tokenizer_encode(P, P, 1, KV8_SPECIAL_AS_TEXT, P, NULL));
}

static void harmony_calls(void **state) {
    (void)state;
    REFUSED(kv8_harmony_render(NULL, P, 1, NULL, P, P));
    REFUSED(kv8_harmony_render(P, NULL, 1, NULL, P, P));
    REFUSED(kv8_harmony_render(P, P, 1, NULL, NULL, P));
    REFUSED(kv8_harmony_render(P, P, 1, NULL, P, NULL));
    REFUSED(kv8_harmony_parser_create(NULL, P));
    REFUSED(kv8_harmony_parser_create(P, NULL));
    REFUSED(kv8_harmony_parser_push(NULL, 0, P));
    REFUSED(kv8_harmony_parser_push(P, 0, NULL));
    REFUSED(kv8_harmony_parser_finish(NULL, P));
    REFUSED(kv8_harmony_parser_finish(P, NULL));
}

static void scale_file_calls(void **state) {
    (void)state;
    REFUSED(kv8_scale_file_create(NULL, P));
    REFUSED(kv8_scale_file_create(P, NULL));
    REFUSED(kv8_scale_file_open(NULL, P, P));
    REFUSED(kv8_scale_file_open(P, NULL, P));
    REFUSED(kv8_scale_file_open(P, P, NULL));
    REFUSED(kv8_scale_file_get(NULL, P));
    REFUSED(kv8_scale_file_get(P, NULL));
    REFUSED(kv8_scale_file_split(NULL, P, 0, 1));
    REFUSED(kv8_scale_file_split(P, NULL, 0, 1));
    REFUSED(kv8_scale_file_write(NULL, P, KV8_SCALES_KV8, 1));
    REFUSED(kv8_scale_file_write(P, NULL, KV8_SCALES_KV8, 1));
}

static void model_calls(void **state) {
    (void)state;
    REFUSED(kv8_model_open(NULL, P, P));
    REFUSED(kv8_model_open(P, NULL, P));
    REFUSED(kv8_model_open(P, P, NULL));
    REFUSED(kv8_model_get_info(NULL, P));
    REFUSED(kv8_model_get_info(P, NULL));
    REFUSED(kv8_model_cache_layers(NULL, KV8_F32, KV8_F32, P, P));
    REFUSED(kv8_model_cache_layers(P, KV8_F32, KV8_F32, NULL, P));
    REFUSED(kv8_model_cache_layers(P, KV8_F32, KV8_F32, P, NULL));
    REFUSED(kv8_model_step(NULL, P, P));
    REFUSED(kv8_model_step(P, NULL, P));
    REFUSED(kv8_model_step(P, P, NULL));
    REFUSED(kv8_model_set_observer(NULL, NULL));
}

static void engine_calls(void **state) {
    (void)state;
    REFUSED(kv8_kv_setting_parse(NULL, P));
    REFUSED(kv8_kv_setting_parse(P, NULL));
    REFUSED(kv8_kv_setting_parse_list(NULL, P, 1, P));
    REFUSED(kv8_kv_setting_parse_list(P, NULL, 1, P));
    REFUSED(kv8_kv_setting_parse_list(P, P, 1, NULL));
    REFUSED(kv8_kv_setting_cache_create(NULL, P, P, P));
    REFUSED(kv8_kv_setting_cache_create(P, NULL, P, P));
    REFUSED(kv8_kv_setting_cache_create(P, P, NULL, P));
    REFUSED(kv8_kv_setting_cache_create(P, P, P, NULL));
    REFUSED(kv8_engine_create(NULL, P, P, P));
    REFUSED(kv8_engine_create(P, NULL, P, P));
    REFUSED(kv8_engine_create(P, P, NULL, P));
    REFUSED(kv8_engine_create(P, P, P, NULL));
    REFUSED(kv8_engine_submit(NULL, P, P));
    REFUSED(kv8_engine_submit(P, NULL, P));
    REFUSED(kv8_engine_submit(P, P, NULL));
    REFUSED(kv8_engine_cancel(NULL, 1));
    REFUSED(kv8_engine_step(NULL, P));
    REFUSED(kv8_engine_step(P, NULL));
    REFUSED(kv8_engine_get_stats(NULL, P));
    REFUSED(kv8_engine_get_stats(P, NULL));
    REFUSED(kv8_service_start(NULL, P, P));
    REFUSED(kv8_service_start(P, NULL, P));
    REFUSED(kv8_service_start(P, P, NULL));
    REFUSED(kv8_service_submit(NULL, P, P));
    REFUSED(kv8_service_submit(P, NULL, P));
    REFUSED(kv8_service_submit(P, P, NULL));
    REFUSED(kv8_service_cancel(NULL, 1));
    REFUSED(kv8_service_call(NULL, call_nothing, P));
    REFUSED(kv8_service_call(P, NULL, P));
    REFUSED(kv8_service_get_stats(NULL, P));
    REFUSED(kv8_service_get_stats(P, NULL));
    REFUSED(kv8_engine_get_page_map(NULL, P));
    REFUSED(kv8_engine_get_page_map(P, NULL));
    REFUSED(kv8_service_get_page_map(NULL, P));
    REFUSED(kv8_service_get_page_map(P, NULL));
    REFUSED(kv8_step_time_fit(NULL, 1, P));
    REFUSED(kv8_step_time_fit(P, 1, NULL));
    REFUSED(kv8_simulate(NULL, P));
    REFUSED(kv8_simulate(P, NULL));
}

static void evaluate_calls(void **state) {
    (void)state;
    REFUSED(kv8_evaluate_score(NULL, P, P, 2, P, P));
    REFUSED(kv8_evaluate_score(P, NULL, P, 2, P, P));
    REFUSED(kv8_evaluate_score(P, P, NULL, 2, P, P));
    REFUSED(kv8_evaluate_score(P, P, P, 2, NULL, P));
    REFUSED(kv8_evaluate_score(P, P, P, 2, P, NULL));
    REFUSED(kv8_evaluate_compare(NULL, P, 1, P, P));
    REFUSED(kv8_evaluate_compare(P, NULL, 1, P, P));
    REFUSED(kv8_evaluate_compare(P, P, 1, NULL, P));
    REFUSED(kv8_evaluate_compare(P, P, 1, P, NULL));
    REFUSED(kv8_evaluate_observe(NULL, P, P));
    REFUSED(kv8_evaluate_observe(P, NULL, P));
    REFUSED(kv8_evaluate_observe(P, P, NULL));
    REFUSED(kv8_evaluate_choose(NULL, P, P));
    REFUSED(kv8_evaluate_choose(P, NULL, P));
    REFUSED(kv8_evaluate_choose(P, P, NULL));
    REFUSED(kv8_choice_get_mix(NULL, 0, P));
    REFUSED(kv8_choice_get_mix(P, 0, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(machine_calls),   cmocka_unit_test(formats_calls),
        cmocka_unit_test(rope_calls),      cmocka_unit_test(device_calls),
        cmocka_unit_test(append_calls),    cmocka_unit_test(cache_calls),
        cmocka_unit_test(attention_calls), cmocka_unit_test(attention_device_calls),
        cmocka_unit_test(calibrate_calls), cmocka_unit_test(tokenizer_calls),
        cmocka_unit_test(harmony_calls),   cmocka_unit_test(scale_file_calls),
        cmocka_unit_test(model_calls),     cmocka_unit_test(engine_calls),
        cmocka_unit_test(evaluate_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
