"""What examples of other projects take from `accelerate.test_utils`."""

from __future__ import annotations

import torch

from meshwright import Accelerator
from meshwright.testing import RegressionDataset, RegressionModel, are_the_same_tensors, torch_device
from meshwright.testing.training import mocked_dataloaders, mocked_dataloaders_for_autoregressive_models
from tests.ranks import ranks


def test_the_loaders_are_the_same_every_time_and_padded() -> None:
    accelerator = Accelerator(cpu=True)
    _, validation = mocked_dataloaders(accelerator, batch_size=8)
    batches = list(validation)
    assert [len(batch["labels"]) for batch in batches] == [8, 8, 8]
    for batch, again in zip(batches, mocked_dataloaders(accelerator, batch_size=8)[1], strict=True):
        assert all(torch.equal(batch[name], again[name]) for name in batch)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
        lengths = batch["attention_mask"].sum(1) // 2
        for tokens, length, label in zip(batch["input_ids"], lengths, batch["labels"], strict=True):
            assert torch.equal(tokens[:length], tokens[length : 2 * length]) == bool(label)
    training, _ = mocked_dataloaders_for_autoregressive_models(accelerator)
    assert set(next(iter(training))) == {"input_ids", "attention_mask"}


def test_a_batch_is_moved_and_read_as_those_of_tokenizers() -> None:
    """Examples write `batch.to(accelerator.device)` and take no result."""
    accelerator = Accelerator(cpu=True)
    _, validation = mocked_dataloaders(accelerator, batch_size=8)
    for batch in accelerator.prepare(validation):
        assert batch.to("meta") is batch
        assert {tensor.device.type for tensor in batch.values()} == {"meta"}
        assert batch.labels is batch["labels"]
        assert not hasattr(batch, "pixel_values")


def test_the_line_is_found() -> None:
    data = RegressionDataset(length=64, seed=0)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    model = RegressionModel().to(torch_device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (model(x.to(torch_device)) - y.to(torch_device)).square().mean().backward()
        optimizer.step()
    assert abs(model.a.item() - 2) < 0.1
    assert abs(model.b.item() - 3) < 0.1
    first, second = RegressionModel(1, 2, double_output=True)(x)
    assert torch.equal(first, x + 2)
    assert torch.equal(first, second)


@ranks(2)
def test_equal_tensors_are_recognised() -> None:
    rank = Accelerator(cpu=True).process_index
    assert are_the_same_tensors(torch.ones(3))
    assert not are_the_same_tensors(torch.full((3,), float(rank)))
