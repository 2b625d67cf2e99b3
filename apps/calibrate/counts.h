/* counts.h - what scale files counted, taken together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef CALIBRATE_COUNTS_H
#define CALIBRATE_COUNTS_H

#include "cli.h"

/* Adds what every file of a list, commas between, counted to an observer of this model. */
int counts_add_files(kv8_observer *observer, const char *list, const cli_model *model);

#endif
