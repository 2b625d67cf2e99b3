/* budget.c - what kv8 calibrate --budget reads and shows; the choice is kv8_evaluate_choose's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "budget.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const kv8_dtype single_dtypes[] = {KV8_INT8, KV8_E4M3};

int budget_parse(const char *text, budget *out) {
    static const struct {
        const char *name;
        double most;
    } kinds[] = {[KV8_BUDGET_KL] = {"KL=", 1e3},
                 [KV8_BUDGET_TOP1] = {"top1=", 1},
                 [KV8_BUDGET_BYTES] = {"bytes=", 1e12}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const size_t length = strlen(kinds[i].name);
        if (strncmp(text, kinds[i].name, length) != 0) continue;
        char *end = NULL;
        const double value = strtod(text + length, &end);
        if (end == text + length || *end != '\0' || !(value > 0 && value <= kinds[i].most))
            return cli_fail("--budget is \"%s\", must be %sNUMBER above 0 and at most %g", text,
                            kinds[i].name, kinds[i].most);
        *out = (budget){text, (kv8_budget_kind)i, value};
        return CLI_OK;
    }
    return cli_fail("--budget is \"%s\", must be KL=NUMBER, top1=NUMBER or bytes=NUMBER", text);
}

static kv8_mix get_mix(const kv8_choice *choice, int32_t idx) {
    kv8_mix mix = KV8_MIX_INIT;
    if (kv8_choice_get_mix(choice, idx, &mix) != KV8_OK) mix.layers = NULL; /* idx is in range */
    return mix;
}

/* --- the table --- */

/* "bf16:3 int8:8 e4m3:1", K and V together. */
static void print_formats(const kv8_mix *mix, int32_t num_layers) {
    static const kv8_dtype all[] = {KV8_BF16, KV8_INT8, KV8_E4M3};
    for (size_t f = 0; f < sizeof all / sizeof all[0]; f++) {
        int32_t num = 0;
        for (int32_t i = 0; i < 2 * num_layers; i++) num += mix->layers[i] == all[f];
        if (num > 0) printf(" %s:%d", kv8_dtype_name(all[f]), num);
    }
    putchar('\n');
}

static void print_damages(const kv8_choice *choice, int32_t num_layers) {
    printf("\nKL of one tensor alone, all else bf16:\n%5s %10s %10s %10s %10s\n", "layer", "K int8",
           "K e4m3", "V int8", "V e4m3");
    for (int32_t layer = 0; layer < num_layers; layer++) {
        printf("%5d", layer);
        for (int i = 0; i < 4; i++)
            printf(" %10.3g", kv8_choice_damage(choice, layer, i / 2, single_dtypes[i % 2]));
        putchar('\n');
    }
}

void budget_print(const budget *b, const kv8_choice *choice, int32_t num_layers) {
    print_damages(choice, num_layers);
    const int32_t chosen = kv8_choice_chosen(choice);
    printf(
        "\nmixes, measured on text that chose nothing; all-bf16 is the noise floor:\n"
        "  %11s %10s %10s %9s %8s %8s  %s\n",
        "bytes/token", "KL foreseen", "KL", "+-", "top-1", "+-", "formats of K and V");
    for (int32_t i = 0; i < kv8_choice_num_mixes(choice); i++) {
        const kv8_mix mix = get_mix(choice, i);
        printf("%c %11.0f %10.3g %10.3g %9.2g %8.4f %8.2g ", i == chosen ? '*' : ' ', mix.bytes,
               mix.predicted_kl, mix.kl, mix.kl_error, mix.top1, mix.top1_error);
        print_formats(&mix, num_layers);
    }
    if (chosen < 0) {
        printf("\nno mix holds %s on the held text\n", b->text);
        return;
    }
    const kv8_mix mix = get_mix(choice, chosen);
    printf("\n* chosen for %s:\n", b->text);
    for (int32_t layer = 0; layer < num_layers; layer++)
        printf("  layer %d: k=%s,v=%s\n", layer, kv8_dtype_name(mix.layers[2 * layer]),
               kv8_dtype_name(mix.layers[2 * layer + 1]));
}

/* --- JSON --- */

static json_t *layers_json(const kv8_mix *mix, int32_t num_layers) {
    json_t *const list = json_array();
    for (int32_t i = 0; i < num_layers; i++)
        json_array_append_new(list, json_pack("{s:s, s:s}", "k", kv8_dtype_name(mix->layers[2 * i]),
                                              "v", kv8_dtype_name(mix->layers[2 * i + 1])));
    return list;
}

