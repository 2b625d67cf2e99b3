/* test_tokenizer_large.c - a tokenizer.json of o200k_harmony's size (200,019 ids, 446,189 merges,
 * pairs as arrays): what loading takes in memory and time, and that no token is lost on the way.
 *
 * The file is synthetic: tokens of few letters, and every split of a token into two tokens as a
 * merge, as gpt-oss' converter lists them. Generator and loader each
 * run in a process of their own, so that the loader's peak memory is its own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include <kv8/tokenizer.h>

#include "testing.h"

enum {
    NUM_TOKENS = 199998,
    NUM_SPECIALS = 21,
    NUM_MERGES = 446189,
    MAX_LENGTH = 7,
    NUM_SLOTS = 1 << 19
};
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

typedef struct token {
    uint8_t length;
    char bytes[MAX_LENGTH];
} token;

static char path[] = "/tmp/kv8_tokenizer_XXXXXX";

/* Slot of these bytes (id + 1) or the free one where they belong. */
static int32_t *find(int32_t *slots, const token *tokens, const char *bytes, size_t length) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)bytes[i]) * 0x100000001b3u;
    size_t slot = (size_t)(hash >> 20) % NUM_SLOTS;
    for (; slots[slot] != 0; slot = (slot + 1) % NUM_SLOTS) {
        const token *const there = &tokens[slots[slot] - 1];
        if (there->length == length && memcmp(there->bytes, bytes, length) == 0) break;
    }
    return &slots[slot];
}

/* Bytes as a byte-level string in JSON. */
static void put_bytes(FILE *file, const char *bytes, size_t length) {
    fputc('"', file);
    for (size_t i = 0; i < length; i++) {
        uint32_t code = 0x100;
        for (uint32_t b = 0; b <= (uint8_t)bytes[i]; b++) {
            const bool same = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
            if (b == (uint8_t)bytes[i] && same) code = b;
            if (b < (uint8_t)bytes[i]) code += !same;
        }
        if (code == '"' || code == '\\') fputc('\\', file);
        if (code < 0x80)
            fputc((int)code, file);
        else
            fprintf(file, "%c%c", (int)(0xc0 | code >> 6), (int)(0x80 | (code & 0x3f)));
    }
    fputc('"', file);
}

static void add_token(token *tokens, int32_t *slots, int32_t *num, const token *made) {
    int32_t *const slot = find(slots, tokens, made->bytes, made->length);
    if (*slot != 0 || *num == NUM_TOKENS) return;
    tokens[(*num)++] = *made;
    *slot = *num;
}

/* The bytes, all strings of two to four of 16 of them (69,888), then random ones of seven: each
 * has two splits, 3|4 and 4|3, and most of o200k's have about as many. */
static void make_tokens(token *tokens, int32_t *slots) {
    static const char alphabet[16] = "abcdefghijkl \n\xc3\xe2";
    test_rng rng = {11};
    int32_t num = 0;
    for (int32_t byte = 0; byte < 256; byte++)
        add_token(tokens, slots, &num, &(token){.length = 1, .bytes = {(char)byte}});
    for (uint8_t length = 2; length <= 4; length++) {
        for (uint32_t code = 0; code < 1u << 4 * length; code++) {
            token made = {.length = length};
            for (int i = 0; i < length; i++) made.bytes[i] = alphabet[code >> 4 * i & 15];
            add_token(tokens, slots, &num, &made);
        }
    }
    while (num < NUM_TOKENS) {
        token made = {.length = 7};
        for (int i = 0; i < 7; i++) made.bytes[i] = alphabet[rng_u64(&rng) & 15];
        add_token(tokens, slots, &num, &made);
    }
}

static int32_t put_merges(FILE *file, const token *tokens, int32_t *slots) {
    int32_t count = 0;
    for (int32_t id = 256; id < NUM_TOKENS && count < NUM_MERGES; id++) {
        const token *const whole = &tokens[id];
        for (size_t cut = 1; cut < whole->length && count < NUM_MERGES; cut++) {
            if (*find(slots, tokens, whole->bytes, cut) == 0) continue;
            if (*find(slots, tokens, whole->bytes + cut, whole->length - cut) == 0) continue;
            fputs(count++ > 0 ? ",\n      [\n        " : "\n      [\n        ", file);
            put_bytes(file, whole->bytes, cut);
            fputs(",\n        ", file);
            put_bytes(file, whole->bytes + cut, whole->length - cut);
            fputs("\n      ]", file);
        }
    }
    return count;
}

