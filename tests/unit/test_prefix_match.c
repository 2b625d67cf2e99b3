/* test_prefix_match.c - publish and match: which pages are found, when they are forgotten, what
 * window groups need, and that a published page never changes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_testing.h"

#include <unistd.h>

/* Extends by ids and writes rows that depend on the whole prefix, as a model's would: row t is
 * the running sum of the ids up to t (small: exact in every dtype here). */
static void extend_ids(kv8_cache *cache, int32_t num_layers, kv8_seq seq, const int32_t *ids,
                       int32_t num_tokens) {
    float rows[64 * SMALL_ROW], sum = 0;
    const int32_t begin = seq_length(cache, seq);
    for (int32_t t = 0; t < num_tokens; t++) {
        sum += (float)ids[t];
        if (t >= begin)
            for (int i = 0; i < SMALL_ROW; i++) rows[(t - begin) * SMALL_ROW + i] = sum;
    }
    if (begin >= num_tokens) return;
    assert_ok(kv8_cache_extend(cache, seq, num_tokens - begin, ids + begin));
    append_small(cache, num_layers, seq, rows, num_tokens - begin);
}

static void check_sums(const kv8_cache *cache, int32_t layer, kv8_seq seq, const int32_t *ids,
                       int32_t begin, int32_t end) {
    float sum = 0, k[SMALL_ROW];
    for (int32_t t = 0; t < end; t++) {
        sum += (float)ids[t];
        if (t < begin) continue;
        assert_ok(kv8_cache_read(cache, layer, seq, t, 1, k, NULL));
        assert_true(k[0] == sum && k[SMALL_ROW - 1] == sum);
    }
}

static int32_t match(kv8_cache *cache, const int32_t *ids, int32_t n, kv8_seq *seq_out) {
    int32_t matched = -1;
    assert_ok(kv8_cache_prefix_match(cache, ids, n, seq_out, &matched));
    assert_int_equal(seq_length(cache, *seq_out), matched);
    return matched;
}
/* The length of a match, given up at once. */
static int32_t probe(kv8_cache *cache, const int32_t *ids, int32_t n) {
    kv8_seq seq = KV8_SEQ_NONE;
    const int32_t matched = match(cache, ids, n, &seq);
    assert_ok(kv8_cache_seq_destroy(cache, seq));
    return matched;
}

static kv8_cache *open_cache(const kv8_cache_layer *layers, int32_t num_layers, int32_t num_pages) {
    kv8_cache_options options = small_options(layers, num_layers);
    options.num_pages = num_pages;
    kv8_cache *cache = NULL;
    assert_ok(kv8_cache_create(&cache, &options));
    return cache;
}
static const kv8_cache_layer full = {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, -1, NULL, NULL};

static void whole_pages_and_one_token_left(void **state) {
    (void)state;
    const int32_t ids[14] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
    kv8_cache *const cache = open_cache(&full, 1, 16);
    const kv8_seq a = new_seq(cache);
    extend_ids(cache, 1, a, ids, 14);
    assert_int_equal(probe(cache, ids, 14), 0); /* not published yet */
    assert_ok(kv8_cache_publish(cache, a));
    const int32_t want[15] = {0, 0, 0, 0, 3, 4, 4, 4, 7, 8, 8, 8, 11, 12, 12};
    for (int32_t n = 0; n <= 14; n++) assert_int_equal(probe(cache, ids, n), want[n]);
    kv8_seq b = KV8_SEQ_NONE;
    assert_int_equal(match(cache, ids, 14, &b), 12);
    for (int32_t t = 0; t < 12; t++)
        assert_int_equal(page_of(cache, 0, a, 4, t), page_of(cache, 0, b, 4, t));
    check_sums(cache, 0, b, ids, 0, 12);
    /* Any token that differs ends the match before its page. */
    for (int32_t t = 0; t < 12; t++) {
        int32_t other[14];
        memcpy(other, ids, sizeof ids);
        other[t] += 100;
        assert_int_equal(probe(cache, other, 14), t / 4 * 4);
    }
    /* The same page of tokens after another prefix is another page. */
    const int32_t shifted[9] = {5, 6, 7, 8, 5, 6, 7, 8, 0};
    assert_int_equal(probe(cache, shifted, 9), 0);
    assert_refused(kv8_cache_prefix_match(cache, NULL, 3, &b, &(int32_t){0}), KV8_ERR_INVALID,
                   "NULL");
    assert_refused(kv8_cache_prefix_match(cache, ids, -1, &b, &(int32_t){0}), KV8_ERR_INVALID,
                   "-1");
    kv8_cache_destroy(cache);
}

