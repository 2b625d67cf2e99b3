/* test_server_load.c - the server over an engine that is none, so that what is measured is HTTP: a
 * thousand requests a second, many streams, ten thousand connections that only wait, clients that
 * go. The server is a process of its own: both sides need a file descriptor for every connection.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "server.h"

#define TOKENIZER "models/tiny-gpt-oss/tokenizer.json"

enum { MAX_MODEL_LEN = 1 << 20 };

/* --- the server's process --- */

static server *running_server;

static void on_stop(int number) {
    (void)number;
    server_request_stop(running_server);
}

static void run_server(int port_pipe) {
    static const char *const names[] = {"stub"};
    const server_options options = {
        .host = "127.0.0.1", .names = names, .num_names = 1, .log = SERVER_LOG_NONE};
    char error[256];
    kv8_tokenizer *tokenizer = NULL;
    kv8_service *service = NULL;
    kv8_service_options service_options = KV8_SERVICE_OPTIONS_INIT;
    service_options.on_event = server_on_event;
    running_server = server_start(&options, error, sizeof error);
    if (running_server == NULL) _exit(1);
    signal(SIGTERM, on_stop);
    const int port = server_port(running_server);
    if (write(port_pipe, &port, sizeof port) != (ssize_t)sizeof port) _exit(1);
    if (kv8_tokenizer_open(&tokenizer, TOKENIZER) != KV8_OK ||
        kv8_service_start(&service, NULL, &service_options) != KV8_OK)
        _exit(1);
    const server_model model = {.service = service,
                                .tokenizer = tokenizer,
                                .vocab_size = kv8_tokenizer_vocab_size(tokenizer),
                                .max_model_len = MAX_MODEL_LEN,
                                .harmony = true};
    if (!server_open(running_server, &model)) _exit(1);
    server_run(running_server);
    kv8_service_stop(service);
    server_stop(running_server);
    kv8_tokenizer_close(tokenizer);
    exit(0); /* a leak shows itself under ASan */
}

typedef struct served {
    pid_t pid;
    int port;
} served;

/* --- clients --- */

static int dial(int port) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons((uint16_t)port),
                                        .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (fd < 0) return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) return fd;
    close(fd);
    return -1;
}

static bool send_all(int fd, const char *text) {
    return write(fd, text, strlen(text)) == (ssize_t)strlen(text);
}

static bool post(int fd, const char *body) {
    char request[1024];
    snprintf(request, sizeof request,
             "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %zu\r\n\r\n%s",
             strlen(body), body);
    return send_all(fd, request);
}

/* Reads until `end` ends what was read; returns its length, or 0. */
static size_t read_until(int fd, const char *end, char *data, size_t room) {
    size_t length = 0;
    for (;;) {
        const ssize_t got = read(fd, data + length, room - 1 - length);
        if (got <= 0) return 0;
        length += (size_t)got;
        data[length] = '\0';
        if (length >= strlen(end) && strcmp(data + length - strlen(end), end) == 0) return length;
        if (length == room - 1) return 0;
    }
}

