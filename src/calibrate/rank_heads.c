/* rank_heads.c - which heads a rank of a tensor-parallel run holds, and which it owns.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "base_impl.h"

#include <kv8/calibrate.h>

kv8_status kv8_rank_heads_get(int32_t num_heads, int32_t num_ranks, int32_t rank,
                              kv8_rank_heads *heads_out) {
    KV8_REQUIRE(heads_out);
    if (num_heads < 1 || num_ranks < 1 ||
        (num_heads % num_ranks != 0 && num_ranks % num_heads != 0))
        return kv8_fail(KV8_ERR_INVALID, "%d heads over %d ranks: neither divides the other",
                        num_heads, num_ranks);
    if (rank < 0 || rank >= num_ranks)
        return kv8_fail(KV8_ERR_INVALID, "rank %d, must be 0 to %d", rank, num_ranks - 1);
    if (num_heads >= num_ranks) {
        const int32_t num = num_heads / num_ranks;
        *heads_out = (kv8_rank_heads){.first = rank * num, .num = num, .owns = 1};
    } else {
        const int32_t copies = num_ranks / num_heads;
        *heads_out = (kv8_rank_heads){.first = rank / copies, .num = 1, .owns = rank % copies == 0};
    }
    return KV8_OK;
}
