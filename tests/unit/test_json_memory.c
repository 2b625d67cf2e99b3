/* test_json_memory.c - JSON that is sound, parsed with ever more memory: too little is said to be
 * too little memory, never damage, and leaves nothing behind.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include <jansson.h>

#include <kv8/scale_file.h>

#include "safetensors.h"
#include "testing.h"
#include "tokenizer_tables.h"

static int64_t allocations_left, held;

/* The parser's malloc. */
static void *scarce_malloc(size_t size) {
    void *const memory = allocations_left-- > 0 ? malloc(size) : NULL;
    if (memory == NULL) errno = ENOMEM;
    held += memory != NULL;
    return memory;
}

static void scarce_free(void *memory) {
    held -= memory != NULL;
    free(memory);
}

typedef kv8_status (*reader)(void);

/* Refused for memory with few allocations, `wanted` with enough. */
static void sweep(reader read, kv8_status wanted) {
    kv8_status status = KV8_ERR_NO_MEMORY;
    int64_t num_refused = 0;
    json_set_alloc_funcs(scarce_malloc, scarce_free);
    for (int64_t n = 0; status == KV8_ERR_NO_MEMORY; n += 1 + n / 4) {
        allocations_left = n;
        held = 0;
        status = read();
        assert_int_equal(held, 0);
        if (status != KV8_ERR_NO_MEMORY) break;
        assert_non_null(strstr(kv8_status_message(), "no memory to parse"));
        num_refused++;
    }
    json_set_alloc_funcs(malloc, free);
    assert_int_equal(status, wanted);
    assert_true(num_refused > 5);
}

static kv8_status read_safetensors(void) {
    static const char header[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}";
    uint8_t bytes[8 + sizeof header + 3] = {sizeof header - 1};
    memcpy(bytes + 8, header, sizeof header - 1);
    kv8_safetensors file;
    const kv8_status status =
        kv8_safetensors_parse(&file, "memory", bytes, 8 + sizeof header - 1 + 3, NULL);
    if (status == KV8_OK) kv8_safetensors_close(&file);
    return status;
}

static char scales_path[] = "/tmp/kv8_scales_XXXXXX";

static kv8_status read_scales(void) {
    kv8_scale_file *file = NULL;
    const kv8_scale_expect expect = KV8_SCALE_EXPECT_INIT;
    const kv8_status status = kv8_scale_file_open(&file, scales_path, &expect);
    kv8_scale_file_close(file);
    return status;
}

static kv8_status read_tokenizer(void) {
    kv8_tokenizer *tokenizer = NULL;
    const kv8_status status = kv8_tokenizer_open(&tokenizer, "models/tiny-gpt-oss/tokenizer.json");
    kv8_tokenizer_close(tokenizer);
    return status;
}

static void too_little_memory_is_not_damage(void **state) {
    (void)state;
    static const char scales[] =
        "{\"version\":\"1.0\",\"model\":{\"architectures\":\"GptOssForCausalLM\"},"
        "\"quantization\":{}}";
    const int fd = mkstemp(scales_path);
    assert_int_equal(write(fd, scales, sizeof scales - 1), sizeof scales - 1);
    close(fd);
    sweep(read_safetensors, KV8_OK);
    sweep(read_scales, KV8_ERR_CORRUPT); /* a sound text, though not all that a scale file wants */
    sweep(read_tokenizer, KV8_OK);
    unlink(scales_path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(too_little_memory_is_not_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
