"""Read back what a tracker stored, from its files."""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Point = tuple[int | None, Any]


@dataclass
class Stored:
    """A run as its tracker stored it: curves of (step, value) in the order of the files, and the config."""

    curves: dict[str, list[Point]] = field(default_factory=dict)
    texts: dict[str, list[Point]] = field(default_factory=dict)
    images: int = 0
    tables: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def point(self, name: str, step: int | None, value: Any) -> None:
        """Add a point to the curve or the text of this name."""
        kind = self.texts if isinstance(value, str) else self.curves
        kind.setdefault(name, []).append((step, value))


def tensorboard(directory: Path) -> Stored:
    """Read the event files of the project `shapes`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "runs" / "shapes"), size_guidance={"scalars": 0})
    events.Reload()
    stored = Stored(config=yaml.safe_load((directory / "runs" / "shapes" / "hparams.yml").read_text()))
    for name in events.Tags()["scalars"]:
        stored.curves[name] = [(event.step, event.value) for event in events.Scalars(name)]
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            stored.point(name.removesuffix("/text_summary"), event.step, event.tensor_proto.string_val[0].decode())
    stored.images = sum(len(events.Images(name)) for name in events.Tags()["images"])
    return stored


def wandb(directory: Path) -> Stored:
    """Read the transaction log of the one run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    stored = Stored()
    for data in _leveldb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "config":
            for item in record.config.update:
                stored.config[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
        elif record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            media = {name.removesuffix("/_type"): kind for name, kind in row.items() if name.endswith("/_type")}
            stored.images += sum(row[f"{name}/count"] for name, kind in media.items() if kind.startswith("images"))
            stored.tables += sum(kind == "table-file" for kind in media.values())
            for name, value in row.items():
                if not name.startswith("_") and name.rpartition("/")[0] not in media:
                    stored.point(name, row["_step"], value)
    stored.config.pop("_wandb", None)
    return stored


def _leveldb_records(raw: bytes) -> Iterator[bytes]:
    """Cut a log into its records: blocks of 32 KiB, each part with its checksum, length and type before it."""
    offset, record = 7, b""
    while offset + 7 <= len(raw):
        left_in_block = 32768 - offset % 32768
        if left_in_block < 7:
            offset += left_in_block
            continue
        _, length, kind = struct.unpack("<IHB", raw[offset : offset + 7])
        part = raw[offset + 7 : offset + 7 + length]
        offset += 7 + length
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record


def comet_ml(directory: Path) -> Stored:
    """Read the messages in the archive of the one experiment."""
    (path,) = directory.glob("comet/*.zip")
    stored = Stored()
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if message["type"] == "metric_msg" and not payload["metric"]["metricName"].startswith("sys."):
                metric = payload["metric"]
                stored.point(metric["metricName"], metric["step"], metric["metricValue"])
            elif message["type"] == "parameter_msg" and payload["param"].get("source") not in ("cli", "autologger"):
                stored.config[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif message["type"] == "file_upload" and payload["upload_type"] == "text-sample":
                text = archive.read(payload["file_path"]).decode()
                stored.point(payload["metadata"]["name"], payload["additional_params"]["step"], text)
            elif message["type"] == "file_upload":
                stored.images += payload["upload_type"] == "visualization"
    stored.config.pop("curr_step", None)
    return stored


def mlflow(directory: Path) -> Stored:
    """Read the database of the one run."""
    with sqlite3.connect(directory / "mlflow" / "mlflow.db") as database:
        stored = Stored(config=dict(database.execute("SELECT key, value FROM params")))
        for name, step, value, is_nan in database.execute(
            "SELECT key, step, value, is_nan FROM metrics ORDER BY rowid"
        ):
            stored.point(name, step, float("nan") if is_nan else value)
        for name, text in database.execute("SELECT key, value FROM tags"):
            if not name.startswith("mlflow."):
                stored.point(name, None, text)
        assert database.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
    return stored


_AIM = """
import json, sys
from aim import Repo, Run
repo = Repo(sys.argv[1])
(name,) = repo.list_all_runs()
run = Run(name, repo=repo, read_only=True)
found = {"config": run.get("hparams", {}), "curves": {}, "texts": {}}
for metric in run.metrics():
    steps, (values, _, _) = metric.data.numpy()
    found["curves"][metric.name] = list(zip(steps.tolist(), values.tolist()))
for name, context, _ in run.iter_sequence_info_by_type("aim.text"):
    steps, values = run.get_text_sequence(name, context).values.sparse_list()
    found["texts"][name] = list(zip(steps, [value.data for value in values]))
found["images"] = sum(1 for _ in run.iter_sequence_info_by_type("aim.image"))
print(json.dumps(found))
"""


def aim(directory: Path) -> Stored:
    """Read the repository of the one run, in a process of its own; first as `aim up` does it, with an index."""
    repository = str(directory / "runs")
    command = Path(sys.executable).with_name("aim")
    subprocess.run([command, "storage", "--repo", repository, "reindex", "-y"], check=True, capture_output=True)
    reader = subprocess.run([sys.executable, "-c", _AIM, repository], check=True, capture_output=True, text=True)
    found = json.loads(reader.stdout)
    for kind in ("curves", "texts"):
        found[kind] = {name: [tuple(point) for point in points] for name, points in found[kind].items()}
    return Stored(**found)


def clearml(directory: Path) -> Stored:
    """Read the folder of the one offline task."""
    (folder,) = (path for path in directory.glob("clearml/offline/*") if path.is_dir())
    stored = Stored()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar":
                title, series, step = event["metric"], event["variant"], event["iter"]
                if step < 0:  # a single value of the task, which has no step: they are numbered here
                    stored.point(series, len(stored.curves.get(series, ())), event["value"])
                else:
                    stored.point(title if series in ("train", title) else f"{series}_{title}", step, event["value"])
            stored.tables += event["type"] == "plot"
    stored.images = len(list(folder.glob("data/**/*.jpeg")))
    for line in (folder / "log.jsonl").read_text().splitlines():
        for event in json.loads(line):
            name, found, text = event["msg"].partition(" (step ")
            if found:
                step, _, text = text.partition("): ")
                stored.point(name, int(step), text)
    from clearml.utilities.pyhocon import ConfigFactory

    configuration = json.loads((folder / "task.json").read_text())["configuration"]["General"]["value"]
    stored.config = ConfigFactory.parse_string(configuration).as_plain_ordered_dict()
    return stored


def dvclive(directory: Path) -> Stored:
    """Read the tables and the parameters of the one run."""
    folder = directory / "dvclive"
    stored = Stored(config=yaml.safe_load((folder / "params.yaml").read_text()))
    metrics = folder / "plots" / "metrics"
    for path in metrics.rglob("*.tsv"):
        with path.open() as file:
            for row in csv.DictReader(file, delimiter="\t"):
                name = str(path.relative_to(metrics).with_suffix(""))
                value = row[path.stem]
                try:
                    stored.point(name, int(row["step"]), float(value))
                except ValueError:
                    stored.point(name, int(row["step"]), value)
    return stored


def swanlab(directory: Path) -> Stored:
    """Read the backup of the one run."""
    from swanlab.data.porter.datastore import DataStore

    (path,) = directory.glob("swanlog/run-*/backup.swanlab")
    store = DataStore()
    store.open_for_scan(str(path))
    stored = Stored()
    for line in store:
        record = json.loads(line)
        data = record["data"]
        if record["model_type"] == "Scalar" and not data["key"].startswith("__swanlab__."):
            stored.point(data["key"], data["step"], data["metric"]["data"])
        elif record["model_type"] == "Media" and data["buffers_name"] is None:
            stored.point(data["key"], data["step"], data["metric"]["data"][0])
    stored.images = len(list(path.parent.glob("media/**/*.png")))
    config = yaml.safe_load((path.parent / "files" / "config.yaml").read_text())
    stored.config = {name: entry["value"] for name, entry in config.items()}
    return stored


def trackio(directory: Path) -> Stored:
    """Read the database of the one project."""
    stored = Stored()
    (path,) = directory.glob("trackio/*.db")
    with sqlite3.connect(path) as database:
        for step, metrics in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(metrics).items():
                stored.point(name, step, value)
        for (config,) in database.execute("SELECT config FROM configs"):
            stored.config = {name: value for name, value in json.loads(config).items() if not name.startswith("_")}
    return stored


READERS: dict[str, Callable[[Path], Stored]] = {
    reader.__name__: cache(reader)  # several tests look at one run
    for reader in (aim, clearml, comet_ml, dvclive, mlflow, swanlab, tensorboard, trackio, wandb)
}
