/* http_connection.c - one HTTP request from its headers to its end: what may be ambiguous about its
 * length is refused, the body is collected, then its route answers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* getrandom */
#include "http_connection.h"

#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>

/* --- the request line --- */

static char bad_target; /* its address stands for a request whose target is none */

/* The authority of an absolute target, behind its scheme; NULL = another form. */
static const char *authority_of(const char *target) {
    return strncasecmp(target, "http://", 7) == 0    ? target + 7
           : strncasecmp(target, "https://", 8) == 0 ? target + 8
                                                     : NULL;
}

void *http_look_at_target(void *cookie, const char *target, struct MHD_Connection *connection) {
    (void)cookie;
    (void)connection;
    if (target == NULL || target[0] == '\0') return &bad_target;
    for (const char *c = target; *c != '\0'; c++) {
        if ((unsigned char)*c <= 0x20 || *c == 0x7f) return &bad_target;
    }
    /* An escaped slash there would move the path's beginning. */
    const char *const authority = authority_of(target);
    const bool escapes = authority != NULL && authority[strcspn(authority, "%/?")] == '%';
    return escapes ? &bad_target : NULL;
}

/* The path of a target, without what proxies put before it: http://host/version is /version. */
static const char *path_of(const char *url) {
    const char *const authority = authority_of(url);
    if (authority == NULL) return url;
    const char *const path = strchr(authority, '/');
    return path == NULL ? "/" : path;
}

/* --- headers --- */

/* What says how long the body is, and for whom the request is. Two parties that read it differently
 * would see two different requests in the same bytes. */
typedef struct framing {
    int num_lengths, num_encodings, num_hosts;
    const char *length, *encoding;
    bool expects;
    const char *malformed; /* what is wrong with a header; NULL = nothing */
    const char *end;       /* of the request line, then of the last header's value */
} framing;

/* is_old_library: libmicrohttpd of before 1.0, whose names and values lie where they were received.
 * Later ones refuse what those only misread, where they are strict (http_strictness()). */
static bool is_old_library(void) {
    return strncmp(MHD_get_version(), "0.", 2) == 0;
}

int http_strictness(void) {
    return is_old_library() ? 0 : 1;
}

/* is_token: what RFC 9110 allows for methods and for names of headers. */
static bool is_token(const char *text) {
    static const char others[] = "!#$%&'*+-.^_`|~";
    for (const char *c = text; *c != '\0'; c++) {
        const bool letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z');
        if (!letter && !(*c >= '0' && *c <= '9') && strchr(others, *c) == NULL) return false;
    }
    return text[0] != '\0';
}

static const char *check_header(const char *name, const char *value) {
    for (const char *c = value; *c != '\0'; c++) {
        if (*c == 0x7f || ((unsigned char)*c < 0x20 && *c != '\t'))
            return "a header's value holds a control character";
    }
    return is_token(name) ? NULL : "a header's name is no token";
}

/* look_at_header: a line begins right behind the one before and its two bytes of end. One that goes
 * on in a second does not: libmicrohttpd 0.9.75 puts that line behind the name ("Content-Len: 5"
 * and " gth" are "Content-Length: 5"), which it copies elsewhere for it. */
static enum MHD_Result look_at_header(void *cookie, enum MHD_ValueKind kind, const char *name,
                                      const char *value) {
    framing *const f = cookie;
    (void)kind;
    if (value == NULL) value = "";
    if (f->malformed == NULL) f->malformed = check_header(name, value);
    if (f->malformed == NULL && is_old_library() && name != f->end + strlen("\r\n"))
        f->malformed = "a header goes on in a second line, or a line ends without a return";
    f->end = value + strlen(value);
    if (strcasecmp(name, "Content-Length") == 0) {
        f->num_lengths++;
        f->length = value;
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        f->num_encodings++;
        f->encoding = value;
    } else if (strcasecmp(name, "Host") == 0) {
        f->num_hosts++;
    } else if (strcasecmp(name, "Expect") == 0) {
        f->expects = true;
    }
    return MHD_YES;
}

/* look_at_headers: the headers end where libmicrohttpd says so. A line ": a" behind the first it
 * takes for the end of them, but it is none: what follows it would be the body or a request. */
static void look_at_headers(struct MHD_Connection *connection, const char *method,
                            const char *version, framing *f) {
    f->end = version + strlen(version);
    if (!is_token(method)) f->malformed = "the method is no token";
    MHD_get_connection_values(connection, MHD_HEADER_KIND, look_at_header, f);
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    const size_t two_lines = strlen("\r\n\r\n");
    if (f->malformed == NULL && is_old_library() &&
        (info == NULL || (uintptr_t)method + info->header_size != (uintptr_t)f->end + two_lines))
        f->malformed = "a header has no name or holds a zero, or a line ends without a return";
}

static bool is_number(const char *text) {
    for (const char *c = text; *c != '\0'; c++) {
        if (!isdigit((unsigned char)*c)) return false;
    }
    return text[0] != '\0' && strlen(text) <= 18;
}

