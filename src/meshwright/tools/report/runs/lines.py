"""Read the lines of a run's files: records that a crash may have torn, and that another user may have written.

Files of runs are large, and their lines are many: a line is parsed by the standard library alone, if it is too small to
be deep, and only the fields that are used are checked.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ....errors import InvalidDataError
from ....untrusted import MOST_LEVELS, open_regular, parse_object

MOST_BYTES = 1 << 22
"""The longest line that is read."""
LATEST = 1e11
"""Times are below: seconds since 1970, for about 3,000 years."""


class LineError(ValueError):
    """Report a line that is no record.

    It is counted and left out: the views show how many there were.
    """


def parsed(line: bytes) -> dict[str, Any]:
    """Return the object of a line; raise LineError if it is none."""
    try:
        if line.count(b"{") + line.count(b"[") > MOST_LEVELS:
            return parse_object(line, "a line")
        record = json.loads(str(line, "utf-8"))
    except ValueError as error:
        raise LineError from error
    if type(record) is not dict:
        raise LineError
    return record


def number_within(record: dict[str, Any], key: str, most: float) -> float | None:
    """Return a finite number that a record may have; raise LineError if it is anything else."""
    value = record.get(key)
    if value is None:
        return None
    if (type(value) is float or type(value) is int) and -most <= value <= most:
        return float(value)
    raise LineError


def newest_lines(file: Path, most_bytes: int) -> list[bytes]:
    """Return the complete lines in the last part of a file; none if there is no such file, or it cannot be read."""
    try:
        with open_regular(file, "a file of a run") as lines:
            skipped = max(0, os.fstat(lines.fileno()).st_size - most_bytes)
            lines.seek(skipped)
            complete = lines.read(most_bytes).split(b"\n")[:-1]
    except (OSError, InvalidDataError):
        return []
    return complete[1:] if skipped else complete
