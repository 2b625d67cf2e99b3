/* row_format.c - sizes of rows and of pages of rows, and a row's values to bytes and back. The
 * numbers themselves are the block conversions' of kv8/formats.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "row_format.h"

#include <math.h>
#include <string.h>

#include "block_codec.h"

/* Scales are 2^-13 at least: 1e-4, rounded up to a power of two. A page is a multiple of its rows,
 * as the tensor copies of GPUs want the distance between pages. */
const kv8_row_format kv8_row_latent_584 = {
    .segment = {{KV8_E4M3, 448}, {KV8_BF16, 64}},
    .scale = KV8_SCALE_E8M0,
    .place = KV8_SCALES_AT_TAIL,
    .scale_block = 64,
    .scale_padding = 1,
    .min_scale = 0x1p-13f,
    .page_multiple = 576,
};

const kv8_row_format kv8_row_latent_656 = {
    .segment = {{KV8_E4M3, 512}, {KV8_BF16, 64}},
    .scale = KV8_SCALE_F32,
    .place = KV8_SCALES_IN_ROW,
    .scale_block = 128,
    .min_scale = 0x1p-13f,
};

kv8_row_format kv8_row_format_of(kv8_dtype dtype, int32_t head_dim) {
    return (kv8_row_format){.segment = {{dtype, head_dim}},
                            .scale = dtype == KV8_INT8 ? KV8_SCALE_F16 : KV8_SCALE_NONE};
}

/* --- sizes --- */

static size_t segment_bytes(const kv8_row_segment *segment) {
    return (size_t)segment->count * kv8_dtype_size(segment->dtype);
}

static size_t bytes_of_scale(kv8_scale_kind kind) {
    static const size_t bytes[] = {
        [KV8_SCALE_NONE] = 0, [KV8_SCALE_F16] = 2, [KV8_SCALE_E8M0] = 1, [KV8_SCALE_F32] = 4};
    return bytes[kind];
}

int32_t kv8_row_num_values(const kv8_row_format *format) {
    return format->segment[0].count + format->segment[1].count;
}

int32_t kv8_row_num_scales(const kv8_row_format *format) {
    if (format->scale == KV8_SCALE_NONE) return 0;
    if (format->scale_block == 0) return 1;
    return (int32_t)kv8_ceil_div(format->segment[0].count, format->scale_block);
}

size_t kv8_row_scale_bytes(const kv8_row_format *format) {
    return (size_t)kv8_row_num_scales(format) * bytes_of_scale(format->scale) +
           (size_t)format->scale_padding;
}

size_t kv8_row_total_bytes(const kv8_row_format *format) {
    return segment_bytes(&format->segment[0]) + segment_bytes(&format->segment[1]) +
           kv8_row_scale_bytes(format);
}

size_t kv8_row_bytes(const kv8_row_format *format) {
    const size_t apart = format->place == KV8_SCALES_IN_ROW ? 0 : kv8_row_scale_bytes(format);
    return kv8_row_total_bytes(format) - apart;
}

size_t kv8_row_segment_offset(const kv8_row_format *format, int segment) {
    if (segment == 0) return 0;
    return kv8_row_bytes(format) - segment_bytes(&format->segment[1]);
}

/* --- a page of rows --- */

static bool add_plane(const kv8_page_shape *shape, size_t offset, size_t bytes, size_t *page_bytes,
                      kv8_row_plane *plane_out) {
    const size_t heads = (size_t)shape->num_heads, slots = (size_t)shape->num_slots;
    size_t plane_bytes = 0, end = 0;
    if (!kv8_mul_size(bytes, heads, &plane_bytes) ||
        !kv8_mul_size(plane_bytes, slots, &plane_bytes) ||
        !kv8_add_size(offset, plane_bytes, &end) || end > SIZE_MAX / 4)
        return false;
    *plane_out = (kv8_row_plane){
        .offset = offset,
        .slot_bytes = shape->head_major ? bytes : bytes * heads,
        .head_bytes = shape->head_major ? bytes * slots : bytes,
    };
    *page_bytes = end;
    return true;
}

bool kv8_row_lay_out(const kv8_row_format *format, const kv8_page_shape *shape, size_t *page_bytes,
                     kv8_row_plane *rows_out, kv8_row_plane *scales_out) {
    const size_t offset = kv8_round_up(*page_bytes, KV8_ALIGNMENT);
    if (!add_plane(shape, offset, kv8_row_bytes(format), page_bytes, rows_out)) return false;
    if (format->place == KV8_SCALES_AT_TAIL &&
        !add_plane(shape, *page_bytes, kv8_row_scale_bytes(format), page_bytes, scales_out))
        return false;
    if (format->page_multiple > 0) {
        const size_t multiple = (size_t)format->page_multiple;
        *page_bytes = (*page_bytes + multiple - 1) / multiple * multiple;
    }
    return true;
}

bool kv8_row_lay_out_scales(const kv8_row_format *format, const kv8_page_shape *shape,
                            size_t *page_bytes, kv8_row_plane *scales_out) {
    if (format->place != KV8_SCALES_IN_PLANE || format->scale == KV8_SCALE_NONE) return true;
    return add_plane(shape, kv8_round_up(*page_bytes, KV8_ALIGNMENT), kv8_row_scale_bytes(format),
                     page_bytes, scales_out);
}

