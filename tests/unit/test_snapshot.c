/* test_snapshot.c - save and load: the format byte by byte, round trips between page sizes and
 * layouts, every truncation and every altered byte, forged files, caches that do not fit, full
 * disks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_testing.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <xxhash.h>

#include "snapshot.h"
#include "snapshot_shape.h"

enum { K_ROW = SHAPE_HEADS * SHAPE_K_DIM, V_ROW = SHAPE_HEADS * SHAPE_V_DIM, MAX_FILE = 1 << 16 };

/* A private directory per run; its file is `path`. */
static char directory[64], path[96];
static int set_up(void **state) {
    (void)state;
    strcpy(directory, "/tmp/kv8-snapshot-XXXXXX");
    if (mkdtemp(directory) == NULL) return -1;
    snprintf(path, sizeof path, "%s/file.kv8snap", directory);
    return 0;
}
static int tear_down(void **state) {
    (void)state;
    unlink(path);
    return rmdir(directory);
}
static int files_in(const char *name) {
    DIR *const dir = opendir(name);
    int count = 0;
    for (const struct dirent *e = readdir(dir); e != NULL; e = readdir(dir))
        count += e->d_name[0] != '.' || strlen(e->d_name) > 2;
    closedir(dir);
    return count;
}

typedef struct file {
    uint8_t data[MAX_FILE];
    size_t size;
} file;
static file read_file(const char *name) {
    static file result;
    FILE *const stream = fopen(name, "rb");
    assert_non_null(stream);
    result.size = fread(result.data, 1, MAX_FILE, stream);
    assert_true(result.size > 0 && result.size < MAX_FILE);
    fclose(stream);
    return result;
}
static void write_file(const char *name, const void *data, size_t size) {
    FILE *const stream = fopen(name, "wb");
    assert_non_null(stream);
    assert_int_equal(fwrite(data, 1, size, stream), size);
    fclose(stream);
}
static file saved(const kv8_cache *cache, kv8_seq seq) {
    assert_ok(kv8_cache_save(cache, seq, path));
    assert_int_equal(files_in(directory), 1);
    return read_file(path);
}
static void fix_checksum(file *f) {
    XXH128_canonical_t checksum;
    XXH128_canonicalFromHash(&checksum, XXH3_128bits(f->data, f->size - 16));
    memcpy(f->data + f->size - 16, &checksum, 16);
}

static kv8_cache *open_shape(int32_t page_size, kv8_layout layout) {
    kv8_cache_options options = snapshot_shape();
    options.page_size = page_size;
    options.num_pages = 32 / page_size + 2;
    options.layout = layout;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    return cache;
}

/* Row values by position: from a fixed random source, NaN and infinities among them. */
static float k_rows[40 * K_ROW], v_rows[40 * V_ROW];
static int32_t token_ids[40];
static void make_rows(void) {
    test_rng rng = {5};
    for (int i = 0; i < 40 * K_ROW; i++) k_rows[i] = rng_normal(&rng);
    for (int i = 0; i < 40 * V_ROW; i++) v_rows[i] = rng_normal(&rng);
    for (int i = 0; i < 40; i++) token_ids[i] = rng_range(&rng, -5, 100000);
    k_rows[20] = NAN;
    v_rows[31] = NAN;
    v_rows[47] = INFINITY;
}
static void grow_to(kv8_cache *cache, kv8_seq seq, int32_t length, bool with_ids) {
    const int32_t begin = seq_length(cache, seq);
    assert_ok(kv8_cache_extend(cache, seq, length - begin, with_ids ? token_ids + begin : NULL));
    const kv8_append append = {.struct_size = sizeof(kv8_append),
                               .num_seqs = 1,
                               .seqs = &seq,
                               .indptr = (const int32_t[]){0, length - begin},
                               .src_dtype = KV8_F32,
                               .k = k_rows + begin * K_ROW,
                               .k_stride_row = K_ROW,
                               .k_stride_head = SHAPE_K_DIM,
                               .v = v_rows + begin * V_ROW,
                               .v_stride_row = V_ROW,
                               .v_stride_head = SHAPE_V_DIM};
    for (int32_t layer = 0; layer < SHAPE_LAYERS; layer++)
        assert_ok(kv8_cache_append(cache, layer, &append));
}
/* 13 tokens, then one more: the window layer holds tokens 8.. (page 2) and stores 9.. . */
static kv8_seq make_sequence(kv8_cache *cache, bool own_scales) {
    const float own[SHAPE_HEADS] = {3.0f, 0.125f};
    const kv8_seq seq = new_seq(cache);
    if (own_scales) assert_ok(kv8_cache_seq_set_scales(cache, seq, 2, own, NULL));
    grow_to(cache, seq, 13, true);
    grow_to(cache, seq, 14, true);
    return seq;
}

