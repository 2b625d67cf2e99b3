/* test_cache_device.c - a cache on a GPU against one in host memory: the same calls on both give
 * the same handles, tables, values, counts, statistics and snapshots, over thousands of random
 * steps of every kind; tables in device memory are the host's; and what is refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_impl.h"
#include "cache_testing.h"
#include "gpu_testing.h"

#include <kv8/rope.h>
#include <unistd.h>

enum { LAYERS = 3, HEADS = 2, K_DIM = 16, V_DIM = 32, SEQS = 6, MAX_LEN = 60, MAX_ROWS = 24 };
enum { K_ROW = HEADS * K_DIM, V_ROW = HEADS * V_DIM, GROUPS = 2 };

static const float k_scales[HEADS] = {0.25f, 0.7f};
static const kv8_cache_layer layers[LAYERS] = {
    {sizeof(kv8_cache_layer), KV8_E4M3, KV8_INT8, -1, k_scales, NULL},
    {sizeof(kv8_cache_layer), KV8_INT8, KV8_BF16, 6, NULL, k_scales},
    {sizeof(kv8_cache_layer), KV8_F32, KV8_E5M2, -1, NULL, NULL},
};

/* A cache of each kind, which live the same life. */
typedef struct pair {
    const gpu *g;
    kv8_cache *host, *device;
    int32_t page_size;
    kv8_seq seqs[SEQS]; /* KV8_SEQ_NONE = not alive */
    kv8_rope *rope[2];  /* halves, pairs */
    char path[2][64];
} pair;

static kv8_cache_options options_of(int32_t page_size, kv8_layout layout) {
    kv8_cache_options options = small_options(layers, LAYERS);
    options.num_kv_heads = HEADS;
    options.k_head_dim = K_DIM;
    options.v_head_dim = V_DIM;
    options.page_size = page_size;
    options.layout = layout;
    options.num_pages = 3 * MAX_LEN / page_size;
    options.num_window_pages = 2 * MAX_LEN / page_size;
    options.max_seqs = SEQS;
    options.max_seq_len = MAX_LEN;
    options.window_slack = 3;
    return options;
}

static void open_pair(pair *p, const gpu *g, int32_t page_size, kv8_layout layout) {
    *p = (pair){.g = g, .page_size = page_size};
    kv8_cache_options options = options_of(page_size, layout);
    assert_ok(kv8_cache_create(&p->host, &options));
    options.device = g->device;
    options.stream = g->stream;
    assert_ok(kv8_cache_create(&p->device, &options));
    for (int i = 0; i < SEQS; i++) p->seqs[i] = KV8_SEQ_NONE;
    for (int i = 0; i < 2; i++) {
        kv8_rope_options rope = KV8_ROPE_OPTIONS_INIT;
        rope.head_dim = K_DIM;
        rope.theta = 10000;
        rope.interleaved = i;
        assert_ok(kv8_rope_create(&p->rope[i], &rope));
        snprintf(p->path[i], sizeof p->path[i], "/tmp/kv8_cache_device_%d_%d", (int)getpid(), i);
    }
}

static void close_pair(pair *p) {
    kv8_cache_destroy(p->host);
    kv8_cache_destroy(p->device);
    for (int i = 0; i < 2; i++) {
        kv8_rope_destroy(p->rope[i]);
        (void)unlink(p->path[i]);
    }
}

/* --- comparing --- */

static void compare_rows(const pair *p, int32_t layer, kv8_seq seq, int32_t begin, int32_t count) {
    static float k[2][MAX_LEN * K_ROW], v[2][MAX_LEN * V_ROW];
    const kv8_status want = kv8_cache_read(p->host, layer, seq, begin, count, k[0], v[0]);
    assert_int_equal(kv8_cache_read(p->device, layer, seq, begin, count, k[1], v[1]), want);
    if (want != KV8_OK) return;
    assert_memory_equal(k[0], k[1], (size_t)(count * K_ROW) * sizeof(float));
    assert_memory_equal(v[0], v[1], (size_t)(count * V_ROW) * sizeof(float));
}

