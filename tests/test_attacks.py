"""Files and messages made by hand against the readers: each is refused by name, and the process is as before."""

from __future__ import annotations

import argparse
import datetime
import decimal
import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

import meshwright
from meshwright.checkpoint.formats import codec
from meshwright.checkpoint.formats.model_files import files_of_model
from meshwright.checkpoint.layout import CommitRecord
from meshwright.checkpoint.storage.memory import CopyRecord
from meshwright.commands.config import tpu
from meshwright.config.launch.files import load_mapping
from meshwright.errors import InvalidDataError, LaunchError
from meshwright.inference.offload.weights import SafetensorsFile
from meshwright.launch.machines import preflight
from meshwright.launch.machines.hostfile import read_hostfile
from meshwright.runtime.devices import catalogue
from meshwright.runtime.membership.events import Event
from meshwright.untrusted import build, parse_json
from tests.checkpoint.formats.test_hostile import name_of, piece, storage, tensor, torch_file
from tests.fuzzing.targets import attributes, changed_since

REFUSALS = (InvalidDataError, LaunchError)


def offered(kind: str, content: Any, folder: Path) -> Any:
    """Give what an attacker has written to the reader that will get it."""
    if kind == "message":
        return [build(each, parse_json(content, "a message"), "a message") for each in (Event, preflight.MachineReport)]
    name, read = READERS[kind]
    path = folder / name
    if kind == "program":
        torch_file(path, content)
    elif kind == "archive":
        torch_file(path, b"}" + piece("a") + tensor(0, (2,), (1,), storage(2)) + b"s")
        path.write_bytes(content(path.read_bytes()))
    else:
        path.write_bytes(content)
    return read(path)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "program": ("optimizer.bin", codec.read),
    "archive": ("optimizer.bin", codec.read),
    "commit": ("commit.json", CommitRecord.read),
    "copy": ("copy.json", lambda path: CopyRecord.from_json(path.read_text())),
    "index": ("model.safetensors.index.json", files_of_model),
    "safetensors": ("model.safetensors", lambda path: SafetensorsFile(path).names()),
    "config": ("config.yaml", load_mapping),
    "hostfile": ("hostfile", read_hostfile),
}


def with_end(**fields: int) -> Callable[[bytes], bytes]:
    """Return a change of the last record of an archive."""

    def change(content: bytes) -> bytes:
        magic, count, length, place, comment = struct.unpack("<4s6xHLLH", content[-22:])
        now = {"count": count, "length": length, "place": place, "comment": comment}
        now = {name: now[name] + fields.get(name, 0) for name in now}
        return content[:-22] + struct.pack("<4s4xHHLLH", magic, now["count"], *now.values())

    return change


def with_locator(place: int) -> Callable[[bytes], bytes]:
    """Return a change that says where the last record of a large archive is."""
    return lambda content: content[:-22] + struct.pack("<4s4xQL", b"PK\6\7", place, 1) + content[-22:]


def in_entry(at: int, value: bytes, number: int = -1) -> Callable[[bytes], bytes]:
    """Return a change of an entry of the directory."""

    def change(content: bytes) -> bytes:
        starts = [where for where in range(len(content)) if content[where : where + 4] == b"PK\1\2"]
        where = starts[number] + at
        return content[:where] + value + content[where + len(value) :]

    return change


def in_other_order(content: bytes) -> bytes:
    first, second, third = (where for where in range(len(content)) if content[where : where + 4] == b"PK\1\2")
    return content[:first] + content[second:third] + content[first:second] + content[third:]


def two_in_one(content: bytes) -> bytes:
    return content + content


def call(module: str, name: str, *arguments: Any) -> bytes:
    return name_of(module, name) + piece(arguments) + b"R"


def commit(**facts: Any) -> bytes:
    return json.dumps({"num_processes": 1, "parts": {}, "files": {}} | facts).encode()


def header(text: str, length: int | None = None, numbers: int = 8) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + bytes(numbers)