static double clock_seconds(clockid_t clock) {
    struct timespec at = {0};
    clock_gettime(clock, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static double now(void) {
    return clock_seconds(CLOCK_MONOTONIC);
}

/* Seconds of this machine, all its processors, that other programs left to us: what our processes
 * took, and what nobody took. On a machine that is ours alone it is as fast as the clock. */
static double our_seconds(pid_t server_pid) {
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    double user = 0, nice = 0, system = 0, idle = 0, waits = 0;
    clockid_t server_clock;
    FILE *const file = fopen("/proc/stat", "r");
    assert_non_null(file);
    const int read = fscanf(file, "cpu %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &waits);
    fclose(file);
    assert_int_equal(read, 5);
    assert_int_equal(clock_getcpuclockid(server_pid, &server_clock), 0);
    const double ours = clock_seconds(CLOCK_PROCESS_CPUTIME_ID) + clock_seconds(server_clock);
    const double nobodys = (idle + waits) / (double)sysconf(_SC_CLK_TCK);
    return (ours + nobodys) / (double)processors;
}

/* The number behind `key` in /stats. */
static int read_stat(int port, const char *key) {
    char data[4096];
    const int fd = dial(port);
    assert_true(send_all(fd, "GET /stats HTTP/1.1\r\nHost: a\r\n\r\n"));
    assert_true(read_until(fd, "}", data, sizeof data) > 0);
    close(fd);
    const char *const at = strstr(data, key);
    assert_non_null(at);
    return atoi(at + strlen(key));
}

/* --- its life --- */

/* Figures are answered from the first moment; they are 0 until the model is there. */
static void figures_while_it_loads(int port) {
    const double begin = now();
    for (;;) {
        const int length = read_stat(port, "\"max_model_len\":");
        if (length == MAX_MODEL_LEN) return;
        assert_int_equal(length, 0);
        if (now() - begin > 60) fail_msg("the model does not come");
    }
}

static int start(void **state) {
    static served it;
    int ends[2];
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if (pipe(ends) != 0 || (it.pid = fork()) < 0) return -1;
    if (it.pid == 0) run_server(ends[1]);
    close(ends[1]);
    const bool told = read(ends[0], &it.port, sizeof it.port) == (ssize_t)sizeof it.port;
    close(ends[0]);
    *state = &it;
    if (!told) return -1;
    figures_while_it_loads(it.port);
    return 0;
}

static int stop(void **state) {
    const served *const it = *state;
    int status = 0;
    kill(it->pid, SIGTERM);
    return waitpid(it->pid, &status, 0) == it->pid && status == 0 ? 0 : -1;
}

enum { PROMPT_TOKENS = 64, NUM_CLIENTS = 16, NUM_STREAMS = 64, STREAM_TOKENS = 200 };

/* A prompt of 64 token ids. */
static void write_prompt(char *text, size_t size) {
    size_t length = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < PROMPT_TOKENS; i++)
        length +=
            (size_t)snprintf(text + length, size - length, "%s%d", i == 0 ? "" : ",", 300 + i);
    snprintf(text + length, size - length, "]");
}

typedef struct client {
    pthread_t thread;
    int port, index;
    double until;
    int num_answers;
    bool good;
} client;

static void *ask_often(void *cookie) {
    client *const self = cookie;
    char prompt[512], body[700], answer[8192];
    write_prompt(prompt, sizeof prompt);
    snprintf(body, sizeof body, "{\"prompt\":%s,\"max_tokens\":1}", prompt);
    const int fd = dial(self->port);
    self->good = fd >= 0;
    while (self->good && now() < self->until) {
        self->good = post(fd, body) && read_until(fd, "}}}", answer, sizeof answer) > 0 &&
                     strncmp(answer, "HTTP/1.1 200 OK", 15) == 0;
        self->num_answers++;
    }
    close(fd);
    return NULL;
}

static void a_thousand_requests_a_second(void **state) {
    const served *const it = *state;
    static client clients[NUM_CLIENTS];
    const double begin = now(), ours = our_seconds(it->pid);
    int total = 0;
    for (int i = 0; i < NUM_CLIENTS; i++) {
        clients[i] = (client){.port = it->port, .until = begin + 2};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, ask_often, &clients[i]), 0);
    }
    for (int i = 0; i < NUM_CLIENTS; i++) {
        pthread_join(clients[i].thread, NULL);
        assert_true(clients[i].good);
        total += clients[i].num_answers;
    }
    const double seconds = our_seconds(it->pid) - ours, rate = total / seconds;
    print_message("%.0f requests a second, of %.1f s that others left %.1f\n", rate, now() - begin,
                  seconds);
#ifndef __SANITIZE_ADDRESS__
#ifndef __SANITIZE_THREAD__
    assert_true(rate >= 1000);
#endif
#endif
}

/* --- streams --- */

/* "text":"..." of every event, put together. */
static void join_texts(const char *answer, char *text) {
    static const char key[] = "\"text\":\"";
    for (const char *at = answer; (at = strstr(at, key)) != NULL;) {
        at += sizeof key - 1;
        while (*at != '"') *text++ = *at++;
    }
    *text = '\0';
}

