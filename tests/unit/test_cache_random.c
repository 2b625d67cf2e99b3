/* test_cache_random.c - thousands of random operations against a model in which a sequence is a
 * plain array of rows. After each: what every sequence reads, which pages its tables hold, all
 * reference counts, the free list and the prefix index; before each: whether it must succeed.
 *
 * A row's values follow from the ids of the whole prefix, as in a transformer, so pages that are
 * shared through the index must read as if they had been computed anew.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_testing.h"

#include "cache_state.h"
#include "pages_state.h"

enum { LAYERS = 5, HEADS = 2, DIM = 3, ROW = HEADS * DIM, MAX_LEN = 48, SEQS = 6, GROUPS = 3 };

typedef struct model_seq {
    bool alive, has_ids;
    kv8_seq handle;
    int32_t length;
    int32_t ids[MAX_LEN];
    uint64_t rows[MAX_LEN]; /* names the row's values; with ids: a hash of ids[0..t] */
    int32_t held_from[GROUPS];
} model_seq;

typedef struct model {
    kv8_cache *cache;
    int32_t page_size, slack, max_len, num_pages[GROUPS], window_left[GROUPS];
    model_seq seq[SEQS];
    uint64_t content[GROUPS][64]; /* of listed pages: the row that ends them */
    char path[64];
} model;

/* Full, window 1, window 2, and again: int8 is the one dtype that rounds these values. */
static const int group_of[LAYERS] = {0, 1, 2, 0, 1};
static const kv8_dtype k_dtypes[LAYERS] = {KV8_F32, KV8_BF16, KV8_E4M3, KV8_INT8, KV8_E5M2};
static const kv8_dtype v_dtypes[LAYERS] = {KV8_E4M3, KV8_E5M2, KV8_F16, KV8_F32, KV8_INT8};

static uint64_t mix(uint64_t a, uint64_t b) {
    test_rng rng = {a * 0x9e3779b97f4a7c15u ^ b};
    return rng_u64(&rng);
}
/* An integer of -8..8: exact in every dtype but int8. */
static float value_of(uint64_t row, int layer, int kv, int element) {
    return (float)(mix(row, (uint64_t)(layer * 1000 + kv * 100 + element)) % 17) - 8;
}

static model_seq *pick(model *m, test_rng *rng, bool alive) {
    const int32_t start = rng_range(rng, 0, SEQS - 1);
    for (int i = 0; i < SEQS; i++) {
        model_seq *const s = &m->seq[(start + i) % SEQS];
        if (s->alive == alive) return s;
    }
    return NULL;
}
static int32_t page_end(const model *m, int32_t length) {
    return (length + m->page_size - 1) / m->page_size;
}
/* The table of one sequence, as the public call gives it. */
static int32_t table(const model *m, const model_seq *s, int g, int32_t *pages) {
    int32_t indptr[2], last;
    assert_ok(kv8_cache_page_table(m->cache, g, &s->handle, 1, indptr, pages, MAX_LEN, &last));
    return indptr[1];
}
static void count_references(const model *m, int g, int32_t *references) {
    memset(references, 0, 64 * sizeof *references);
    for (int i = 0; i < SEQS; i++) {
        int32_t pages[MAX_LEN];
        const int32_t n = m->seq[i].alive ? table(m, &m->seq[i], g, pages) : 0;
        for (int32_t j = 0; j < n; j++)
            if (pages[j] != KV8_NO_PAGE) references[pages[j]]++;
    }
}
static int32_t num_unreferenced(const model *m, int g) {
    int32_t references[64], free_pages = 0;
    count_references(m, g, references);
    for (int32_t p = 0; p < m->num_pages[g]; p++) free_pages += references[p] == 0;
    return free_pages;
}

/* --- checks --- */

static void check_pool(const model *m, int g) {
    const kv8_page_pool *const pool = &m->cache->pages->groups[g].pool;
    const kv8_prefix_index *const index = &m->cache->pages->groups[g].index;
    int32_t references[64], num_free = 0;
    count_references(m, g, references);
    for (int32_t p = 0; p < m->num_pages[g]; p++) {
        assert_int_equal(pool->refcount[p], references[p]);
        if (index->listed[p])
            assert_int_equal(
                kv8_prefix_index_find(index, index->hash[p], index->parent[p],
                                      index->token_ids + (size_t)p * (size_t)m->page_size),
                p);
    }
    const int32_t anchor = m->num_pages[g];
    for (int32_t p = pool->next[anchor]; p != anchor; p = pool->next[p], num_free++) {
        assert_true(num_free < anchor);
        assert_int_equal(references[p], 0);
        assert_int_equal(pool->next[pool->prev[p]], p);
    }
    assert_int_equal(pool->num_free, num_free);
    assert_int_equal(num_unreferenced(m, g), num_free);
}

