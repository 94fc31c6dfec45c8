"""Fake models, in a setup that has data."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.tools.plan.tracing.traced import LOOP, printed_by, trace_of

_PREPARE = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(8, 4), batch_size=2))
"""


def test_what_happens_before_prepare_has_real_numbers(tmp_path: Path) -> None:
    printed = printed_by(
        """
        numbers = torch.arange(6)
        print(numbers.tolist(), numbers.numpy().sum(), (numbers > 2).nonzero().shape)
        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        print(Blocks().rates, nn.Linear(2, 2).weight.tolist())
        """,
        tmp_path,
    )
    assert printed == [
        "[0, 1, 2, 3, 4, 5] 15 torch.Size([3, 1])",
        "[0.0, 0.5, 1.0] [[1.0, 1.0], [1.0, 1.0]]",
    ]


def test_a_model_larger_than_any_memory_is_built(tmp_path: Path) -> None:
    trace = trace_of(
        "model = nn.Sequential(nn.Linear(4, 1 << 20), nn.Linear(1 << 20, 1 << 20))" + _PREPARE + LOOP, tmp_path
    )
    assert trace.parameters == (4 + 1 + (1 << 20) + 1) << 20


def test_weights_of_a_file_are_loaded(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "weights.pt")
    loaded = f"model = nn.Linear(4, 4)\nmodel.load_state_dict(torch.load({str(tmp_path / 'weights.pt')!r}))"
    assert trace_of(loaded + _PREPARE + LOOP, tmp_path).parameters == 20


def test_weights_are_initialized_by_rejection_without_an_end_to_it(tmp_path: Path) -> None:
    initialized = "model = nn.Linear(4, 4)\nnn.init.trunc_normal_(model.weight)"
    assert trace_of(initialized + _PREPARE + LOOP, tmp_path).parameters == 20


def test_compiled_models_are_planned_without_a_compiler(tmp_path: Path) -> None:
    compiled = "model = torch.compile(nn.Linear(4, 4))\nmodel.compile()"
    assert trace_of(compiled + _PREPARE + LOOP, tmp_path).parameters == 20
