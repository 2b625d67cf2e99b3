/* grammar.c - which symbols an answer may go on with.
 *
 * A place is a node and a stack of nodes to return to; stacks share their tails. A state is a set
 * of places, all of which wait for a symbol or for the end. Equal states have one number.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "grammar.h"

#include <stdlib.h>
#include <string.h>

enum {
    MAX_NODES = 1 << 20,
    MAX_STATES = 1 << 15,
    MAX_PLACES = 1 << 11, /* of a state */
    MAX_DEPTH = 128,      /* of calls: values within values */
    NUM_BUCKETS = 1 << 12,
    NUM_RECENT = 256
};

typedef enum node_kind { NODE_END, NODE_RANGE, NODE_PLAIN, NODE_EITHER, NODE_CALL } node_kind;

typedef struct node {
    node_kind kind;
    int lo, hi;      /* RANGE */
    int next, other; /* EITHER: both; CALL: other is the rule; PLAIN: of its ranges of lead bytes,
                      * NUM_LEADS side by side */
    byte_set but;    /* PLAIN */
} node;

/* Characters of several bytes by their lead byte: a second byte lo to hi, then `tail` more. */
static const struct lead {
    unsigned char from, to, lo, hi;
    int tail;
} leads[] = {{0xc2, 0xdf, 0x80, 0xbf, 0}, {0xe0, 0xe0, 0xa0, 0xbf, 1}, {0xe1, 0xec, 0x80, 0xbf, 1},
             {0xed, 0xed, 0x80, 0x9f, 1}, {0xee, 0xef, 0x80, 0xbf, 1}, {0xf0, 0xf0, 0x90, 0xbf, 2},
             {0xf1, 0xf3, 0x80, 0xbf, 2}, {0xf4, 0xf4, 0x80, 0x8f, 2}};
enum { NUM_LEADS = sizeof leads / sizeof leads[0] };

/* Plain characters of one byte. */
static const struct ascii {
    unsigned char from, to;
} ascii[] = {{' ', '!'}, {'#', '['}, {']', '~'}};
enum { NUM_ASCII = sizeof ascii / sizeof ascii[0] };

typedef struct stack {
    int node, tail, depth;
    int same_hash; /* the next one of its bucket */
} stack;

typedef struct place {
    int node, stack;
} place;

/* Where a step to a single place led. */
typedef struct recent {
    place from;
    int to; /* 0 = nothing is remembered here */
} recent;

typedef struct state {
    size_t first, num; /* of grammar.places */
    uint16_t *row;     /* [GRAMMAR_NUM_SYMBOLS]: where they lead; NULL = not known yet */
    bool may_end;
    int same_hash;
} state;

struct grammar {
    node *nodes;
    size_t num_nodes, nodes_capacity;
    int *rules;
    size_t num_rules, rules_capacity;
    stack *stacks; /* 0 is the empty one */
    size_t num_stacks, stacks_capacity;
    place *places;
    size_t num_places, places_capacity;
    state *states;
    size_t num_states, states_capacity;
    int stack_buckets[NUM_BUCKETS], state_buckets[NUM_BUCKETS]; /* 0 = empty */
    place *found; /* [MAX_PLACES]: where a step leads, those passed through too */
    size_t num_found;
    recent recent[NUM_RECENT];
    bool broken;
};

/* Room for one more item; NULL and broken when there is no memory. */
static void *grow(grammar *g, void *items, size_t num, size_t *capacity, size_t size) {
    if (num < *capacity) return items;
    const size_t wanted = *capacity == 0 ? 64 : *capacity * 2;
    void *const grown = realloc(items, wanted * size);
    g->broken |= grown == NULL;
    if (grown != NULL) *capacity = wanted;
    return grown;
}

/* --- building --- */

static int add_node(grammar *g, const node *given) {
    node *const nodes = g->num_nodes < MAX_NODES
                            ? grow(g, g->nodes, g->num_nodes, &g->nodes_capacity, sizeof *nodes)
                            : NULL;
    g->broken |= nodes == NULL;
    if (nodes == NULL) return 0;
    g->nodes = nodes;
    nodes[g->num_nodes] = *given;
    return (int)g->num_nodes++;
}

