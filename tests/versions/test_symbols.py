"""Names of torch are found in the source, and looked for in this torch."""

from __future__ import annotations

from pathlib import Path

import symbols

SOURCE = """
import torch
import torch.distributed as dist

def lazily():
    from torch.distributed.fsdp import fully_shard, not_there
    from torch import optim as patched
    patched.Optimizer._gone = patched._gone
    try:
        torch._C._may_be_missing
    except AttributeError:
        pass
    return dist.group.WORLD.rank, torch._C._gone, torch.hpu.synchronize
"""


def test_names_inside_functions_are_found_and_missing_ones_told(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(SOURCE)
    names = dict(symbols.names_in(tmp_path / "lazy.py"))
    assert names["torch.distributed.fsdp.not_there"] == 6
    assert names["torch.optim.Optimizer._gone"] == 8
    assert names["torch._C._gone"] == 13
    assert "torch._C._may_be_missing" not in names
    missing = {name for name in names if not symbols.exists(name)}
    assert missing == {
        "torch.distributed.fsdp.not_there",
        "torch._C._gone",
        "torch.hpu",
        "torch.hpu.synchronize",
        "torch.optim._gone",
        "torch.optim.Optimizer._gone",
    }


def test_every_name_that_this_package_uses_is_there() -> None:
    assert symbols.missing() == []
