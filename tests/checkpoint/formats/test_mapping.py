"""Tensors of a file in torch's format get memory of their own, and what was shared stays shared."""

from __future__ import annotations

from pathlib import Path

import torch

from accelerate.checkpoint.formats import codec
from accelerate.checkpoint.formats.mapping import copy_storages


def test_what_was_read_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    whole = torch.arange(3 << 20, dtype=torch.float32)
    state = {"whole": whole, "part": whole[5:9], "again": [whole], "empty": torch.empty(0), "step": 3}
    state["sparse"] = torch.eye(3).to_sparse()
    state["columns"] = torch.arange(6).reshape(2, 3).t()
    codec.write(state, path)
    read = codec.read(path)
    path.write_bytes(b"\0" * path.stat().st_size)  # in place: a mapping would see it
    assert torch.equal(read["whole"], whole)
    assert torch.equal(read["columns"], state["columns"])
    assert torch.equal(read["sparse"].to_dense(), torch.eye(3))
    assert read["step"] == 3
    assert read["again"][0] is read["whole"]
    read["whole"][5] = -1.0
    assert read["part"][0] == -1.0


def test_copies_do_not_share_memory_with_their_sources() -> None:
    source = torch.arange(10)
    view = source[2:]
    copies = copy_storages([source, view])
    copies[id(source)][2] = 7
    assert source[2] == 2
    assert copies[id(view)][0] == 7