/* --- conversions --- */

/* The smallest power of two >= absmax / max, which min_scale bounds from below. */
static float power_of_two_scale(const kv8_row_format *format, const float *values, int32_t count) {
    float absmax = 0;
    for (int32_t i = 0; i < count; i++) {
        const float x = fabsf(values[i]);
        if (isfinite(x) && x > absmax) absmax = x;
    }
    const float exact = absmax / kv8_dtype_max(format->segment[0].dtype);
    return exact > format->min_scale ? kv8_e8m0_to_f32(kv8_e8m0_from_f32_up(exact))
                                     : format->min_scale;
}

static float load_scale(const kv8_row_format *format, const uint8_t *scales, int32_t block) {
    const uint8_t *const at = scales + (size_t)block * bytes_of_scale(format->scale);
    kv8_f16 f16;
    float f32;
    switch (format->scale) {
        case KV8_SCALE_F16: memcpy(&f16, at, sizeof f16); return kv8_f16_to_f32(f16);
        case KV8_SCALE_E8M0: return kv8_e8m0_to_f32((kv8_e8m0){*at});
        case KV8_SCALE_F32: memcpy(&f32, at, sizeof f32); return f32;
        case KV8_SCALE_NONE: break;
    }
    return 1.0f;
}

static void store_power_of_two(const kv8_row_format *format, uint8_t *scales, int32_t block,
                               float scale) {
    uint8_t *const at = scales + (size_t)block * bytes_of_scale(format->scale);
    if (format->scale == KV8_SCALE_E8M0)
        *at = kv8_e8m0_from_f32_up(scale).bits;
    else
        memcpy(at, &scale, sizeof scale);
}

/* Values under each scale of a first segment that has scales. */
static int32_t block_of(const kv8_row_format *format) {
    return format->scale_block > 0 ? format->scale_block : format->segment[0].count;
}

/* Blocks whose scales are powers of two. */
static void narrow_blocks(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                          const float *values, uint8_t *row, uint8_t *scales,
                          kv8_narrow_counts *counts) {
    const kv8_row_segment *const segment = &format->segment[0];
    memset(scales, 0, kv8_row_scale_bytes(format)); /* and what pads them */
    for (int32_t begin = 0; begin < segment->count; begin += block_of(format)) {
        const int32_t count = (int32_t)kv8_min_i64(block_of(format), segment->count - begin);
        const float scale = power_of_two_scale(format, values + begin, count);
        store_power_of_two(format, scales, begin / block_of(format), scale);
        kernels->narrow[segment->dtype](values + begin, (size_t)count, scale,
                                        row + (size_t)begin * kv8_dtype_size(segment->dtype),
                                        counts);
    }
}

/* A first segment with scales: divided by the row's scale, then by its own. */
static void narrow_scaled(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                          const float *values, float scale, float *scratch, uint8_t *row,
                          uint8_t *scales, kv8_narrow_counts *counts) {
    const int32_t count = format->segment[0].count;
    if (scale != 1.0f) {
        for (int32_t i = 0; i < count; i++) scratch[i] = values[i] / scale;
        values = scratch;
    }
    if (format->scale != KV8_SCALE_F16) {
        if (format->place == KV8_SCALES_IN_ROW) scales = row + segment_bytes(&format->segment[0]);
        narrow_blocks(kernels, format, values, row, scales, counts);
        return;
    }
    void *const codes = row, *const f16 = scales;
    kv8_narrow_int8_by(kernels, values, (size_t)count, codes, f16, counts);
}

void kv8_row_narrow(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                    const float *values, float scale, float *scratch, uint8_t *row, uint8_t *scales,
                    kv8_narrow_counts *counts) {
    const kv8_row_segment *const first = &format->segment[0], *const second = &format->segment[1];
    if (format->scale == KV8_SCALE_NONE)
        kernels->narrow[first->dtype](values, (size_t)first->count, scale, row, counts);
    else
        narrow_scaled(kernels, format, values, scale, scratch, row, scales, counts);
    if (second->count > 0)
        kernels->narrow[second->dtype](values + first->count, (size_t)second->count, scale,
                                       row + kv8_row_segment_offset(format, 1), counts);
}

static void multiply(float *values, int32_t count, float factor) {
    if (factor == 1.0f) return;
    for (int32_t i = 0; i < count; i++) values[i] *= factor;
}

void kv8_row_widen(const kv8_formats_kernels *kernels, const kv8_row_format *format,
                   const uint8_t *row, const uint8_t *scales, float scale, float *values_out) {
    const kv8_row_segment *const first = &format->segment[0], *const second = &format->segment[1];
    kernels->widen[first->dtype](row, (size_t)first->count, values_out);
    if (format->place == KV8_SCALES_IN_ROW) scales = row + segment_bytes(first);
    const int32_t num_scales = kv8_row_num_scales(format);
    for (int32_t block = 0; block < num_scales; block++) {
        const int32_t begin = block * block_of(format);
        multiply(values_out + begin, (int32_t)kv8_min_i64(block_of(format), first->count - begin),
                 load_scale(format, scales, block));
    }
    if (second->count > 0)
        kernels->widen[second->dtype](row + kv8_row_segment_offset(format, 1),
                                      (size_t)second->count, values_out + first->count);
    multiply(values_out, kv8_row_num_values(format), scale);
}