int grammar_end(grammar *g) {
    return add_node(g, &(node){.kind = NODE_END});
}

int grammar_range(grammar *g, int lo, int hi, int next) {
    return add_node(g, &(node){.kind = NODE_RANGE, .lo = lo, .hi = hi, .next = next});
}

int grammar_text(grammar *g, const char *text, size_t length, int next) {
    for (size_t i = length; i-- > 0;)
        next = grammar_range(g, (unsigned char)text[i], (unsigned char)text[i], next);
    return next;
}

int grammar_plain(grammar *g, byte_set but, int next) {
    int tails[3] = {next}, seconds[NUM_LEADS];
    for (int i = 1; i < 3; i++) tails[i] = grammar_range(g, 0x80, 0xbf, tails[i - 1]);
    for (int i = 0; i < NUM_LEADS; i++)
        seconds[i] = grammar_range(g, leads[i].lo, leads[i].hi, tails[leads[i].tail]);
    const int first = grammar_range(g, leads[0].from, leads[0].to, seconds[0]);
    for (int i = 1; i < NUM_LEADS; i++) grammar_range(g, leads[i].from, leads[i].to, seconds[i]);
    return add_node(g, &(node){.kind = NODE_PLAIN, .next = next, .other = first, .but = but});
}

int grammar_either(grammar *g, int one, int other) {
    return add_node(g, &(node){.kind = NODE_EITHER, .next = one, .other = other});
}

int grammar_open(grammar *g) {
    return grammar_either(g, 0, 0);
}

void grammar_close(grammar *g, int open, int one, int other) {
    if (g->broken) return;
    g->nodes[open].next = one;
    g->nodes[open].other = other;
}

int grammar_add_rule(grammar *g) {
    int *const rules = grow(g, g->rules, g->num_rules, &g->rules_capacity, sizeof *rules);
    if (rules == NULL) return 0;
    g->rules = rules;
    rules[g->num_rules] = 0;
    return (int)g->num_rules++;
}

void grammar_set_rule(grammar *g, int rule, int entry) {
    if (!g->broken) g->rules[rule] = entry;
}

int grammar_call(grammar *g, int rule, int next) {
    return add_node(g, &(node){.kind = NODE_CALL, .next = next, .other = rule});
}

/* --- stacks and states, each once --- */

static uint32_t mix(uint32_t hash, uint32_t value) {
    hash = (hash ^ value) * 0x9e3779b1u;
    return hash ^ hash >> 15;
}

/* The stack with `node` on top of `tail`; -1 = too deep, or no memory. */
static int push(grammar *g, int top, int tail) {
    const uint32_t bucket = mix(mix(1, (uint32_t)top), (uint32_t)tail) % NUM_BUCKETS;
    for (int at = g->stack_buckets[bucket]; at != 0; at = g->stacks[at].same_hash) {
        if (g->stacks[at].node == top && g->stacks[at].tail == tail) return at;
    }
    if (g->stacks[tail].depth == MAX_DEPTH) return -1;
    stack *const stacks = grow(g, g->stacks, g->num_stacks, &g->stacks_capacity, sizeof *stacks);
    if (stacks == NULL) return -1;
    g->stacks = stacks;
    stacks[g->num_stacks] = (stack){.node = top,
                                    .tail = tail,
                                    .depth = stacks[tail].depth + 1,
                                    .same_hash = g->stack_buckets[bucket]};
    g->stack_buckets[bucket] = (int)g->num_stacks;
    return (int)g->num_stacks++;
}

/* Adds a place to those found, once. */
static void find(grammar *g, int at, int on) {
    if (on < 0 || g->num_found == MAX_PLACES) return;
    for (size_t i = 0; i < g->num_found; i++) {
        if (g->found[i].node == at && g->found[i].stack == on) return;
    }
    g->found[g->num_found++] = (place){.node = at, .stack = on};
}

