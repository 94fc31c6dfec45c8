"""`Accelerator.verify_parallel` inside of a test: the ranks that are here, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Accelerator
from tests.parallel.small_transformer import LENGTH, VOCABULARY, loss_of, model
from tests.parallel.ways import WAYS
from tests.ranks import run_on_ranks


def batches(number: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(0, VOCABULARY, (number, 4, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(4, -1)
    return [((part[:, :-1].contiguous(), positions.contiguous()), part[:, 1:].contiguous()) for part in text]


def verify(way: str, breaks: bool = False) -> tuple[bool, str]:
    """Verify the small transformer on this rank's mesh."""
    accelerator = Accelerator(cpu=True, **WAYS[way][1]())

    def make_model() -> nn.Module:
        made = model()
        if breaks and torch.distributed.get_rank() == 1:  # the ranks do not hold the same weights
            with torch.no_grad():
                made.blocks[1].down.bias.add_(1.0)
        return made

    result = accelerator.verify_parallel(
        make_model,
        batches(2 * accelerator.strategy.num_data_ranks),
        loss_of,
        make_optimizer=torch.optim.AdamW,
        sequence_dim=1 if "cp" in way else None,
    )
    return result.equal, str(result)


@pytest.mark.parametrize("way", ["ddp2", "fsdp2", "tp2", "cp2", "pp2", "fsdp2xtp2"])
def test_a_mesh_is_found_equal(way: str) -> None:
    for equal, panel in run_on_ranks(WAYS[way][0], verify, way=way):
        assert equal, panel
        assert "the mesh equals one process" in panel
        assert "2 steps" in panel


def test_weights_that_differ_between_ranks_are_named() -> None:
    results = run_on_ranks(2, verify, way="fsdp2", breaks=True)
    assert not results[0][0]
    assert "the initial value of blocks.1.down.bias" in results[0][1]
    assert "did not begin with the same weights" in results[0][1]


def too_few_batches() -> None:
    """Give one batch to two data ranks."""
    Accelerator(cpu=True).verify_parallel(model, batches(1), loss_of)


def test_a_number_of_batches_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Exception, match="1 batches for 2 data ranks"):
        run_on_ranks(2, too_few_batches)