COPY = {"kind": "state", "owner": 0, "step": 1, "num_processes": 1, "size": 1, "checksum": "", "slot": "a"}
EVENT = {"kind": "left", "ranks": [1], "reason": "", "time": 1.0}
ATTACKS: dict[str, tuple[str, Any, str]] = {
    # archives
    "a directory that begins in the numbers": ("archive", with_end(place=-8, length=8), "an entry that is none"),
    "a directory that ends in the numbers": ("archive", with_end(length=-4), "is not where it should be"),
    "a record that the directory does not have": ("archive", with_end(count=1), "two of its records have one name"),
    "a record that is not counted": ("archive", with_end(count=-1), "two of its records have one name"),
    "a comment behind the end": ("archive", with_end(comment=4), "does not end as an archive"),
    "bytes behind the end": ("archive", lambda content: content + b"PK\5\6", "does not end as an archive"),
    "a large end that is not there": ("archive", with_locator(1 << 63), "does not end as an archive|damaged"),
    "a large end in the numbers": ("archive", with_locator(0), "does not end as an archive"),
    "a compressed record": ("archive", in_entry(10, b"\x08\0"), "compresses nothing"),
    "two sizes of a record": ("archive", in_entry(20, b"\xff\0\0\0"), "a record has two sizes"),
    "a size of 64 bits that is not there": ("archive", in_entry(24, b"\xff\xff\xff\xff"), "a record has two sizes"),
    "a record in the place of another": ("archive", in_entry(42, b"\0\0\0\0"), "two records are at the same place"),
    "a record behind the directory": ("archive", in_entry(42, b"\xff\xff\xff\x7f"), "is not where it should be"),
    "a name longer than the directory": ("archive", in_entry(28, b"\xff\xff"), "is not where it should be|damaged"),
    "a name that is no text": ("archive", in_entry(46, b"\xff\xfe"), "damaged"),
    "records in another order": ("archive", in_other_order, "not in order"),
    "one archive behind another": ("archive", two_in_one, "is not where it should be"),
    # programs
    "a number of the memo that comes too early": ("program", b"Nr\5\0\0\0", "leaves out a number of its memo"),
    "a draft as a key": ("program", b"}" + name_of("numpy", "dtype") + piece(("f8",)) + b"RNs", "has no state"),
    "a constructor among values": ("program", b"]" + name_of("decimal", "Decimal") + b"a", "more than data"),
    "a state for a finished object": ("program", call("decimal", "Decimal", "1") + b"}b", "more than data"),
    "a time beyond time": ("program", call("datetime", "timedelta", 10**18), "OverflowError"),
    "a date of other bytes": ("program", call("datetime", "date", b"\xff\xff"), "damaged"),
    "a range without a step": ("program", call("builtins", "range", 0, 9, 0), "ValueError"),
    "a device without a kind": ("program", call("torch", "device", "pwned:0"), "RuntimeError"),
    "a size of truth": ("program", call("torch", "Size", (True,)), "a shape is not one"),
    "a size of 2 ** 63": ("program", call("torch", "Size", (1 << 63,)), "a shape is not one"),
    "a name that is no UTF-8": ("program", b"c\xff\xfe\nx\n", "UnicodeDecodeError"),
    "a number of a thousand bytes": ("program", b"\x8b\x01\x04\0\0" + b"\1" * 1025, "a number is too long"),
    "a hook on a tensor": (
        "program",
        tensor(0, (2,), (1,), storage(2))[: -len(name_of("collections", "OrderedDict") + b")RtR")] + b"]K\1atR",
        "a tensor has hooks",
    ),
    "a fraction of nothing": ("program", call("fractions", "Fraction", 1, 0), "ZeroDivisionError"),
    # records
    "a file of another checkpoint": ("commit", commit(folder="../other"), "outside of its folder"),
    "a part with a drive": ("commit", commit(parts={"model": "C:\\x"}), "outside of its folder"),
    "no processes": ("commit", commit(num_processes=0), "of 0 processes"),
    "a size of minus one": ("commit", commit(files={"x": {"size": -1, "checksum": ""}}), "bytes"),
    "a size that is true": ("commit", commit(files={"x": {"size": True, "checksum": ""}}), "expected int"),
    "a format in words": ("commit", commit(format="9"), "expected int"),
    "a time without end": ("commit", b'{"num_processes": 1, "parts": {}, "files": {}, "time": 1e999}', "out of range"),
    "a copy in another folder": ("copy", json.dumps(COPY | {"slot": "../a"}).encode(), "no known kind"),
    "a copy of step minus one": ("copy", json.dumps(COPY | {"step": -1}).encode(), "negative"),
    "an index of folders": ("index", b'{"weight_map": {"a": "x/y.safetensors"}}', "outside of its folder"),
    "an index of lists": ("index", b'{"weight_map": {"a": ["x"]}}', "expected str"),
    "an index that says two things": ("index", b'{"weight_map": {}, "weight_map": {"a": "b"}}', "twice"),
    "a header without end": ("safetensors", header("{}", 1 << 63), "damaged"),
    "a header of lists": ("safetensors", header("[" * 3000), "damaged"),
    "weights that overlap": (
        "safetensors",
        header(json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "ab"})),
        "damaged",
    ),
    # settings
    "a call in a configuration": ("config", b"x: !!python/object/apply:os.system ['touch stolen']", "not valid YAML"),
    "a billion laughs": (
        "config",
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 107)),
        "holds more than",
    ),
    "an alias of itself": ("config", b"x: &x [*x]", "holds itself"),
    "a date that is none": ("config", b"x: !!timestamp soon", "cannot read"),
    "a hostfile in another encoding": ("hostfile", b"\xff\xfe slots=8", "not text in UTF-8"),
    "a host that is an option": ("hostfile", b"-oProxyCommand=x slots=8", "cannot be read"),
    "more slots than digits": ("hostfile", b"a slots=" + b"9" * 5000, "cannot be read"),
    "a host that paints": ("hostfile", b"\x1b[2Jevil", r"'·\[2Jevil' cannot be read"),
    # messages
    "an event of a rank that is text": ("message", json.dumps(EVENT | {"ranks": ["1"]}), "expected int"),
    "an event that is unknown": ("message", json.dumps(EVENT | {"kind": "root"}), "damaged"),
    "an event with a field more": ("message", json.dumps(EVENT | {"run": "x"}), "unknown field"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def the_process_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    before, allowed = attributes(), list(torch.serialization.get_safe_globals())
    state, context = torch.get_rng_state(), decimal.getcontext().copy()
    yield
    assert changed_since(before) == []
    assert torch.serialization.get_safe_globals() == allowed
    assert torch.equal(torch.get_rng_state(), state)
    assert (decimal.getcontext().prec, decimal.getcontext().traps) == (context.prec, context.traps)
    assert datetime.date(2026, 1, 2).isoformat() == "2026-01-02"
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, content, reason = ATTACKS[name]
    with pytest.raises(REFUSALS, match=reason) as refused:
        offered(kind, content, tmp_path)
    assert "\x1b" not in str(refused.value)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("kind", READERS)
def test_each_reader_of_these_attacks_reads_what_is_sound(kind: str, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"")
    sound: dict[str, Any] = {
        "program": b"}",
        "archive": lambda content: content,
        "commit": commit(),
        "copy": json.dumps(COPY).encode(),
        "index": b'{"weight_map": {"a": "x.safetensors"}}',
        "safetensors": header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})),
        "config": b"num_processes: 2",
        "hostfile": b"a slots=8",
    }
    assert offered(kind, sound[kind], tmp_path) is not None


