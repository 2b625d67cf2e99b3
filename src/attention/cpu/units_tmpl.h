/* units_tmpl.h - what lies in units: Q beside the others of its step, and a weight among them.
 *
 * Part of attention_tmpl.h and of attention_amx.c, which bring t_q_at and T_WEIGHTS(job), where
 * softmax leaves the weights.
 *
 * SPDX-License-Identifier: Apache-2.0 */

/* Where unit u of the step's row lies in the step's part of q_lanes. */
static inline int64_t t_q_at(const t_lanes *at, int32_t row, int32_t u);

/* Q and the scales in lanes. */
static void t_lay_out_q(const kv8_attention_job *job) {
    const kv8_attention_item *const item = job->item;
    const int32_t rows = t_rows_per_head(job);
    const int32_t depth = (int32_t)kv8_round_up((size_t)job->depth, V_LANES);
    const bool scaled = t_scales_q(job);
    for (int32_t head = 0; head < item->num_heads; head++) {
        for (int32_t begin = 0; begin < item->num_rows;) {
            const t_lanes at = t_lanes_of(job, begin);
            const int64_t lane = t_first_lane(job, &at, head);
            float *const to = job->q_lanes + ((int64_t)head * rows + begin) * job->q_row;
            const int64_t step = t_q_at(&at, 0, at.fold); /* between units of a lane */
            int64_t place[KV8_MAX_HEAD_DIM];
            for (int32_t u = 0; at.num_quartered > 0 && u < depth; u++)
                place[u] = t_q_at(&at, 0, u);
            for (int32_t row = 0; row < at.num_rows; row++) {
                const int64_t from = (int64_t)head * item->num_rows + begin + row;
                const float *const q = job->q + from * job->q_row;
                const float factor = job->scale[from] * t_log2e;
                for (int32_t f = 0; f < at.fold; f++) {
                    float *unit = to + t_q_at(&at, row, f);
                    if (at.num_quartered > 0) {
                        for (int32_t u = f; u < depth; u += at.fold) to[place[u] + row] = q[u];
                    } else {
                        for (int32_t u = f; u < depth; u += at.fold, unit += step)
                            *unit = scaled ? q[u] * factor : q[u];
                    }
                    job->lane_scale[lane + t_score_at(&at, row, f)] = job->scale[from];
                }
            }
            begin += at.num_rows;
        }
    }
}

/* The weight of key i as it enters P V. */
static inline float t_weight(const kv8_attention_job *job, const t_lanes *at, int32_t row,
                             int32_t i) {
#if T_PAIRS
    const int32_t sums = at->sums, pair = i / (2 * sums) * sums + i % sums;
    uint32_t bits;
    memcpy(&bits, T_WEIGHTS(job) + t_score_at(at, row, pair), sizeof bits);
    bits = i / sums % 2 == 0 ? bits << 16 : bits & 0xffff0000u;
    float weight;
    memcpy(&weight, &bits, sizeof weight);
    return weight;
#else
    return T_WEIGHTS(job)[t_score_at(at, row, i)];
#endif
}