/* Goes on from what was found to all that is reached without a symbol. */
static void follow(grammar *g) {
    for (size_t i = 0; i < g->num_found; i++) {
        const place here = g->found[i];
        const node at = g->nodes[here.node];
        if (at.kind == NODE_EITHER) {
            find(g, at.next, here.stack);
            find(g, at.other, here.stack);
        } else if (at.kind == NODE_CALL) {
            find(g, g->rules[at.other], push(g, at.next, here.stack));
        } else if (at.kind == NODE_END && here.stack != 0) {
            find(g, g->stacks[here.stack].node, g->stacks[here.stack].tail);
        }
    }
}

static bool waits(const grammar *g, const place *at) {
    const node_kind kind = g->nodes[at->node].kind;
    return kind == NODE_RANGE || kind == NODE_PLAIN || (kind == NODE_END && at->stack == 0);
}

static bool comes_before(const place *x, const place *y) {
    return x->node != y->node ? x->node < y->node : x->stack < y->stack;
}

/* They are few, and nearly in order. */
static void sort_found(grammar *g) {
    for (size_t i = 1; i < g->num_found; i++) {
        const place it = g->found[i];
        size_t to = i;
        for (; to > 0 && comes_before(&it, &g->found[to - 1]); to--)
            g->found[to] = g->found[to - 1];
        g->found[to] = it;
    }
}

/* Of what was found, the places that wait, in order. */
static void keep_waiting(grammar *g) {
    size_t num = 0;
    for (size_t i = 0; i < g->num_found; i++) {
        if (waits(g, &g->found[i])) g->found[num++] = g->found[i];
    }
    g->num_found = num;
    sort_found(g);
}

static bool add_places(grammar *g) {
    for (size_t i = 0; i < g->num_found; i++) {
        place *const places =
            grow(g, g->places, g->num_places, &g->places_capacity, sizeof *places);
        if (places == NULL) return false;
        g->places = places;
        places[g->num_places++] = g->found[i];
    }
    return true;
}

static bool is_found(const grammar *g, const state *s) {
    return s->num == g->num_found &&
           memcmp(g->places + s->first, g->found, s->num * sizeof *g->found) == 0;
}

/* The number of the state that was found. */
static int intern(grammar *g) {
    follow(g);
    keep_waiting(g);
    if (g->num_found == 0) return 0;
    uint32_t bucket = 2;
    for (size_t i = 0; i < g->num_found; i++)
        bucket = mix(mix(bucket, (uint32_t)g->found[i].node), (uint32_t)g->found[i].stack);
    bucket %= NUM_BUCKETS;
    for (int at = g->state_buckets[bucket]; at != 0; at = g->states[at].same_hash) {
        if (is_found(g, &g->states[at])) return at;
    }
    state *const states = g->num_states < MAX_STATES ? grow(g, g->states, g->num_states,
                                                            &g->states_capacity, sizeof *states)
                                                     : NULL;
    if (states == NULL) return 0;
    g->states = states;
    const size_t first = g->num_places;
    if (!add_places(g)) return 0;
    bool may_end = false;
    for (size_t i = 0; i < g->num_found; i++)
        may_end |= g->nodes[g->found[i].node].kind == NODE_END;
    states[g->num_states] = (state){.first = first,
                                    .num = g->num_found,
                                    .may_end = may_end,
                                    .same_hash = g->state_buckets[bucket]};
    g->state_buckets[bucket] = (int)g->num_states;
    return (int)g->num_states++;
}

/* --- following --- */

int grammar_begin(grammar *g, int entry) {
    g->num_found = 0;
    find(g, entry, 0);
    return g->broken ? 0 : intern(g);
}

/* As intern(), with a look at what a single place led to before. */
static int intern_recent(grammar *g) {
    if (g->num_found != 1) return intern(g);
    const place from = g->found[0];
    const uint32_t slot = mix(mix(3, (uint32_t)from.node), (uint32_t)from.stack) % NUM_RECENT;
    recent *const r = &g->recent[slot];
    if (r->to == 0 || r->from.node != from.node || r->from.stack != from.stack)
        *r = (recent){.from = from, .to = intern(g)};
    return r->to;
}

static bool takes(const node *range, int symbol) {
    return symbol >= range->lo && symbol <= range->hi;
}

