/* device_loader.h - bytes of a mapped file into a GPU's memory: copied into a ring of page-locked
 * pieces by all threads, and from there by the GPU's copy engine while the next are filled. Knows
 * addresses; never what a tensor is for. Private to the room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_DEVICE_LOADER_H
#define KV8_DEVICE_LOADER_H

#include "base_impl.h"

#include <kv8/device.h>
#include <kv8/model.h>

enum { KV8_LOADER_PIECES = 4 };

typedef struct kv8_device_loader {
    kv8_device *device;   /* borrowed, as the threads */
    kv8_threads *threads; /* NULL = the calling thread */
    kv8_stream *stream;   /* all copies are work on it, in the order of the calls */
    uint8_t *pieces[KV8_LOADER_PIECES];
    size_t piece_bytes;
    kv8_event *sent[KV8_LOADER_PIECES]; /* the piece may be filled again */
    uint64_t num_pieces;                /* sent so far */
    uint64_t done, total;               /* bytes, of progress */
    kv8_progress progress;
    void *cookie;
} kv8_device_loader;

/* total: the bytes that will be sent. After a failure too the loader is to be closed. */
kv8_status kv8_device_loader_open(kv8_device_loader *loader, kv8_device *device,
                                  const kv8_model_options *options, uint64_t total);
/* Host bytes of any alignment. KV8_ERR_CANCELLED when progress asks to stop. */
kv8_status kv8_device_loader_send(kv8_device_loader *loader, void *to, const void *from,
                                  size_t bytes);
/* Waits until all that was given to the stream is done. */
kv8_status kv8_device_loader_finish(kv8_device_loader *loader);
void kv8_device_loader_close(kv8_device_loader *loader);

#endif
