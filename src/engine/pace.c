/* pace.c - the times that steps took, and what follows from them for the next.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "pace.h"

static const double PACE_SHARE = 0.6;
enum {
    PACE_CROWD = 32,
    PACE_AGE = 64,
    PACE_LEAST = 8,
    PACE_GRAIN = 16 /* of more tokens than two of it */
};

/* Numbers of requests that differ by less than an eighth are one class. */
static int32_t class_of(int32_t num_decoding) {
    int32_t num = num_decoding, octave = 0;
    for (; num >= 16; num /= 2) octave++;
    const int32_t found = num + 8 * octave;
    return found < KV8_PACE_CLASSES ? found : KV8_PACE_CLASSES - 1;
}

int32_t kv8_pace_tokens(const kv8_pace *pace, int32_t num_decoding, int32_t num_reading,
                        int32_t most) {
    const int32_t here = class_of(num_decoding);
    if (num_decoding == 0 || num_reading == 0) return most;
    if (pace->decode_ns[here] == 0 || pace->age[here] >= PACE_AGE) return 0;
    const double few = num_decoding < PACE_CROWD ? (double)PACE_CROWD / num_decoding : 1;
    const double spare = pace->decode_ns[here] * PACE_SHARE * few * num_reading;
    /* Not known, a token is taken to cost what one costs that decodes. */
    const double each = pace->token_ns > 0 ? pace->token_ns : pace->decode_ns[here] / num_decoding;
    if (spare >= each * most) return most;
    const int32_t tokens = (int32_t)(spare / each);
    if (tokens >= 2 * PACE_GRAIN) return tokens / PACE_GRAIN * PACE_GRAIN;
    const int32_t least = most < PACE_LEAST ? most : PACE_LEAST;
    return tokens > least ? tokens : least;
}

void kv8_pace_learn(kv8_pace *pace, int32_t num_decoding, int32_t prompt_tokens, double ns) {
    const int32_t here = class_of(num_decoding);
    if (num_decoding == 0) return;
    if (prompt_tokens == 0) {
        const double before = pace->decode_ns[here];
        pace->decode_ns[here] = before > 0 ? before + (ns - before) / 4 : ns;
        pace->age[here] = 0;
        return;
    }
    pace->age[here]++;
    if (pace->decode_ns[here] == 0) return;
    /* A token that proves dearer counts at once, a cheaper one by and by. */
    const double extra = ns - pace->decode_ns[here], before = pace->token_ns;
    const double each = (extra > 0 ? extra : 0) / prompt_tokens;
    pace->token_ns = each >= before ? each : before + (each - before) / 8;
}