static void compare_sequence(const pair *p, kv8_seq seq) {
    const int32_t length = seq_length(p->host, seq);
    assert_int_equal(seq_length(p->device, seq), length);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        int32_t indptr[2][2], last[2], pages[2][MAX_LEN];
        assert_ok(
            kv8_cache_page_table(p->host, layer, &seq, 1, indptr[0], pages[0], MAX_LEN, &last[0]));
        assert_ok(kv8_cache_page_table(p->device, layer, &seq, 1, indptr[1], pages[1], MAX_LEN,
                                       &last[1]));
        assert_int_equal(indptr[0][1], indptr[1][1]);
        assert_int_equal(last[0], last[1]);
        assert_memory_equal(pages[0], pages[1], (size_t)indptr[0][1] * sizeof(int32_t));
        int32_t first = 0;
        while (first < indptr[0][1] && pages[0][first] == KV8_NO_PAGE) first++;
        /* A restored window may begin inside its first page. */
        for (int32_t begin = first * p->page_size; begin < length; begin++) {
            compare_rows(p, layer, seq, begin, length - begin);
            if (begin >= (first + 1) * p->page_size) break;
        }
    }
}

static void compare(const pair *p) {
    kv8_cache_stats stats[2] = {KV8_CACHE_STATS_INIT, KV8_CACHE_STATS_INIT};
    assert_ok(kv8_cache_get_stats(p->host, &stats[0]));
    assert_ok(kv8_cache_get_stats(p->device, &stats[1]));
    assert_memory_equal(&stats[0], &stats[1], sizeof stats[0]);
    for (int i = 0; i < SEQS; i++) {
        if (p->seqs[i] != KV8_SEQ_NONE) compare_sequence(p, p->seqs[i]);
    }
}

static void compare_counters(const pair *p) {
    kv8_cache_counters sums[2];
    assert_ok(kv8_cache_sum_counters(p->host, &sums[0]));
    assert_ok(kv8_cache_sum_counters(p->device, &sums[1]));
    assert_memory_equal(&sums[0], &sums[1], sizeof sums[0]);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t head = 0; head < HEADS; head++) {
            kv8_cache_counters counters[2];
            assert_ok(kv8_cache_get_counters(p->host, layer, head, &counters[0]));
            assert_ok(kv8_cache_get_counters(p->device, layer, head, &counters[1]));
            assert_memory_equal(&counters[0], &counters[1], sizeof counters[0]);
        }
    }
}

/* Requests from num_seqs to SEQS have no page. */
static void check_padding(const pair *p, const kv8_page_table *table, int32_t num_seqs,
                          int32_t num_entries) {
    int32_t indptr[SEQS + 1], last[SEQS];
    gpu_download(p->g, indptr, table->page_indptr, sizeof indptr);
    gpu_download(p->g, last, table->last_page_len, sizeof last);
    for (int32_t b = num_seqs; b < SEQS; b++) {
        assert_int_equal(indptr[b + 1], num_entries);
        assert_int_equal(last[b], 0);
    }
}

/* A layer's own scales, as the host's cache has them. */
static void check_layer_scales(const pair *p, int32_t layer) {
    float k[HEADS], v[HEADS];
    kv8_cache_layer host;
    kv8_cache_device_layer device;
    assert_ok(kv8_cache_get_layer(p->host, layer, &host));
    assert_ok(kv8_cache_get_device_layer(p->device, layer, &device));
    gpu_download(p->g, k, device.k_scale, sizeof k);
    gpu_download(p->g, v, device.v_scale, sizeof v);
    assert_memory_equal(k, host.k_scale, sizeof k);
    assert_memory_equal(v, host.v_scale, sizeof v);
}

