# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch

    torch.set_num_threads(1)  # its threads spin, and kv8's wait for the processors
except ImportError:
    pass


@pytest.fixture
def rng():
    return np.random.default_rng(1234)