static void *read_stream(void *cookie) {
    client *const self = cookie;
    enum { ROOM = 1 << 18 };
    char body[200], wanted[8192] = "";
    char *const answer = malloc(2 * ROOM);
    const int fd = dial(self->port);
    /* One token each, which nobody else has; ASCII letters. */
    const int token = 64 + self->index % 26;
    snprintf(body, sizeof body, "{\"prompt\":[%d],\"max_tokens\":%d,\"stream\":true}", token,
             STREAM_TOKENS);
    self->good = answer != NULL && fd >= 0 && post(fd, body) &&
                 read_until(fd, "\r\n0\r\n\r\n", answer, ROOM) > 0;
    if (self->good) {
        char *const text = answer + ROOM;
        join_texts(answer, text);
        for (int i = 0; i < STREAM_TOKENS; i++) wanted[i] = text[0];
        self->good = strcmp(text, wanted) == 0 && strstr(answer, "data: [DONE]") != NULL;
    }
    if (fd >= 0) close(fd);
    free(answer);
    return NULL;
}

static void many_streams_at_once(void **state) {
    const served *const it = *state;
    static client clients[NUM_STREAMS];
    for (int i = 0; i < NUM_STREAMS; i++) {
        clients[i] = (client){.port = it->port, .index = i};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, read_stream, &clients[i]), 0);
    }
    for (int i = 0; i < NUM_STREAMS; i++) {
        pthread_join(clients[i].thread, NULL);
        if (!clients[i].good) fail_msg("stream %d is not its own", i);
    }
}

/* --- those that only wait --- */

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds to the first event of a stream, of the tenth that waits least: other programs hold up the
 * others. */
static double time_to_first_token(int port) {
    enum { NUM = 101 };
    double times[NUM];
    char data[4096];
    for (int i = 0; i < NUM; i++) {
        const int fd = dial(port);
        assert_true(fd >= 0);
        const double begin = now();
        assert_true(post(fd, "{\"prompt\":[70],\"max_tokens\":1,\"stream\":true}"));
        assert_true(read(fd, data, sizeof data) > 0);
        times[i] = now() - begin;
        close(fd);
    }
    qsort(times, NUM, sizeof times[0], by_value);
    return times[NUM / 10];
}

static void thousands_that_only_wait(void **state) {
    const served *const it = *state;
    enum { WANTED = 10000 };
    static int fds[WANTED];
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    int num = WANTED;
    if (limit.rlim_cur < WANTED + 200) {
        num = (int)limit.rlim_cur - 200;
        print_message("SKIPPED: %d of %d connections: the limit of open files is %d\n",
                      WANTED - num, WANTED, (int)limit.rlim_cur);
    }
    const double before = time_to_first_token(it->port);
    char answer[4096];
    for (int i = 0; i < num; i++) {
        fds[i] = dial(it->port);
        if (fds[i] < 0) fail_msg("connection %d: %s", i, strerror(errno));
        /* Idle after an answer, or in the middle of a request. */
        if (i % 4 == 0) {
            assert_true(send_all(fds[i], "GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"));
            assert_true(read_until(fds[i], "\r\n\r\n", answer, sizeof answer) > 0);
        } else if (i % 4 == 1) {
            assert_true(send_all(fds[i], "POST /v1/completions HTTP/1.1\r\nContent-Le"));
        }
    }
    /* The least of five: other programs take the processor too. */
    double beside = time_to_first_token(it->port);
    for (int i = 1; i < 5; i++) {
        const double again = time_to_first_token(it->port);
        if (again < beside) beside = again;
    }
    print_message("first token in %.0f us, beside %d connections in %.0f us\n", before * 1e6, num,
                  beside * 1e6);
    for (int i = 0; i < num; i++) close(fds[i]);
    assert_true(beside <= 2 * before + 0.2e-3);
}

/* --- those that go --- */

static void those_that_go_are_cancelled(void **state) {
    const served *const it = *state;
    char data[256];
    for (int stream = 0; stream < 2; stream++) {
        int fds[32];
        for (int i = 0; i < 32; i++) {
            fds[i] = dial(it->port);
            assert_true(post(fds[i], stream ? "{\"prompt\":[70],\"max_tokens\":1000000,"
                                              "\"stream\":true}"
                                            : "{\"prompt\":[70],\"max_tokens\":1000000}"));
            if (stream) assert_true(read(fds[i], data, sizeof data) > 0);
        }
        for (int i = 0; i < 32; i++) close(fds[i]);
        const double begin = now();
        while (read_stat(it->port, "\"running\":") > 0) {
            if (now() - begin > 20) fail_msg("requests of clients that went still run");
            usleep(1000);
        }
    }
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_requests_a_second),
        cmocka_unit_test(many_streams_at_once),
        cmocka_unit_test(thousands_that_only_wait),
        cmocka_unit_test(those_that_go_are_cancelled),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