/* What attention on the GPU would read is what the host's calls give. */
static void compare_device_tables(const pair *p, const kv8_seq *seqs, int32_t num_seqs) {
    int32_t indptr[SEQS + 1], last[SEQS], pages[SEQS * MAX_LEN];
    int32_t got_indptr[SEQS + 1], got_last[SEQS], got_pages[SEQS * MAX_LEN];
    float k[SEQS * HEADS], v[SEQS * HEADS], got_k[SEQS * HEADS], got_v[SEQS * HEADS];
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        assert_ok(kv8_cache_page_table(p->host, layer, seqs, num_seqs, indptr, pages,
                                       SEQS * MAX_LEN, last));
        assert_ok(kv8_cache_scales(p->host, layer, seqs, num_seqs, k, v));
        kv8_page_table table = KV8_PAGE_TABLE_INIT;
        const float *k_scale = NULL, *v_scale = NULL;
        assert_ok(kv8_cache_page_table_device(p->device, layer, seqs, num_seqs, &table));
        assert_ok(kv8_cache_scales_device(p->device, layer, seqs, num_seqs, &k_scale, &v_scale));
        const size_t n = (size_t)num_seqs, entries = (size_t)indptr[num_seqs];
        gpu_download(p->g, got_indptr, table.page_indptr, (n + 1) * sizeof(int32_t));
        assert_memory_equal(got_indptr, indptr, (n + 1) * sizeof(int32_t));
        check_padding(p, &table, num_seqs, indptr[num_seqs]);
        check_layer_scales(p, layer);
        if (num_seqs == 0) continue;
        gpu_download(p->g, got_last, table.last_page_len, n * sizeof(int32_t));
        assert_memory_equal(got_last, last, n * sizeof(int32_t));
        if (entries > 0) {
            gpu_download(p->g, got_pages, table.page_indices, entries * sizeof(int32_t));
            assert_memory_equal(got_pages, pages, entries * sizeof(int32_t));
        }
        gpu_download(p->g, got_k, k_scale, n * HEADS * sizeof(float));
        gpu_download(p->g, got_v, v_scale, n * HEADS * sizeof(float));
        assert_memory_equal(got_k, k, n * HEADS * sizeof(float));
        assert_memory_equal(got_v, v, n * HEADS * sizeof(float));
    }
}

/* --- steps: both caches answer alike --- */

/* Rows for the newest tokens of several sequences, in every layer; `turn` chooses the source. */
static void append(const pair *p, const kv8_seq *seqs, const int32_t *indptr, int32_t num_seqs,
                   int turn, test_rng *rng) {
    static float k[MAX_ROWS * K_ROW], v[MAX_ROWS * V_ROW], cos_sin[MAX_ROWS * K_DIM];
    static uint16_t codes[2][MAX_ROWS * V_ROW];
    const int32_t num_rows = indptr[num_seqs];
    const kv8_dtype sources[] = {KV8_F32, KV8_BF16, KV8_F16};
    int32_t positions[MAX_ROWS];
    for (int32_t i = 0; i < num_rows; i++) positions[i] = rng_range(rng, 0, 1000);
    kv8_rope_angles(p->rope[turn % 2], positions, (size_t)num_rows, cos_sin);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t i = 0; i < num_rows * K_ROW; i++) k[i] = rng_normal(rng) * 20;
        for (int32_t i = 0; i < num_rows * V_ROW; i++) v[i] = rng_normal(rng) * 20;
        if (rng_range(rng, 0, 3) == 0 && num_rows > 0) v[0] = 1e30f;
        const kv8_dtype source = sources[(turn + layer) % 3];
        const void *k_from = k, *v_from = v;
        if (source != KV8_F32) {
            assert_ok(kv8_narrow(KV8_ISA_SCALAR, source, k, (size_t)(num_rows * K_ROW), 1, codes[0],
                                 NULL));
            assert_ok(kv8_narrow(KV8_ISA_SCALAR, source, v, (size_t)(num_rows * V_ROW), 1, codes[1],
                                 NULL));
            k_from = codes[0], v_from = codes[1];
        }
        kv8_append rows = KV8_APPEND_INIT;
        rows.num_seqs = num_seqs;
        rows.seqs = seqs;
        rows.indptr = indptr;
        rows.src_dtype = source;
        rows.k = k_from;
        rows.k_stride_row = K_ROW;
        rows.k_stride_head = K_DIM;
        rows.v = v_from;
        rows.v_stride_row = V_ROW;
        rows.v_stride_head = V_DIM;
        const bool rotates = turn % 3 != 0;
        if (rotates) rows.cos_sin = cos_sin, rows.interleaved = turn % 2;
        assert_ok(kv8_cache_append(p->host, layer, &rows));
        const size_t element = kv8_dtype_size(source);
        void *const all[3] = {gpu_upload(p->g, k_from, (size_t)(MAX_ROWS * K_ROW) * element),
                              gpu_upload(p->g, v_from, (size_t)(MAX_ROWS * V_ROW) * element),
                              gpu_upload(p->g, cos_sin, sizeof cos_sin)};
        rows.k = all[0];
        rows.v = all[1];
        if (rotates) rows.cos_sin = all[2];
        assert_ok(kv8_cache_append(p->device, layer, &rows));
        for (int i = 0; i < 3; i++) kv8_device_free(p->g->device, all[i]);
    }
}

