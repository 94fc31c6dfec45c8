"""Files: what is data comes back, and what is more than data is refused without being executed."""

from __future__ import annotations

import datetime
import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import meshwright
from meshwright.checkpoint.commit.engine import CheckpointError
from meshwright.checkpoint.formats import codec
from meshwright.checkpoint.layout import COMMIT_FILE
from meshwright.errors import InvalidDataError, UnsafeFileError
from meshwright.inference.loading import load_checkpoint_in_model

from ..runs import Notes, StampedRun

DATA = {
    "tensors": {"a": torch.arange(3), "b": [torch.ones(2, dtype=torch.bfloat16)]},
    "numbers": [1, 2.5, 3j, True, None, 2**80, Decimal("0.1")],
    "texts": ["text", b"bytes", bytearray(b"x")],
    "containers": [(1, (2,)), {1, 2}, frozenset({3}), OrderedDict(a=1), Counter("aab"), range(3), slice(1, 2)],
    "times": [
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1),
        datetime.date(1, 2, 3),
    ],
    "path": Path("a/b"),
    "numpy": [np.float64(1.5), np.int64(3), np.bool_(True)],
}


def test_plain_data_comes_back(tmp_path: Path) -> None:
    codec.write(DATA, tmp_path / "x.bin")
    assert str(codec.read(tmp_path / "x.bin")) == str(DATA)
    assert codec.culprit_in(tmp_path / "x.bin") is None


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u8", "?", "c16", "U3", "M8[D]"])
def test_arrays_of_numpy_come_back(dtype: str, tmp_path: Path) -> None:
    array = np.zeros(3, dtype=dtype)
    codec.write({"array": array}, tmp_path / "x.bin")
    assert (codec.read(tmp_path / "x.bin")["array"] == array).all()


def test_arrays_written_by_the_other_major_version_of_numpy_come_back(tmp_path: Path) -> None:
    """NumPy 2 renamed the module that is named in every file with an array, such as those of the generators."""
    here = b"numpy._core.multiarray" if int(np.__version__.split(".")[0]) >= 2 else b"numpy.core.multiarray"
    there = b"numpy.core.multiarray" if here.startswith(b"numpy._") else b"numpy._core.multiarray"
    state = np.random.get_state()
    codec.write({"state": state}, tmp_path / "x.pkl")
    with zipfile.ZipFile(tmp_path / "x.pkl") as before, zipfile.ZipFile(tmp_path / "y.pkl", "w") as after:
        for entry in before.infolist():
            contents = before.open(entry.filename)
            contents._expected_crc = None  # type: ignore[attr-defined]
            read = contents.read()
            assert entry.filename.endswith("data.pkl") == (here in read)
            after.writestr(entry.filename, read.replace(here, there))
    assert str(codec.read(tmp_path / "y.pkl")["state"]) == str(state)