static void check_length(exchange *x, const framing *f, bool old_version) {
    if (f->num_lengths + f->num_encodings > 1)
        api_fail(&x->error, 400, "ambiguous_length", NULL,
                 "the length of the body is given more than once");
    else if (f->length != NULL && !is_number(f->length))
        api_fail(&x->error, 400, "ambiguous_length", NULL,
                 "Content-Length is \"%.32s\", must be a whole number", f->length);
    else if (f->encoding != NULL && strcasecmp(f->encoding, "chunked") != 0)
        api_fail(&x->error, 400, "ambiguous_length", NULL,
                 "Transfer-Encoding is \"%.32s\", must be chunked", f->encoding);
    else if (f->encoding != NULL && old_version)
        api_fail(&x->error, 400, "ambiguous_length", NULL, "HTTP/1.0 has no Transfer-Encoding");
}

/* Returns true when the answer must come before the body, and the connection end with it. */
static bool check_framing(exchange *x, const framing *f, const char *version) {
    const bool old_version = strcmp(version, "HTTP/1.0") == 0;
    if (f->malformed != NULL)
        api_fail(&x->error, 400, "invalid_header", NULL, "%s", f->malformed);
    else if (f->num_hosts > 1 || (f->num_hosts == 0 && !old_version))
        api_fail(&x->error, 400, "invalid_header", NULL, "there are %d Host headers, must be one",
                 f->num_hosts);
    else
        check_length(x, f, old_version);
    if (x->error.status != 0) return true;
    const size_t limit = x->server->options.max_body_bytes;
    if (f->length != NULL && (size_t)strtoll(f->length, NULL, 10) > limit)
        return !api_fail(&x->error, 413, "body_too_large", NULL,
                         "the body has %s bytes, at most %zu are taken", f->length, limit);
    return false;
}