static void grow(pair *p, test_rng *rng, int turn) {
    kv8_seq seqs[SEQS];
    int32_t indptr[SEQS + 1] = {0}, ids[MAX_ROWS], num_seqs = 0;
    for (int i = 0; i < SEQS; i++) {
        const kv8_seq seq = p->seqs[i];
        if (seq == KV8_SEQ_NONE || rng_range(rng, 0, 2) == 0) continue;
        const int32_t count = rng_range(rng, 0, MAX_ROWS / SEQS);
        /* Few ids, so that prefixes meet. */
        for (int32_t t = 0; t < count; t++) ids[t] = rng_range(rng, 0, 1);
        const kv8_status want = kv8_cache_extend(p->host, seq, count, ids);
        assert_int_equal(kv8_cache_extend(p->device, seq, count, ids), want);
        if (want != KV8_OK) continue;
        seqs[num_seqs] = seq;
        indptr[num_seqs + 1] = indptr[num_seqs] + count;
        num_seqs++;
    }
    append(p, seqs, indptr, num_seqs, turn, rng);
    compare_device_tables(p, seqs, num_seqs);
}

static int find(const pair *p, bool alive, test_rng *rng) {
    const int32_t start = rng_range(rng, 0, SEQS - 1);
    for (int i = 0; i < SEQS; i++) {
        const int at = (start + i) % SEQS;
        if ((p->seqs[at] != KV8_SEQ_NONE) == alive) return at;
    }
    return -1;
}

static void create_or_match(pair *p, test_rng *rng) {
    const int at = find(p, false, rng);
    if (at < 0) return;
    kv8_seq seqs[2] = {KV8_SEQ_NONE, KV8_SEQ_NONE};
    int32_t ids[MAX_LEN], matched[2] = {0, 0};
    for (int i = 0; i < MAX_LEN; i++) ids[i] = rng_range(rng, 0, 1);
    if (rng_range(rng, 0, 1) == 0) {
        assert_ok(kv8_cache_seq_create(p->host, &seqs[0]));
        assert_ok(kv8_cache_seq_create(p->device, &seqs[1]));
        if (rng_range(rng, 0, 3) == 0) {
            assert_ok(kv8_cache_seq_set_scales(p->host, seqs[0], 0, NULL, k_scales));
            assert_ok(kv8_cache_seq_set_scales(p->device, seqs[1], 0, NULL, k_scales));
        }
    } else {
        assert_ok(kv8_cache_prefix_match(p->host, ids, MAX_LEN, &seqs[0], &matched[0]));
        assert_ok(kv8_cache_prefix_match(p->device, ids, MAX_LEN, &seqs[1], &matched[1]));
    }
    assert_int_equal(matched[0], matched[1]);
    assert_true(seqs[0] == seqs[1]);
    p->seqs[at] = seqs[0];
}

static void fork_one(pair *p, test_rng *rng) {
    const int from = find(p, true, rng), to = find(p, false, rng);
    if (from < 0 || to < 0) return;
    kv8_seq seqs[2];
    assert_ok(kv8_cache_seq_fork(p->host, p->seqs[from], &seqs[0]));
    assert_ok(kv8_cache_seq_fork(p->device, p->seqs[from], &seqs[1]));
    assert_true(seqs[0] == seqs[1]);
    p->seqs[to] = seqs[0];
}

static void assert_same_files(const pair *p) {
    static uint8_t bytes[2][1 << 20];
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        FILE *const file = fopen(p->path[i], "rb");
        assert_non_null(file);
        size[i] = fread(bytes[i], 1, sizeof bytes[i], file);
        assert_true(size[i] < sizeof bytes[i]);
        fclose(file);
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(bytes[0], bytes[1], size[0]);
}

/* Saves from both, and loads what the other has saved. */
static void save_and_load(pair *p, test_rng *rng) {
    const int from = find(p, true, rng), to = find(p, false, rng);
    if (from < 0) return;
    assert_ok(kv8_cache_save(p->host, p->seqs[from], p->path[0]));
    assert_ok(kv8_cache_save(p->device, p->seqs[from], p->path[1]));
    assert_same_files(p);
    if (to < 0) return;
    kv8_seq seqs[2];
    const kv8_status want = kv8_cache_load(p->host, p->path[1], &seqs[0]);
    assert_int_equal(kv8_cache_load(p->device, p->path[0], &seqs[1]), want);
    if (want != KV8_OK) return;
    assert_true(seqs[0] == seqs[1]);
    p->seqs[to] = seqs[0];
}

static void shrink(pair *p, test_rng *rng) {
    const int at = find(p, true, rng);
    if (at < 0) return;
    const kv8_seq seq = p->seqs[at];
    if (rng_range(rng, 0, 2) == 0) {
        assert_ok(kv8_cache_seq_destroy(p->host, seq));
        assert_ok(kv8_cache_seq_destroy(p->device, seq));
        p->seqs[at] = KV8_SEQ_NONE;
        return;
    }
    const int32_t length = seq_length(p->host, seq);
    const int32_t shorter = length - rng_range(rng, 0, length < 9 ? length : 9);
    assert_int_equal(kv8_cache_truncate(p->device, seq, shorter),
                     kv8_cache_truncate(p->host, seq, shorter));
}

static void publish(pair *p, test_rng *rng) {
    const int at = find(p, true, rng);
    if (at < 0) return;
    assert_ok(kv8_cache_publish(p->host, p->seqs[at]));
    assert_ok(kv8_cache_publish(p->device, p->seqs[at]));
}

static void both_live_the_same_life(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    static const int32_t page_sizes[] = {4, 1, 7};
    for (int i = 0; i < 6; i++) {
        pair p;
        test_rng rng = {(uint64_t)i + 1};
        open_pair(&p, g, page_sizes[i % 3], i < 3 ? KV8_LAYOUT_NHD : KV8_LAYOUT_HND);
        for (int turn = 0; turn < 250; turn++) {
            switch (rng_range(&rng, 0, 9)) {
                case 0:
                case 1: create_or_match(&p, &rng); break;
                case 2: fork_one(&p, &rng); break;
                case 3: save_and_load(&p, &rng); break;
                case 4: shrink(&p, &rng); break;
                case 5: publish(&p, &rng); break;
                default: grow(&p, &rng, turn); break;
            }
            if (turn % 5 == 0) compare(&p);
        }
        compare(&p);
        compare_counters(&p);
        assert_ok(kv8_cache_reset_counters(p.host));
        assert_ok(kv8_cache_reset_counters(p.device));
        compare_counters(&p);
        close_pair(&p);
    }
}