class Malicious:
    """Executes something when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def as_torch_writes(evil: Malicious, path: Path) -> None:
    torch.save({"step": evil}, path)


def as_old_torch_wrote(evil: Malicious, path: Path) -> None:
    torch.save({"step": evil}, path, _use_new_zipfile_serialization=False)


def as_pickle_writes(evil: Malicious, path: Path) -> None:
    path.write_bytes(pickle.dumps({"step": evil}))


def as_pickle_wrote(evil: Malicious, path: Path) -> None:
    path.write_bytes(pickle.dumps({"step": evil}, protocol=2))


WRITERS = [as_torch_writes, as_old_torch_wrote, as_pickle_writes, as_pickle_wrote]


def forge_record(checkpoint: Path, file: str) -> None:
    """Let the record agree with a file that was exchanged."""
    record = json.loads((checkpoint / COMMIT_FILE).read_text())
    record["files"][file]["size"] = (checkpoint / file).stat().st_size
    (checkpoint / COMMIT_FILE).write_text(json.dumps(record))


def test_the_trap_works(tmp_path: Path) -> None:
    for writer in WRITERS:
        writer(Malicious(tmp_path / writer.__name__), tmp_path / "trap")
        with suppress(RuntimeError):  # a pickle that is not torch's is executed before it is refused
            torch.load(tmp_path / "trap", weights_only=False)
        assert (tmp_path / writer.__name__).exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("of_1x", [False, True], ids=["ours", "1.x"])
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_pickle_that_executes_something_is_refused_in_every_file(
    writer: Callable[[Malicious, Path], None], of_1x: bool, safe_serialization: bool, tmp_path: Path
) -> None:
    run = StampedRun()
    run.stamp(1)
    run.accelerator.save_state(tmp_path / "whole", safe_serialization=safe_serialization)
    run.stamp(2)
    if of_1x:
        (tmp_path / "whole" / COMMIT_FILE).unlink()
        (tmp_path / "whole" / "progress.bin").unlink()
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(files) == (6 if of_1x else 8)
    for file in files:
        shutil.copytree(tmp_path / "whole", tmp_path / "evil")
        writer(Malicious(tmp_path / "marker"), tmp_path / "evil" / file)
        if not of_1x and file != COMMIT_FILE:
            forge_record(tmp_path / "evil", file)
        with pytest.raises(CheckpointError, match=file):
            run.accelerator.load_state(tmp_path / "evil")
        assert not (tmp_path / "marker").exists(), f"{file} was executed"
        assert run.stamp_of_all() == 2, "nothing was restored"
        shutil.rmtree(tmp_path / "evil")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_that_executes_something_is_refused(file: str, tmp_path: Path) -> None:
    as_torch_writes(Malicious(tmp_path / "marker"), tmp_path / file)
    with pytest.raises(Exception, match=r"more than data \((posix|nt)|Error while deserializing|HeaderToo|header"):
        load_checkpoint_in_model(torch.nn.Linear(1, 1), tmp_path)
    assert not (tmp_path / "marker").exists()


def test_the_refusal_names_the_class_and_the_way_out(tmp_path: Path) -> None:
    torch.save({"a": Notes()}, tmp_path / "x.bin")
    with pytest.raises(UnsafeFileError, match=r"x\.bin is not loaded.*\(tests\.checkpoint\.runs\.Notes\).*add_safe"):
        codec.read(tmp_path / "x.bin")
    with torch.serialization.safe_globals([Notes]):
        assert codec.read(tmp_path / "x.bin")["a"].stamp == 0
    assert codec.read(tmp_path / "x.bin", weights_only=False)["a"].stamp == 0


class Queue(Notes):
    def state_dict(self) -> dict[str, Any]:
        return {"queue": deque([1]), "stamp": 1}


def test_a_save_warns_of_what_a_load_will_refuse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = StampedRun()
    run.accelerator.register_for_checkpointing(Queue())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.accelerator.save_state(tmp_path / "ckpt")
        run.accelerator.save_state(tmp_path / "ckpt")
    (message,) = [record.getMessage() for record in caplog.records if "will refuse" in record.getMessage()]
    assert message.startswith("custom_checkpoint_1.pkl holds collections.deque")
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_1\.pkl is not loaded"):
        run.accelerator.load_state(tmp_path / "ckpt")
    run.accelerator.load_state(tmp_path / "ckpt", {"weights_only": False})


# --- `meshwright.load` ------------------------------------------------------------------------------------------------


def given_as(path: Path, form: str) -> Any:
    """Return a file as `load` takes it."""
    match form:
        case "a path":
            return path
        case "a text":
            return str(path)
        case "a file":
            return path.open("rb")
        case _:
            stream = io.BytesIO(b"before" + path.read_bytes())
            stream.seek(6)
            return stream


FORMS = ("a path", "a text", "a file", "a stream")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_old", [False, True])
def test_load_reads_what_torch_has_written(form: str, is_old: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3.0), "b": [1, "x"]}, tmp_path / "x", _use_new_zipfile_serialization=not is_old)
    read = meshwright.load(given_as(tmp_path / "x", form), map_location="cpu")
    assert read["a"].tolist() == [0, 1, 2]
    assert read["b"] == [1, "x"]


@pytest.mark.parametrize("form", FORMS)
def test_load_refuses_what_load_state_refuses(form: str, tmp_path: Path) -> None:
    """A dtype of NumPy that turns bytes of the file into pointers: torch makes it where the names are allowed."""
    path = tmp_path / "x"
    torch.save({"a": ForgedArray()}, path)
    names = [np.dtype, np.ndarray, (np.empty(0).__reduce__()[0], "numpy._core.multiarray._reconstruct")]
    with torch.serialization.safe_globals(names), pytest.raises(InvalidDataError, match="dtype"):
        meshwright.load(given_as(path, form))
    torch.save({"a": Malicious(tmp_path / "made")}, path)
    with pytest.raises(UnsafeFileError, match="mkdir"):
        meshwright.load(given_as(path, form))
    assert not (tmp_path / "made").exists()
    meshwright.load(given_as(path, form), weights_only=False)
    assert (tmp_path / "made").exists()


class ForgedDtype:
    """Eight bytes that are said to be a pointer to an object."""

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), (3, "|", None, ("f",), {"f": (np.dtype("O"), 0)}, 8, 1, 0)


class ForgedArray:
    """Bytes of the file as elements of the forged dtype."""

    def __reduce__(self) -> Any:
        make = np.empty(0).__reduce__()[0]
        return make, (np.ndarray, (0,), b"b"), (1, (1,), ForgedDtype(), False, b"A" * 8)
