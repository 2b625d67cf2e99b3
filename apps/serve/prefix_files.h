/* prefix_files.h - the prefixes of a cache, on disk from one run of kv8 serve to the next: a folder
 * for a model, its scales and a KV setting, and in it a snapshot for each prefix. A file is whole
 * or refused; those of other models and settings lie in folders of their own, and are left alone.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_PREFIX_FILES_H
#define KV8_PREFIX_FILES_H

#include "cli.h"

typedef struct prefix_files {
    const char *directory;      /* the user's */
    const char *model, *scales; /* paths; scales: NULL = none */
    const char *setting;        /* the KV setting's name */
} prefix_files;

/* What is on disk becomes findable in an empty cache, what was used last stays longest. Says on
 * stderr how much that is, and which files are refused and why. */
int prefix_files_restore(const prefix_files *files, kv8_cache *cache);
/* The cache's prefixes are on disk, and no others of this folder. A file appears whole, and none
 * goes before all that take its place are there. No sequence is alive. */
int prefix_files_save(const prefix_files *files, kv8_cache *cache);

#endif
