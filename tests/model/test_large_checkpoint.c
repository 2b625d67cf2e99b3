/* test_large_checkpoint.c - a synthesised checkpoint of the 20b shape: its facts, and the memory
 * that opening it and decoding from it take beside the mapped files.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "checkpoint_files.h"
#include "model_runs.h"

/* A line of /proc/self/status, in bytes. */
static int64_t own_memory(const char *key) {
    FILE *const status = fopen("/proc/self/status", "r");
    assert_non_null(status);
    char line[256];
    int64_t kib = -1;
    while (kib < 0 && fgets(line, sizeof line, status) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) kib = strtoll(line + strlen(key) + 1, NULL, 10);
    }
    fclose(status);
    assert_true(kib >= 0);
    return kib << 10;
}

static const int64_t limit = 300 << 20;

/* gpt_oss.md's figures for 20b: 459 tensors, 13,761,264,768 bytes, 3,708,089,088 of them read for
 * one token, 20.915e9 parameters. */
static void check_facts(const kv8_model_info *info) {
    assert_int_equal(info->num_files, 3);
    assert_int_equal(info->num_tensors, 459);
    assert_int_equal(info->bytes, 13761264768);
    assert_int_equal(info->bytes_per_decoded_token, 3708089088);
    assert_in_range(info->num_parameters, 20914000000, 20916000000);
    assert_int_equal(info->num_sliding_layers, 12);
    assert_int_equal(info->eos[0], 200002);
}

/* One token reads 3.708 GB and is multiplied by 3.607e9 weights: of 24 layers queries, keys,
 * values, o and the router, four of 32 experts, and the head. 512 tokens read all experts, 17 bytes
 * for 32 weights and the biases; where a byte takes as long as 350 operations they are bound by
 * those, and dense weights by products. */
static void check_step_seconds(const kv8_model_info *info) {
    const double much = 1e30, dense = 26634240.0 * 24 + 579133440, expert = 24883200;
    assert_true(fabs(kv8_model_step_seconds(info, 1, 0, 1, much) - 3.708089088) < 1e-9);
    const double one = kv8_model_step_seconds(info, 1, 0, much, 1);
    assert_true(fabs(one / (2e-12 * (dense + 4 * 24 * expert)) - 1) < 3e-3);
    const double both = kv8_model_step_seconds(info, 512, 0, 1000, 350);
    const double bytes = 24 * 32 * (expert * 17 / 32 + 2 * (5760 + 2880));
    assert_true(fabs(both / (512 * 2 * dense / 350e12 + bytes / 1e12) - 1) < 3e-3);
    const double of_twenty = kv8_model_step_seconds(info, 64, 20, 1, much);
    assert_true(fabs(of_twenty - kv8_model_step_bytes(info, 64, 20) * 1e-9) < 1e-9);
}

static void a_20b_checkpoint_opens_and_decodes_in_little_memory(void **state) {
    (void)state;
    char path[256], command[1024];
    make_directory(path);
    snprintf(command, sizeof command, "%s %s --preset 20b", KV8_MAKE_CHECKPOINT, path);
    assert_int_equal(system(command), 0);

    kv8_threads *threads = NULL;
    assert_ok(kv8_threads_create(&threads, 0));
    kv8_model_options options = KV8_MODEL_OPTIONS_INIT;
    options.threads = threads;
    kv8_model *model = NULL;
    assert_ok(kv8_model_open(&model, path, &options));
    kv8_model_info info = KV8_MODEL_INFO_INIT;
    assert_ok(kv8_model_get_info(model, &info));
    check_facts(&info);
    check_step_seconds(&info);
    const int64_t peak = own_memory("VmHWM:"); /* all of it: files are hardly touched yet */
    print_message("open: at most %.1f MB resident\n", (double)peak / 1e6);
    assert_true(peak < limit);

    kv8_cache *const cache = open_cache(model, KV8_BF16, 16, 1, 64, false);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_ok(kv8_cache_seq_create(cache, &seq));
    const int32_t ids[] = {200006, 17360, 200008};
    float *const logits = malloc((size_t)info.vocab_size * 3 * sizeof *logits);
    assert_non_null(logits);
    run_ids(model, cache, seq, ids, 2, 2, logits);
    run_ids(model, cache, seq, ids + 2, 1, 1, logits + 2 * (size_t)info.vocab_size);
    for (size_t i = 0; i < 3 * (size_t)info.vocab_size; i++) assert_true(isfinite(logits[i]));
    const int64_t anonymous = own_memory("RssAnon:");
    print_message("after two steps: %.1f MB beside the mapped files\n", (double)anonymous / 1e6);
    assert_true(anonymous < limit);

    free(logits);
    kv8_cache_destroy(cache);
    kv8_model_close(model);
    kv8_threads_destroy(threads);
    remove_directory(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_20b_checkpoint_opens_and_decodes_in_little_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
