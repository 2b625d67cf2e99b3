/* cli.c - how the program fails and how it is interrupted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

static const char *verb_name = "";
static volatile sig_atomic_t interrupt_signal;

void cli_hold_streams(void) {
    static const int modes[] = {O_WRONLY, O_RDONLY, O_RDONLY}; /* the wrong way round: EBADF */
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", modes[fd]);
    }
}

void cli_set_verb(const char *verb) {
    verb_name = verb;
}

const char *cli_verb(void) {
    return verb_name;
}

/* One line, whatever a path or an argument holds. */
static void print_line(const char *text) {
    fprintf(stderr, "kv8%s%s: ", verb_name[0] == '\0' ? "" : " ", verb_name);
    for (const char *c = text; *c != '\0'; c++)
        fputc((unsigned char)*c < 0x20 || *c == 0x7f ? '?' : *c, stderr);
    fputc('\n', stderr);
}

int cli_fail(const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_line(text);
    return CLI_FAILED;
}

int cli_fail_status(kv8_status status) {
    if (cli_interrupted() != 0) return cli_interrupted();
    const char *const message = kv8_status_message();
    return cli_fail("%s", message[0] == '\0' ? kv8_status_name(status) : message);
}

static void on_interrupt(int signal_number) {
    interrupt_signal = signal_number;
}

void cli_catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

int cli_interrupted(void) {
    return interrupt_signal == 0 ? 0 : 128 + (int)interrupt_signal; /* as shells report it */
}