static void check_rows(const model *m, const model_seq *s) {
    static float out[2][MAX_LEN * ROW];
    for (int layer = 0; layer < LAYERS; layer++) {
        const int32_t begin = s->held_from[group_of[layer]];
        assert_ok(
            kv8_cache_read(m->cache, layer, s->handle, begin, s->length - begin, out[0], out[1]));
        for (int kv = 0; kv < 2; kv++) {
            const kv8_dtype dtype = kv == 0 ? k_dtypes[layer] : v_dtypes[layer];
            /* Half a step of absmax / 127, the scale rounded up by at most 2^-10. */
            const float tolerance = dtype == KV8_INT8 ? 8.0f / 127 / 2 * 1.002f : 0;
            for (int32_t t = begin; t < s->length; t++)
                for (int e = 0; e < ROW; e++)
                    assert_true(fabsf(out[kv][(t - begin) * ROW + e] -
                                      value_of(s->rows[t], layer, kv, e)) <= tolerance);
        }
        if (begin > 0 && begin < s->length)
            assert_int_equal(kv8_cache_read(m->cache, layer, s->handle, begin - 1, 1, NULL, NULL),
                             KV8_ERR_NOT_FOUND);
    }
}

static void check(const model *m) {
    int32_t num_alive = 0;
    for (int i = 0; i < SEQS; i++) {
        const model_seq *const s = &m->seq[i];
        if (!s->alive) continue;
        num_alive++;
        assert_int_equal(seq_length(m->cache, s->handle), s->length);
        for (int g = 0; g < GROUPS; g++) {
            int32_t pages[MAX_LEN];
            assert_int_equal(table(m, s, g, pages), page_end(m, s->length));
            for (int32_t p = 0; p < page_end(m, s->length); p++)
                assert_int_equal(pages[p] != KV8_NO_PAGE, p >= s->held_from[g] / m->page_size);
        }
        check_rows(m, s);
    }
    for (int g = 0; g < GROUPS; g++) check_pool(m, g);
    kv8_cache_stats stats = KV8_CACHE_STATS_INIT;
    assert_ok(kv8_cache_get_stats(m->cache, &stats));
    assert_int_equal(stats.num_seqs, num_alive);
}

/* --- operations --- */

static int32_t behind(const model *m, int g, int32_t length, int32_t slack) {
    const int32_t from = length - m->window_left[g] - slack;
    return m->window_left[g] < 0 || from < 0 ? 0 : from;
}

static bool extend_fits(const model *m, const model_seq *s, int32_t n) {
    for (int g = 0; g < GROUPS; g++) {
        int32_t pages[MAX_LEN], references[64];
        const int32_t end = table(m, s, g, pages);
        count_references(m, g, references);
        int32_t room = num_unreferenced(m, g);
        const int32_t keep = behind(m, g, s->length, m->slack) / m->page_size;
        for (int32_t p = s->held_from[g] / m->page_size; p < keep; p++)
            room += references[pages[p]] == 1;
        int32_t needed = page_end(m, s->length + n) - end;
        if (s->length % m->page_size != 0) needed += references[pages[end - 1]] > 1;
        if (needed > room) return false;
    }
    return true;
}

static void write_newest(model *m, const model_seq *s, int32_t n) {
    static float k[MAX_LEN * ROW], v[MAX_LEN * ROW];
    kv8_append append = {.struct_size = sizeof(kv8_append),
                         .num_seqs = 1,
                         .seqs = &s->handle,
                         .indptr = (const int32_t[]){0, n},
                         .src_dtype = KV8_F32,
                         .k = k,
                         .k_stride_row = ROW,
                         .k_stride_head = DIM,
                         .v = v,
                         .v_stride_row = ROW,
                         .v_stride_head = DIM};
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int32_t i = 0; i < n * ROW; i++) {
            const uint64_t row = s->rows[s->length - n + i / ROW];
            k[i] = value_of(row, layer, 0, i % ROW);
            v[i] = value_of(row, layer, 1, i % ROW);
        }
        assert_ok(kv8_cache_append(m->cache, layer, &append));
    }
}

