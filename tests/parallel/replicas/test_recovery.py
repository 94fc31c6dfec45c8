"""A replica that did not complete a step that another one has made copies it, and both end as one process does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, DataLoaderConfiguration, ParallelismConfig
from meshwright.config.environment import INCARNATION, MEMBERSHIP_STORE
from meshwright.runtime.membership.member import Member, MembershipChanged
from tests.ranks import run_on_ranks

REPLICAS, STEPS = 3, 8


def fail_once(member: Member) -> None:
    """Let the next collective that a member waits for count as failed on this process, although it completes."""
    plain = member.wait

    def wait(work: Any) -> None:
        member.wait = plain  # type: ignore[method-assign]
        plain(work)
        member.hears_of_loss()
        raise MembershipChanged("A member was lost.")

    member.wait = wait  # type: ignore[method-assign]


def train(address: str | None = None, shards: int = 1, folder: Path | None = None) -> dict[str, Any] | None:
    """Train; in the fourth step the last replica leaves, and the second one does not complete it.

    At the end the survivors save a checkpoint, destroy the weights, and load it.
    """
    if address is not None:
        os.environ |= {MEMBERSHIP_STORE: address, INCARNATION: "0"}
    sizes = ParallelismConfig(dp_replicate_size=REPLICAS, dp_shard_size=shards) if shards > 1 else None
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=sizes,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=3),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = TensorDataset(torch.randn(96, 4), torch.randint(3, (96,)))
    loader = DataLoader(data, batch_size=12, shuffle=True)  # eight steps
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    member = accelerator.state._runtime.member
    if member is not None:
        accelerator.resume()
    replica = -1 if member is None else member.rank // shards
    for inputs, targets in loader:
        if optimizer.steps_taken == 3 and replica == 1 and member is not None and member.rank % shards == 0:
            fail_once(member)
        accelerator.backward(cross_entropy(model(inputs), targets))
        if optimizer.steps_taken == 3 and replica == REPLICAS - 1 and member is not None:
            time.sleep(0.5)
            if member.rank % shards == 0:
                member.events.publish("left", member.replica, "it ends")
            accelerator.state._runtime.leave_members(is_pending=True)
            return None
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(folder)
    parameters = [param.full_tensor() if shards > 1 else param for param in model.parameters()]  # type: ignore[operator]
    flat = torch.nn.utils.parameters_to_vector(parameters).detach()
    return {"steps": optimizer.steps_taken, "rate": optimizer.param_groups[0]["lr"], "parameters": flat}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_that_only_another_replica_has_made_is_copied(shards: int, tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = run_on_ranks(REPLICAS * shards, train, address=f"127.0.0.1:{server.port}", shards=shards, folder=tmp_path)
    [alone] = run_on_ranks(1, train)
    assert ends[2 * shards :] == [None] * shards
    for end in ends[: 2 * shards]:
        assert end["steps"] == alone["steps"] == STEPS
        assert end["rate"] == pytest.approx(alone["rate"])
        assert torch.equal(end["parameters"], ends[0]["parameters"])
        torch.testing.assert_close(end["parameters"], alone["parameters"], rtol=0, atol=1e-6)
