/* budget.h - the cheapest mix within a budget: read, chosen, shown.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef CALIBRATE_BUDGET_H
#define CALIBRATE_BUDGET_H

#include "cli.h"

typedef struct budget {
    const char *text; /* "KL=2e-4", "top1=0.99", "bytes=1560" */
    kv8_budget_kind kind;
    double value;
} budget;

int budget_parse(const char *text, budget *out);

/* Damage of every layer, the measured mixes, and which was chosen. */
void budget_print(const budget *b, const kv8_choice *choice, int32_t num_layers);
json_t *budget_json(const budget *b, const kv8_choice *choice, int32_t num_layers);
/* SVG: damage by layer, and KL over bytes, predicted and measured. */
int budget_draw(const budget *b, const kv8_choice *choice, int32_t num_layers, FILE *file);

#endif
