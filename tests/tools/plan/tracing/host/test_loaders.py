"""Data that a planned script reads."""

from __future__ import annotations

from pathlib import Path

from tests.tools.plan.tracing.traced import LOOP, trace_of


def test_one_rank_alone_does_not_take_its_data_for_split_by_rank(tmp_path: Path) -> None:
    """Ranks compare checksums of the columns of a Hugging Face data set, and here is one rank."""
    source = """
import sys, types
class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(4)
    def with_format(self, kind):
        return Stored()
class Stored:
    def __getitem__(self, places):
        return self
    def to_pydict(self):
        return {"text": ["some", "thing"], "label": [0, 1]}
sys.modules["datasets"] = types.SimpleNamespace(Dataset=Dataset, IterableDataset=())
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Dataset(), batch_size=2))
assert not loader._presharded
assert len(loader) == 64 // 2 // accelerator.num_processes
"""
    trace = trace_of(source + LOOP, tmp_path, world_size=4)
    assert trace.guesses == []
    assert [step.samples for step in trace.steps] == [2, 2]


def test_prompts_in_a_list_are_samples(tmp_path: Path) -> None:
    source = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prompts = DataLoader(["the cat", "a dog"] * 8, batch_size=2, collate_fn=list)
model, optimizer, loader = accelerator.prepare(model, optimizer, prompts)
for batch in loader:
    accelerator.backward(model(torch.ones(len(batch), 4)).mean())
    optimizer.step()
    optimizer.zero_grad()
"""
    assert [step.samples for step in trace_of(source, tmp_path).steps] == [2, 2]
