/* test_prefix_index.c - the list of free pages and the prefix index alone: order of reuse, forged
 * equal hashes, chains of one bucket, removal in every order, failing allocations.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include "page_pool.h"
#include "prefix_index.h"

static void pages_are_taken_in_order_and_kept_ones_last(void **state) {
    (void)state;
    kv8_page_pool pool;
    assert_ok(kv8_page_pool_create(&pool, 5, NULL));
    for (int32_t i = 0; i < 5; i++) assert_int_equal(kv8_page_pool_take(&pool), i);
    assert_int_equal(pool.num_free, 0);
    kv8_page_pool_give(&pool, 3, true);
    kv8_page_pool_give(&pool, 0, true);
    kv8_page_pool_give(&pool, 4, false); /* nobody can find it: goes before the kept ones */
    assert_int_equal(pool.num_free, 3);
    kv8_page_pool_share(&pool, 3); /* found again while free */
    kv8_page_pool_share(&pool, 3);
    assert_int_equal(pool.num_free, 2);
    kv8_page_pool_give(&pool, 3, true);
    assert_int_equal(pool.num_free, 2); /* one reference is left */
    kv8_page_pool_give(&pool, 3, true);
    assert_int_equal(kv8_page_pool_take(&pool), 4);
    assert_int_equal(kv8_page_pool_take(&pool), 0);
    assert_int_equal(kv8_page_pool_take(&pool), 3);
    assert_int_equal(pool.num_free, 0);
    kv8_page_pool_destroy(&pool, NULL);
}

/* Equal hash, equal parent, other tokens: never confused, in whichever order they come. */
static void equal_hashes_of_other_tokens_are_told_apart(void **state) {
    (void)state;
    const kv8_prefix_hash hash = {7, 9}, parent = {1, 2}, other_parent = {1, 3};
    const int32_t a[2] = {10, 11}, b[2] = {10, 12}, c[2] = {10, 13};
    kv8_prefix_index index;
    assert_ok(kv8_prefix_index_create(&index, 8, 2, NULL));
    kv8_prefix_index_insert(&index, 5, hash, parent, a);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, a), 5);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, b), -1);
    assert_int_equal(kv8_prefix_index_find(&index, hash, other_parent, a), -1);
    assert_int_equal(kv8_prefix_index_find(&index, (kv8_prefix_hash){7, 8}, parent, a), -1);
    kv8_prefix_index_insert(&index, 2, hash, parent, b);
    kv8_prefix_index_insert(&index, 3, hash, other_parent, a);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, a), 5);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, b), 2);
    assert_int_equal(kv8_prefix_index_find(&index, hash, other_parent, a), 3);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, c), -1);
    kv8_prefix_index_insert(&index, 6, hash, parent, a); /* page 5 holds the same */
    assert_int_equal(index.listed[6], 0);
    kv8_prefix_index_remove(&index, 5);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, a), -1);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, b), 2);
    kv8_prefix_index_remove(&index, 5); /* not listed any more: nothing */
    kv8_prefix_index_insert(&index, 6, hash, parent, a);
    assert_int_equal(kv8_prefix_index_find(&index, hash, parent, a), 6);
    kv8_prefix_index_destroy(&index, NULL);
}

/* One bucket for all pages (equal low bits): insert all, remove in random order. */
static void long_chains_survive_removal_in_any_order(void **state) {
    (void)state;
    enum { PAGES = 33 };
    test_rng rng = {1};
    kv8_prefix_index index;
    assert_ok(kv8_prefix_index_create(&index, PAGES, 1, NULL));
    for (int round = 0; round < 20; round++) {
        bool present[PAGES] = {false};
        for (int step = 0; step < 300; step++) {
            const int32_t page = rng_range(&rng, 0, PAGES - 1);
            const kv8_prefix_hash hash = {(uint64_t)page << 32, (uint64_t)page};
            if (present[page])
                kv8_prefix_index_remove(&index, page);
            else
                kv8_prefix_index_insert(&index, page, hash, hash, &page);
            present[page] = !present[page];
            for (int32_t i = 0; i < PAGES; i++) {
                const kv8_prefix_hash h = {(uint64_t)i << 32, (uint64_t)i};
                assert_int_equal(kv8_prefix_index_find(&index, h, h, &i), present[i] ? i : -1);
            }
        }
        for (int32_t i = 0; i < PAGES; i++) kv8_prefix_index_remove(&index, i);
    }
    kv8_prefix_index_destroy(&index, NULL);
}

static bool same(kv8_prefix_hash a, kv8_prefix_hash b) {
    return a.low == b.low && a.high == b.high;
}

static void every_bit_of_parent_and_tokens_reaches_the_hash(void **state) {
    (void)state;
    const kv8_prefix_hash parent = {123, 456};
    const int32_t tokens[3] = {1, 2, 3};
    const kv8_prefix_hash hash = kv8_prefix_hash_page(parent, tokens, 3);
    assert_true(same(hash, kv8_prefix_hash_page(parent, tokens, 3)));
    for (int bit = 0; bit < 64; bit++) {
        const kv8_prefix_hash low = {parent.low ^ (1ull << bit), parent.high};
        const kv8_prefix_hash high = {parent.low, parent.high ^ (1ull << bit)};
        assert_false(same(hash, kv8_prefix_hash_page(low, tokens, 3)));
        assert_false(same(hash, kv8_prefix_hash_page(high, tokens, 3)));
    }
    for (int bit = 0; bit < 96; bit++) {
        int32_t changed[3] = {1, 2, 3};
        changed[bit / 32] ^= (int32_t)(1u << (bit % 32));
        assert_false(same(hash, kv8_prefix_hash_page(parent, changed, 3)));
    }
    assert_false(same(hash, kv8_prefix_hash_page(parent, tokens, 2)));
}

static void failed_allocations_leave_nothing(void **state) {
    (void)state;
    for (int64_t fail_at = 0;; fail_at++) {
        failing_heap heap = {.fail_at = fail_at};
        const kv8_allocator allocator = {failing_alloc, failing_release, &heap};
        kv8_page_pool pool;
        kv8_prefix_index index = {0};
        kv8_status status = kv8_page_pool_create(&pool, 10, &allocator);
        if (status == KV8_OK) status = kv8_prefix_index_create(&index, 10, 4, &allocator);
        kv8_prefix_index_destroy(&index, &allocator);
        kv8_page_pool_destroy(&pool, &allocator);
        assert_int_equal(heap.live, 0);
        if (status == KV8_OK) break;
        assert_int_equal(status, KV8_ERR_NO_MEMORY);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_taken_in_order_and_kept_ones_last),
        cmocka_unit_test(equal_hashes_of_other_tokens_are_told_apart),
        cmocka_unit_test(long_chains_survive_removal_in_any_order),
        cmocka_unit_test(every_bit_of_parent_and_tokens_reaches_the_hash),
        cmocka_unit_test(failed_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