/* The client's id where it is a plain one, else 32 random digits. */
static void choose_request_id(exchange *x) {
    const char *const given =
        MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "X-Request-Id");
    size_t length = 0;
    while (given != NULL && given[length] > 0x20 && given[length] < 0x7f && length <= 128) length++;
    if (length > 0 && length <= 128 && given[length] == '\0') {
        memcpy(x->request_id, given, length + 1);
        return;
    }
    uint64_t random[2] = {0};
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) random[0] = monotonic_ns();
    snprintf(x->request_id, sizeof x->request_id, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

static enum MHD_Result refuse_now(exchange *x) {
    x->closes = true;
    reply_error(x, &x->error);
    return x->status == 0 ? MHD_NO : MHD_YES;
}

static exchange *begin(server *s, struct MHD_Connection *connection, const char *method) {
    exchange *const x = calloc(1, sizeof *x);
    if (x == NULL) return NULL;
    x->server = s;
    x->connection = connection;
    x->method = method;
    x->arrived_ns = monotonic_ns();
    choose_request_id(x);
    return x;
}

/* --- the body --- */

/* refuse_within: libmicrohttpd takes no answer within a body, so this one goes to the socket, and
 * what still comes is dropped: a client that is closed upon while it sends may never read why. */
static void refuse_within(exchange *x) {
    const size_t limit = x->server->options.max_body_bytes;
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    byte_buffer body = {0}, text = {0};
    x->error = (api_error){0};
    api_fail(&x->error, 413, "body_too_large", NULL, "the body has more than %zu bytes", limit);
    byte_buffer_free(&x->body);
    answer_add_json(&body, api_error_json(&x->error));
    byte_buffer_printf(&text,
                       "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n"
                       "Content-Type: application/json\r\nContent-Length: %zu\r\n"
                       "X-Request-Id: %s\r\nAccess-Control-Allow-Origin: *\r\n"
                       "Access-Control-Expose-Headers: X-Request-Id\r\n\r\n",
                       body.length, x->request_id);
    byte_buffer_add(&text, body.data, body.length);
    if (info != NULL && !body.failed && !text.failed) {
        (void)send(info->connect_fd, text.data, text.length, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)shutdown(info->connect_fd, SHUT_WR);
    }
    byte_buffer_free(&body);
    byte_buffer_free(&text);
    x->status = x->error.status;
    x->refused_ns = monotonic_ns();
}

static void take_body(exchange *x, const char *bytes, size_t length) {
    const size_t limit = x->server->options.max_body_bytes;
    x->num_taken += length;
    if (x->status == 0 && x->num_taken > limit) refuse_within(x); /* chunked: nobody said so */
    if (x->error.status != 0) return;
    byte_buffer_add(&x->body, bytes, length);
    if (x->body.failed) api_fail_memory(&x->error);
}

/* drops_enough: of a body that is refused already as much again has come, or for long. */
static bool drops_enough(const exchange *x) {
    return x->refused_ns > 0 &&
           (x->num_taken / 2 > x->server->options.max_body_bytes ||
            monotonic_ns() - x->refused_ns > (uint64_t)BODY_SECONDS * 1000000000);
}

/* peer_has_gone: the client has closed, and nothing of it is left to read. libmicrohttpd's epoll
 * set is edge-triggered: the end of a stream that came with the last bytes read is not reported
 * again. */
static bool peer_has_gone(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *const info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    char byte;
    return info != NULL && recv(info->connect_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/* await_body: the body stands still for less long than a connection between requests. */
static void await_body(exchange *x, const framing *f) {
    if (f->length == NULL && f->encoding == NULL) return;
    if (f->length != NULL) x->num_awaited = (size_t)strtoll(f->length, NULL, 10);
    x->is_chunked = f->encoding != NULL;
    (void)MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT,
                                    (unsigned)BODY_SECONDS);
}

/* take_part returns MHD_NO, which ends the connection, when the rest of the body never comes. The
 * end of a chunked body may be read already; it then comes at once, and a second is enough. */
static enum MHD_Result take_part(exchange *x, const char *bytes, size_t length) {
    take_body(x, bytes, length);
    if (drops_enough(x)) return MHD_NO;
    x->num_awaited -= length < x->num_awaited ? length : x->num_awaited;
    if (x->num_awaited == 0 && !x->is_chunked) return MHD_YES;
    if (!peer_has_gone(x->connection)) return MHD_YES;
    if (!x->is_chunked) return MHD_NO;
    (void)MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT, 1u);
    return MHD_YES;
}

static json_t *parse_body(exchange *x) {
    json_error_t why;
    json_t *const body =
        json_loadb(x->body.data == NULL ? "" : x->body.data, x->body.length, JSON_ALLOW_NUL, &why);
    byte_buffer_free(&x->body);
    if (body == NULL)
        api_fail(&x->error, 400, "invalid_json", NULL,
                 "the body is no JSON: line %d, column %d: %s", why.line, why.column, why.text);
    else if (!json_is_object(body))
        api_fail(&x->error, 400, "invalid_json", NULL, "the body must be a JSON object");
    if (x->error.status == 0) return body;
    json_decref(body);
    return NULL;
}

/* --- the answer --- */

static enum MHD_Result handle(exchange *x) {
    if (x->refused_ns > 0) return MHD_NO;
    const bool posts = x->route != NULL && strcmp(x->route->method, "POST") == 0;
    x->handled = true;
    /* libmicrohttpd takes a lone line feed for the end of a chunk's line, and before 1.0 a trailer
     * without a name for that of the trailers: nothing is read behind either. */
    x->closes = x->is_chunked;
    (void)MHD_set_connection_option(x->connection, MHD_CONNECTION_OPTION_TIMEOUT,
                                    (unsigned)IDLE_SECONDS);
    json_t *const body =
        x->error.status == 0 && posts && x->route->handle != handle_health ? parse_body(x) : NULL;
    if (x->error.status != 0)
        reply_error(x, &x->error);
    else if (x->route == NULL)
        reply_empty(x, 204); /* OPTIONS */
    else
        x->route->handle(x, body);
    if (x->status == 0 && x->generation != NULL) return continue_generation(x);
    return x->status == 0 ? MHD_NO : MHD_YES;
}

static enum MHD_Result take_headers(server *s, struct MHD_Connection *connection, const char *path,
                                    const char *method, const char *version, void **state) {
    const bool has_target = *state != &bad_target;
    framing f = {0};
    exchange *const x = begin(s, connection, method);
    *state = x;
    if (x == NULL) return MHD_NO;
    look_at_headers(connection, method, version, &f);
    if (!has_target)
        api_fail(&x->error, 400, "invalid_target", NULL, "the request's target is no path or URL");
    if (!has_target || check_framing(x, &f, version)) return refuse_now(x);
    find_route(x, path);
    if (x->error.status != 0 && f.expects) return refuse_now(x);
    await_body(x, &f);
    return MHD_YES;
}

enum MHD_Result http_answer(void *cookie, struct MHD_Connection *connection, const char *url,
                            const char *method, const char *version, const char *upload,
                            size_t *upload_size, void **state) {
    if (*state == NULL || *state == &bad_target)
        return take_headers(cookie, connection, path_of(url), method, version, state);
    exchange *const x = *state;
    if (*upload_size > 0) {
        const size_t length = *upload_size;
        *upload_size = 0;
        return take_part(x, upload, length);
    }
    return x->handled ? continue_generation(x) : handle(x);
}

void http_completed(void *cookie, struct MHD_Connection *connection, void **state,
                    enum MHD_RequestTerminationCode why) {
    exchange *const x = *state == &bad_target ? NULL : *state;
    (void)cookie;
    (void)connection;
    (void)why;
    if (x == NULL) return;
    log_request(x);
    if (x->generation != NULL) end_generation(x);
    byte_buffer_free(&x->body);
    byte_buffer_free(&x->out);
    free(x->path);
    free(x);
    *state = NULL;
}
