"""The tests' own means of starting programs: what they say of one that does not end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import run_to_success

LEFT_BEHIND = """
import subprocess, sys
subprocess.Popen(["sleep", "61"], start_new_session=True)
print("ended")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_who_keeps_the_output_of_an_ended_program_open_is_named_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEFT_BEHIND)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)kept open by:\n\d+ of \d+ sleeping \['sleep', '61'\].*ended"):
        run_to_success([sys.executable, str(script)], "it", directory=tmp_path, env={}, time_limit=2)
