"""Tensors of a file in torch's format get memory of their own, and what was shared stays shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.formats import codec
from meshwright.runtime.streams.mapping import copy_storages, new_shared_file, release_pages, write_pages


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


def test_a_shared_file_keeps_what_is_written_when_its_pages_are_released(tmp_path: Path) -> None:
    buffer = new_shared_file(tmp_path, 1 << 16)
    numbers = buffer.view(torch.float32)
    numbers.copy_(torch.arange(len(numbers)))
    write_pages(buffer)
    release_pages(buffer)
    assert torch.equal(numbers, torch.arange(len(numbers)).float())
    assert list(tmp_path.iterdir()) == [], "it has no name"


def test_a_disk_that_is_full_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space|too large"):
        new_shared_file(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []
