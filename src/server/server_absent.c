/* server_absent.c - in place of the room where libmicrohttpd was not there when kv8 was built: says
 * so.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "server.h"

server *server_start(const server_options *options, char *error, size_t error_size) {
    (void)options;
    snprintf(error, error_size,
             "this kv8 was built without libmicrohttpd; install the package libmicrohttpd-dev "
             "(scripts/setup does) and build it again");
    return NULL;
}

/* Without a server nobody comes here. */
int server_port(const server *s) {
    (void)s;
    return 0;
}
void server_on_event(void *cookie, const kv8_event *event) {
    (void)cookie;
    (void)event;
}
bool server_open(server *s, const server_model *model) {
    (void)s;
    (void)model;
    return false;
}
void server_run(server *s) {
    (void)s;
}
void server_request_stop(server *s) {
    (void)s;
}
void server_stop(server *s) {
    (void)s;
}