static void op_extend(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, true);
    if (s == NULL) return;
    const int32_t n = rng_range(rng, 1, 9);
    const bool with_ids = rng_range(rng, 0, 19) != 0;
    int32_t ids[9];
    for (int32_t i = 0; i < n; i++) ids[i] = rng_range(rng, 0, 6) == 0; /* prefixes meet again */
    kv8_status want = KV8_OK;
    if (s->length + n > m->max_len)
        want = KV8_ERR_INVALID;
    else if (!extend_fits(m, s, n))
        want = KV8_ERR_FULL;
    assert_int_equal(kv8_cache_extend(m->cache, s->handle, n, with_ids ? ids : NULL), want);
    if (want != KV8_OK) return;
    s->has_ids = s->has_ids && with_ids;
    for (int g = 0; g < GROUPS; g++) {
        const int32_t from = behind(m, g, s->length, m->slack) / m->page_size * m->page_size;
        if (from > s->held_from[g]) s->held_from[g] = from;
    }
    for (int32_t i = 0; i < n; i++) {
        const int32_t t = s->length + i;
        s->ids[t] = with_ids ? ids[i] : -1;
        const uint64_t before = t == 0 ? 1 : s->rows[t - 1];
        s->rows[t] = s->has_ids ? mix(before, (uint64_t)ids[i]) : rng_u64(rng);
    }
    s->length += n;
    write_newest(m, s, n);
}

static void op_publish(model *m, test_rng *rng) {
    const model_seq *const s = pick(m, rng, true);
    if (s == NULL) return;
    assert_ok(kv8_cache_publish(m->cache, s->handle));
    for (int g = 0; g < GROUPS; g++) {
        int32_t pages[MAX_LEN];
        table(m, s, g, pages);
        for (int32_t p = 0; s->has_ids && p < s->length / m->page_size; p++)
            if (p * m->page_size >= s->held_from[g] &&
                m->cache->pages->groups[g].index.listed[pages[p]])
                m->content[g][pages[p]] = s->rows[(p + 1) * m->page_size - 1];
    }
}

static bool is_listed(const model *m, int g, uint64_t content) {
    for (int32_t p = 0; p < m->num_pages[g]; p++)
        if (m->cache->pages->groups[g].index.listed[p] && m->content[g][p] == content) return true;
    return false;
}

/* The longest usable prefix by trying them all against the contents of the listed pages. */
static int32_t longest_match(const model *m, const uint64_t *rows, int32_t num_tokens) {
    bool whole = num_tokens % m->page_size == 0; /* but for the last token */
    for (int g = 0; g < GROUPS; g++) {
        const int32_t from = behind(m, g, num_tokens, 0) / m->page_size;
        whole = whole && from == behind(m, g, num_tokens - 1, 0) / m->page_size;
    }
    for (int32_t n = (num_tokens - !whole) / m->page_size; n > 0; n--) {
        bool usable = true;
        for (int g = 0; g < GROUPS; g++)
            for (int32_t p = behind(m, g, n * m->page_size, 0) / m->page_size; p < n; p++)
                usable = usable && is_listed(m, g, rows[(p + 1) * m->page_size - 1]);
        if (usable) return n * m->page_size < num_tokens ? n * m->page_size : num_tokens - 1;
    }
    return 0;
}

static void op_match(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, false);
    const model_seq *const like = pick(m, rng, true);
    if (s == NULL) return;
    *s = (model_seq){.alive = true, .has_ids = true};
    int32_t n = rng_range(rng, 1, m->max_len);
    const int32_t common = like == NULL ? 0 : rng_range(rng, 0, like->length);
    for (int32_t t = 0; t < n; t++) {
        s->ids[t] = t < common && like->ids[t] >= 0 ? like->ids[t] : rng_range(rng, 0, 6) == 0;
        s->rows[t] = mix(t == 0 ? 1 : s->rows[t - 1], (uint64_t)s->ids[t]);
    }
    const int32_t want = longest_match(m, s->rows, n);
    assert_ok(kv8_cache_prefix_match(m->cache, s->ids, n, &s->handle, &s->length));
    assert_int_equal(s->length, want);
    for (int g = 0; g < GROUPS; g++)
        s->held_from[g] = behind(m, g, s->length, 0) / m->page_size * m->page_size;
}

static void op_create_or_fork(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, false);
    const model_seq *const parent = rng_range(rng, 0, 2) == 0 ? NULL : pick(m, rng, true);
    kv8_seq handle = KV8_SEQ_NONE;
    const kv8_status status = parent == NULL
                                  ? kv8_cache_seq_create(m->cache, &handle)
                                  : kv8_cache_seq_fork(m->cache, parent->handle, &handle);
    assert_int_equal(status, s == NULL ? KV8_ERR_FULL : KV8_OK);
    if (s == NULL) return;
    *s = parent == NULL ? (model_seq){.has_ids = true} : *parent;
    s->alive = true;
    s->handle = handle;
}

static void op_destroy(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, true);
    if (s == NULL) return;
    assert_ok(kv8_cache_seq_destroy(m->cache, s->handle));
    assert_int_equal(kv8_cache_seq_destroy(m->cache, s->handle), KV8_ERR_NOT_FOUND);
    s->alive = false;
}

static void op_truncate(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, true);
    if (s == NULL) return;
    const int32_t back = rng_range(rng, 0, 3) == 0 ? s->length : 6;
    const int32_t length = rng_range(rng, s->length > back ? s->length - back : 0, s->length);
    bool possible = true;
    for (int g = 0; g < GROUPS; g++)
        if (s->held_from[g] > 0 && length - m->window_left[g] < s->held_from[g]) possible = false;
    possible = possible || length == 0 || length == s->length;
    assert_int_equal(kv8_cache_truncate(m->cache, s->handle, length),
                     possible ? KV8_OK : KV8_ERR_INVALID);
    if (!possible) return;
    s->length = length;
    for (int g = 0; g < GROUPS; g++)
        if (length == 0) s->held_from[g] = 0;
}

static void op_save_and_load(model *m, test_rng *rng) {
    model_seq *const s = pick(m, rng, false);
    const model_seq *const source = pick(m, rng, true);
    if (source == NULL) return;
    assert_ok(kv8_cache_save(m->cache, source->handle, m->path));
    model_seq copy = *source;
    kv8_status want = s == NULL ? KV8_ERR_FULL : KV8_OK;
    for (int g = 0; g < GROUPS; g++) {
        const int32_t stored = behind(m, g, source->length, m->slack);
        if (stored > copy.held_from[g]) copy.held_from[g] = stored;
        const int32_t needed = page_end(m, source->length) - copy.held_from[g] / m->page_size;
        if (needed > num_unreferenced(m, g)) want = KV8_ERR_FULL;
    }
    copy.handle = KV8_SEQ_NONE;
    assert_int_equal(kv8_cache_load(m->cache, m->path, &copy.handle), want);
    if (want == KV8_OK) *s = copy;
}

static void run_round(test_rng *rng, model *m) {
    const int32_t page_sizes[] = {1, 2, 4, 7};
    kv8_cache_layer layers[LAYERS];
    m->page_size = page_sizes[rng_range(rng, 0, 3)];
    m->slack = rng_range(rng, 0, 1) * rng_range(rng, 0, 6);
    m->window_left[0] = -1;
    m->window_left[1] = rng_range(rng, 0, 8);
    m->window_left[2] = m->window_left[1] + rng_range(rng, 1, 9);
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (kv8_cache_layer){.struct_size = sizeof(kv8_cache_layer),
                                      .k_dtype = k_dtypes[i],
                                      .v_dtype = v_dtypes[i],
                                      .window_left = m->window_left[group_of[i]]};
    kv8_cache_options options = small_options(layers, LAYERS);
    options.k_head_dim = DIM;
    options.num_kv_heads = HEADS;
    options.page_size = m->page_size;
    options.layout = (kv8_layout)rng_range(rng, 0, 1);
    options.num_pages = 90 / m->page_size > 60 ? 60 : 90 / m->page_size;
    options.num_window_pages = 70 / m->page_size > 50 ? 50 : 70 / m->page_size;
    options.max_seqs = SEQS;
    options.max_seq_len = m->max_len = rng_range(rng, 20, MAX_LEN);
    options.window_slack = m->slack;
    m->num_pages[0] = options.num_pages;
    m->num_pages[1] = m->num_pages[2] = options.num_window_pages;
    memset(m->seq, 0, sizeof m->seq);
    assert_ok(kv8_cache_create(&m->cache, &options));
    for (int step = 0; step < 250; step++) {
        const int32_t op = rng_range(rng, 0, 199);
        if (op < 80)
            op_extend(m, rng);
        else if (op < 110)
            op_publish(m, rng);
        else if (op < 135)
            op_match(m, rng);
        else if (op < 155)
            op_create_or_fork(m, rng);
        else if (op < 175)
            op_destroy(m, rng);
        else if (op < 198)
            op_truncate(m, rng);
        else
            op_save_and_load(m, rng);
        check(m);
    }
    kv8_cache_destroy(m->cache);
}

static void random_operations_match_plain_arrays(void **state) {
    (void)state;
    static model m;
    strcpy(m.path, "/tmp/kv8-random-XXXXXX");
    const int fd = mkstemp(m.path);
    assert_true(fd >= 0);
    close(fd);
    for (uint64_t seed = 1; seed <= 60; seed++) {
        test_rng rng = {seed};
        run_round(&rng, &m);
    }
    unlink(m.path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations_match_plain_arrays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