/* --- the format --- */

typedef struct byte_writer {
    file f;
} byte_writer;
static void push(byte_writer *w, const void *data, size_t size) {
    memcpy(w->f.data + w->f.size, data, size);
    w->f.size += size;
}
static void push_u32(byte_writer *w, uint32_t value) {
    const uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                              (uint8_t)(value >> 24)};
    push(w, bytes, 4);
}
static void push_floats(byte_writer *w, const float *values, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        push_u32(w, bits);
    }
}
static void push_plane_row(byte_writer *w, kv8_dtype dtype, const float *values, int32_t head_dim,
                           const float *scale) {
    kv8_narrow_counts counts = {0};
    kv8_f16 row_scale[SHAPE_HEADS];
    for (int32_t h = 0; h < SHAPE_HEADS; h++) {
        int8_t codes[8];
        if (dtype == KV8_INT8) {
            expected_int8(values + h * head_dim, head_dim, scale[h], codes, &row_scale[h], &counts);
            push(w, codes, (size_t)head_dim);
            continue;
        }
        for (int32_t d = 0; d < head_dim; d++) {
            uint8_t bytes[4];
            expected_code(dtype, values[h * head_dim + d], scale[h], bytes, &counts);
            push(w, bytes, kv8_dtype_size(dtype));
        }
    }
    if (dtype == KV8_INT8) push(w, row_scale, sizeof row_scale);
}

/* The file of make_sequence(own_scales = true), assembled from the format's description. */
static void the_file_is_what_the_format_says(void **state) {
    (void)state;
    static byte_writer w;
    const float one[2] = {1, 1}, own[2] = {3.0f, 0.125f};
    const float *const k_scale[3] = {shape_k_scale, one, own};
    push(&w, "kv8snap\n", 8);
    const uint32_t header[8] = {1, 1, SHAPE_LAYERS, SHAPE_HEADS, SHAPE_K_DIM, SHAPE_V_DIM, 14, 0};
    for (int i = 0; i < 8; i++) push_u32(&w, header[i]);
    const int32_t first[3] = {0, 9, 0};                     /* 14 - window 4 - slack 1 */
    const uint32_t dtypes[3][2] = {{7, 4}, {2, 7}, {6, 1}}; /* as numbered in kv8/formats.h */
    for (int i = 0; i < 3; i++) {
        push_u32(&w, dtypes[i][0]);
        push_u32(&w, dtypes[i][1]);
        push_u32(&w, (uint32_t)shape_layers[i].window_left);
        push_u32(&w, (uint32_t)first[i]);
    }
    for (int i = 0; i < 3; i++) {
        push_floats(&w, k_scale[i], 2);
        push_floats(&w, one, 2);
    }
    for (int t = 0; t < 14; t++) push_u32(&w, (uint32_t)token_ids[t]);
    for (int i = 0; i < 3; i++) {
        for (int t = first[i]; t < 14; t++) {
            push_plane_row(&w, shape_layers[i].k_dtype, k_rows + t * K_ROW, SHAPE_K_DIM,
                           k_scale[i]);
            push_plane_row(&w, shape_layers[i].v_dtype, v_rows + t * V_ROW, SHAPE_V_DIM, one);
        }
    }
    w.f.size += 16;
    fix_checksum(&w.f);
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    const file f = saved(cache, make_sequence(cache, true));
    assert_int_equal(f.size, w.f.size);
    assert_memory_equal(f.data, w.f.data, f.size);
    kv8_cache_destroy(cache);
}

/* --- round trips --- */