/* More rows than one launch takes, and more than the staging holds at once. */
static void long_appends_are_cut(void **state) {
    const gpu *const g = gpu_get_with_kernels(state);
    enum { ROWS = 200000, DIM = 16 };
    const kv8_cache_layer layer = {sizeof layer, KV8_E4M3, KV8_E4M3, -1, NULL, NULL};
    kv8_cache_options options = small_options(&layer, 1);
    options.num_kv_heads = 1;
    options.k_head_dim = DIM;
    options.page_size = 16;
    options.num_pages = ROWS / 16 + 2;
    options.max_seq_len = ROWS;
    kv8_cache *caches[2] = {NULL, NULL};
    assert_ok(kv8_cache_create(&caches[0], &options));
    options.device = g->device;
    options.stream = g->stream;
    assert_ok(kv8_cache_create(&caches[1], &options));
    float *const source = malloc(sizeof(float) * ROWS * DIM);
    float *const values[2] = {malloc(sizeof(float) * ROWS * DIM),
                              malloc(sizeof(float) * ROWS * DIM)};
    test_rng rng = {1};
    for (int i = 0; i < ROWS * DIM; i++) source[i] = rng_normal(&rng);
    float *const source_on_gpu = gpu_upload(g, source, sizeof(float) * ROWS * DIM);
    for (int i = 0; i < 2; i++) {
        const kv8_seq seqs[2] = {new_seq(caches[i]), new_seq(caches[i])};
        const int32_t indptr[3] = {0, 7, ROWS};
        assert_ok(kv8_cache_extend(caches[i], seqs[0], 7, NULL));
        assert_ok(kv8_cache_extend(caches[i], seqs[1], ROWS - 7, NULL));
        kv8_append rows = KV8_APPEND_INIT;
        rows.num_seqs = 2;
        rows.seqs = seqs;
        rows.indptr = indptr;
        rows.src_dtype = KV8_F32;
        rows.k = rows.v = i == 0 ? source : source_on_gpu;
        rows.k_stride_row = rows.k_stride_head = rows.v_stride_row = rows.v_stride_head = DIM;
        assert_ok(kv8_cache_append(caches[i], 0, &rows));
        assert_ok(kv8_cache_read(caches[i], 0, seqs[1], 0, ROWS - 7, values[i], NULL));
    }
    assert_memory_equal(values[0], values[1], sizeof(float) * (ROWS - 7) * DIM);
    for (int i = 0; i < 2; i++) {
        free(values[i]);
        kv8_cache_destroy(caches[i]);
    }
    free(source);
    kv8_device_free(g->device, source_on_gpu);
}

/* Lists of thousands of pages, which several blocks and launches make tables of; they grow by a few
 * pages and by many, shrink, fork and change places. */
