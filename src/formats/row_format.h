/* row_format.h - the bytes of one row of a cache as data: which values it has, where their scales
 * lie, how large it is, and the conversions that follow from that. A row is K or V of one token and
 * one head, or a latent that is both; who owns it and in which page it lies is not known here.
 *
 * A row is one or two segments, each of one dtype. Scales belong to the first segment: one for the
 * whole of it or one for every scale_block values. A value is code * its scale, if it has one, *
 * the scale that the caller gives for the row.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef KV8_ROW_FORMAT_H
#define KV8_ROW_FORMAT_H

#include "base_impl.h"

#include <kv8/formats.h>

typedef enum kv8_scale_kind {
    KV8_SCALE_NONE = 0,
    KV8_SCALE_F16,  /* by kv8_narrow_int8's rule; of int8 alone, whole, apart from the row */
    KV8_SCALE_E8M0, /* the smallest power of two under which no finite value clips */
    KV8_SCALE_F32   /* the same power of two */
} kv8_scale_kind;

typedef enum kv8_scale_place {
    KV8_SCALES_IN_PLANE = 0, /* a plane of their own in the page, ordered as the rows */
    KV8_SCALES_IN_ROW,       /* between the first segment and the second */
    KV8_SCALES_AT_TAIL       /* right after the page's rows, ordered as they are */
} kv8_scale_place;

typedef struct kv8_row_segment {
    kv8_dtype dtype;
    int32_t count; /* of values; 0 = no such segment */
} kv8_row_segment;

typedef struct kv8_row_format {
    kv8_row_segment segment[2];
    kv8_scale_kind scale;
    kv8_scale_place place;
    int32_t scale_block;   /* values under one scale; 0 = the first segment whole */
    int32_t scale_padding; /* bytes after a row's scales that mean nothing */
    float min_scale;       /* of powers of two */
    int32_t page_multiple; /* a page's bytes are a multiple of it; 0 = any */
} kv8_row_format;

/* The longest row there is, in values. */
enum { KV8_MAX_ROW_VALUES = 576 };

/* Latent rows of 448 + 64 values in 584 bytes: 576 of the row, 8 at the page's tail. */
extern const kv8_row_format kv8_row_latent_584;
/* Latent rows of 512 + 64 values in 656 bytes, scales within. */
extern const kv8_row_format kv8_row_latent_656;
/* Rows of head_dim values of one dtype. */
kv8_row_format kv8_row_format_of(kv8_dtype dtype, int32_t head_dim);

/* --- sizes --- */

int32_t kv8_row_num_values(const kv8_row_format *format);
int32_t kv8_row_num_scales(const kv8_row_format *format);
/* A row as it lies, with the scales that lie within it. */
size_t kv8_row_bytes(const kv8_row_format *format);
/* A row's scales and what pads them. */
size_t kv8_row_scale_bytes(const kv8_row_format *format);
/* A row and its scales, wherever they lie. */
size_t kv8_row_total_bytes(const kv8_row_format *format);
/* From the row's first byte. */
size_t kv8_row_segment_offset(const kv8_row_format *format, int segment);

/* --- a page of rows --- */

/* Rows or scales of a page: entry (slot, head) is at offset + slot * slot_bytes + head *
 * head_bytes. */
typedef struct kv8_row_plane {
    size_t offset, slot_bytes, head_bytes;
} kv8_row_plane;
typedef struct kv8_page_shape {
    int32_t num_slots, num_heads;
    bool head_major; /* [head, slot] instead of [slot, head] */
} kv8_page_shape;

/* Adds the page's rows (and scales, where those lie at their tail) after *page_bytes, which grows
 * by them; rows start at a cache line. false on overflow. */
bool kv8_row_lay_out(const kv8_row_format *format, const kv8_page_shape *shape, size_t *page_bytes,
                     kv8_row_plane *rows_out, kv8_row_plane *scales_out);
/* Adds the page's scales where they lie in a plane of their own; where not, nothing changes. */
bool kv8_row_lay_out_scales(const kv8_row_format *format, const kv8_page_shape *shape,
                            size_t *page_bytes, kv8_row_plane *scales_out);

/* --- conversions --- */

/* The block conversions of one rung: opaque outside the room, named in formats_kernels.inc. */
typedef struct kv8_formats_kernels kv8_formats_kernels;
/* The conversions of a resolved rung; a rung without its own uses the one below. */
const kv8_formats_kernels *kv8_formats_kernels_get(kv8_isa isa);

/* Stores values / scale (scale finite and > 0). `scales` is where the row's scales lie, NULL when
 * that is in the row or nowhere. `scratch` has room for the row and may be `values`. Clipped values
 * and NaN are added to *counts. */
void kv8_row_narrow(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                    const float *values, float scale, float *scratch, uint8_t *row, uint8_t *scales,
                    kv8_narrow_counts *counts);
/* Reads a row's kv8_row_num_values() values. */
void kv8_row_widen(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                   const uint8_t *row, const uint8_t *scales, float scale, float *values_out);

#endif