static void check_equal(const kv8_cache *a, kv8_seq seq_a, const kv8_cache *b, kv8_seq seq_b) {
    const int32_t length = seq_length(a, seq_a);
    assert_int_equal(seq_length(b, seq_b), length);
    for (int32_t layer = 0; layer < SHAPE_LAYERS; layer++) {
        const int32_t window_left = shape_layers[layer].window_left;
        const int32_t begin = window_left < 0 ? 0 : length - window_left;
        float k[2][40 * K_ROW], v[2][40 * V_ROW], scales[2][2 * SHAPE_HEADS];
        assert_ok(kv8_cache_read(a, layer, seq_a, begin, length - begin, k[0], v[0]));
        assert_ok(kv8_cache_read(b, layer, seq_b, begin, length - begin, k[1], v[1]));
        assert_memory_equal(k[0], k[1], sizeof(float) * (size_t)(length - begin) * K_ROW);
        assert_memory_equal(v[0], v[1], sizeof(float) * (size_t)(length - begin) * V_ROW);
        assert_ok(kv8_cache_scales(a, layer, &seq_a, 1, scales[0], scales[0] + SHAPE_HEADS));
        assert_ok(kv8_cache_scales(b, layer, &seq_b, 1, scales[1], scales[1] + SHAPE_HEADS));
        assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
    }
}

/* Into every page size and layout, and out again: the second file equals the first. */
static void page_size_and_layout_need_not_match(void **state) {
    (void)state;
    const int32_t page_sizes[] = {1, 2, 4, 7, 16, 64};
    for (int own = 0; own < 2; own++) {
        kv8_cache *const source = open_shape(4, KV8_LAYOUT_NHD);
        const kv8_seq seq = make_sequence(source, own == 1);
        static file f;
        f = saved(source, seq);
        for (int i = 0; i < 12; i++) {
            kv8_cache *const cache = open_shape(page_sizes[i / 2], (kv8_layout)(i % 2));
            kv8_seq loaded = KV8_SEQ_NONE;
            write_file(path, f.data, f.size);
            assert_ok(kv8_cache_load(cache, path, &loaded));
            check_equal(source, seq, cache, loaded);
            const file again = saved(cache, loaded);
            assert_int_equal(again.size, f.size);
            assert_memory_equal(again.data, f.data, f.size);
            /* It goes on like the original, and behind the stored window there is nothing. */
            float k[K_ROW];
            assert_refused(kv8_cache_read(cache, 1, loaded, 8, 1, k, NULL), KV8_ERR_NOT_FOUND,
                           "9 on");
            assert_ok(kv8_cache_truncate(cache, loaded, 13));
            assert_refused(kv8_cache_truncate(cache, loaded, 12), KV8_ERR_INVALID, "held from 9");
            grow_to(cache, loaded, 20, true);
            kv8_seq longer = KV8_SEQ_NONE;
            assert_ok(kv8_cache_seq_fork(source, seq, &longer));
            grow_to(source, longer, 20, true);
            check_equal(source, longer, cache, loaded);
            assert_ok(kv8_cache_seq_destroy(source, longer));
            kv8_cache_destroy(cache);
        }
        kv8_cache_destroy(source);
    }
}

static void restored_prefixes_are_found_again(void **state) {
    (void)state;
    kv8_cache *const source = open_shape(4, KV8_LAYOUT_NHD);
    const kv8_seq seq = make_sequence(source, false);
    assert_ok(kv8_cache_save(source, seq, path));
    kv8_cache *const cache = open_shape(2, KV8_LAYOUT_HND);
    kv8_seq loaded = KV8_SEQ_NONE, match = KV8_SEQ_NONE;
    int32_t matched = -1;
    assert_ok(kv8_cache_load(cache, path, &loaded));
    assert_ok(kv8_cache_publish(cache, loaded));
    assert_ok(kv8_cache_prefix_match(cache, token_ids, 20, &match, &matched));
    assert_int_equal(matched, 14);
    check_equal(source, seq, cache, match);
    /* A prefix of 12 needs tokens 8..11 of the window layer, but page 4 holds only token 9. */
    assert_ok(kv8_cache_seq_destroy(cache, match));
    assert_ok(kv8_cache_prefix_match(cache, token_ids, 13, &match, &matched));
    assert_int_equal(matched, 0);
    kv8_cache_destroy(cache);
    kv8_cache_destroy(source);
}

