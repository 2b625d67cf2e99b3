/* device_loader.c - the ring of page-locked pieces between a mapped file and a GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#include "device_loader.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_PIECE = 16 << 20, SLICE_BYTES = 1 << 20, AHEAD_BYTES = 128 << 20 };

kv8_status kv8_device_loader_open(kv8_device_loader *loader, kv8_device *device,
                                  const kv8_model_options *options, uint64_t total) {
    *loader = (kv8_device_loader){.device = device,
                                  .threads = options->threads,
                                  .total = total,
                                  .piece_bytes = (size_t)kv8_min_i64(MAX_PIECE, (int64_t)total),
                                  .progress = options->progress,
                                  .cookie = options->progress_cookie};
    KV8_TRY(kv8_stream_create(&loader->stream, device));
    for (int i = 0; i < KV8_LOADER_PIECES; i++) {
        void *piece = NULL;
        KV8_TRY(kv8_device_alloc_host(device, loader->piece_bytes, &piece));
        loader->pieces[i] = piece;
        KV8_TRY(kv8_event_create(&loader->sent[i], device));
    }
    return KV8_OK;
}

/* --- a piece --- */

typedef struct piece_copy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
} piece_copy;

static void copy_slice(void *cookie, size_t slice, int32_t thread_idx) {
    const piece_copy *const copy = cookie;
    const size_t at = slice * SLICE_BYTES;
    (void)thread_idx;
    memcpy(copy->to + at, copy->from + at,
           (size_t)kv8_min_i64(SLICE_BYTES, (int64_t)(copy->bytes - at)));
}

/* A piece is filled again when its last copy has left it. */
static kv8_status send_piece(kv8_device_loader *loader, uint8_t *to, const uint8_t *from,
                             size_t bytes) {
    const int idx = (int)(loader->num_pieces % KV8_LOADER_PIECES);
    KV8_TRY(kv8_event_synchronize(loader->sent[idx]));
    piece_copy copy = {loader->pieces[idx], from, bytes};
    kv8_threads_run(loader->threads, (bytes + SLICE_BYTES - 1) / SLICE_BYTES, copy_slice, &copy);
    KV8_TRY(kv8_stream_copy(loader->stream, to, copy.to, bytes));
    KV8_TRY(kv8_event_record(loader->sent[idx], loader->stream));
    loader->num_pieces++;
    loader->done += bytes;
    if (loader->progress != NULL &&
        loader->progress(loader->cookie, "load", loader->done, loader->total) != 0)
        return kv8_fail(KV8_ERR_CANCELLED, "interrupted");
    return KV8_OK;
}

/* Has the system read [at, at + bytes) of mapped files before it is touched: in large requests,
 * where touching reads a few pages at a time. Advice: what it cannot do is read when it is touched.
 */
static void read_ahead(const uint8_t *at, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)at & ~(page - 1);
    (void)madvise((void *)begin, (uintptr_t)at + bytes - begin, MADV_WILLNEED);
}

kv8_status kv8_device_loader_send(kv8_device_loader *loader, void *to, const void *from,
                                  size_t bytes) {
    size_t asked = 0;
    for (size_t at = 0; at < bytes; at += loader->piece_bytes) {
        const size_t left = bytes - at;
        const size_t wanted = left < AHEAD_BYTES ? bytes : at + AHEAD_BYTES;
        if (wanted > asked) read_ahead((const uint8_t *)from + asked, wanted - asked);
        asked = wanted;
        KV8_TRY(send_piece(loader, (uint8_t *)to + at, (const uint8_t *)from + at,
                           left < loader->piece_bytes ? left : loader->piece_bytes));
    }
    return KV8_OK;
}

kv8_status kv8_device_loader_finish(kv8_device_loader *loader) {
    return kv8_stream_synchronize(loader->stream);
}

void kv8_device_loader_close(kv8_device_loader *loader) {
    kv8_stream_destroy(loader->stream); /* what it was given may still run; freeing waits for it */
    for (int i = 0; i < KV8_LOADER_PIECES; i++) {
        kv8_event_destroy(loader->sent[i]);
        kv8_device_free_host(loader->device, loader->pieces[i]);
    }
    *loader = (kv8_device_loader){0};
}
