"""The command of the published guides for two nodes of two processes: two torchrun that meet on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.clusters.machines import machines, why_not
from tests.clusters.test_slurm import SUMS, placed
from tests.ranks.pool import free_port


def test_two_torchrun_of_two_processes(tmp_path: Path) -> None:
    meeting = ("--rdzv_id", "2299", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--nnodes", "2", *meeting]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": ""}
    nodes = [
        warm.Popen(
            [*command, "--local_addr", "127.0.0.1", str(SUMS)],
            cwd=tmp_path,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        printed = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], printed
    ranks = [found[:3] + found[4:] for found in placed("".join(printed))]
    assert ranks == [("0", "4", "0", "10"), ("1", "4", "1", "10"), ("2", "4", "0", "10"), ("3", "4", "1", "10")]
    assert all(len(placed(part)) == 2 for part in printed)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_machines_whose_own_names_are_loopback_addresses_meet_by_torchrun(tmp_path: Path) -> None:
    with machines(["n1", "n2"], tmp_path, own_name_is_loopback=True) as both:
        command = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 1, "--nnodes", 2)
        started = [
            machine.start(*command, "--node_rank", rank, "--master_addr", both[0].address, SUMS)
            for rank, machine in enumerate(both)
        ]
        assert [running.wait() for running in started] == [0, 0], started[0].printed
        for rank, running in enumerate(started):
            assert f"rank {rank} of 2, local 0, on n{rank + 1}, by eth0: sum 3" in running.printed
