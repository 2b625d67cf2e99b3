/* api_error.h - why a request is refused: the HTTP status and the four fields of the error object
 * that OpenAI's clients read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_API_ERROR_H
#define KV8_SERVER_API_ERROR_H

#include <jansson.h>
#include <stdbool.h>

#include <kv8/tokenizer.h>

typedef struct api_error {
    int status;       /* 0 = no error */
    const char *code; /* NULL = null */
    char param[64];   /* the field at fault; "" = null */
    char message[512];
} api_error;

/* Sets the error; returns false, for `return api_fail(...)`. param NULL = none. */
bool api_fail(api_error *error, int status, const char *code, const char *param, const char *format,
              ...) __attribute__((format(printf, 5, 6)));
/* A field's value is wrong: status 400. */
bool api_fail_value(api_error *error, const char *param, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The library's failure of this thread: what the caller asked for is 400, no room 503, the rest
 * 500. */
bool api_fail_library(api_error *error, kv8_status status, const char *param);
bool api_fail_memory(api_error *error);

/* {"error": {message, type, param, code}}; NULL = no memory. */
json_t *api_error_json(const api_error *error);

#endif