json_t *budget_json(const budget *b, const kv8_choice *choice, int32_t num_layers) {
    json_t *const damages = json_array(), *const mixes = json_array();
    for (int32_t layer = 0; layer < num_layers; layer++) {
        json_array_append_new(damages,
                              json_pack("{s:f, s:f, s:f, s:f}", "k_int8",
                                        kv8_choice_damage(choice, layer, 0, KV8_INT8), "k_e4m3",
                                        kv8_choice_damage(choice, layer, 0, KV8_E4M3), "v_int8",
                                        kv8_choice_damage(choice, layer, 1, KV8_INT8), "v_e4m3",
                                        kv8_choice_damage(choice, layer, 1, KV8_E4M3)));
    }
    for (int32_t i = 0; i < kv8_choice_num_mixes(choice); i++) {
        const kv8_mix mix = get_mix(choice, i);
        json_array_append_new(
            mixes,
            json_pack("{s:f, s:f, s:f, s:f, s:o, s:f, s:o, s:o}", "bytes_per_token", mix.bytes,
                      "predicted_kl", mix.predicted_kl, "predicted_top1", mix.predicted_top1, "kl",
                      mix.kl, "kl_error", cli_json_number(mix.kl_error), "top1", mix.top1,
                      "top1_error", cli_json_number(mix.top1_error), "layers",
                      layers_json(&mix, num_layers)));
    }
    const int32_t chosen = kv8_choice_chosen(choice);
    return json_pack("{s:s, s:o, s:o, s:o}", "budget", b->text, "chosen",
                     chosen < 0 ? json_null() : json_integer(chosen), "damages", damages, "mixes",
                     mixes);
}

/* --- the plot --- */

typedef struct drawing {
    const budget *budget;
    const kv8_choice *choice;
    int32_t num_layers;
} drawing;

static void write_damages(const drawing *self, FILE *script) {
    fprintf(script, "$damage << EOD\n");
    for (int32_t layer = 0; layer < self->num_layers; layer++) {
        fprintf(script, "%d", layer);
        for (int i = 0; i < 4; i++)
            fprintf(script, " %.6g",
                    kv8_choice_damage(self->choice, layer, i / 2, single_dtypes[i % 2]));
        fputc('\n', script);
    }
    fprintf(script,
            "EOD\nset title 'KL of one tensor alone, all else bf16'\nset xlabel 'layer'\n"
            "set xrange [-0.5:%g]\n"
            "plot $damage using 1:2 with linespoints title 'K int8',"
            " $damage using 1:3 with linespoints title 'K e4m3',"
            " $damage using 1:4 with linespoints title 'V int8',"
            " $damage using 1:5 with linespoints title 'V e4m3'\n",
            self->num_layers - 0.5);
}

static void write_frontier(const drawing *self, FILE *script) {
    const int32_t chosen = kv8_choice_chosen(self->choice);
    fprintf(script, "$mixes << EOD\n");
    for (int32_t i = 0; i < kv8_choice_num_mixes(self->choice); i++) {
        const kv8_mix mix = get_mix(self->choice, i);
        const double error = isfinite(mix.kl_error) ? mix.kl_error : 0;
        fprintf(script, "%.9g %.6g %.6g %.6g %.6g\n", mix.bytes, mix.predicted_kl, mix.kl,
                fmax(mix.kl - error, mix.kl * 0.1), mix.kl + error);
    }
    fprintf(script,
            "EOD\nset title 'mixes: KL from f32 KV'\nset xlabel 'bytes per token'\n"
            "set autoscale x\n");
    if (chosen >= 0) {
        const kv8_mix mix = get_mix(self->choice, chosen);
        fprintf(script, "set label 1 '  chosen' at %.9g,%.6g point pointtype 6 pointsize 2\n",
                mix.bytes, mix.kl);
    }
    fprintf(script,
            "plot $mixes using 1:2 with lines dashtype 2 title 'foreseen',"
            " $mixes using 1:3:4:5 with yerrorlines title 'measured'\n");
}

static void write_budget(const void *cookie, FILE *script) {
    const drawing *const self = cookie;
    fprintf(script,
            "set terminal svg size 1180,520 noenhanced font 'Helvetica,13' background '#ffffff'\n"
            "set encoding utf8\nset multiplot layout 1,2\nset logscale y\nset format y '%%.0e'\n"
            "set ylabel 'nats per token'\nset grid linetype 1 linecolor rgb '#e4e4e4'\n");
    write_damages(self, script);
    write_frontier(self, script);
    fprintf(script, "unset multiplot\n");
}

int budget_draw(const budget *b, const kv8_choice *choice, int32_t num_layers, FILE *file) {
    const drawing self = {b, choice, num_layers};
    return cli_plot_run(write_budget, &self, b->text, file);
}
