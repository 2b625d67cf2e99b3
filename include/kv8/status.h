/* kv8/status.h - status codes and messages, the rule by which structs grow, host memory.
 *
 * Every kv8 call that can fail returns kv8_status. On failure the calling thread's message
 * (kv8_status_message) holds one line naming the cause, the offending value and the limit; results
 * passed by pointer are untouched, or NULL for `create` and `open`, as each function says. A NULL
 * where such a call needs an object, a struct, an array of one or more or a result is
 * KV8_ERR_INVALID and is named; `destroy`, `close` and `free` take NULL.
 *
 * A struct that may grow begins with struct_size, which its KV8_..._INIT sets. One that a caller
 * fills may be shorter than the library's, as an older header declares it: the rest is 0, which
 * means "off". It may be longer if the rest is 0. One that a call fills is filled up to its own
 * struct_size. An array of such structs steps by the struct_size of its first.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_STATUS_H
#define KV8_STATUS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define KV8_API       __attribute__((visibility("default")))
#define KV8_NODISCARD __attribute__((warn_unused_result))
#else
#define KV8_API
#define KV8_NODISCARD
#endif

/* How a growing struct begins, `kv8_x_options o = KV8_X_OPTIONS_INIT;`: its size, the rest 0. */
#ifdef __cplusplus
template <typename type>
inline type kv8_sized() {
    type value = type();
    value.struct_size = sizeof value;
    return value;
}
#define KV8_SIZED(type) kv8_sized<type>()
#else
#define KV8_SIZED(type) \
    { .struct_size = sizeof(type) }
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kv8_status {
    KV8_OK = 0,
    KV8_ERR_INVALID,     /* an argument, option or file content is wrong */
    KV8_ERR_UNSUPPORTED, /* well formed, but nothing here computes it; never replaced in silence */
    KV8_ERR_NO_MEMORY,   /* the allocator said no */
    KV8_ERR_FULL,        /* a pool (pages, sequences) has no room; nothing was changed */
    KV8_ERR_NOT_FOUND,   /* a file, tensor, key, sequence or GPU does not exist */
    KV8_ERR_IO,          /* the operating system refused a read or write */
    KV8_ERR_CORRUPT,     /* a file is torn, truncated or not what it claims to be */
    KV8_ERR_DEVICE,      /* the GPU or its driver refused or failed; the message quotes it */
    KV8_ERR_CANCELLED    /* a callback of the caller's asked to stop */
} kv8_status;

/* Short fixed name of a status ("invalid argument"). Never NULL. */
KV8_API const char *kv8_status_name(kv8_status status);

/* The one-line cause of this thread's latest failure; "" before the first. Valid until the next
 * failing call on the same thread. */
KV8_API const char *kv8_status_message(void);

/* Where an object takes its host memory from. `alloc` returns `size` bytes aligned to `alignment`
 * (a power of two) or NULL; `release` gets back a pointer that `alloc` returned with its size.
 * Both may be called from any thread that calls into the object. NULL options mean the system's
 * heap. */
typedef struct kv8_allocator {
    void *(*alloc)(void *cookie, size_t size, size_t alignment);
    void (*release)(void *cookie, void *ptr, size_t size);
    void *cookie;
} kv8_allocator;

/* Releases what a call gave as malloc'ed. NULL is fine. */
KV8_API void kv8_free(void *ptr);

/* Library version, "major.minor.patch". */
KV8_API const char *kv8_version(void);

#ifdef __cplusplus
}
#endif
#endif
