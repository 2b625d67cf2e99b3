/* base_impl.h - what base shows the other rooms: errors as values, checked sizes, memory, files,
 * threads, processor facts. Knows the operating system, never a tensor.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_BASE_IMPL_H
#define KV8_BASE_IMPL_H

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <kv8/machine.h>
#include <kv8/status.h>

/* KV8_SHARED marks what libkv8_engine uses of libkv8 beside the public headers: exported under the
 * version KV8_PRIVATE, cmake/libkv8.map. */
#define KV8_SHARED __attribute__((visibility("default")))

/* --- errors --- */

/* Sets this thread's message and returns `status`: `return kv8_fail(KV8_ERR_INVALID, "...")`. */
KV8_SHARED kv8_status kv8_fail(kv8_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Puts "prefix: " before the message already set; returns `status`. */
KV8_SHARED kv8_status kv8_fail_within(kv8_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Forwards a failure. */
#define KV8_TRY(expr)                            \
    do {                                         \
        const kv8_status kv8_try_ = (expr);      \
        if (kv8_try_ != KV8_OK) return kv8_try_; \
    } while (0)
/* The same for functions that clean up: sets the local `status` and jumps to `fail`. */
#define KV8_TRY_GOTO(expr)               \
    do {                                 \
        status = (expr);                 \
        if (status != KV8_OK) goto fail; \
    } while (0)
/* A call that cannot fail, because its arguments were checked. */
#define KV8_MUST(expr)                   \
    do {                                 \
        const kv8_status must_ = (expr); \
        assert(must_ == KV8_OK);         \
        (void)must_;                     \
    } while (0)

/* First line of a public call: the pointers that it needs. The first that is NULL is refused by its
 * name. */
#define KV8_REQUIRE(...)                                                               \
    do {                                                                               \
        const void *const needed_[] = {__VA_ARGS__};                                   \
        for (size_t i_ = 0; i_ < sizeof needed_ / sizeof *needed_; i_++)               \
            if (needed_[i_] == NULL) return kv8_fail_null(__func__, #__VA_ARGS__, i_); \
    } while (0)
/* KV8_ERR_INVALID: name `idx` of `names`, between which stand ", ", is NULL. */
KV8_SHARED kv8_status kv8_fail_null(const char *caller, const char *names, size_t idx);

/* --- structs that grow: the rule of kv8/status.h --- */

/* A struct's name and sizes: today's, and that of its first publication. */
typedef struct kv8_struct_type {
    const char *name;
    size_t size, first_size;
} kv8_struct_type;
#define KV8_STRUCT(type) (&(const kv8_struct_type){#type, sizeof(type), type##_first_size})
enum {
#define X(type, first) type##_first_size = first,
#include "struct_sizes.inc"
#undef X
};

/* *out (today's size) from a caller's struct of any size: NULL, one shorter than the first
 * published and one with more than today's fields set are refused. */
KV8_SHARED kv8_status kv8_struct_read(void *out, const void *given, const kv8_struct_type *type,
                                      const char *caller);
/* Today's *value into a caller's struct, as far as that reaches; its struct_size stays. */
KV8_SHARED kv8_status kv8_struct_write(void *given, const void *value, const kv8_struct_type *type,
                                       const char *caller);
#define KV8_READ_STRUCT(type, out, given) \
    KV8_TRY(kv8_struct_read(out, given, KV8_STRUCT(type), __func__))
#define KV8_WRITE_STRUCT(type, given, value) \
    KV8_TRY(kv8_struct_write(given, value, KV8_STRUCT(type), __func__))
/* The same into element `idx` of a caller's array, which steps by its first element's size. */
KV8_SHARED kv8_status kv8_struct_write_element(void *array, size_t idx, const void *value,
                                               const kv8_struct_type *type, const char *caller);
#define KV8_WRITE_ELEMENT(type, array, idx, value) \
    KV8_TRY(kv8_struct_write_element(array, idx, value, KV8_STRUCT(type), __func__))
/* First line of a call that takes such a struct: points `given`, its parameter, at a local copy of
 * today's size. */
#define KV8_TAKE_STRUCT(type, given)              \
    type given##_today;                           \
    KV8_READ_STRUCT(type, &given##_today, given); \
    (given) = &given##_today

/* --- sizes --- */

/* false on overflow; *out is then unchanged. */
static inline bool kv8_mul_size(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}
static inline bool kv8_add_size(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}
/* Rounds up to a multiple of a power of two; the caller has checked that it fits. */
static inline size_t kv8_round_up(size_t n, size_t multiple) {
    return (n + multiple - 1) & ~(multiple - 1);
}
static inline int64_t kv8_ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
static inline int64_t kv8_min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static inline int64_t kv8_max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* --- memory --- */

/* Alignment of every kv8 allocation: a cache line, and the widest vector. */
enum { KV8_ALIGNMENT = 64 };

/* count * size bytes, zeroed, KV8_ALIGNMENT-aligned, from allocator (NULL = heap). *out is NULL on
 * failure; the message names `what` and the size. A zero size gives a valid pointer. */
KV8_SHARED kv8_status kv8_alloc(const kv8_allocator *allocator, size_t count, size_t size,
                                const char *what, void **out);
/* The same count and size that alloc got. NULL ptr is fine. */
KV8_SHARED void kv8_release(const kv8_allocator *allocator, void *ptr, size_t count, size_t size);

/* Gives freed memory of the C heap back to the system. For after something large and short-lived
 * that left its pages between others, as a parsed JSON file does. */
KV8_SHARED void kv8_heap_trim(void);

/* --- files --- */

/* A file mapped read-only and shared: pages are read when touched. */
typedef struct kv8_file_map {
    const uint8_t *data;
    size_t size;
} kv8_file_map;
KV8_SHARED kv8_status kv8_file_map_open(kv8_file_map *map_out, const char *path);
KV8_SHARED void kv8_file_map_close(kv8_file_map *map);

/* Reads a whole file of at most max_size bytes, with a 0 after the last. The caller releases
 * (NULL allocator, *size_out + 1 bytes, size 1). */
KV8_SHARED kv8_status kv8_file_read(const char *path, size_t max_size, char **data_out,
                                    size_t *size_out);

/* A file that appears whole or not at all: writes go to a temporary neighbour, commit syncs and
 * renames, abort removes. After any failed call only abort may follow. */
typedef struct kv8_file_writer {
    FILE *file;
    char *path, *temporary;
} kv8_file_writer;
KV8_SHARED kv8_status kv8_file_writer_open(kv8_file_writer *writer_out, const char *path);
KV8_SHARED kv8_status kv8_file_writer_write(kv8_file_writer *writer, const void *data, size_t size);
KV8_SHARED kv8_status kv8_file_writer_commit(kv8_file_writer *writer);
KV8_SHARED void kv8_file_writer_abort(kv8_file_writer *writer);

/* --- threads --- */

/* pthread_create() of a thread that takes no signal sent to the process: those are for the caller's
 * own threads. Signals of a fault go to the thread that made it, as ever. Returns an errno or 0. */
KV8_SHARED int kv8_thread_start(pthread_t *thread, void *(*body)(void *), void *cookie);

/* Calls task(cookie, index, thread_idx) for every index in [0, count); thread_idx <
 * kv8_threads_count(threads) names per-thread scratch. Returns when all are done. NULL threads
 * runs on the caller. */
typedef void (*kv8_task)(void *cookie, size_t index, int32_t thread_idx);
KV8_SHARED void kv8_threads_run(kv8_threads *threads, size_t count, kv8_task task, void *cookie);

/* --- machine --- */
/* Vectors of bf16 dot products multiply faster than vectors of f32 here. */
bool kv8_machine_bf16_dots_pay(void);

/* --- time --- */
KV8_SHARED uint64_t kv8_time_ns(void); /* monotonic */

#endif