@pytest.mark.parametrize(
    ("name", "read"),
    {
        "a configuration": load_mapping,
        "devices": catalogue.load,
        "commands": lambda path: tpu._commands(argparse.Namespace(command_file=path, command=None), {}),
        "a file of torch": meshwright.load,
        "a checkpoint": codec.read,
    }.items(),
)
def test_a_pipe_and_an_endless_file_are_refused_where_a_file_is_read(
    name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    """A pipe that nobody writes to would be waited for; the program that reads it has 10 seconds here."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        outcome: Queue[Any] = Queue()

        def offer(path: Path = path, outcome: Queue[Any] = outcome) -> None:
            try:
                outcome.put(read(path))
            except Exception as error:
                outcome.put(error)

        threading.Thread(target=offer, daemon=True).start()
        refusal = outcome.get(timeout=10)
        assert isinstance(refusal, InvalidDataError), (name, refusal)
        assert "is not a regular file" in str(refusal)


def test_a_configuration_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(InvalidDataError, match="is larger than"):
        load_mapping(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidDataError, match="is not text in UTF-8"):
        load_mapping(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text", ['"num_\\e[2Jprocesses": 2', 'main_process_ip: "\\x9b2J"', 'fsdp_config: {"x": ["\\u202Etxt"]}']
)
def test_a_configuration_cannot_steer_a_terminal(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InvalidDataError, match="has control characters in") as refused:
        load_mapping(tmp_path / "config.yaml")
    assert str(refused.value).isprintable()
    (tmp_path / "config.yaml").write_text('main_training_function: "a\\tb\\nc"\ndeepspeed_config: {名前: "\u3000道"}')
    assert load_mapping(tmp_path / "config.yaml")["main_training_function"] == "a\tb\nc"
