/* struct_size.c - structs between callers and a library of other ages: what one has and the other
 * does not know is 0. Knows sizes, no field but the first.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "base_impl.h"

/* More is no size but memory that nobody set. */
enum { MOST_BYTES = 1 << 16 };

static kv8_status check_size(const void *given, const kv8_struct_type *type, const char *caller,
                             size_t *size_out) {
    if (given == NULL) return kv8_fail(KV8_ERR_INVALID, "%s: %s is NULL", caller, type->name);
    memcpy(size_out, given, sizeof *size_out);
    if (*size_out >= type->first_size && *size_out <= MOST_BYTES) return KV8_OK;
    return kv8_fail(KV8_ERR_INVALID, "%s: %s.struct_size is %zu, must be %zu to %d", caller,
                    type->name, *size_out, type->first_size, (int)MOST_BYTES);
}

kv8_status kv8_struct_read(void *out, const void *given, const kv8_struct_type *type,
                           const char *caller) {
    size_t size = 0;
    KV8_TRY(check_size(given, type, caller, &size));
    const uint8_t *const bytes = given;
    for (size_t i = type->size; i < size; i++) {
        if (bytes[i] != 0)
            return kv8_fail(KV8_ERR_UNSUPPORTED,
                            "%s: byte %zu of a %s of %zu bytes is set; this library knows %zu",
                            caller, i, type->name, size, type->size);
    }
    memset(out, 0, type->size);
    memcpy(out, given, size < type->size ? size : type->size);
    memcpy(out, &type->size, sizeof type->size);
    return KV8_OK;
}

kv8_status kv8_struct_write(void *given, const void *value, const kv8_struct_type *type,
                            const char *caller) {
    size_t size = 0;
    KV8_TRY(check_size(given, type, caller, &size));
    const size_t known = size < type->size ? size : type->size;
    memcpy((uint8_t *)given + sizeof size, (const uint8_t *)value + sizeof size,
           known - sizeof size);
    return KV8_OK;
}

kv8_status kv8_struct_write_element(void *array, size_t idx, const void *value,
                                    const kv8_struct_type *type, const char *caller) {
    size_t size = 0;
    KV8_TRY(check_size(array, type, caller, &size));
    void *const element = (uint8_t *)array + idx * size;
    memcpy(element, &size, sizeof size);
    return kv8_struct_write(element, value, type, caller);
}
