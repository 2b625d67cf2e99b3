/* waiting.c - the heap of requests that wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "waiting.h"

bool kv8_comes_before(const kv8_waiting *a, const kv8_waiting *b) {
    return a->order != b->order ? a->order < b->order : a->serial < b->serial;
}

static void swap(kv8_waiting *heap, int32_t i, int32_t j) {
    const kv8_waiting entry = heap[i];
    heap[i] = heap[j];
    heap[j] = entry;
}
static bool less(const kv8_waiting *heap, int32_t i, int32_t j) {
    return kv8_comes_before(&heap[i], &heap[j]);
}
static void rise(kv8_waiting *heap, int32_t i) {
    for (; i > 0 && less(heap, i, (i - 1) / 2); i = (i - 1) / 2) swap(heap, i, (i - 1) / 2);
}
static void sink(kv8_waiting *heap, int32_t num, int32_t i) {
    for (;;) {
        int32_t least = i;
        for (int32_t child = 2 * i + 1; child <= 2 * i + 2; child++)
            if (child < num && less(heap, child, least)) least = child;
        if (least == i) return;
        swap(heap, i, least);
        i = least;
    }
}

void kv8_waiting_push(kv8_waiting *heap, int32_t *num, kv8_waiting entry) {
    heap[*num] = entry;
    rise(heap, (*num)++);
}

void kv8_waiting_remove(kv8_waiting *heap, int32_t *num, int32_t idx) {
    heap[idx] = heap[--*num];
    if (idx == *num) return;
    rise(heap, idx);
    sink(heap, *num, idx);
}
