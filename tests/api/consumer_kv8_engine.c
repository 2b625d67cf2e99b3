/* consumer_kv8_engine.c - the smallest program that uses an installed libkv8_engine: prints the
 * version and whether a KV setting parses (it does).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <kv8/kv8_engine.h>
#include <stdio.h>

int main(void) {
    kv8_kv_setting setting;
    const int parses = kv8_kv_setting_parse("e4m3", &setting) == KV8_OK;
    return printf("%s %d\n", kv8_version(), parses) < 0;
}
