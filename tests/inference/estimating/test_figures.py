"""What the benchmarks promise of memory, in a bounded form: fresh processes, 100 MB of weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

SCRIPT = """
import json, sys
from pathlib import Path
from benchmarks import offload

offload.LAYERS, offload.LOADED_LAYERS, offload.SHARDS = 6, 6, 3
what, folder = sys.argv[1:]
print(json.dumps(getattr(offload, what)(folder)))
"""

PREPARE = """
import sys
from pathlib import Path
from benchmarks import offload
from meshwright import disk_offload
from meshwright.checkpoint.formats.model_files import save_model_files

model = offload.make_model(6)
save_model_files(model.state_dict(), Path(sys.argv[1]) / "shards", max_shard_size="35MB", safe_serialization=True)
disk_offload(model, Path(sys.argv[1]) / "offload", execution_device="cpu")
"""


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory is Linux's to tell")
def test_memory_stays_within_two_layers_and_within_model_and_shard(tmp_path: Path) -> None:
    run(PREPARE, tmp_path)
    for what, bound in (("memory_of_forward", 1.3), ("memory_of_load", 1.05)):
        expected, measured = json.loads(run(SCRIPT, what, tmp_path))
        assert measured / expected <= bound, f"{what}: {measured / 1e6:.1f} MB, {expected / 1e6:.1f} MB expected"
