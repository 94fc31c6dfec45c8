"""Files made by hand to run code, to forge memory or to exhaust it: each is refused, and nothing has changed."""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import resource
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # which allows its classes in files
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright import Accelerator, merge_fsdp_weights
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.formats import codec, dcp as tables
from meshwright.checkpoint.formats.dcp import SafeReader, _fill
from meshwright.checkpoint.formats.objects import TorchNames
from meshwright.checkpoint.formats.pickles import interpret
from meshwright.checkpoint.parts.shards import read_tensors
from meshwright.errors import InvalidDataError, UnsafeFileError
from tests.fuzzing.targets import attributes, changed_since, table_of
from tests.ranks import ranks

from ..parts.test_shards import prepared

TABLE = "torch.distributed.checkpoint.metadata"


def name_of(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def piece(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, protocol=2)[2:-1]


def attribute_of(target: bytes, name: str, value: bytes) -> bytes:
    """Return a program that sets an attribute of what another one pushes, and leaves nothing on the stack."""
    return target + b"N}" + piece(name) + value + b"s\x86b0"


# --- Programs ---------------------------------------------------------------------------------------------------------

PATH = name_of("pathlib", "PosixPath")
SYSTEM = name_of("os", "system") + piece(("touch stolen",)) + b"R"
NO_DATA = {
    "a key with the same hash as others": b"}" + b"\x8a\x0c" + ((1 << 61) - 1 << 20).to_bytes(12, "little") + b"K\1s",
    "a key of many shared parts": b"}" + b"K\1" + (b"q\0" + b"(" + b"h\0" * 50 + b"t") * 7 + b"K\1s",
    "values that double in every container": b"K\1" + b"q\0h\0\x86" * 25,
    "a call of values without end": b"]q\0" + b"h\0h\0\x86q\0" * 60 + b")R",
    "a list a thousand levels deep": b"]" * 1000 + b"a" * 999,
    "a million empty sets": b"(" + b"\x8f" * 1_000_000 + b"t",
    "a million empty dictionaries": b"(" + b"}" * 1_500_000 + b"t",
    "a million marks": b"(" * 1_000_000 + b"N",
    "a call": SYSTEM,
    "a call by the name of Python 3.13": name_of("pathlib._local", "os") + b")R",
    "an attribute of a class": attribute_of(PATH, "name", piece("pwned")) + SYSTEM,
    "an attribute of a class, and then a good value": attribute_of(PATH, "name", piece("pwned")) + piece({}),
    "an attribute of a dataclass": attribute_of(name_of(TABLE, "Metadata"), "__init__", PATH) + piece({}),
    "an attribute of an enum": attribute_of(name_of(TABLE, "_MEM_FORMAT_ENCODING"), "_value2member_map_", b"}"),
    "an attribute of a dictionary": name_of("collections", "OrderedDict") + b")R}" + piece("items") + PATH + b"sb",
    "a state for a plain dictionary": b"}" + b"}" + piece("x") + b"K\1sb",
    "a state for a list": b"]" + b"}" + piece("append") + PATH + b"sb",
    "a name of a module": name_of(TABLE, "os"),
    "a name with a dot": b"\x8c\x06pathlib"[:1] + b"\x05torch" + b"\x8c\x0fserialization.x" + b"\x93",
    "getattr": name_of("builtins", "getattr") + b"(" + PATH + piece("home") + b"tR",
    "eval under its name in Python 2": name_of("__builtin__", "eval") + piece(("1",)) + b"R",
    "an import by copyreg": name_of("copyreg", "__newobj__") + b"(" + PATH + b"tR",
    "a call of a result": name_of("torch", "Size") + b")R" + b")R",
    "a call of a text": piece("print") + b")R",
    "INST": b"(ios\ngetcwd\n",
    "OBJ": b"(" + PATH + b"o",
    "an extension": b"\x82\x01",
    "a persistent text": b"P1\n",
    "a buffer from outside": b"\x97",
    "more taken than pushed": b"\x87",
    "no mark": b"e",
    "a list that adds to a class": PATH + piece(["x"])[:1] + b"a",
    "a key that is set on a class": PATH + piece("x") + b"K\1s",
    "a list that holds itself": b"]q\0h\0a",
    "a dictionary that holds itself": b"}q\0K\1h\0s",
    "2 ** 60 values in 60 containers": b"]q\0" + b"h\0h\0\x86q\0" * 60,
    "a key a million levels deep": b"}" + b"K\1" + b"\x85" * 1_000_000 + b"K\1s",
    "a text longer than the file": b"X\xff\xff\xff\x7fabc",
    "bytes longer than the file": b"\x8e" + b"\xff" * 7 + b"\x7f" + b"abc",
    "a bytearray longer than the file": b"\x96" + b"\xff" * 5 + b"\0\0\0abc",
    "a frame longer than the file": b"\x95" + b"\xff" * 8 + b"N",
    "a number of 2 GB": b"\x8b\xff\xff\xff\x7f" + b"1" * 100,
    "a memo of 2 ** 32 places": b"Nr\xfe\xff\xff\xff0h\x01",
    "nothing": b"",
    "no STOP": b"N0",
}  # fmt: skip


def storage(count: int, kind: str = "FloatStorage", key: str = "0") -> bytes:
    return b"(" + piece("storage") + name_of("torch", kind) + piece(key) + piece("cpu") + piece(count) + b"tQ"


def tensor(offset: Any, size: Any, stride: Any, stored: bytes) -> bytes:
    rest = piece(offset) + piece(size) + piece(stride) + b"\x89" + name_of("collections", "OrderedDict") + b")R"
    return name_of("torch._utils", "_rebuild_tensor_v2") + b"(" + stored + rest + b"tR"


def dtype(code: str, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> bytes:
    state = state if isinstance(state, bytes) else piece(state)
    return name_of("numpy", "dtype") + piece((code, False, True)) + b"R" + state + b"b"


def array(kind: bytes, shape: Any, content: bytes) -> bytes:
    made = name_of("numpy._core.multiarray", "_reconstruct") + b"(" + name_of("numpy", "ndarray") + piece((0,))
    made = (
        name_of("numpy._core.multiarray", "_reconstruct")
        + b"("
        + name_of("numpy", "ndarray")
        + piece((0,))
        + piece(b"b")
        + b"tR"
    )
    return made + b"(K\1" + piece(shape) + kind + b"\x89" + piece(content) + b"tb"


EIGHT = b"A" * 8
SCALAR = name_of("numpy._core.multiarray", "scalar") + b"("
FIELDS = piece(3) + piece("|") + b"N" + piece(("f",)) + b"}" + piece("f") + b"(" + dtype("O8") + b"K\0tsK\x08K\1K\0"
TORCH_ONLY = {
    "a unit a million levels deep": dtype("M8", b"(K\4" + piece("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0}(K\1"
    + b"\x85" * 1_000_000 + b"K\1K\1K\1t\x86t"),
    "bytes that are copied again and again": b"]" + piece(b"A" * 100_000) + b"q\0000"
    + b"(" + (name_of("builtins", "bytearray") + b"(h\0tR") * 3000 + b"e",
    "a parameter with an address of memory": name_of("torch._utils", "_rebuild_parameter_with_state") + b"("
    + tensor(0, (2,), (1,), storage(2)) + b"\x89" + name_of("collections", "OrderedDict") + b")R}"
    + piece("__array_interface__") + piece({"data": (4096, True)}) + b"stR",
    "a mesh that is made": name_of("torch.distributed.device_mesh", "DeviceMesh") + piece(("cpu", [0])) + b"R",
    "a placement without its state": name_of("torch.distributed.tensor.placement_types", "Shard") + b")\x81",
    "a sparse tensor of lists": name_of("torch._utils", "_rebuild_sparse_tensor") + b"("
    + name_of("torch.serialization", "_get_layout") + piece(("torch.sparse_coo",)) + b"R"
    + piece(([[0]], [1.0], (1,))) + b"tR",
    "an array of objects": array(dtype("O8"), (1,), EIGHT),
    "a dtype with fields in its state": array(dtype("V8", b"(" + FIELDS + b"t"), (4,), b"A" * 32),
    "a dtype with a subarray in its state": array(dtype("V8", (3, "|", ("O", (1,)), None, None, 8, 1, 0)), (1,), EIGHT),
    "a dtype with another size in its state": array(dtype("f8", (3, "<", None, None, None, 800, 8, 0)), (1,), EIGHT),
    "a dtype of a structure": dtype("f8,O"),
    "a dtype of a class": name_of("numpy", "dtype") + b"(" + PATH + b"tR",
    "an array of more than its bytes": array(dtype("f8"), (1 << 40,), EIGHT),
    "an array of fewer than its bytes": array(dtype("f8"), (1,), b"A" * 16),
    "an array of a negative size": array(dtype("f8"), (-1,), EIGHT),
    "an array of nobody's memory": name_of("numpy", "ndarray") + piece((1 << 20,)) + b"R",
    "an array without a state": array(dtype("f8"), (1,), EIGHT)[:-1] + b"0",
    "a number of an object": SCALAR + dtype("O8") + piece(EIGHT) + b"tR",
    "a number of more than its bytes": SCALAR + dtype("f8") + piece(b"A") + b"tR",
    "a tensor of nobody's memory": name_of("torch", "Tensor") + piece((1 << 10, 1 << 10)) + b"R",
    "a storage of nobody's memory": name_of("torch", "FloatStorage") + piece((1 << 10,)) + b"R",
    "bytes of 0": name_of("builtins", "bytearray") + piece((1 << 40,)) + b"R",
    "a list of a range": name_of("builtins", "list") + b"(" + name_of("builtins", "range") + piece((1 << 40,)) + b"RtR",
    "a set of a range": name_of("builtins", "set") + b"(" + name_of("builtins", "range") + piece((1 << 40,)) + b"RtR",
    "a fraction with many digits": name_of("fractions", "Fraction") + piece(("1e999999999",)) + b"R",
    "a codec": name_of("_codecs", "encode") + piece(("x", "zip")) + b"R",
    "a tensor that begins before its storage": tensor(-2, (2,), (1,), storage(2)),
    "a tensor that ends behind its storage": tensor(0, (3,), (1,), storage(2)),
    "a tensor that steps out of its storage": tensor(0, (2, 2), (1 << 40, 1), storage(2)),
    "a tensor that steps back": tensor(1, (2,), (-1,), storage(2)),
    "a tensor of a small number many times": tensor(0, (1 << 40,), (0,), storage(2)),
    "a tensor without its strides": tensor(0, (2,), (), storage(2)),
    "a storage larger than its record": tensor(0, (2,), (1,), storage(1 << 30)),
    "a storage of another type": tensor(0, (2,), (1,), storage(2, "DoubleStorage")),
    "a storage that is not there": tensor(0, (2,), (1,), storage(2, key="7")),
    "a storage outside of its folder": tensor(0, (2,), (1,), storage(2, key="../data.pkl")),
    "a storage that is a list": tensor(0, (2,), (1,), b"(" + piece("storage") + b"]" + piece(("0", "cpu", 2)) + b"tQ"),
    "a nested tensor": name_of("torch._utils", "_rebuild_nested_tensor") + b"(" + b"]" * 4 + b"tR",
    "a nested tensor with offsets": name_of("torch.nested._internal.nested_tensor", "_rebuild_njt") + b")R",
    "a sparse tensor that points outside": name_of("torch._utils", "_rebuild_sparse_tensor") + b"("
    + name_of("torch.serialization", "_get_layout") + piece(("torch.sparse_coo",)) + b"R("
    + tensor(0, (1, 1), (1, 1), storage(1, "LongStorage")) + tensor(0, (1,), (1,), storage(2)) + piece((1,)) + b"ttR",
    "a parameter with the method of a tensor": name_of("torch._utils", "_rebuild_parameter_with_state") + b"("
    + tensor(0, (2,), (1,), storage(2)) + b"\x89" + name_of("collections", "OrderedDict") + b")R}"
    + piece("detach") + PATH + b"stR",
    "a class of its own for a tensor": name_of("torch._tensor", "_rebuild_from_type_v2") + b"(" + PATH + PATH + b")}tR",
}  # fmt: skip


def torch_file(
    path: Path, program: bytes, numbers: bytes = struct.pack("<2f", 1.0, 2.0), method: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", numbers)
    return path


@pytest.fixture(autouse=True)
def nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    before = attributes()
    yield
    assert changed_since(before) == []
    assert Path("/x/y").name == "y"
    assert not (tmp_path / "stolen").exists()


@pytest.fixture
def little_memory() -> Any:
    """Let 4 GB more be mapped, so that a declared size that is believed is an error."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", NO_DATA)
@pytest.mark.usefixtures("little_memory")
def test_a_program_is_refused_as_a_table(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + NO_DATA[name] + b".")
    with pytest.raises(InvalidDataError, match=r"\.metadata is"):
        _ = SafeReader(tmp_path).contents


@pytest.mark.parametrize("name", NO_DATA | TORCH_ONLY)
@pytest.mark.usefixtures("little_memory")
def test_a_program_is_refused_as_a_file_of_torch(name: str, tmp_path: Path) -> None:
    file = torch_file(tmp_path / "optimizer.bin", (NO_DATA | TORCH_ONLY)[name])
    with pytest.raises(InvalidDataError, match=r"optimizer\.bin is"):
        codec.read(file)


def test_the_programs_of_these_tests_are_those_of_data_but_for_the_attack(tmp_path: Path) -> None:
    good = (
        piece("t") + tensor(0, (2,), (1,), storage(2)) + piece("a") + array(dtype("f8"), (1,), struct.pack("<d", 3.0))
    )
    read = codec.read(torch_file(tmp_path / "good.bin", b"}(" + good + b"u"))
    assert read["t"].tolist() == [1.0, 2.0]
    assert read["a"].tolist() == [3.0]


def test_records_that_two_readers_could_read_differently_are_refused(tmp_path: Path) -> None:
    def write(name: str, *records: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w", method) as archive:
            for record, content in records:
                archive.writestr(record, content)
        return tmp_path / name

    good, evil = b"\x80\x02}.", b"\x80\x02" + SYSTEM + b"."
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = write("twice.bin", ("archive/data.pkl", evil), ("archive/data.pkl", good))
    two = write("two.bin", ("a/data.pkl", good), ("b/data.pkl", evil))
    packed = write(
        "packed.bin", ("archive/data.pkl", b"\x80\x02" + piece("x" * 10_000_000) + b"."), method=zipfile.ZIP_DEFLATED
    )
    other = write("other.bin", ("archive/data.pkl", good), ("archive/byteorder", b"big"))
    none = write("none.bin", ("archive/version", b"3"))
    for file in (twice, two, packed, other, none):
        with pytest.raises(InvalidDataError, match=f"{file.name} (is damaged|was written)"):
            codec.read(file)


def test_two_records_at_one_place_are_refused(tmp_path: Path) -> None:
    file = torch_file(tmp_path / "x.bin", b"}.", bytes(64))
    content = bytearray(file.read_bytes())
    directory = content.index(b"PK\1\2")
    entries = [position for position in range(directory, len(content)) if content[position : position + 4] == b"PK\1\2"]
    content[entries[2] + 42 : entries[2] + 46] = content[entries[1] + 42 : entries[1] + 46]
    file.write_bytes(content)
    with pytest.raises(InvalidDataError, match="same place"):
        codec.read(file)


OLD = [
    lambda: name_of("torch", "Tensor") + piece((4096,)) + b"R",
    lambda: name_of("builtins", "bytearray") + piece((1 << 40,)) + b"R",
    lambda: tensor(0, (1 << 20,), (1,), storage(1 << 40)),
    lambda: SYSTEM,
]


@pytest.mark.parametrize("attack", OLD)
@pytest.mark.usefixtures("little_memory")
def test_a_program_is_refused_in_the_format_before_torch_1_6(attack: Callable[[], bytes], tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    parts = (tmp_path / "x.bin").read_bytes().split(b".\x80\x02")
    parts[3] = attack()
    (tmp_path / "x.bin").write_bytes(b".\x80\x02".join(parts))
    with pytest.raises(InvalidDataError, match=r"x\.bin is"):
        codec.read(tmp_path / "x.bin")


def test_files_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    shared = torch.arange(12.0)
    value = {
        "a": shared[2:6],
        "b": shared,
        "n": np.arange(3),
        "e": torch.empty(0),
        "h": torch.ones(2, dtype=torch.bfloat16),
    }
    torch.save(value, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    read = codec.read(tmp_path / "x.bin")
    assert str(read) == str(value)
    assert read["a"].untyped_storage().data_ptr() == read["b"].untyped_storage().data_ptr()
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(content[:-10])
    with pytest.raises(InvalidDataError, match="not whole"):
        codec.read(tmp_path / "x.bin")


@pytest.mark.parametrize("position", [1 << 30, -100_000, "x", True])
def test_a_generator_at_a_position_out_of_its_memory_is_refused(position: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    folder = Path(accelerator.save_state(str(tmp_path / "saved")))
    state = codec.read(folder / "random_states_0.pkl")
    kind, keys, _, *rest = state["numpy_random_seed"]
    torch.save(state | {"numpy_random_seed": (kind, keys, position, *rest)}, folder / "random_states_0.pkl")
    for record in ("commit.json", "progress.bin"):
        (folder / record).unlink()
    torch.nn.init.zeros_(model.weight)
    with pytest.raises(CheckpointError, match="state of the generators"):
        accelerator.load_state(str(folder))
    assert not model.weight.any(), "nothing was restored"


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(InvalidDataError, match="not a regular file"):
        codec.read(tmp_path / "optimizer.bin")
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(InvalidDataError, match="not a regular file"):
        _ = SafeReader(tmp_path).contents


# --- Tables -----------------------------------------------------------------------------------------------------------


def folder_of(table: dcp.Metadata, folder: Path, size: int = 1 << 12) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    (folder / "__0_0.distcp").write_bytes(bytes(size))
    return folder


def changed(**facts: Any) -> dcp.Metadata:
    table = table_of()
    table.state_dict_metadata["model.weight"] = replace(table.state_dict_metadata["model.weight"], **facts)  # type: ignore[type-var]
    return table


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def moved(**place: Any) -> dcp.Metadata:
    table = table_of()
    first = next(iter(table.storage_data))
    table.storage_data[first] = replace(table.storage_data[first], **place)
    return table


LIES = {
    "no chunks": lambda: changed(chunks=[]),
    "a size of a terabyte": lambda: changed(chunks=[], size=torch.Size([1 << 38])),
    "a chunk too few": lambda: changed(chunks=[box((0, 0), (2, 2))]),
    "a chunk twice": lambda: changed(chunks=[box((0, 0), (2, 2))] * 2),
    "chunks that overlap": lambda: changed(chunks=[box((0, 0), (2, 2)), box((1, 0), (2, 2))]),
    "a chunk that is too large": lambda: changed(chunks=[box((0, 0), (2, 2)), box((2, 0), (3, 2))]),
    "a chunk of other dimensions": lambda: changed(chunks=[box((0,), (4,)), box((2, 0), (2, 2))]),
    "more numbers than bytes": lambda: table_of(shape=(1 << 20, 2)),
    "a larger type": lambda: changed(properties=dcp.TensorProperties(dtype=torch.complex128), size=torch.Size([64, 2])),
    "a file of another folder": lambda: moved(relative_path="../__0_0.distcp"),
    "an absolute file": lambda: moved(relative_path="/etc/passwd"),
    "a file in a folder": lambda: moved(relative_path="x/__0_0.distcp"),
    "a file that is not there": lambda: moved(relative_path="__1_0.distcp"),
    "a place before the file": lambda: moved(offset=-8),
    "a place behind the file": lambda: moved(offset=1 << 40),
    "a place without an end": lambda: moved(length=1 << 60),
    "a place that is shared": lambda: moved(offset=1 << 10),
    "a place that is compressed": lambda: moved(transform_descriptors=["zstd"]),
    "an offset that is no number": lambda: moved(offset=True),
    "a place that is none": lambda: replace(table_of(), storage_data={dcp.MetadataIndex("model.weight"): "x"}),
    "no places": lambda: replace(table_of(), storage_data={}),
    "places in a list": lambda: replace(table_of(), storage_data=[]),
    "a name that is none": lambda: replace(table_of(), state_dict_metadata={3: dcp.BytesStorageMetadata()}),
    "an entry that is none": lambda: replace(table_of(), state_dict_metadata={"x": 3}),
    "a version that is none": lambda: replace(table_of(), version=3),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.usefixtures("little_memory")
def test_a_table_that_lies_is_refused_before_anything_is_allocated(lie: str, tmp_path: Path) -> None:
    folder = folder_of(LIES[lie](), tmp_path / "shards")
    with pytest.raises(InvalidDataError, match=r"\.metadata is damaged"):
        merge_fsdp_weights(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_table_of_these_tests_is_read_but_for_the_lie(tmp_path: Path) -> None:
    assert list(SafeReader(folder_of(table_of(), tmp_path / "shards")).tensors) == ["model.weight"]


def test_chunks_fill_a_tensor_exactly_or_they_do_not() -> None:
    for size in ([], [0], [3], [4, 3], [2, 3, 2]):
        assert _fill(torch.Size(size), [box(tuple(0 for _ in size), tuple(size))])
    assert not _fill(torch.Size([]), [])
    assert not _fill(torch.Size([]), [box((), ())] * 2)
    assert _fill(torch.Size([0, 4]), [])
    # A pinwheel: no cut goes through from side to side.
    wheel = [box((0, 0), (1, 2)), box((0, 2), (2, 1)), box((2, 1), (1, 2)), box((1, 0), (2, 1)), box((1, 1), (1, 1))]
    assert _fill(torch.Size([3, 3]), wheel)
    assert not _fill(torch.Size([3, 3]), wheel[:-1])
    assert not _fill(torch.Size([3, 3]), [*wheel[:-1], box((0, 0), (1, 1))])
    # The same number of elements, with a gap and an overlap.
    assert not _fill(torch.Size([4]), [box((0,), (2,)), box((1,), (2,))])
    blocks = [box((x, y), (2, 3)) for x in range(0, 64, 2) for y in range(0, 63, 3)]
    assert _fill(torch.Size([64, 63]), blocks)
    assert not _fill(torch.Size([64, 63]), [*blocks[:-1], box((62, 59), (2, 3))])


# --- Chunks -----------------------------------------------------------------------------------------------------------


def saved(folder: Path) -> Path:
    tensors = {"model.weight": torch.arange(8.0).reshape(4, 2), "model.bias": torch.ones(3)}
    save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def content_of(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch stolen",)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (lambda: content_of(Payload()), "more than data"),
        (lambda: content_of(torch.zeros(4, 2, dtype=torch.float64)), "is not the torch.float32 of"),
        (lambda: content_of(torch.zeros(2, 4)), "is not the torch.float32 of"),
        (lambda: content_of({"x": torch.zeros(4, 2)}), "is not the torch.float32 of"),
        (lambda: content_of(torch.nn.Parameter(torch.zeros(4, 2))), "is not the torch.float32 of"),
        (lambda: pickle.dumps(Payload()), "damaged"),
        (lambda: bytes(2000), "damaged"),
    ],
)
def test_a_chunk_that_is_no_tensor_of_the_table_is_refused(
    chunk: Callable[[], bytes], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "shards")
    table = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in table.storage_data if index.fqn == "model.weight")
    content = chunk()
    (folder / "evil.distcp").write_bytes(content)
    table.storage_data[index] = _StorageInfo("evil.distcp", 0, len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(ValueError, match=reason):
        merge_fsdp_weights(folder, tmp_path / "out")


def test_what_dcp_would_unpickle_is_not_read(tmp_path: Path) -> None:
    """A name is a tensor when it is listed and bytes when it is loaded."""
    folder = saved(tmp_path / "shards")
    reader = SafeReader(folder)
    into = {"model.weight": torch.zeros(4, 2)}
    reader.contents.state_dict_metadata["model.weight"] = dcp.BytesStorageMetadata()
    with pytest.raises((InvalidDataError, ValueError, KeyError)):
        read_tensors(into, reader)
    assert not into["model.weight"].any()


def test_what_dcp_writes_is_read(tmp_path: Path) -> None:
    merge_fsdp_weights(saved(tmp_path / "shards"), tmp_path / "out")
    read = codec.read(tmp_path / "out" / "model.safetensors")
    assert read["weight"].tolist() == torch.arange(8.0).reshape(4, 2).tolist()
    assert read["bias"].tolist() == [1.0] * 3


@ranks(2)
def test_a_sharded_checkpoint_with_a_hostile_table_is_refused_on_every_rank(tmp_path: Path) -> None:
    from meshwright import FullyShardedDataParallelPlugin

    accelerator, net, _ = prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.save_state(str(tmp_path / "saved"))
    before = [param.to_local().clone() for param in net.parameters()]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        evil = attribute_of(PATH, "name", piece("pwned")) + SYSTEM
        (tmp_path / "saved" / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"\x80\x02" + evil + b".")
        for record in ("commit.json", "progress.bin"):
            (tmp_path / "saved" / record).unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="more than data"):
        accelerator.load_state(str(tmp_path / "saved"))
    assert Path("/x/y").name == "y"
    assert all(torch.equal(param.to_local(), value) for param, value in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("file", ["random_states_0.pkl", "optimizer.bin"])
def test_a_forged_dtype_in_a_checkpoint_is_refused(file: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder = Path(accelerator.save_state(str(tmp_path / "saved")))
    evil = array(dtype("V8", b"(" + FIELDS + b"t"), (4,), b"A" * 32)
    torch_file(folder / file, b"}" + piece("state") + evil + b"s")
    for record in ("commit.json", "progress.bin"):
        (folder / record).unlink()
    with pytest.raises(CheckpointError, match="more than data"):
        accelerator.load_state(str(folder))


def of_another_class(state: Any) -> bytes:
    kind = name_of("torch.distributed.tensor", "DTensor")
    rest = piece(0) + piece((2,)) + piece((1,)) + b"\x89" + name_of("collections", "OrderedDict") + b")R"
    made = name_of("torch._utils", "_rebuild_tensor_v2") + kind + b"(" + storage(2) + rest + b"t"
    return name_of("torch._tensor", "_rebuild_from_type_v2") + b"(" + made + piece(state) + b"tR"


NO_VALUES = {
    "a fraction as a key": b"}" + name_of("fractions", "Fraction") + piece(("1/3",)) + b"RN" + b"s",
    "a decimal number as a key": b"}" + name_of("decimal", "Decimal") + piece(("1.5",)) + b"RN" + b"s",
    "a complex number as a key": b"}" + name_of("builtins", "complex") + piece((1.0, 2.0)) + b"RN" + b"s",
    "versions of modules that are none": name_of("collections", "OrderedDict")
    + b")R}" + piece("_metadata") + piece({"": [1]}) + b"sb",
    "a tensor of another class with a state of Python's": of_another_class({"__class__": 1}),
    "a tensor of another class with a method": of_another_class({"numel": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_VALUES)
def test_values_that_a_checkpoint_does_not_have_are_refused(name: str, tmp_path: Path) -> None:
    reason = r"x\.bin is damaged: (a key is|a dictionary has|a tensor has)"
    with pytest.raises(InvalidDataError, match=reason):
        codec.read(torch_file(tmp_path / "x.bin", NO_VALUES[name]))


def called(module: str, name: str, arguments: bytes) -> tuple[bytes, bytes]:
    """Return what comes once, and a call that repeats."""
    return name_of(module, name) + b"q\0" + pickletools.optimize(arguments + b".")[:-1] + b"q\1", b"h\0h\1R"


SMALL = {
    "empty lists": (b"", b"]"),
    "empty dictionaries": (b"", b"}"),
    "empty sets": (b"", b"\x8f"),
    "dictionaries of one": (b"", b"}K\1Ns"),
    "dictionaries of one, in a list of two": (b"", b"}(K\1Nu"),
    "lists of one": (b"", b"]Na"),
    "sets of one": (b"", b"\x8f(K\1\x90"),
    "frozen sets": (b"", b"(K\1\x91"),
    "tuples of one": (b"", b"N\x85"),
    "tuples": (b"", b"(NNNNt"),
    "nothing": (b"", b"N"),
    "numbers": (b"", b"M\xff\xff"),
    "long numbers": (b"", b"\x8a\5\xff\xff\xff\xff\1"),
    "floats": (b"", b"G12345678"),
    "texts": (b"", b"\x8c\2ab"),
    "texts of four bytes a character": (b"", b"\x8c\5\xf0\x9f\x98\x80a"),
    "bytes": (b"", b"C\2ab"),
    "bytearrays": (b"", b"\x96\2" + bytes(7) + b"ab"),
    "a memo": (b"", b"N\x94"),
    "references": (b"]q\0", b"h\0"),
    "drafts in the memo": (name_of("numpy", "dtype") + b"q\0" + b"\x8c\2f8\x85q\1", b"h\0h\1R\x94"),
    "dictionaries in order": called("collections", "OrderedDict", b")"),
    "numbers of NumPy": called("numpy._core.multiarray", "scalar", b"(" + dtype("f8") + piece(EIGHT) + b"t"),
    "arrays of NumPy": called("numpy._core.multiarray", "_reconstruct",
                              b"(" + name_of("numpy", "ndarray") + piece((0,)) + piece(b"b") + b"t"),
    "paths": called("pathlib", "PosixPath", piece(("a", "b"))),
    "fractions": called("fractions", "Fraction", piece((1, 3))),
    "decimals": called("decimal", "Decimal", piece(("1.25",))),
    "times": called("datetime", "timedelta", piece((1, 2, 3))),
    "sizes": called("torch", "Size", piece(((1, 2),))),
}  # fmt: skip
"""Values that take much more memory than their bytes in a pickle."""


@pytest.mark.parametrize("name", SMALL)
def test_small_values_take_no_more_memory_than_a_bound(name: str) -> None:
    once, again = SMALL[name]
    program, most = b"\x80\2" + once + b"(" + again * 30_000, 1 << 17
    interpret(b"\x80\2" + b"].", TorchNames(lambda key: None), "another file")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidDataError, match="take too much memory"):
            interpret(program, TorchNames(lambda key: None), "the file", most_held=most)
        assert tracemalloc.get_traced_memory()[1] < 1.25 * most + len(program) + (1 << 16)
    finally:
        tracemalloc.stop()


def test_a_table_takes_no_more_memory_than_twice_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_HELD", 0)  # which small ones may have
    table = table_of()
    table.planner_data = {number: {number: ()} for number in range(5_000)}  # type: ignore[attr-defined]
    folder = folder_of(table, tmp_path / "table")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidDataError, match="its objects take too much memory"):
            _ = SafeReader(folder).contents
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert tracemalloc.get_traced_memory()[1] < 3 * size + (1 << 16)  # its bytes, and its objects
    finally:
        tracemalloc.stop()


def test_an_archive_of_many_records_takes_no_more_memory_than_twice_the_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        for number in range(5_000):
            archive.writestr(f"{number:x}", b"")
    tracemalloc.start()
    try:
        assert codec.read(tmp_path / "x.bin") == {}
        assert tracemalloc.get_traced_memory()[1] < 2 * (tmp_path / "x.bin").stat().st_size + (1 << 18)
    finally:
        tracemalloc.stop()


def test_an_archive_of_more_than_four_gigabytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("w+b") as file:
        file.write(b"PK\3\4")
        file.seek((1 << 32) + 64)  # a hole, behind which the records begin
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02" + tensor(0, (2,), (1,), storage(2)) + b".")
            archive.writestr("archive/data/0", struct.pack("<2f", 1.0, 2.0))
    assert codec.read(path).tolist() == [1.0, 2.0]
    path.unlink()


# --- What stays -------------------------------------------------------------------------------------------------------


def test_versions_of_modules_travel_with_their_weights(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    codec.write(state, tmp_path / "x.bin")
    read = codec.read(tmp_path / "x.bin")
    assert type(read) is OrderedDict
    assert read._metadata == state._metadata  # type: ignore[attr-defined]


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    shared = torch.arange(12.0)
    values = {
        "view": shared[2:8].reshape(2, 3).t(),
        "same": shared[4:],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8),
        "trained": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "meta": torch.empty(3, device="meta"),
        "bits": torch.ones(2, dtype=torch.uint16),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
    }
    values["parameter"].note = "kept"  # type: ignore[attr-defined]
    codec.write(values, tmp_path / "x.bin")
    for read in (codec.read(tmp_path / "x.bin"), codec.read(tmp_path / "x.bin", mmap=True)):
        for name, value in values.items():
            assert (read[name].dtype, read[name].shape, read[name].layout) == (
                value.dtype,
                value.shape,
                value.layout,
            ), name
            assert type(read[name]) is type(value)
            if name != "meta":
                assert str(read[name].detach()) == str(value.detach()), name
        assert read["view"].untyped_storage().data_ptr() == read["same"].untyped_storage().data_ptr()
    assert codec.read(tmp_path / "x.bin", mmap=True)["parameter"].note == "kept"


def test_every_protocol_is_read(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, "x", b"y", (True, None), {3}, 1 << 100], "t": torch.arange(3), "n": np.arange(3.0)}
    for protocol in range(2, 5):
        torch.save(value, tmp_path / "x.bin", pickle_protocol=protocol)
        assert str(codec.read(tmp_path / "x.bin")) == str(value)


def test_a_class_is_named_if_it_is_refused_and_read_if_it_is_allowed() -> None:
    class Names:
        """No names."""

        def find(self, module: str, name: str) -> Any:
            raise UnsafeFileError(f"{module}.{name}")

        call = new = build = storage = None

    with pytest.raises(UnsafeFileError, match=r"the file is not loaded.*\(os\.system\)") as raised:
        interpret(b"\x80\x02" + SYSTEM + b".", Names(), "the file")  # type: ignore[arg-type]
    assert raised.value.culprit == "os.system"
    assert math.isfinite(interpret(pickle.dumps(1.5), Names(), "the file"))  # type: ignore[arg-type]