static void empty_and_anonymous_sequences(void **state) {
    (void)state;
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    const kv8_seq empty = new_seq(cache), anonymous = new_seq(cache);
    kv8_seq loaded = KV8_SEQ_NONE;
    assert_ok(kv8_cache_save(cache, empty, path));
    assert_ok(kv8_cache_load(cache, path, &loaded));
    assert_int_equal(seq_length(cache, loaded), 0);
    grow_to(cache, loaded, 3, true);
    assert_ok(kv8_cache_seq_destroy(cache, loaded));
    grow_to(cache, anonymous, 9, false);
    assert_ok(kv8_cache_save(cache, anonymous, path));
    assert_ok(kv8_cache_load(cache, path, &loaded));
    check_equal(cache, anonymous, cache, loaded);
    assert_ok(kv8_cache_publish(cache, loaded));
    kv8_cache_destroy(cache);
}

/* --- refusals --- */

static void check_untouched(const kv8_cache *cache) {
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    assert_ok(kv8_cache_get_stats(cache, &stats));
    assert_int_equal(stats.num_seqs, 0);
    assert_int_equal(stats.pages_free, stats.pages_total);
}

static void torn_and_altered_files_are_refused(void **state) {
    (void)state;
    kv8_cache *const source = open_shape(4, KV8_LAYOUT_NHD);
    static file f;
    f = saved(source, make_sequence(source, true));
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    kv8_seq seq = KV8_SEQ_NONE;
    for (size_t size = 0; size < f.size; size++) {
        const guarded copy = guarded_alloc(size); /* a read past the end crashes */
        memcpy(copy.data, f.data, size);
        assert_refused(kv8_cache_load_bytes(cache, copy.data, size, "torn-file", &seq),
                       KV8_ERR_CORRUPT, "torn-file: ");
        guarded_free(copy);
    }
    assert_refused(kv8_cache_load_bytes(cache, f.data, f.size + 1, "x", &seq), KV8_ERR_CORRUPT,
                   "too long");
    for (size_t i = 0; i < f.size; i++) {
        for (int bit = 0; bit < 9; bit++) {
            const uint8_t original = f.data[i];
            f.data[i] ^= (uint8_t)(bit == 8 ? 0xff : 1 << bit);
            assert_refused(kv8_cache_load_bytes(cache, f.data, f.size, "x", &seq), KV8_ERR_CORRUPT,
                           "x: ");
            f.data[i] = original;
        }
    }
    assert_true(seq == KV8_SEQ_NONE);
    check_untouched(cache);
    assert_ok(kv8_cache_load_bytes(cache, f.data, f.size, "x", &seq));
    kv8_cache_destroy(cache);
    kv8_cache_destroy(source);
}

static void foreign_files_are_refused(void **state) {
    (void)state;
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_refused(kv8_cache_load(cache, "/nonexistent/file", &seq), KV8_ERR_NOT_FOUND,
                   "/nonexistent/file");
    assert_refused(kv8_cache_load(cache, directory, &seq), KV8_ERR_INVALID, "not a regular file");
    write_file(path, "", 0);
    assert_refused(kv8_cache_load(cache, path, &seq), KV8_ERR_CORRUPT, "empty");
    write_file(path, "kv8", 3);
    assert_refused(kv8_cache_load(cache, path, &seq), KV8_ERR_CORRUPT, "not a kv8 snapshot");
    const char text[] = "# A text that is no snapshot, but longer than any header would be.";
    write_file(path, text, sizeof text);
    assert_refused(kv8_cache_load(cache, path, &seq), KV8_ERR_CORRUPT, "not a kv8 snapshot");
    check_untouched(cache);
    kv8_cache_destroy(cache);
}

