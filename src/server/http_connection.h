/* http_connection.h - libmicrohttpd's callbacks: a request's headers, body and end.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_SERVER_HTTP_CONNECTION_H
#define KV8_SERVER_HTTP_CONNECTION_H

#include "server_state.h"

/* For MHD_OPTION_STRICT_FOR_CLIENT. Off for libmicrohttpd 0.9, which then refuses nothing that
 * http_answer() does not refuse with an error object; on for later ones, which join folded lines
 * where it is off. */
int http_strictness(void);
/* The state that a request begins with, by its target as it was sent. */
void *http_look_at_target(void *cookie, const char *target, struct MHD_Connection *connection);
enum MHD_Result http_answer(void *cookie, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload,
                            size_t *upload_size, void **state);
void http_completed(void *cookie, struct MHD_Connection *connection, void **state,
                    enum MHD_RequestTerminationCode why);

#endif
