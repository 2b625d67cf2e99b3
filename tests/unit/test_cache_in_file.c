/* test_cache_in_file.c - a cache whose pages lie in a mapped file: the same bytes as in a cache on
 * the heap, found in the file after the cache is gone; and what a place for pages cannot be.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <sys/mman.h>
#include <unistd.h>

#include "cache_testing.h"

enum { NUM_LAYERS = 2, NUM_TOKENS = 11, HEADS = 2, DIM = 4, FILE_BYTES = 1 << 16 };

/* Blocks of one file, one behind the other. */
typedef struct file_memory {
    int file;
    uint8_t *mapped;
    size_t used;
    int num_blocks;
} file_memory;

static void *take_block(void *cookie, size_t size, size_t alignment) {
    file_memory *const memory = cookie;
    const size_t begin = (memory->used + alignment - 1) / alignment * alignment;
    if (size > FILE_BYTES - begin) return NULL;
    memory->used = begin + size;
    memory->num_blocks++;
    return memory->mapped + begin;
}
static void give_block(void *cookie, void *ptr, size_t size) {
    file_memory *const memory = cookie;
    const uint8_t *const at = ptr;
    assert_true(at >= memory->mapped && at + size <= memory->mapped + memory->used);
    memory->num_blocks--;
}

static file_memory open_file(void) {
    FILE *const opened = tmpfile();
    assert_non_null(opened);
    file_memory memory = {.file = dup(fileno(opened))};
    fclose(opened);
    assert_int_equal(ftruncate(memory.file, FILE_BYTES), 0);
    memory.mapped = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory.file, 0);
    assert_true(memory.mapped != MAP_FAILED);
    return memory;
}

/* A sequence, and a fork that goes on: a page is copied. */
static void fill(kv8_cache *cache, kv8_seq seqs_out[2]) {
    static float values[NUM_TOKENS * HEADS * DIM];
    for (int i = 0; i < NUM_TOKENS * HEADS * DIM; i++) values[i] = (float)(i % 23) * 0.37f - 4;
    seqs_out[0] = new_seq(cache);
    for (int fork = 0; fork < 2; fork++) {
        if (fork == 1) assert_ok(kv8_cache_seq_fork(cache, seqs_out[0], &seqs_out[1]));
        const int32_t indptr[2] = {0, NUM_TOKENS};
        kv8_append rows = KV8_APPEND_INIT;
        rows.num_seqs = 1;
        rows.seqs = &seqs_out[fork];
        rows.indptr = indptr;
        rows.src_dtype = KV8_F32;
        rows.k = rows.v = values;
        rows.k_stride_row = rows.v_stride_row = HEADS * DIM;
        rows.k_stride_head = rows.v_stride_head = DIM;
        assert_ok(kv8_cache_extend(cache, seqs_out[fork], NUM_TOKENS, NULL));
        for (int32_t i = 0; i < NUM_LAYERS; i++) assert_ok(kv8_cache_append(cache, i, &rows));
    }
}

static void pages_lie_in_the_file(void **state) {
    (void)state;
    const kv8_cache_layer layers[NUM_LAYERS] = {
        {.struct_size = sizeof *layers,
         .k_dtype = KV8_E4M3,
         .v_dtype = KV8_INT8,
         .window_left = -1},
        {.struct_size = sizeof *layers,
         .k_dtype = KV8_BF16,
         .v_dtype = KV8_E5M2,
         .window_left = -1},
    };
    file_memory memory = open_file();
    const kv8_allocator in_file = {take_block, give_block, &memory};
    kv8_cache_options options = small_options(layers, NUM_LAYERS);
    kv8_cache *caches[2];
    kv8_seq seqs[2][2];
    for (int i = 0; i < 2; i++) {
        options.page_allocator = i == 0 ? NULL : &in_file;
        assert_ok(kv8_cache_create(&caches[i], &options));
        fill(caches[i], seqs[i]);
    }
    assert_int_equal(memory.num_blocks, NUM_LAYERS);
    size_t offset[NUM_LAYERS][2][NUM_TOKENS];
    uint8_t code[NUM_LAYERS][2][NUM_TOKENS];
    for (int32_t layer = 0; layer < NUM_LAYERS; layer++) {
        for (int seq = 0; seq < 2; seq++) {
            for (int32_t t = 0; t < NUM_TOKENS; t++) {
                const kv8_dtype dtype = layers[layer].k_dtype;
                const stored_head heap =
                    find_head(caches[0], layer, 0, dtype, seqs[0][seq], 4, t, 1);
                const stored_head file =
                    find_head(caches[1], layer, 0, dtype, seqs[1][seq], 4, t, 1);
                assert_memory_equal(file.codes, heap.codes, DIM * kv8_dtype_size(dtype));
                offset[layer][seq][t] = (size_t)(file.codes - memory.mapped);
                assert_true(offset[layer][seq][t] < memory.used);
                code[layer][seq][t] = heap.codes[0];
            }
        }
    }
    for (int i = 0; i < 2; i++) kv8_cache_destroy(caches[i]);
    assert_int_equal(memory.num_blocks, 0);
    munmap(memory.mapped, FILE_BYTES);
    for (int32_t layer = 0; layer < NUM_LAYERS; layer++) {
        for (int seq = 0; seq < 2; seq++) {
            for (int32_t t = 0; t < NUM_TOKENS; t++) {
                uint8_t byte;
                assert_int_equal(pread(memory.file, &byte, 1, (off_t)offset[layer][seq][t]), 1);
                assert_int_equal(byte, code[layer][seq][t]);
            }
        }
    }
    close(memory.file);
}

static void a_file_too_short_is_no_memory(void **state) {
    (void)state;
    const kv8_cache_layer layers[NUM_LAYERS] = {
        {.struct_size = sizeof *layers, .k_dtype = KV8_F32, .v_dtype = KV8_F32, .window_left = -1},
        {.struct_size = sizeof *layers, .k_dtype = KV8_F32, .v_dtype = KV8_F32, .window_left = -1},
    };
    file_memory memory = open_file();
    const kv8_allocator in_file = {take_block, give_block, &memory};
    kv8_cache_options options = small_options(layers, NUM_LAYERS);
    options.page_allocator = &in_file;
    options.num_pages = FILE_BYTES / (2 * 4 * HEADS * DIM * 4) * 3 / 4; /* of one layer */
    kv8_cache *cache;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_NO_MEMORY,
                   "cache pages of one layer");
    assert_null(cache);
    assert_int_equal(memory.num_blocks, 0);
    munmap(memory.mapped, FILE_BYTES);
    close(memory.file);
}

static void a_gpu_takes_no_allocator(void **state) {
    (void)state;
    const kv8_cache_layer layer = {
        .struct_size = sizeof layer, .k_dtype = KV8_E4M3, .v_dtype = KV8_E4M3, .window_left = -1};
    const kv8_allocator none = {take_block, give_block, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    options.page_allocator = &none;
    options.device = (kv8_device *)&options; /* never looked into */
    kv8_cache *cache;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_INVALID, "page_allocator is set");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_lie_in_the_file),
        cmocka_unit_test(a_file_too_short_is_no_memory),
        cmocka_unit_test(a_gpu_takes_no_allocator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
