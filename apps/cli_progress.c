/* cli_progress.c - one line on stderr: what runs, how much is done, how long it still takes. Only
 * on a terminal that can erase: logs and pipes get nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

double cli_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void cli_progress_begin(cli_progress *progress) {
    const char *const term = getenv("TERM");
    const bool is_dumb = term != NULL && strcmp(term, "dumb") == 0; /* cannot erase a line */
    *progress =
        (cli_progress){.enabled = isatty(STDERR_FILENO) != 0 && !is_dumb, .started = cli_seconds()};
}

void cli_progress_end(cli_progress *progress) {
    if (progress->enabled && progress->shown > 0) fprintf(stderr, "\r\033[K");
    progress->shown = 0;
}

int cli_progress_show(void *cookie, const char *what, uint64_t done, uint64_t total) {
    cli_progress *const progress = cookie;
    const double now = cli_seconds();
    if (progress->enabled && now - progress->shown > 0.2 && total > 0) {
        progress->shown = now;
        const double share = (double)done / (double)total;
        fprintf(stderr, "\r%-8s %3d %%", what, (int)(100 * share));
        /* The first moments say little about the rest. */
        if (now - progress->started > 1 && done > 0) {
            const int left = (int)((now - progress->started) * (1 - share) / share + 0.5);
            fprintf(stderr, "  %d:%02d:%02d left", left / 3600, left / 60 % 60, left % 60);
        }
        fprintf(stderr, "\033[K");
        fflush(stderr);
    }
    return cli_interrupted();
}
