"""The readers: each takes any bytes and returns, or raises InvalidDataError; nothing else happens."""

from __future__ import annotations

import io
import json
import pathlib
import pickle
import random
import struct
import tempfile
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from meshwright.checkpoint.formats import codec, dcp as tables, objects
from meshwright.checkpoint.formats.pickles import interpret, require
from meshwright.checkpoint.layout import CommitRecord, FileFacts
from meshwright.checkpoint.storage.memory import CopyRecord
from meshwright.errors import InvalidDataError
from meshwright.inference.offload.weights import SafetensorsFile
from meshwright.launch.machines import preflight
from meshwright.runtime.membership.events import Event, Note
from meshwright.tools.report.runs.reading import RunRecords, describe_lost
from meshwright.untrusted import build, parse_json, parse_yaml

from .mutating import damaged, program


@dataclass(frozen=True)
class Target:
    """One reader, with inputs that it accepts."""

    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[Sequence[bytes], random.Random], bytes] = lambda seeds, rng: damaged(rng.choice(seeds), rng)


# --- Pickles ----------------------------------------------------------------------------------------------------------


def table_of(name: str = "model.weight", shape: Sequence[int] = (4, 2), length: int = 1 << 10) -> dcp.Metadata:
    """Return a table of contents as DCP writes it: a tensor in two chunks along the first dimension."""
    half = [shape[0] // 2, *shape[1:]]
    chunks = [
        dcp.ChunkStorageMetadata(torch.Size([first, *[0] * (len(shape) - 1)]), torch.Size(half))
        for first in (0, half[0])
    ]
    facts = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)
    places = {
        dcp.MetadataIndex(name, chunk.offsets): _StorageInfo("__0_0.distcp", number * length, length)
        for number, chunk in enumerate(chunks)
    }
    entries = {name: facts, "step": dcp.BytesStorageMetadata()}
    meta = dcp.StorageMeta(checkpoint_id=Path("a/b"), save_id="x", modules=["m"])
    return dcp.Metadata(entries, planner_data={name: ("model", "weight", 0)}, storage_data=places, storage_meta=meta)


@cache
def _tables() -> list[bytes]:
    return [pickle.dumps(table_of(), protocol) for protocol in (2, 4, 5)]


def _read_table(content: bytes) -> object:
    return interpret(content, tables._TableNames(), "the table")


