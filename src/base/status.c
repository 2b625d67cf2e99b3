/* status.c - status names and the per-thread message. The message is the library's only state
 * that is not in an object, and each thread has its own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <string.h>

#include "base_impl.h"
#include "kv8_version.h"

enum { MESSAGE_SIZE = 512 };
static _Thread_local char message[MESSAGE_SIZE];

const char *kv8_version(void) {
    return KV8_VERSION;
}

const char *kv8_status_name(kv8_status status) {
    switch (status) {
        case KV8_OK: return "ok";
        case KV8_ERR_INVALID: return "invalid argument";
        case KV8_ERR_UNSUPPORTED: return "unsupported";
        case KV8_ERR_NO_MEMORY: return "out of memory";
        case KV8_ERR_FULL: return "full";
        case KV8_ERR_NOT_FOUND: return "not found";
        case KV8_ERR_IO: return "input/output error";
        case KV8_ERR_CORRUPT: return "corrupt file";
        case KV8_ERR_DEVICE: return "device error";
        case KV8_ERR_CANCELLED: return "cancelled";
    }
    return "unknown status";
}

const char *kv8_status_message(void) {
    return message;
}

/* One cause, one line: text from files may hold anything, a terminal must not. */
static void make_one_line(char *text) {
    for (char *c = text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    }
}

kv8_status kv8_fail(kv8_status status, const char *format, ...) {
    char text[MESSAGE_SIZE]; /* an argument may be the old message */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    make_one_line(text);
    memcpy(message, text, sizeof text);
    return status;
}

kv8_status kv8_fail_within(kv8_status status, const char *format, ...) {
    char text[MESSAGE_SIZE];
    va_list args;
    va_start(args, format);
    const int used = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    size_t at = used < 0 ? 0 : (size_t)kv8_min_i64(used, MESSAGE_SIZE - 1);
    const char *const parts[] = {": ", message};
    for (int i = 0; i < 2; i++) {
        for (const char *c = parts[i]; *c != '\0' && at < sizeof text - 1; c++) text[at++] = *c;
    }
    text[at] = '\0';
    make_one_line(text);
    memcpy(message, text, sizeof text);
    return status;
}

kv8_status kv8_fail_null(const char *caller, const char *names, size_t idx) {
    for (size_t i = 0; i < idx; i++) names = strchr(names, ',') + 2;
    return kv8_fail(KV8_ERR_INVALID, "%s: %.*s is NULL", caller, (int)strcspn(names, ","), names);
}
