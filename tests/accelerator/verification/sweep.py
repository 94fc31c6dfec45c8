"""Verify scripts one after the other in one process that has torch imported."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from accelerate.accelerator.verification.comparing.comparison import compare
from accelerate.accelerator.verification.comparing.panel import panel
from accelerate.commands.verify.parallel import verify_parallel_parser
from accelerate.commands.verify.runs import Runs


def main() -> None:
    """Read lines `[reference, [word, ...]]`, and print the result of each; runs of one process are shared by name."""
    references: dict[str, Any] = {}
    for line in sys.stdin:
        reference, words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            try:
                runs = Runs(verify_parallel_parser().parse_args(words), Path(folder))
                mesh = runs.on_mesh()
                if reference not in references:
                    references[reference] = runs.on_one_process(mesh)
                result = compare(mesh, *references[reference])
                print(json.dumps(result.to_dict() | {"panel": panel(result, 0.0)}), flush=True)
            except ValueError as error:
                print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
