"""`meshwright launch --debug_rank`: one rank in a debugger at a real terminal, the others wait."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pexpect
import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.launch.plan import make_plan

SCRIPT = """
import torch
from meshwright import Accelerator
accelerator = Accelerator(cpu=True)
mine = torch.tensor([accelerator.process_index])
breakpoint()
everybody = accelerator.gather(mine)
import pdb; pdb.set_trace()
print("timeout of a new group:", torch.distributed.distributed_c10d._get_default_timeout("gloo").days, "days")
if accelerator.process_index == 1:
    raise ValueError("look here")
"""


def test_breakpoints_and_an_exception_of_one_rank_at_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "meshwright.commands.launch", "--cpu", "--num_processes=2", "--debug_rank=1", "train.py"]
    environment = os.environ | {"MESHWRIGHT_HANG_SECONDS": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    terminal = pexpect.spawn(
        sys.executable, command, cwd=str(tmp_path), env=environment, encoding="utf-8", timeout=300, dimensions=(40, 200)
    )
    prompt = r"\(Pdb\) "
    terminal.expect(prompt)
    terminal.sendline("p mine")
    terminal.expect(r"tensor\(\[1\]\)")
    terminal.expect(r"Rank 1 is in a debugger at train.py:7")  # the other rank waits, and says for whom
    terminal.sendline("c")
    terminal.expect(prompt)
    terminal.sendline("p everybody")
    terminal.expect(r"tensor\(\[0, 1\]\)")
    terminal.sendline("c")
    terminal.expect("timeout of a new group: 30 days")
    terminal.expect("ValueError: look here")
    terminal.expect(prompt)
    terminal.sendline("p accelerator.process_index + 41")
    terminal.expect("42")
    terminal.sendline("q")
    terminal.expect("rank 1 failed.*: ValueError")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 1


def test_a_rank_that_is_not_there_is_refused() -> None:
    settings = LaunchSettings.resolve({"debug_rank": 2, "num_processes": 2, "cpu": True}, None)
    with pytest.raises(
        ValueError, match=r"debug_rank is 2 \(flag --debug_rank\), but there are 2 processes: use 0 to 1"
    ):
        make_plan(settings, ("train.py",), None)


def test_one_process_has_the_terminal_anyway() -> None:
    settings = LaunchSettings.resolve({"debug_rank": 0, "num_processes": 1, "cpu": True}, None)
    assert any(
        "debug_rank = 0" in note and "has no effect" in note for note in make_plan(settings, ("t.py",), None).notes
    )