static int32_t write_file(void) {
    token *const tokens = calloc(NUM_TOKENS, sizeof *tokens);
    int32_t *const slots = calloc(NUM_SLOTS, sizeof *slots);
    FILE *const file = fopen(path, "wb");
    if (tokens == NULL || slots == NULL || file == NULL) return 0;
    make_tokens(tokens, slots);
    fputs("{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [",
          file);
    for (int i = 0; i < NUM_SPECIALS; i++)
        fprintf(file, "%s\n{\"id\": %d, \"content\": \"<|special_%d|>\", \"special\": true}",
                i > 0 ? "," : "", NUM_TOKENS + i, i);
    fputs(
        "], \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": ["
        "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"\\\\s+|\\\\S+\"},"
        " \"behavior\": \"Isolated\", \"invert\": false}, {\"type\": \"ByteLevel\","
        " \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": false}]},"
        "\"post_processor\": null, \"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {"
        "\"type\": \"BPE\", \"ignore_merges\": true, \"vocab\": {",
        file);
    for (int32_t id = 0; id < NUM_TOKENS; id++) {
        fputs(id > 0 ? ",\n      " : "\n      ", file);
        put_bytes(file, tokens[id].bytes, tokens[id].length);
        fprintf(file, ": %d", id);
    }
    fputs("}, \"merges\": [", file);
    const int32_t count = put_merges(file, tokens, slots);
    fputs("]}}\n", file);
    fclose(file);
    free(tokens);
    free(slots);
    return count;
}

/* Runs in a child, so that its exit status and peak memory are its own. */
static int in_child(int (*work)(void), struct rusage *usage) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) _exit(work());
    int status = 0;
    assert_int_equal(wait4(child, &status, 0, usage), child);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int generate(void) {
    return write_file() == NUM_MERGES ? 0 : 1;
}

static long resident_kib(void) {
    long pages = 0, resident = 0;
    FILE *const file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    if (file != NULL) fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Every token must encode to itself (ignore_merges), so all of them were read right. */
static int load(void) {
    const clock_t begin = clock();
    kv8_tokenizer *tokenizer;
    if (kv8_tokenizer_open(&tokenizer, path) != KV8_OK) {
        fprintf(stderr, "%s\n", kv8_status_message());
        return 1;
    }
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    print_message("loaded in %.2f s, %ld KiB resident after\n", seconds, resident_kib());
    if (kv8_tokenizer_vocab_size(tokenizer) != NUM_TOKENS + NUM_SPECIALS) return 2;
    for (int32_t id = 0; id < NUM_TOKENS; id += 97) {
        size_t length;
        const char *const bytes = kv8_tokenizer_token_bytes(tokenizer, id, &length);
        bool plain = true; /* one piece of the pattern: ASCII without spaces */
        for (size_t i = 0; i < length; i++) plain &= bytes[i] > 0x20 && bytes[i] < 0x7f;
        if (!plain) continue;
        int32_t *ids;
        size_t count;
        if (kv8_tokenizer_encode(tokenizer, bytes, length, KV8_SPECIAL_AS_TEXT, &ids, &count))
            return 3;
        if (count != 1 || ids[0] != id) return 4;
        kv8_free(ids);
    }
    kv8_tokenizer_close(tokenizer);
#ifndef SANITIZED
    /* About one; in an emulator, where CI asks for short tests, up to six. */
    if (!(seconds < (test_is_short() ? 30 : 5))) return 5;
#endif
    return 0;
}

static void real_size_loads_in_bounds(void **state) {
    (void)state;
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct rusage usage;
    const int generated = in_child(generate, &usage);
    const int loaded = generated == 0 ? in_child(load, &usage) : -1;
    unlink(path);
    assert_int_equal(generated, 0);
    assert_int_equal(loaded, 0);
    print_message("peak %ld KiB\n", usage.ru_maxrss);
#ifndef SANITIZED
    assert_true(usage.ru_maxrss < 250 * 1024);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(real_size_loads_in_bounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