/* Files whose checksum is right but whose contents are not. */
static void forged_headers_are_refused(void **state) {
    (void)state;
    kv8_cache *const source = open_shape(4, KV8_LAYOUT_NHD);
    static file f;
    f = saved(source, make_sequence(source, true));
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    const float nan_scale = NAN, zero = 0;
    uint32_t nan_bits, zero_bits;
    memcpy(&nan_bits, &nan_scale, 4);
    memcpy(&zero_bits, &zero, 4);
    const struct {
        size_t offset;
        uint32_t value;
        const char *part;
    } forgeries[] = {
        {8, 2, "version is 2"},
        {12, 2, "impossible"},
        {16, 0, "impossible"},
        {16, 0x7fffffff, "torn"},
        {16, 0x80000000u, "impossible"},
        {20, 0x7fffffff, "its header says"},
        {24, 577, "impossible"},
        {28, 0, "impossible"},
        {32, 0x7fffffff, "its header says"},
        {32, 0xffffffffu, "impossible"},
        {36, 1, "impossible"},
        {40, 0, "dtypes 0 and 4"},
        {44, 8, "dtypes 7 and 8"},
        {52, 1u, "its header says"},
        {52, 15, "begins at token 15 of 14"},
        {52, 0xffffffffu, "begins at token -1"},
        {88, nan_bits, "a scale of layer 0 is nan"},
        {96 + 32, zero_bits, "a scale of layer 2 is 0"},
    };
    for (size_t i = 0; i < sizeof forgeries / sizeof *forgeries; i++) {
        static file forged;
        forged = f;
        memcpy(forged.data + forgeries[i].offset, &forgeries[i].value, 4);
        fix_checksum(&forged);
        kv8_seq seq = KV8_SEQ_NONE;
        assert_refused(kv8_cache_load_bytes(cache, forged.data, forged.size, "x", &seq),
                       KV8_ERR_CORRUPT, forgeries[i].part);
    }
    /* A window that begins too late, with the rows cut to fit: layer 1 stores 9 + 8 bytes... */
    static file forged;
    forged = f;
    const size_t row0 = 88 + 3 * 16 + 14 * 4, layer0 = 14 * (6 + 4 + 4);
    const size_t row1 = 6 * 2 + 4 + 4;
    memmove(forged.data + row0 + layer0, forged.data + row0 + layer0 + 2 * row1,
            forged.size - (row0 + layer0 + 2 * row1));
    forged.size -= 2 * row1;
    const uint32_t first = 11; /* 14 - 4 = 10 is seen */
    memcpy(forged.data + 68, &first, 4);
    fix_checksum(&forged);
    kv8_seq seq = KV8_SEQ_NONE;
    assert_refused(kv8_cache_load_bytes(cache, forged.data, forged.size, "x", &seq),
                   KV8_ERR_CORRUPT, "layer 1 begins at token 11, its window needs token 10");
    check_untouched(cache);
    kv8_cache_destroy(cache);
    kv8_cache_destroy(source);
}

static void other_caches_are_refused_by_name(void **state) {
    (void)state;
    kv8_cache *const source = open_shape(4, KV8_LAYOUT_NHD);
    static file f;
    f = saved(source, make_sequence(source, true));
    kv8_cache_layer layers[4];
    memcpy(layers, shape_layers, sizeof shape_layers);
    layers[3] = layers[0];
    for (int i = 0; i < 9; i++) {
        kv8_cache_options options = snapshot_shape();
        kv8_cache_layer changed[4];
        memcpy(changed, layers, sizeof layers);
        options.layers = changed;
        kv8_status want = KV8_ERR_INVALID;
        const char *part = NULL;
        switch (i) {
            case 0: options.num_layers = 4, part = "num_layers is 3, the cache's 4"; break;
            case 1: options.num_kv_heads = 1, part = "num_kv_heads is 2, the cache's 1"; break;
            case 2: options.k_head_dim = 4, part = "k_head_dim is 3, the cache's 4"; break;
            case 3: options.v_head_dim = 1, part = "v_head_dim is 2, the cache's 1"; break;
            case 4: changed[2].k_dtype = KV8_E4M3, part = "layer 2 stores K as e5m2"; break;
            case 5: changed[0].v_dtype = KV8_BF16, part = "layer 0 stores V as e4m3"; break;
            case 6: changed[1].window_left = 5, part = "layer 1 has window_left 4"; break;
            case 7: options.max_seq_len = 13, part = "length is 14, max_seq_len 13"; break;
            default:
                options.num_pages = 3, part = "4 pages needed in the group of layer 0";
                want = KV8_ERR_FULL;
                break;
        }
        kv8_cache *cache = NULL;
        kv8_seq seq = KV8_SEQ_NONE;
        assert_ok(kv8_cache_create(&cache, &options));
        assert_refused(kv8_cache_load_bytes(cache, f.data, f.size, "x", &seq), want, part);
        check_untouched(cache);
        kv8_cache_destroy(cache);
    }
    /* No sequence left. */
    kv8_seq seq = KV8_SEQ_NONE;
    while (kv8_cache_seq_create(source, &seq) == KV8_OK) {
    }
    const int32_t free_before = pages_free(source);
    seq = KV8_SEQ_NONE;
    assert_refused(kv8_cache_load_bytes(source, f.data, f.size, "x", &seq), KV8_ERR_FULL,
                   "max_seqs");
    assert_int_equal(pages_free(source), free_before);
    kv8_cache_destroy(source);
}