@cache
def _programs() -> list[bytes]:
    tensor = torch.arange(6.0).reshape(2, 3)
    values: list[Any] = [
        {"state": {0: {"step": torch.tensor(1.0), "exp_avg": tensor}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        {
            "numpy": np.random.get_state(),
            "date": np.datetime64("2026-01-02"),
            "text": np.array(["a", "bc"]),
            "f": np.float64(2),
        },
        [
            OrderedDict(a=1),
            Counter("aab"),
            {1, 2},
            frozenset([3]),
            (1, (2.5,)),
            Path("a/b"),
            b"x",
            1 << 70,
            3j,
            range(3),
        ],
        [torch.nn.Parameter(tensor), torch.device("cpu"), torch.Size([2]), tensor.to_sparse(), torch.float32],
    ]
    found = []
    for value in values:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        with zipfile.ZipFile(buffer) as archive:
            found.append(archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl"))))
    return found


_NUMBERS = torch.zeros(1024, dtype=torch.uint8).untyped_storage()


def _storage(key: Any) -> Any:
    """Refer to numbers as a file does: as many as there are."""
    require(
        type(key) is tuple and len(key) >= 5 and type(key[1]) is objects._StorageKind and type(key[4]) is int, "key"
    )
    size = key[4] * key[1].dtype.itemsize
    require(0 <= size <= 1024, "size")
    return objects._Storage(_NUMBERS[:size], key[1].dtype)


def _read_program(content: bytes) -> object:
    return interpret(content, objects.TorchNames(_storage), "the file")


# --- Files ------------------------------------------------------------------------------------------------------------


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzzing-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def _of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def read_content(content: bytes) -> object:
        path = _scratch() / name
        path.write_bytes(content)
        return read(path)

    return read_content


@cache
def _torch_files() -> list[bytes]:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(8.0), "b": [1, "x", np.zeros(3)]}, buffer)
    return [buffer.getvalue()]


@cache
def _safetensors_files() -> list[bytes]:
    from safetensors.torch import save

    return [save({"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16)})]


@cache
def _headers() -> list[bytes]:
    (file,) = _safetensors_files()
    length = struct.unpack("<Q", file[:8])[0]
    return [file[8 : 8 + length]]


def _read_header(content: bytes) -> object:
    """Read a file with a header of the right length, so that not every input ends at its first bytes."""
    return _read_safetensors(struct.pack("<Q", len(content)) + content + bytes(30))


def _all_of(path: Path) -> object:
    file = SafetensorsFile(path)
    return [file.view(name).sum() for name in file.names()]


_read_safetensors = _of_file("x.safetensors", _all_of)


def _commits() -> list[bytes]:
    files = {"model.safetensors": FileFacts(size=3, checksum="crc32/33554432:00000000")}
    return [
        CommitRecord(num_processes=2, parts={"model": "model.safetensors"}, files=files, time=1.0).to_json().encode()
    ]


def _copies() -> list[bytes]:
    record = CopyRecord(kind="state", owner=0, step=3, num_processes=2, size=9, checksum="crc32/1:0", slot="a")
    return [record.to_json().encode()]


def _indices() -> list[bytes]:
    return [json.dumps({"metadata": {"total_size": 3}, "weight_map": {"a.b": "model.safetensors"}}).encode()]


def _read_index(path: Path) -> object:
    from meshwright.checkpoint.formats.model_files import files_of_model

    try:
        return files_of_model(path)
    except FileNotFoundError:
        return None


def _read_run(path: Path) -> object:
    run = RunRecords(path)
    run.update()
    return [series.points() for series in run.scalars.values()], describe_lost(run), run.state(), run.seconds


def _run_files() -> list[bytes]:
    records = [
        {"start": {"time": 1.0, "project": "p", "resumed": "x"}},
        {"config": {"lr": 0.1}},
        {"time": 2.0, "step": 1, "values": {"loss": 0.5, "note": "text", "bad": "NaN"}},
        {"checkpoint": {"id": "x", "time": 2.5}},
        {"time": 3.0, "step": 2, "system": {"memory": 1}},
        {"lost": {"wandb": 2}},
        {"end": {"time": 4.0}},
    ]
    return [b"".join(json.dumps(record).encode() + b"\n" for record in records)]


def _events() -> list[bytes]:
    event = Event(kind="left", ranks=(1,), reason="killed", time=1.0)
    return [json.dumps(asdict(event)).encode(), b'{"kind": "broken", "ranks": [], "reason": "", "time": 1}']


def _reports() -> list[bytes]:
    report = preflight.MachineReport(machine_rank=1, num_machines=2, processes_here=8, host="node-1", nonce="ab")
    return [json.dumps(asdict(report)).encode(), json.dumps(asdict(preflight.PreflightReply(challenge="00"))).encode()]


def _message_of(*kinds: type) -> Callable[[bytes], object]:
    """Read a message as each of the types that it could be."""

    def read(content: bytes) -> object:
        value, found = parse_json(content, "a message"), []
        for kind in kinds:
            with suppress(InvalidDataError):
                found.append(build(kind, value, "a message"))
        return found

    return read


TARGETS = {
    "run": Target(_of_file("metrics.jsonl", _read_run), _run_files),
    "event": Target(_message_of(Event, Note, int), _events),
    "report": Target(_message_of(preflight.MachineReport, preflight.Proof, preflight.PreflightReply), _reports),
    "table": Target(_read_table, _tables, program),
    "program": Target(_read_program, _programs, program),
    "torch": Target(_of_file("x.bin", codec.read), _torch_files),
    "safetensors": Target(_read_safetensors, _safetensors_files),
    "header": Target(_read_header, _headers),
    "commit": Target(lambda content: CommitRecord.from_json(content.decode("utf-8", "replace")), _commits),
    "copy": Target(lambda content: CopyRecord.from_json(content.decode("utf-8", "replace")), _copies),
    "index": Target(_of_file("model.safetensors.index.json", _read_index), _indices),
    "yaml": Target(
        lambda content: parse_yaml(content.decode("utf-8", "replace"), "the file"),
        lambda: [b"compute_environment: LOCAL_MACHINE\nfsdp_config:\n  fsdp_version: 2\n  x: [1, {a: &b c}, *b]\n"],
    ),
}


_REACHABLE: list[Any] = [
    pathlib.Path, pathlib.PurePath, pathlib.PosixPath, pathlib.PureWindowsPath, OrderedDict, Counter, torch.Size,
    torch.Tensor, torch.nn.Parameter, torch.device, dcp._MEM_FORMAT_ENCODING, dcp.Metadata, dcp.MetadataIndex,
    dcp.TensorProperties, dcp.StorageMeta, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata,
    dcp.TensorStorageMetadata, _StorageInfo, objects.TorchNames, tables.SafeReader, torch, dcp, np, pickle,
]  # fmt: skip
"""Classes and modules that the names in a file reach, whose attributes a hostile one would like to set."""


def attributes() -> list[dict[str, int]]:
    """Return the identities of all attributes that a file could set."""
    return [{name: id(value) for name, value in vars(item).items()} for item in _REACHABLE]


def changed_since(before: list[dict[str, int]]) -> list[str]:
    """Return the attributes that were set; what a module imports late is none."""
    changed = []
    for item, old, new in zip(_REACHABLE, before, attributes(), strict=True):
        names = old.keys() if isinstance(item, ModuleType) else old.keys() | new.keys()
        changed += [f"{item.__name__}.{name}" for name in names if old.get(name) != new.get(name)]
    known = ("__warningregistry__", "__slotnames__", "torch.manual_seed")  # set by warnings, by pickle, and by dynamo
    return [name for name in changed if not name.endswith(known)]