static bool is_ascii_plain(int symbol) {
    return symbol >= ' ' && symbol <= '~' && symbol != '"' && symbol != '\\';
}

/* Where a plain character that begins with this byte leads. */
static void find_plain(grammar *g, const node *plain, int symbol, int on) {
    if (symbol > 0xff || byte_set_has(&plain->but, symbol)) return;
    if (is_ascii_plain(symbol)) find(g, plain->next, on);
    for (int i = 0; i < NUM_LEADS && symbol >= leads[0].from; i++) {
        const node *const lead = &g->nodes[plain->other + i];
        if (takes(lead, symbol)) find(g, lead->next, on);
    }
}

/* Where a symbol leads from a state. */
static int find_next(grammar *g, int from, int symbol) {
    const state *const s = &g->states[from];
    g->num_found = 0;
    for (size_t i = s->first; i < s->first + s->num; i++) {
        const place here = g->places[i];
        const node *const at = &g->nodes[here.node];
        if (at->kind == NODE_RANGE && takes(at, symbol)) find(g, at->next, here.stack);
        if (at->kind == NODE_PLAIN) find_plain(g, at, symbol, here.stack);
    }
    return g->num_found == 0 ? 0 : intern_recent(g);
}

typedef void range_call(void *cookie, int from, int to);

/* The parts of lo..hi that a NODE_PLAIN takes. */
static void each_part(const node *plain, int lo, int hi, range_call *with, void *cookie) {
    for (int from = lo, to; from <= hi; from = to + 1) {
        const bool taken = !byte_set_has(&plain->but, from);
        for (to = from; to < hi && byte_set_has(&plain->but, to + 1) != taken; to++) continue;
        if (taken) with(cookie, from, to);
    }
}

/* Calls `with` for the symbols from..to that a place waits for. */
static void each_range(const node *at, range_call *with, void *cookie) {
    if (at->kind == NODE_RANGE) with(cookie, at->lo, at->hi);
    if (at->kind != NODE_PLAIN) return;
    for (int i = 0; i < NUM_ASCII; i++) each_part(at, ascii[i].from, ascii[i].to, with, cookie);
    for (int i = 0; i < NUM_LEADS; i++) each_part(at, leads[i].from, leads[i].to, with, cookie);
}

static void mark_unknown(void *cookie, int from, int to) {
    uint16_t *const row = cookie;
    memset(row + from, 0xff, (size_t)(to + 1 - from) * sizeof *row); /* GRAMMAR_UNKNOWN */
}

const uint16_t *grammar_row(grammar *g, int from) {
    state *const s = &g->states[from];
    if (from == 0 || s->row != NULL) return s->row;
    s->row = calloc(GRAMMAR_NUM_SYMBOLS, sizeof *s->row);
    for (size_t i = s->first; i < s->first + s->num && s->row != NULL; i++)
        each_range(&g->nodes[g->places[i].node], mark_unknown, s->row);
    return s->row;
}

/* Symbols about one that every place of a state waits for as it does for that one. */
typedef struct alike {
    int symbol, from, to;
} alike;

static void narrow(void *cookie, int from, int to) {
    alike *const a = cookie;
    if (a->symbol < from) {
        if (a->to >= from) a->to = from - 1;
    } else if (a->symbol > to) {
        if (a->from <= to) a->from = to + 1;
    } else {
        if (a->from < from) a->from = from;
        if (a->to > to) a->to = to;
    }
}

int grammar_step(grammar *g, int from, int symbol) {
    const uint16_t *const known = grammar_row(g, from);
    if (known == NULL || known[symbol] != GRAMMAR_UNKNOWN) return known == NULL ? 0 : known[symbol];
    const int to = find_next(g, from, symbol); /* may move the states */
    const state *const s = &g->states[from];
    alike a = {symbol, 0, GRAMMAR_NUM_SYMBOLS - 1};
    for (size_t i = s->first; i < s->first + s->num; i++)
        each_range(&g->nodes[g->places[i].node], narrow, &a);
    for (int i = a.from; i <= a.to; i++) s->row[i] = (uint16_t)to;
    return to;
}

