"""Conversions against ml_dtypes, an implementation of its own.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

import kv8
from reference import NUMPY, random


@pytest.mark.parametrize("dtype", ["e4m3", "e4m3fnuz", "e5m2"])
def test_every_code(dtype):
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(NUMPY[dtype]).astype(np.float32)
    got = kv8.widen(codes, dtype)
    assert ((got == wanted) | (np.isnan(got) & np.isnan(wanted))).all()
    assert (kv8.widen(codes.view(NUMPY[dtype]).reshape(16, 16)).shape) == (16, 16)
    assert kv8.widen(codes[7], dtype) == wanted[7] and kv8.widen(codes[7], dtype).shape == ()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e4m3fnuz", "e5m2"])
def test_narrow(rng, dtype):
    values = random(rng, (3, 1000), "f32") * np.float32(10)
    codes, clips, nans = kv8.narrow(values, dtype, 0.5)
    assert codes.dtype == NUMPY[dtype] and codes.shape == values.shape and (clips, nans) == (0, 0)
    assert (codes.view(np.uint8) == (values / np.float32(0.5)).astype(NUMPY[dtype]).view(np.uint8)).all()
    limit = kv8.dtype_max(dtype)
    codes, clips, nans = kv8.narrow([np.inf, -np.inf, np.nan, limit], dtype)
    assert (clips, nans) == (2, 1) and (kv8.widen(codes)[[0, 1, 3]] == [limit, -limit, limit]).all()


def test_int8_and_mxfp4(rng):
    values = random(rng, (7, 64))
    codes, scales, clips, nans = kv8.narrow_int8(values)
    assert codes.shape == (7, 64) and scales.shape == (7,)
    assert (np.abs(codes * scales.astype(np.float32)[:, None] - values)
            <= scales.astype(np.float32)[:, None] * 0.51).all() and clips == nans == 0
    blocks, exponents = kv8.mxfp4_narrow(values.reshape(7, 2, 32))
    assert blocks.shape == (7, 2, 16) and exponents.shape == (7, 2)
    table = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
    got = kv8.mxfp4_widen(blocks, exponents)
    step = np.exp2(exponents.astype(np.float32) - 127)[..., None]
    low, high = blocks & 15, blocks >> 4
    nibbles = np.stack((low, high), -1).reshape(7, 2, 32)
    assert (got == np.where(nibbles & 8, -1, 1) * table[nibbles & 7] * step).all()
    assert np.abs(got.reshape(7, 64) - values).max() <= step.max()
