"""Names of files and folders, and the record of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright.checkpoint import layout
from meshwright.checkpoint.layout import CommitRecord, FileFacts, NewerFormatError
from meshwright.errors import InvalidDataError

RECORD = CommitRecord(
    num_processes=2,
    parts={"model": "model.safetensors"},
    files={"model.safetensors": FileFacts(size=0, checksum="0")},
    step=3,
)


def test_names_are_the_published_ones() -> None:
    assert [layout.numbered("model", index, ".bin") for index in (0, 1, 2)] == [
        "model.bin",
        "model_1.bin",
        "model_2.bin",
    ]
    assert (layout.model_folder(0), layout.model_folder(1)) == ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1")
    assert (layout.engine_folder(0), layout.engine_folder(1)) == ("pytorch_model", "pytorch_model_1")
    assert layout.optimizer_folder(1) == "optimizer_1"
    assert layout.random_states_file(1) == "random_states_1.pkl"
    assert layout.supplement_file(1) == "commit_1.json"
    assert layout.custom_file(0) == "custom_checkpoint_0.pkl"
    for file in ("commit.json", "progress.bin", "model_1.safetensors", "scheduler.bin", "commit_12.json", "scaler.pt"):
        assert layout.is_published(file)
    for file in ("notes.txt", "xmodel.bin", "model.bin2", "commit_.json", "scaler_1.pt"):
        assert not layout.is_published(file)


def test_an_automatic_name_has_its_number() -> None:
    assert layout.iteration_of(layout.automatic_name(12)) == 12
    for name in ("checkpoint_", "checkpoint_1x", "my_checkpoint_1", "checkpoint_" + "1" * 19):
        assert layout.iteration_of(name) is None


def test_a_folder_that_is_not_committed_has_name_and_state() -> None:
    for state in ("partial", "removed", "replaced"):
        assert layout.unfinished(layout.unfinished_name("last", state, "0123abcd")) == ("last", state)
    for name in ("last", "last.partial-0123abc", "last.partial-0123abcd0", ".partial-0123abcd", "last.other-0123abcd"):
        assert layout.unfinished(name) is None


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(RECORD.to_json()) | changes)


def test_a_record_is_read_as_it_was_written() -> None:
    assert CommitRecord.from_json(RECORD.to_json()) == RECORD
    one = replace(RECORD, num_processes=1)
    assert CommitRecord.from_json(one.to_json()) == one


@pytest.mark.parametrize("processes", [0, -1])
def test_a_record_of_no_processes_is_damaged(processes: int) -> None:
    with pytest.raises(InvalidDataError, match=f"my.json is damaged: it is of {processes} processes"):
        CommitRecord.from_json(changed(num_processes=processes), "my.json")


@pytest.mark.parametrize(
    "changes",
    [{"files": {"../x": {"size": 1, "checksum": ""}}}, {"parts": {"model": "../b"}}, {"folder": "/tmp"}],
)
def test_a_record_names_plain_files_only(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidDataError):
        CommitRecord.from_json(changed(**changes))


def test_a_file_has_at_least_no_bytes() -> None:
    assert FileFacts(size=0, checksum="").size == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        FileFacts(size=-1, checksum="")
    with pytest.raises(InvalidDataError):
        CommitRecord.from_json(changed(files={"a": {"size": -1, "checksum": ""}}))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"format": 2}, r"format 2, this one reads 1"),
        ({"format": 2, "extra": 1}, r"format 2, this one reads 1"),
        ({"extra": 1, "another": 2}, r"commit.json has another, extra"),
    ],
)
def test_a_record_of_a_newer_version_is_called_that(changes: dict[str, Any], difference: str) -> None:
    with pytest.raises(NewerFormatError, match=difference):
        CommitRecord.from_json(changed(**changes))


@pytest.mark.parametrize("format", [True, "2", None])
def test_a_format_that_is_no_number_is_damage(format: Any) -> None:
    with pytest.raises(InvalidDataError) as caught:
        CommitRecord.from_json(changed(format=format))
    assert not isinstance(caught.value, NewerFormatError)