static void freed_pages_stay_until_their_room_is_needed(void **state) {
    (void)state;
    int32_t ids[3][17];
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < 17; t++) ids[i][t] = 20 * i + t % 9 + 1;
    kv8_cache *const cache = open_cache(&full, 1, 12);
    kv8_seq seq[2];
    for (int i = 0; i < 2; i++) {
        seq[i] = new_seq(cache);
        extend_ids(cache, 1, seq[i], ids[i], 16);
        assert_ok(kv8_cache_publish(cache, seq[i]));
    }
    assert_ok(kv8_cache_seq_destroy(cache, seq[0]));
    assert_ok(kv8_cache_seq_destroy(cache, seq[1]));
    assert_int_equal(pages_free(cache), 12);
    assert_int_equal(probe(cache, ids[1], 17), 16);
    assert_int_equal(probe(cache, ids[0], 17), 16); /* now the latest used */
    /* Four pages were never used; two more cost the end of the least recently used chain. */
    const kv8_seq c = new_seq(cache);
    extend_ids(cache, 1, c, ids[2], 16);
    assert_int_equal(probe(cache, ids[1], 17), 16);
    assert_int_equal(probe(cache, ids[0], 17), 16);
    assert_ok(kv8_cache_extend(cache, c, 8, NULL));
    assert_int_equal(probe(cache, ids[0], 17), 16);
    assert_int_equal(probe(cache, ids[1], 17), 8);
    /* A match takes its pages out of reach of eviction. */
    kv8_seq d = KV8_SEQ_NONE;
    assert_int_equal(match(cache, ids[1], 17, &d), 8);
    assert_int_equal(pages_free(cache), 4);
    assert_ok(kv8_cache_extend(cache, c, 16, NULL));
    assert_int_equal(probe(cache, ids[0], 17), 0);
    check_sums(cache, 0, d, ids[1], 0, 8);
    assert_refused(kv8_cache_extend(cache, d, 1, NULL), KV8_ERR_FULL, "0 of its 12");
    kv8_cache_destroy(cache);
}

static void a_published_page_never_changes(void **state) {
    (void)state;
    const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, other[9] = {1, 2, 3, 4, 5, 60, 70, 80, 90};
    kv8_cache *const cache = open_cache(&full, 1, 16);
    const kv8_seq a = new_seq(cache);
    extend_ids(cache, 1, a, ids, 8);
    assert_ok(kv8_cache_publish(cache, a));
    kv8_seq b = KV8_SEQ_NONE;
    assert_int_equal(match(cache, ids, 9, &b), 8);
    /* Shared: a goes on in a copy, and the published page stays what it was. */
    assert_ok(kv8_cache_truncate(cache, a, 5));
    extend_ids(cache, 1, a, other, 8);
    assert_int_not_equal(page_of(cache, 0, a, 4, 4), page_of(cache, 0, b, 4, 4));
    check_sums(cache, 0, b, ids, 0, 8);
    check_sums(cache, 0, a, other, 0, 8);
    assert_int_equal(probe(cache, ids, 9), 8);
    assert_ok(kv8_cache_publish(cache, a));
    assert_int_equal(probe(cache, other, 9), 8);
    /* Alone: b writes in place, so the page is no longer found by its old tokens. */
    assert_ok(kv8_cache_truncate(cache, b, 5));
    assert_int_equal(probe(cache, ids, 9), 8);
    const int32_t page = page_of(cache, 0, b, 4, 4);
    const int32_t third[9] = {1, 2, 3, 4, 5, 6, 7, 30, 9};
    extend_ids(cache, 1, b, third, 8);
    assert_int_equal(page_of(cache, 0, b, 4, 4), page);
    assert_int_equal(probe(cache, ids, 9), 4);
    assert_ok(kv8_cache_publish(cache, b));
    assert_int_equal(probe(cache, third, 9), 8);
    check_sums(cache, 0, a, other, 0, 8);
    check_sums(cache, 0, b, third, 0, 8);
    kv8_cache_destroy(cache);
}

