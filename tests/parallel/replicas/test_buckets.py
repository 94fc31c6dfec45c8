"""Gradients are gathered in flat buffers, and given back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.replicas.buckets import Bucket, buckets_of


def params(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


def sizes(buckets: list[Bucket]) -> list[list[int]]:
    return [[param.numel() for param in bucket.params] for bucket in buckets]


def test_the_first_bucket_is_small_and_parameters_come_in_reverse() -> None:
    buckets = buckets_of(params(1, 2, 3, 4, 5), first_bytes=20, bytes_per_bucket=28, extra=2)
    assert sizes(buckets) == [[5], [4, 3], [2, 1]]
    assert [bucket.extra for bucket in buckets] == [0, 0, 2]
    assert sizes(buckets_of(params(1, 2, 3, 4, 5), 21, 29, 0)) == [[5, 4], [3, 2, 1]]


def test_every_dtype_has_buckets_of_its_own_in_the_order_in_which_they_are_complete() -> None:
    mixed = [*params(1, 2), *params(3, 4, dtype=torch.float64), *params(5)]
    assert sizes(buckets_of(mixed, first_bytes=20, bytes_per_bucket=10**6, extra=0)) == [[5], [4], [3], [2, 1]]


def loaded(extra: int = 0) -> tuple[Bucket, list[Tensor]]:
    bucket = Bucket(params(3, 17, 2), extra)
    bucket.allocate()
    gradients = [torch.full_like(param, index + 1.0) for index, param in enumerate(bucket.params)]
    for param, gradient in zip(bucket.params, gradients, strict=True):
        param.grad = gradient
    return bucket, gradients


def test_gradients_are_copied_scaled_and_aligned() -> None:
    bucket, _ = loaded()
    flat = bucket.load(0.5)
    assert flat.shape == (16 + 32 + 16 + 3,)
    assert flat[:3].tolist() == [0.5] * 3
    assert flat[16:33].tolist() == [1.0] * 17
    assert flat[48:50].tolist() == [1.5] * 2
    assert flat[64:].tolist() == [1.0] * 3, "marks are not scaled"
    assert float(flat.sum()) == 1.5 + 17 + 3 + 3


def test_numbers_of_the_caller_follow_the_marks() -> None:
    bucket, _ = loaded(extra=2)
    assert bucket.load(1.0)[64:].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert bucket.load(1.0, [4.0, 5.0])[64:].tolist() == [1.0, 1.0, 1.0, 4.0, 5.0]
    assert bucket.numbers == [4.0, 5.0]


def test_a_parameter_that_no_rank_used_keeps_no_gradient() -> None:
    bucket, _ = loaded()
    bucket.load(1.0)
    bucket.params[0].grad = bucket.params[1].grad = None
    flat = bucket.load(1.0)
    assert flat[64:].tolist() == [0.0, 0.0, 1.0]
    assert not flat[:48].any(), "old gradients are gone"
    flat[65] += 1  # another rank has used it
    flat[16:33] += 7
    bucket.store()
    assert bucket.params[0].grad is None
    second = bucket.params[1].grad
    assert second is not None
    assert second.tolist() == [7.0] * 17


def test_sums_become_the_gradients_and_those_of_this_rank_come_back() -> None:
    bucket, own = loaded()
    flat = bucket.load(1.0)
    flat.mul_(2)
    bucket.store()
    assert [float(param.grad[0]) for param in bucket.params] == [2.0, 4.0, 6.0]  # type: ignore[index]
    bucket.restore()
    assert all(param.grad is gradient for param, gradient in zip(bucket.params, own, strict=True))
    bucket.restore()  # a second time changes nothing
    assert all(param.grad is gradient for param, gradient in zip(bucket.params, own, strict=True))


@pytest.mark.parametrize("released", [False, True])
def test_changed_or_released_sums_become_copies(released: bool) -> None:
    bucket, _ = loaded()
    flat = bucket.load(1.0)
    bucket.store()
    if released:
        bucket.release()
    else:
        bucket.params[0].grad.mul_(3)  # type: ignore[union-attr]
    bucket.restore()
    first: Tensor = bucket.params[0].grad  # type: ignore[assignment]
    assert first.tolist() == [1.0 if released else 3.0] * 3
    flat.zero_()
    assert first.all(), "it is a copy"


def test_a_replaced_gradient_stays() -> None:
    bucket, own = loaded()
    bucket.load(1.0)
    bucket.store()
    mine = torch.ones(3)
    bucket.params[0].grad = mine
    bucket.restore()
    assert bucket.params[0].grad is mine
    assert bucket.params[1].grad is own[1]


def test_missing_gradients_are_awaited_again() -> None:
    bucket, _ = loaded()
    bucket.missing.clear()
    bucket.work = object()
    bucket.await_all()
    assert (bucket.missing, bucket.work) == ({0, 1, 2}, None)


def test_a_sparse_gradient_is_refused_with_the_remedy() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    bucket = Bucket([table.weight])
    bucket.allocate()
    with pytest.raises(UnsupportedSettingError, match="sparse=False"):
        bucket.load(1.0)
