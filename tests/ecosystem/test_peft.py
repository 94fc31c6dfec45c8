"""peft on our package: adapters over quantised models, whose packages are those of the tests' own venv."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from tests.sizes import at_night

from .libraries import needs_libraries, run_scenario

pytestmark = [needs_libraries]


@pytest.mark.parametrize("how", ["nf4", at_night("torchao int4")])
def test_qlora_trains_under_fsdp2_as_on_one_process_and_resumes_exactly(how: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(_quantisers(tmp_path)), os.environ.get("PYTHONPATH", "")])
    found = {}
    for world_size in (1, 2):
        directory = tmp_path / str(world_size)
        directory.mkdir()
        found[world_size] = run_scenario("qlora", how, world_size=world_size, directory=directory, PYTHONPATH=path)
    alone, both = found[1], found[2]
    assert both["losses"] == pytest.approx(alone["losses"], abs=1e-3)
    assert alone["losses"][-1] < alone["losses"][0] - 0.1, "it learns"
    for run in (alone, both):
        assert run["resumed"] == run["went_on"]
        assert run["largest_adapter"] > 0
        assert run["resumed_differ_by"] == run["loaded_differ_by"] == 0.0
    if how.startswith("nf4"):
        assert max(both["held"]) < 0.55 * alone["held"][0], "packed weights are sharded, too"


def _quantisers(directory: Path) -> Path:
    """Make a folder with the packages that quantise, for a venv that has none."""
    folder = directory / "quantisers"
    folder.mkdir()
    for name in ("bitsandbytes", "torchao"):
        files = importlib.metadata.distribution(name)
        for part in {Path(str(file)).parts[0] for file in files.files or []} - {".."}:
            (folder / part).symlink_to(Path(str(files.locate_file(part))))
    return folder