/* Full and window layers: the window group must hold what the first new query sees, no more. */
static void window_groups_need_only_what_is_seen(void **state) {
    (void)state;
    for (int32_t window_left = 0; window_left <= 9; window_left++) {
        const kv8_cache_layer layers[2] = {
            full, {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, window_left, NULL, NULL}};
        kv8_cache *const cache = open_cache(layers, 2, 16);
        int32_t ids[26];
        for (int t = 0; t < 26; t++) ids[t] = t % 3 + 1;
        const kv8_seq a = new_seq(cache);
        extend_ids(cache, 2, a, ids, 17);
        extend_ids(cache, 2, a, ids, 25); /* frees what a query at 17 cannot see */
        assert_ok(kv8_cache_publish(cache, a));
        const int32_t held = (17 - window_left) / 4 * 4;
        for (int32_t n = 1; n <= 26; n++) {
            /* The longest n - 1 rounded down to pages, if its window (of 0: nothing) is held. Of
             * n whole pages all but a token, if it sees no page more than what follows them. */
            const int32_t first = n > window_left ? (n - window_left) / 4 * 4 : 0;
            const bool whole = n % 4 == 0 && (first == 0 || n - 1 - window_left >= first);
            const int32_t last = whole ? n : n - 1, pages = last > 24 ? 24 : last / 4 * 4;
            const bool reachable = window_left == 0 || pages - window_left >= held;
            kv8_seq seq = KV8_SEQ_NONE;
            const int32_t matched = match(cache, ids, n, &seq);
            assert_int_equal(matched, !reachable ? 0 : pages == n ? n - 1 : pages);
            const int32_t seen = matched - window_left < 0 ? 0 : matched - window_left;
            check_sums(cache, 0, seq, ids, 0, matched);
            check_sums(cache, 1, seq, ids, seen, matched);
            for (int32_t i = 0; i < matched / 4; i++)
                assert_int_equal(page_of(cache, 1, seq, 4, 4 * i) >= 0, i >= seen / 4);
            /* The match can be continued and decoded on. */
            extend_ids(cache, 2, seq, ids, 26);
            check_sums(cache, 1, seq, ids, seen, 26);
            assert_ok(kv8_cache_seq_destroy(cache, seq));
        }
        kv8_cache_destroy(cache);
    }
}

/* The prefixes that a list shows, one after the other, each behind its length. */
typedef struct shown {
    int32_t num, values[256];
} shown;

static kv8_status note(void *cookie, const int32_t *ids, int32_t num) {
    shown *const s = cookie;
    s->values[s->num++] = num;
    for (int32_t i = 0; i < num; i++) s->values[s->num++] = ids[i];
    return KV8_OK;
}

static kv8_status refuse(void *cookie, const int32_t *ids, int32_t num) {
    (void)cookie, (void)ids, (void)num;
    return KV8_ERR_FULL;
}

/* Three sequences of which two begin alike: two ends, the fork, and what stands alone; what was
 * used longest ago comes first, and what a sequence holds comes last. */
static void ends_and_forks_are_listed(void **state) {
    (void)state;
    static const int32_t ids[3][12] = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 1},
                                       {1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2, 2},
                                       {7, 7, 7, 7, 3, 3, 3, 3, 3, 1, 1, 1}};
    kv8_cache *const cache = open_cache(&full, 1, 16);
    shown s = {0};
    assert_ok(kv8_cache_list_prefixes(cache, note, &s));
    assert_int_equal(s.num, 0);
    const int32_t order[3] = {2, 0, 1}, lengths[3] = {10, 12, 12};
    for (int i = 0; i < 3; i++) {
        kv8_seq seq = KV8_SEQ_NONE;
        (void)match(cache, ids[order[i]], lengths[i], &seq);
        extend_ids(cache, 1, seq, ids[order[i]], lengths[i]);
        assert_ok(kv8_cache_publish(cache, seq));
        if (i < 2) assert_ok(kv8_cache_seq_destroy(cache, seq));
    }
    assert_ok(kv8_cache_list_prefixes(cache, note, &s));
    const int32_t want[] = {8, 7, 7, 7, 7, 3, 3, 3, 3, 12, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1, 1,
                            8, 1, 2, 3, 4, 5, 6, 7, 8, 12, 1, 2, 3, 4, 5, 6, 7, 8, 2, 2, 2, 2};
    assert_int_equal(s.num, sizeof want / sizeof want[0]);
    assert_memory_equal(s.values, want, sizeof want);
    assert_int_equal(kv8_cache_list_prefixes(cache, refuse, NULL), KV8_ERR_FULL);
    kv8_cache_destroy(cache);
}