/* The first bytes of plain characters: of ascii and leads. */
static const byte_set plain_bytes = {
    .bits = {0xfffffffb00000000, 0x7fffffffefffffff, 0, 0x001ffffffffffffc}};

static void add_bytes(byte_set *s, int lo, int hi) {
    for (int k = lo >> 6; k <= hi >> 6 && k < 4; k++) {
        const int from = lo > k * 64 ? lo & 63 : 0, to = hi < k * 64 + 63 ? hi & 63 : 63;
        s->bits[k] |= (~(uint64_t)0 >> (63 - (to - from))) << from;
    }
}

static bool has_place(const grammar *g, int at, const place *wanted) {
    const state *const s = &g->states[at];
    for (size_t i = s->first; i < s->first + s->num; i++) {
        if (g->places[i].node == wanted->node && g->places[i].stack == wanted->stack) return true;
    }
    return false;
}

/* Some place takes every plain character and is come back to by each. */
static bool is_endless(grammar *g, int from) {
    static const byte_set none = {0};
    for (size_t i = 0; i < g->states[from].num; i++) {
        const place here = g->places[g->states[from].first + i];
        const node *const at = &g->nodes[here.node];
        if (at->kind != NODE_PLAIN || memcmp(&at->but, &none, sizeof none) != 0) continue;
        g->num_found = 0;
        find(g, at->next, here.stack);
        if (has_place(g, intern_recent(g), &here)) return true;
    }
    return false;
}

/* The exceptions are those that a range takes, or some places do not. */
plain_step grammar_plain_step(grammar *g, int from) {
    plain_step step = {.endless = is_endless(g, from)};
    const state *const s = &g->states[from];
    bool first = true;
    g->num_found = 0;
    for (size_t i = s->first; i < s->first + s->num; i++) {
        const place here = g->places[i];
        const node *const at = &g->nodes[here.node];
        if (at->kind == NODE_RANGE) add_bytes(&step.elsewhere, at->lo, at->hi);
        for (int k = 0; at->kind == NODE_PLAIN && k < 4; k++) {
            const uint64_t both = first ? at->but.bits[k] : at->but.bits[k] & step.never.bits[k];
            if (!first) step.elsewhere.bits[k] |= (at->but.bits[k] | step.never.bits[k]) & ~both;
            step.never.bits[k] = both;
        }
        if (at->kind == NODE_PLAIN) {
            first = false;
            find(g, at->next, here.stack);
        }
    }
    for (int k = 0; k < 4; k++) {
        step.never.bits[k] &= plain_bytes.bits[k] & ~step.elsewhere.bits[k];
        step.elsewhere.bits[k] &= plain_bytes.bits[k];
    }
    if (g->num_found > 0) step.to = intern_recent(g);
    return step;
}

bool grammar_may_end(const grammar *g, int at) {
    return at != 0 && g->states[at].may_end;
}

bool grammar_is_half_full(const grammar *g) {
    return g->num_states >= MAX_STATES / 2;
}

/* --- life --- */

grammar *grammar_create(void) {
    grammar *const g = calloc(1, sizeof *g);
    if (g == NULL) return NULL;
    g->found = malloc(MAX_PLACES * sizeof *g->found);
    g->stacks = grow(g, NULL, 0, &g->stacks_capacity, sizeof *g->stacks);
    g->states = grow(g, NULL, 0, &g->states_capacity, sizeof *g->states);
    if (g->found == NULL || g->stacks == NULL || g->states == NULL) {
        grammar_destroy(g);
        return NULL;
    }
    g->stacks[g->num_stacks++] = (stack){0};
    g->states[g->num_states++] = (state){0};
    return g;
}

void grammar_destroy(grammar *g) {
    if (g == NULL) return;
    for (size_t i = 0; i < g->num_states; i++) free(g->states[i].row);
    free(g->nodes);
    free(g->rules);
    free(g->stacks);
    free(g->places);
    free(g->states);
    free(g->found);
    free(g);
}

bool grammar_is_broken(const grammar *g) {
    return g->broken;
}
