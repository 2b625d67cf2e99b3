/* cache_create.c - kv8_cache_create: chooses the store of a cache's pages, by its options. The one
 * file that knows which stores there are.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "cache_state.h"

kv8_status kv8_cache_create(kv8_cache **out, const kv8_cache_options *options) {
    if (out == NULL) return kv8_fail(KV8_ERR_INVALID, "cache: out is NULL");
    *out = NULL;
    KV8_TAKE_STRUCT(kv8_cache_options, options);
    if (options->device == NULL && options->stream != NULL)
        return kv8_fail(KV8_ERR_INVALID, "cache: stream is set and device is NULL");
    if (options->device != NULL && options->page_allocator != NULL)
        return kv8_fail(KV8_ERR_INVALID,
                        "cache: page_allocator is set, and device, whose memory it cannot give");
    if (options->device == NULL)
        return kv8_cache_create_in(
            out, options, kv8_host_store_create,
            options->page_allocator != NULL ? options->page_allocator : options->allocator);
    const kv8_device_place place = {options->device, options->stream};
    return kv8_cache_create_in(out, options, kv8_device_store_create, &place);
}
