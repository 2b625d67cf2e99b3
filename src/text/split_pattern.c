/* split_pattern.c - PCRE2 behind the two calls the tokenizer needs.
 *
 * JIT code where the system allows it, else the interpreter. Backtracking is limited per match, in
 * steps and in memory, so that neither a hostile text nor a hostile pattern can hang or overflow.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "split_pattern.h"

#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum {
    MAX_PATTERN = 1 << 16,
    JIT_STACK_START = 32 << 10,
    JIT_STACK_MAX = 8 << 20,
    HEAP_LIMIT_KIB = 64 << 10, /* of the interpreter's backtracking frames */
    /* Backtracking steps per match: a floor, and so many per byte of text. The o200k pattern takes
     * about four per byte of one match at worst (a run of capitals, given back one by one). */
    MIN_STEPS = 10000000,
    STEPS_PER_BYTE = 16
};

/* `message` of PCRE2's error code. */
static const char *error_text(int code, char *buffer, size_t size) {
    if (pcre2_get_error_message(code, (PCRE2_UCHAR *)buffer, size) < 0) buffer[0] = '\0';
    return buffer;
}

/* Copies the pattern with \s and \S spelt as the property White_Space; *out (released with
 * kv8_release, *capacity_out x 1) is at most eight times as long. */
static kv8_status spell_white_space(const char *text, size_t length, char **out, size_t *length_out,
                                    size_t *capacity_out) {
    static const char property[] = "{White_Space}";
    void *memory = NULL;
    *capacity_out = length * sizeof property;
    KV8_TRY(kv8_alloc(NULL, *capacity_out, 1, "split pattern", &memory));
    char *const copy = memory;
    size_t at = 0;
    for (size_t i = 0; i < length; i++) {
        copy[at++] = text[i];
        if (text[i] != '\\' || i + 1 == length) continue;
        const char escaped = text[++i];
        copy[at++] = escaped;
        if (escaped == 's' || escaped == 'S') {
            copy[at - 1] = escaped == 's' ? 'p' : 'P';
            memcpy(copy + at, property, sizeof property - 1);
            at += sizeof property - 1;
        }
    }
    *out = copy;
    *length_out = at;
    return KV8_OK;
}

static kv8_status refuse_empty_matches(const pcre2_code *code) {
    uint32_t can_match_empty = 1;
    pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &can_match_empty);
    if (can_match_empty)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "the pattern can match the empty string");
    return KV8_OK;
}

kv8_status kv8_split_pattern_compile(kv8_split_pattern *pattern_out, const char *text,
                                     size_t length) {
    *pattern_out = (kv8_split_pattern){0};
    if (length > MAX_PATTERN)
        return kv8_fail(KV8_ERR_UNSUPPORTED, "a pattern of %zu bytes, the limit is %d", length,
                        MAX_PATTERN);
    char *spelt = NULL;
    size_t spelt_length = 0, capacity = 0;
    KV8_TRY(spell_white_space(text, length, &spelt, &spelt_length, &capacity));
    int error = 0;
    PCRE2_SIZE offset = 0;
    pcre2_code *const code =
        pcre2_compile((PCRE2_SPTR)spelt, spelt_length,
                      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, NULL);
    kv8_release(NULL, spelt, capacity, 1);
    if (code == NULL) {
        char reason[160];
        return kv8_fail(KV8_ERR_UNSUPPORTED, "the pattern does not compile: %s (at %zu)",
                        error_text(error, reason, sizeof reason), (size_t)offset);
    }
    const kv8_status status = refuse_empty_matches(code);
    if (status != KV8_OK) {
        pcre2_code_free(code);
        return status;
    }
    /* A system may forbid executable memory: the interpreter gives the same matches. */
    const bool jit = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
    *pattern_out = (kv8_split_pattern){.code = code, .jit = jit};
    return KV8_OK;
}

void kv8_split_pattern_free(kv8_split_pattern *pattern) {
    pcre2_code_free(pattern->code);
    *pattern = (kv8_split_pattern){0};
}

kv8_status kv8_splitter_open(kv8_splitter *splitter_out, const kv8_split_pattern *pattern) {
    kv8_splitter splitter = {
        .pattern = pattern,
        .match_data = pcre2_match_data_create_from_pattern(pattern->code, NULL),
        .context = pcre2_match_context_create(NULL)};
    *splitter_out = (kv8_splitter){0};
    bool complete = splitter.match_data != NULL && splitter.context != NULL;
    if (complete && pattern->jit) {
        splitter.jit_stack = pcre2_jit_stack_create(JIT_STACK_START, JIT_STACK_MAX, NULL);
        complete = splitter.jit_stack != NULL;
        if (complete) pcre2_jit_stack_assign(splitter.context, NULL, splitter.jit_stack);
    }
    if (!complete) {
        kv8_splitter_close(&splitter);
        return kv8_fail(KV8_ERR_NO_MEMORY, "split pattern: no memory to match with");
    }
    pcre2_set_heap_limit(splitter.context, HEAP_LIMIT_KIB);
    *splitter_out = splitter;
    return KV8_OK;
}

void kv8_splitter_close(kv8_splitter *splitter) {
    pcre2_match_data_free(splitter->match_data);
    pcre2_match_context_free(splitter->context);
    pcre2_jit_stack_free(splitter->jit_stack);
    *splitter = (kv8_splitter){0};
}

kv8_status kv8_splitter_next(const kv8_splitter *splitter, const char *text, size_t length,
                             size_t start, size_t *begin_out, size_t *end_out) {
    const uint64_t steps = MIN_STEPS + (uint64_t)length * STEPS_PER_BYTE;
    pcre2_set_match_limit(splitter->context, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    /* Without NOTEMPTY a \K could still leave nothing and stop the caller from advancing. */
    const uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int matched = pcre2_match(splitter->pattern->code, (PCRE2_SPTR)text, length, start, options,
                              splitter->match_data, splitter->context);
    if (matched == PCRE2_ERROR_JIT_STACKLIMIT)
        matched = pcre2_match(splitter->pattern->code, (PCRE2_SPTR)text, length, start,
                              options | PCRE2_NO_JIT, splitter->match_data, splitter->context);
    if (matched == PCRE2_ERROR_NOMATCH) {
        *begin_out = *end_out = length;
        return KV8_OK;
    }
    if (matched < 0) {
        char reason[160];
        return kv8_fail(KV8_ERR_UNSUPPORTED,
                        "the split pattern gives up on the text at byte %zu: %s", start,
                        error_text(matched, reason, sizeof reason));
    }
    const PCRE2_SIZE *const bounds = pcre2_get_ovector_pointer(splitter->match_data);
    *begin_out = bounds[0];
    *end_out = bounds[1];
    return KV8_OK;
}
