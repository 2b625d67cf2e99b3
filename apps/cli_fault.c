/* cli_fault.c - the end of the program when a mapped file loses the bytes it is reading: another
 * process has cut it short, or its disk fails. The library maps weights and leaves SIGBUS to the
 * program; this one says which file it was, in one line, and leaves no partial file.
 *
 * Everything here may run inside a signal handler: system calls and memory of this file only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _XOPEN_SOURCE 700
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

/* Reads "START-END ..." in hexadecimal; false for anything else. */
static bool parse_range(const char *line, uintptr_t *begin_out, uintptr_t *end_out) {
    uintptr_t ends[2] = {0, 0};
    for (int i = 0; i < 2; i++, line++) {
        for (; *line != (i == 0 ? '-' : ' '); line++) {
            const char *const digits = "0123456789abcdef", *const digit = strchr(digits, *line);
            if (*line == '\0' || digit == NULL) return false;
            ends[i] = ends[i] * 16 + (uintptr_t)(digit - digits);
        }
    }
    *begin_out = ends[0];
    *end_out = ends[1];
    return true;
}

/* The file that is mapped at an address, from the lines of /proc/self/maps; NULL when none is. */
static const char *find_mapped_file(uintptr_t address) {
    static char line[8192];
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    const char *path = NULL;
    for (char c; path == NULL && fd >= 0 && read(fd, &c, 1) == 1;) {
        if (c != '\n') {
            if (used < sizeof line - 1) line[used++] = c;
            continue;
        }
        line[used] = '\0';
        used = 0;
        uintptr_t begin = 0, end = 0;
        if (parse_range(line, &begin, &end) && address >= begin && address < end)
            path = strchr(line, '/');
    }
    if (fd >= 0) close(fd);
    return path;
}

static void write_text(const char *text) {
    (void)!write(STDERR_FILENO, text, strlen(text));
}

/* Of several threads that fault at once, one speaks. */
static void on_bus_error(int signal_number, siginfo_t *info, void *context) {
    static atomic_flag spoken = ATOMIC_FLAG_INIT;
    (void)context;
    while (atomic_flag_test_and_set(&spoken)) pause();
    const char *const path = find_mapped_file((uintptr_t)info->si_addr);
    if (path == NULL) { /* not a file's: a bug, which a core dump helps to find */
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    }
    write_text("kv8");
    write_text(cli_verb()[0] == '\0' ? "" : " ");
    write_text(cli_verb());
    write_text(": ");
    write_text(path);
    write_text(": cut short, or no longer readable, while it was in use\n");
    cli_output_remove_all();
    _exit(CLI_FAILED);
}

void cli_catch_faults(void) {
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, NULL);
}
