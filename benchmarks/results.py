"""What was measured: rows by contender, kept as JSON so that the table and the chart can be made again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .interleave import Comparison

TITLES = {"ours": "ours", "accelerate": "accelerate", "fabric": "Lightning Fabric", "ray": "Ray Train"}


@dataclass
class Results:
    """Rows in the order in which they were first measured, each with one comparison per contender."""

    rows: dict[str, dict[str, Comparison]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """What a contender said where it could not run: 'contender, subject' -> its last line."""

    def add(self, contender: str, row: Comparison) -> None:
        """Add rounds to those that the contender has of this row."""
        known = self.rows.setdefault(row.what, {})
        earlier = known[contender].costs if contender in known else []
        known[contender] = Comparison(
            row.what, [*earlier, *((bare, library) for bare, library in row.costs)], row.target, row.notes
        )

    @property
    def contenders(self) -> list[str]:
        """Who measured anything, ours first."""
        return [name for name in TITLES if name in self.versions]

    def title(self, contender: str) -> str:
        """Name a contender with its version."""
        return f"{TITLES[contender]} {self.versions[contender]}" if contender != "ours" else "ours"

    @property
    def missed(self) -> bool:
        """Tell whether ours missed a target beyond the noise."""
        return any(row["ours"].verdict == "missed" for row in self.rows.values() if "ours" in row)

    def write(self, file: Path) -> None:
        """Write everything, with the figures that are read off it."""
        rows = [
            asdict(row)
            | {"contender": contender, "ratio": row.ratio, "interval": row.interval, "verdict": row.verdict}
            | {"bare_us": row.bare_us, "library_us": row.library_us}
            for known in self.rows.values()
            for contender, row in known.items()
        ]
        content = {"versions": self.versions, "failures": self.failures, "rows": rows}
        file.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Results:
        """Read what was written."""
        content = json.loads(file.read_text())
        results = cls(versions=content["versions"], failures=content["failures"])
        for row in content["rows"]:
            results.add(row["contender"], Comparison(row["what"], row["costs"], row["target"], row["notes"]))
        return results