/* A snapshot of what is held serves every prefix that the cache served. */
static void what_is_held_serves_shorter_prefixes(void **state) {
    (void)state;
    for (int32_t window_left = 0; window_left <= 9; window_left++) {
        const kv8_cache_layer layers[2] = {
            full, {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, window_left, NULL, NULL}};
        kv8_cache *const cache = open_cache(layers, 2, 16), *const other =
                                                                open_cache(layers, 2, 16);
        int32_t ids[26], held = 0;
        for (int t = 0; t < 26; t++) ids[t] = t % 3 + 1;
        const kv8_seq a = new_seq(cache);
        for (int n = 1; n <= 26; n++) { /* published as they come: the window's pages stay */
            extend_ids(cache, 2, a, ids, n);
            assert_ok(kv8_cache_publish(cache, a));
        }
        assert_ok(kv8_cache_seq_destroy(cache, a));
        kv8_seq seq = KV8_SEQ_NONE, restored = KV8_SEQ_NONE;
        assert_ok(kv8_cache_prefix_hold(cache, ids, 24, &seq, &held));
        assert_int_equal(held, 24);
        char path[] = "/tmp/kv8_hold_XXXXXX";
        const int file = mkstemp(path);
        assert_true(file >= 0);
        close(file);
        assert_ok(kv8_cache_save(cache, seq, path));
        assert_ok(kv8_cache_load(other, path, &restored));
        unlink(path);
        assert_ok(kv8_cache_publish(other, restored));
        assert_ok(kv8_cache_seq_destroy(other, restored));
        for (int32_t n = 1; n <= 26; n++) {
            kv8_seq found = KV8_SEQ_NONE;
            const int32_t matched = match(other, ids, n, &found);
            assert_int_equal(matched, probe(cache, ids, n));
            const int32_t first = n > window_left ? (n - window_left) / 4 * 4 : 0;
            const bool whole = n % 4 == 0 && (first == 0 || n - 1 - window_left >= first);
            assert_int_equal(matched, whole && n <= 24 ? n - 1 : (n - 1) / 4 * 4);
            check_sums(other, 0, found, ids, 0, matched);
            check_sums(other, 1, found, ids, matched < window_left ? 0 : matched - window_left,
                       matched);
            assert_ok(kv8_cache_seq_destroy(other, found));
        }
        kv8_cache_destroy(cache);
        kv8_cache_destroy(other);
    }
}

/* Only window layers: a match may begin anywhere, a hole in front of the window is no harm. */
static void windows_alone_match_behind_a_hole(void **state) {
    (void)state;
    const kv8_cache_layer layers[2] = {
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 4, NULL, NULL},
        {sizeof(kv8_cache_layer), KV8_BF16, KV8_BF16, 6, NULL, NULL}};
    kv8_cache *const cache = open_cache(layers, 2, 16);
    int32_t ids[42];
    for (int t = 0; t < 42; t++) ids[t] = t % 4 + 1;
    const kv8_seq a = new_seq(cache);
    extend_ids(cache, 2, a, ids, 30);
    extend_ids(cache, 2, a, ids, 41);
    assert_ok(kv8_cache_publish(cache, a));
    assert_int_equal(probe(cache, ids, 42), 40);
    assert_int_equal(probe(cache, ids, 37), 36);
    assert_int_equal(probe(cache, ids, 29), 0); /* 28 needs token 22; held from 24 on */
    kv8_cache_destroy(cache);
}

static void unknown_tokens_and_own_scales_are_not_published(void **state) {
    (void)state;
    const int32_t ids[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const float scale[2] = {2, 1}, one[2] = {1, 1};
    kv8_cache *const cache = open_cache(&full, 1, 32);
    kv8_seq seq = new_seq(cache);
    extend_ids(cache, 1, seq, ids, 8);
    assert_ok(kv8_cache_extend(cache, seq, 1, NULL));
    assert_ok(kv8_cache_publish(cache, seq));
    assert_int_equal(probe(cache, ids, 9), 0);
    seq = new_seq(cache);
    assert_ok(kv8_cache_seq_set_scales(cache, seq, 0, scale, NULL));
    extend_ids(cache, 1, seq, ids, 8);
    assert_ok(kv8_cache_publish(cache, seq));
    assert_int_equal(probe(cache, ids, 9), 0);
    seq = new_seq(cache);
    assert_ok(kv8_cache_seq_set_scales(cache, seq, 0, scale, NULL));
    assert_ok(kv8_cache_seq_set_scales(cache, seq, 0, one, NULL)); /* the cache's after all */
    extend_ids(cache, 1, seq, ids, 8);
    assert_ok(kv8_cache_publish(cache, seq));
    assert_int_equal(probe(cache, ids, 9), 8);
    kv8_cache_destroy(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_pages_and_one_token_left),
        cmocka_unit_test(freed_pages_stay_until_their_room_is_needed),
        cmocka_unit_test(a_published_page_never_changes),
        cmocka_unit_test(window_groups_need_only_what_is_seen),
        cmocka_unit_test(windows_alone_match_behind_a_hole),
        cmocka_unit_test(ends_and_forks_are_listed),
        cmocka_unit_test(what_is_held_serves_shorter_prefixes),
        cmocka_unit_test(unknown_tokens_and_own_scales_are_not_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