static void long_lists_stay(void **state) {
    const gpu *const g = gpu_get(state);
    enum { LONG = 1 << 15, NUM = 4, MOST = NUM * LONG };
    static const kv8_cache_layer two[2] = {
        {sizeof(kv8_cache_layer), KV8_E4M3, KV8_E4M3, -1, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_E4M3, KV8_E4M3, 100, NULL, NULL},
    };
    kv8_cache_options options = small_options(two, 2);
    options.page_size = 1;
    options.num_pages = options.num_window_pages = MOST;
    options.max_seqs = NUM + 1;
    options.max_seq_len = LONG;
    options.device = g->device;
    options.stream = g->stream;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    int32_t *const want = malloc(sizeof *want * MOST), *const got = malloc(sizeof *got * MOST);
    kv8_seq seqs[NUM];
    test_rng rng = {5};
    for (int i = 0; i < NUM; i++) {
        seqs[i] = new_seq(cache);
        assert_ok(kv8_cache_extend(cache, seqs[i], LONG / (i + 1) - 600, NULL));
    }
    for (int step = 0; step < 40; step++) {
        const int32_t one = rng_range(&rng, 0, NUM - 1), length = seq_length(cache, seqs[one]);
        const int32_t room = LONG - length, many = rng_range(&rng, 0, 9) == 0 ? 5000 : 3;
        if (step % 10 == 7) { /* may be out of the window's reach */
            const kv8_status status = kv8_cache_truncate(cache, seqs[one], length - 2);
            assert_true(status == KV8_OK || status == KV8_ERR_INVALID);
        } else if (step % 10 == 9) {
            const kv8_seq other = seqs[one];
            seqs[one] = seqs[0];
            seqs[0] = other;
        } else if (room >= many)
            assert_ok(kv8_cache_extend(cache, seqs[one], many, NULL));
        for (int32_t layer = 0; layer < 2; layer++) {
            kv8_page_table table = KV8_PAGE_TABLE_INIT;
            int32_t indptr[NUM + 1], last[NUM], got_indptr[NUM + 1];
            assert_ok(kv8_cache_page_table(cache, layer, seqs, NUM, indptr, want, MOST, last));
            assert_ok(kv8_cache_page_table_device(cache, layer, seqs, NUM, &table));
            gpu_download(g, got_indptr, table.page_indptr, sizeof got_indptr);
            assert_memory_equal(got_indptr, indptr, sizeof indptr);
            const size_t bytes = (size_t)indptr[NUM] * sizeof *want;
            gpu_download(g, got, table.page_indices, bytes);
            assert_memory_equal(got, want, bytes);
        }
    }
    free(want);
    free(got);
    kv8_cache_destroy(cache);
}

static void wrong_inputs_are_refused(void **state) {
    const gpu *const g = gpu_get(state);
    kv8_cache_options options = options_of(4, KV8_LAYOUT_NHD);
    kv8_cache *cache = NULL;
    options.stream = g->stream;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_INVALID, "device is NULL");
    options.device = g->device;
    options.stream = NULL;
    assert_refused(kv8_cache_create(&cache, &options), KV8_ERR_INVALID, "stream is NULL");
    assert_null(cache);
    options.stream = g->stream;
    assert_ok(kv8_cache_create(&cache, &options));
    kv8_seq seqs[SEQS + 1];
    kv8_page_table table = KV8_PAGE_TABLE_INIT;
    const float *k_scale, *v_scale;
    for (int i = 0; i <= SEQS; i++) seqs[i] = i == 0 ? new_seq(cache) : seqs[0];
    assert_refused(kv8_cache_page_table_device(cache, 0, seqs, SEQS + 1, &table), KV8_ERR_INVALID,
                   "num_seqs is 7");
    assert_refused(kv8_cache_scales_device(cache, 0, seqs, SEQS + 1, &k_scale, &v_scale),
                   KV8_ERR_INVALID, "num_seqs is 7");
    assert_refused(kv8_cache_page_table_device(cache, LAYERS, seqs, 1, &table), KV8_ERR_INVALID,
                   "layer is 3");
    kv8_cache_destroy(cache);
    options.device = NULL;
    options.stream = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    seqs[0] = new_seq(cache);
    assert_refused(kv8_cache_page_table_device(cache, 0, seqs, 1, &table), KV8_ERR_INVALID,
                   "host memory");
    assert_refused(kv8_cache_scales_device(cache, 0, seqs, 1, &k_scale, &v_scale), KV8_ERR_INVALID,
                   "host memory");
    kv8_cache_device_layer layer;
    assert_refused(kv8_cache_get_device_layer(cache, 0, &layer), KV8_ERR_INVALID, "host memory");
    kv8_cache_destroy(cache);
}

int main(int argc, char **argv) {
    gpu_filter(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_live_the_same_life),
        cmocka_unit_test(long_appends_are_cut),
        cmocka_unit_test(long_lists_stay),
        cmocka_unit_test(wrong_inputs_are_refused),
    };
    return cmocka_run_group_tests_name("cache_device", tests, gpu_open, gpu_close);
}
