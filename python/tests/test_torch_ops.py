"""torch operators: as attend() and store(), traced by torch.compile, checked by torch's own checks.

SPDX-License-Identifier: Apache-2.0
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kv8  # noqa: E402
import kv8.torch_ops as ops  # noqa: E402


def arguments():
    torch.manual_seed(0)
    q = torch.randn(5, 8, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(6, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
    table = torch.tensor([[4, 0], [3, 5]], dtype=torch.int32)
    lens, cu = torch.tensor([17, 30], dtype=torch.int32), torch.tensor([0, 1, 5], dtype=torch.int32)
    return q, k, v, None, None, table, lens, cu


def test_attend_and_compiled():
    given, scales = arguments(), {"k_scale": torch.tensor([0.5, 2.0]), "sinks": torch.ones(8)}
    o, lse = ops.attend(*given, **scales)
    q, k, v, _, _, table, lens, cu = given
    wanted = kv8.attend(q, k, v, kv8.PageTable.dense(table, lens), cu, **scales)
    assert torch.equal(o, wanted)
    compiled = torch.compile(lambda *a: torch.ops.kv8.attend(*a, **scales), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(compiled(*given)[0], o) and torch.equal(compiled(*given)[1], lse)
    given = (given[0], given[1].bfloat16(), given[2].bfloat16(), *given[3:])
    torch.library.opcheck(torch.ops.kv8.attend, given, {"causal": True, "window_left": 7},
                          test_utils=("test_schema", "test_faketensor"))


def test_store():
    k, v = torch.randn(7, 2, 64, dtype=torch.bfloat16), torch.randn(7, 2, 64, dtype=torch.bfloat16)
    pages = [torch.zeros(4, 8, 2, 64, dtype=torch.int8) for _ in range(2)]
    rows = [torch.zeros(4, 8, 2, dtype=torch.float16) for _ in range(2)]
    slots = torch.tensor([0, 5, 9, -1, 31, 17, 2])
    step = torch.compile(lambda: torch.ops.kv8.store(k, v, *pages, *rows, slots), fullgraph=True,
                         backend="aot_eager")
    step()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            codes, scale, _, _ = kv8.narrow_int8(k[row].float().numpy())
            assert (pages[0].view(32, 2, 64)[slot].numpy() == codes).all()
            assert (rows[0].view(32, 2)[slot].numpy() == scale).all()
    assert int((rows[1] != 0).sum()) == 12 and np.isfinite(rows[1].numpy()).all()
