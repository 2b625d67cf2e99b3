/* fuzz_safetensors.c - any bytes as a safetensors file: refused with a message, or parsed so that
 * every tensor's bytes are readable.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kv8_safetensors file;
    if (kv8_safetensors_parse(&file, "fuzz", data, size, NULL) != KV8_OK) {
        if (kv8_status_message()[0] == '\0') abort();
        return 0;
    }
    uint64_t bytes = 0;
    volatile uint8_t sum = 0;
    for (size_t i = 0; i < file.num_tensors; i++) {
        const kv8_tensor *const tensor = &file.tensors[i];
        for (uint64_t b = 0; b < tensor->bytes; b++) sum = (uint8_t)(sum + tensor->data[b]);
        bytes += tensor->bytes;
        if (kv8_safetensors_find(&file, tensor->name) != tensor) abort();
    }
    if (bytes != file.data_bytes) abort();
    kv8_safetensors_close(&file);
    return 0;
}