/* --- disks --- */

static void check_failed_save(const kv8_cache *cache, kv8_seq seq, const char *target,
                              const char *in, int files_before) {
    assert_refused(kv8_cache_save(cache, seq, target), KV8_ERR_IO, target);
    assert_null(strchr(kv8_status_message(), '\n'));
    assert_int_equal(files_in(in), files_before);
}

/* A limit on file size stands for the full disk: the write fails in the same place. The file that
 * was there before survives. */
static void a_full_disk_leaves_no_partial_file(void **state) {
    (void)state;
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    const kv8_seq seq = make_sequence(cache, true);
    static file f;
    f = saved(cache, seq);
    struct rlimit old, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    void (*const handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (rlim_t limit = 0; limit < f.size; limit += 100) {
        small = old;
        small.rlim_cur = limit;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        const kv8_status status = kv8_cache_save(cache, seq, path);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(status, KV8_ERR_IO);
        assert_non_null(strstr(kv8_status_message(), path));
        assert_int_equal(files_in(directory), 1);
    }
    signal(SIGXFSZ, handler);
    const file kept = read_file(path);
    assert_memory_equal(kept.data, f.data, f.size);
    check_failed_save(cache, seq, "/nonexistent/file", directory, 1);
    check_failed_save(cache, seq, directory, directory, 1); /* a directory cannot be replaced */
    kv8_cache_destroy(cache);
}

/* The real thing, where this process may mount: a file system of one page, in a namespace of its
 * own that ends with the process. */
static void a_full_file_system_leaves_no_partial_file(void **state) {
    (void)state;
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("tmpfs", directory, "tmpfs", 0, "size=4096") != 0)
        skip();
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    const kv8_seq seq = make_sequence(cache, true);
    char filler[96];
    snprintf(filler, sizeof filler, "%s/filler", directory);
    write_file(filler, "x", 1); /* takes the only page */
    check_failed_save(cache, seq, path, directory, 1);
    assert_non_null(strstr(kv8_status_message(), strerror(ENOSPC)));
    assert_int_equal(umount(directory), 0);
    kv8_cache_destroy(cache);
}

/* The seeds of the fuzz harness stay what it says they are. */
static void fuzz_seeds_load(void **state) {
    (void)state;
    kv8_cache *const cache = open_shape(4, KV8_LAYOUT_NHD);
    kv8_seq seq = KV8_SEQ_NONE;
    const char *const seeds = "tests/fuzz/seeds/fuzz_snapshot";
    char name[128];
    snprintf(name, sizeof name, "%s/whole.kv8snap", seeds);
    assert_ok(kv8_cache_load(cache, name, &seq));
    assert_int_equal(seq_length(cache, seq), 14);
    snprintf(name, sizeof name, "%s/torn.kv8snap", seeds);
    assert_refused(kv8_cache_load(cache, name, &seq), KV8_ERR_CORRUPT, "torn");
    snprintf(name, sizeof name, "%s/foreign", seeds);
    assert_refused(kv8_cache_load(cache, name, &seq), KV8_ERR_CORRUPT, "not a kv8 snapshot");
    kv8_cache_destroy(cache);
}

int main(void) {
    make_rows();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_file_is_what_the_format_says, set_up, tear_down),
        cmocka_unit_test_setup_teardown(page_size_and_layout_need_not_match, set_up, tear_down),
        cmocka_unit_test_setup_teardown(restored_prefixes_are_found_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(empty_and_anonymous_sequences, set_up, tear_down),
        cmocka_unit_test_setup_teardown(torn_and_altered_files_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(foreign_files_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(forged_headers_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_caches_are_refused_by_name, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_full_disk_leaves_no_partial_file, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_full_file_system_leaves_no_partial_file, set_up,
                                        tear_down),
        cmocka_unit_test(fuzz_seeds_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
