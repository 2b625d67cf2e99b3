/* api_error.c - why a request is refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "api_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "characters.h"

/* snprintf may cut a character in two, and what a client sent may be none: JSON takes neither. */
static void mend(char *text) {
    text[kv8_utf8_complete_length(text, strlen(text))] = '\0';
    characters_mend(text, strlen(text));
}

static bool fail(api_error *error, int status, const char *code, const char *param,
                 const char *format, va_list args) {
    *error = (api_error){.status = status, .code = code};
    if (param != NULL) snprintf(error->param, sizeof error->param, "%s", param);
    vsnprintf(error->message, sizeof error->message, format, args);
    mend(error->param);
    mend(error->message);
    return false;
}

bool api_fail(api_error *error, int status, const char *code, const char *param, const char *format,
              ...) {
    va_list args;
    va_start(args, format);
    fail(error, status, code, param, format, args);
    va_end(args);
    return false;
}

bool api_fail_value(api_error *error, const char *param, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fail(error, 400, "invalid_value", param, format, args);
    va_end(args);
    return false;
}

bool api_fail_library(api_error *error, kv8_status status, const char *param) {
    const char *const message = kv8_status_message();
    const bool asked = status == KV8_ERR_INVALID || status == KV8_ERR_UNSUPPORTED;
    const int http_status = asked ? 400 : status == KV8_ERR_FULL ? 503 : 500;
    const char *const code = status == KV8_ERR_INVALID       ? "invalid_value"
                             : status == KV8_ERR_UNSUPPORTED ? "unsupported_value"
                             : status == KV8_ERR_FULL        ? "overloaded"
                                                             : NULL;
    return api_fail(error, http_status, code, param, "%s",
                    message[0] == '\0' ? kv8_status_name(status) : message);
}

bool api_fail_memory(api_error *error) {
    return api_fail(error, 500, NULL, NULL, "out of memory");
}

static const char *type_of(int status) {
    switch (status) {
        case 401: return "authentication_error";
        case 404: return "not_found_error";
        case 429: return "rate_limit_error";
        case 503: return "service_unavailable_error";
    }
    return status >= 500 ? "server_error" : "invalid_request_error";
}

json_t *api_error_json(const api_error *error) {
    return json_pack("{s:{s:s, s:s, s:s?, s:s?}}", "error", "message", error->message, "type",
                     type_of(error->status), "param", error->param[0] == '\0' ? NULL : error->param,
                     "code", error->code);
}
