"""Verify scripts one after the other in one process that has torch imported."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshwright.commands.check import check_parser
from meshwright.tools.verify.comparing.comparison import compare
from meshwright.tools.verify.comparing.panel import panel
from meshwright.tools.verify.runs import RanksDisagreeError, VerifyRuns


def main() -> None:
    """Read lines `[reference, [word, ...]]`, and print the result of each; runs of one process are shared by name."""
    references: dict[str, Any] = {}
    for line in sys.stdin:
        reference, words = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            try:
                runs = VerifyRuns(check_parser().parse_args(words), Path(folder))
                mesh = runs.on_mesh()
                if reference not in references:
                    references[reference] = runs.alone(mesh)
                result = compare(mesh, *references[reference])
            except RanksDisagreeError as error:
                result = error.result
            except ValueError as error:
                print(json.dumps({"error": str(error)}), flush=True)
                continue
            print(json.dumps(result.to_dict() | {"panel": panel(result, 0.0)}), flush=True)


if __name__ == "__main__":
    main()
