/* http_reply.c - answers on their way to libmicrohttpd.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "server_state.h"

static void add_header(struct MHD_Response *response, const char *name, const char *value) {
    /* What fails for lack of memory leaves a header out. */
    (void)MHD_add_response_header(response, name, value);
}

void reply_with(exchange *x, int status, struct MHD_Response *response) {
    if (response == NULL) return; /* the connection is closed without an answer */
    add_header(response, "X-Request-Id", x->request_id);
    add_header(response, "Access-Control-Allow-Origin", "*");
    add_header(response, "Access-Control-Expose-Headers", "X-Request-Id");
    /* libmicrohttpd closes after an answer that says so. */
    if (x->closes) add_header(response, "Connection", "close");
    if (status == 503) add_header(response, "Retry-After", "1");
    if (status == 401) add_header(response, "WWW-Authenticate", "Bearer");
    if (x->allow != NULL && status == 405) add_header(response, "Allow", x->allow);
    if (MHD_queue_response(x->connection, (unsigned)status, response) == MHD_YES)
        x->status = status;
    MHD_destroy_response(response);
}

void reply_text(exchange *x, int status, const char *type, const byte_buffer *text) {
    if (text->failed) return;
    struct MHD_Response *const response =
        MHD_create_response_from_buffer(text->length, text->data, MHD_RESPMEM_MUST_COPY);
    if (response != NULL) add_header(response, "Content-Type", type);
    reply_with(x, status, response);
}

void reply_json(exchange *x, int status, json_t *value) {
    byte_buffer text = {0};
    answer_add_json(&text, value);
    reply_text(x, status, "application/json", &text);
    byte_buffer_free(&text);
}

void reply_error(exchange *x, const api_error *error) {
    reply_json(x, error->status, api_error_json(error));
}

void reply_empty(exchange *x, int status) {
    struct MHD_Response *const response =
        MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    const bool preflight = response != NULL && strcmp(x->method, "OPTIONS") == 0;
    if (preflight) {
        add_header(response, "Allow", x->allow);
        const char *const asked = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND,
                                                              "Access-Control-Request-Headers");
        add_header(response, "Access-Control-Allow-Methods", x->allow);
        add_header(response, "Access-Control-Allow-Headers",
                   asked != NULL ? asked : "Authorization, Content-Type");
        add_header(response, "Access-Control-Max-Age", "86400");
    }
    reply_with(x, status, response);
}
