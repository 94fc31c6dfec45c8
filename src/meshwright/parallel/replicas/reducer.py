"""Sum gradients over replicas during the backward pass, so that a step takes place on all of them or on none.

[Note: a reduction is a transaction] The all-reduce of a bucket works on a copy of the gradients. `.grad` holds what
this rank has computed until the reductions of all buckets are complete; only then does it become the sum. If a
replica dies in between, `.grad` is bitwise unchanged, and survivors can go on: they add the gradients of the
lost samples, bind a new group and reduce again.

For the same reason nothing raises inside a backward pass: an error there would leave `.grad` incomplete. If a reduction
cannot be started, `finish` raises the error.

[Note: several backward passes] A step may have several backward passes that reduce (two losses). Before each of them,
`begin` takes the sums out of `.grad` again and puts back what this rank has computed. So every reduction sums what
the step has computed so far, on the ranks that are alive now; nothing of a lost rank remains in it. DDP averages the
average once more, which has the same value as long as the divisor is the number of ranks.

[Note: late gradients] A gradient can change after the reduction of its bucket has begun: reentrant activation
checkpointing computes the gradient of a shared parameter in parts. The last bucket is always started by `finish`, so it
tells all ranks about it, and all of them reduce again. From then on they start reductions after the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .buckets import Bucket, buckets_of

_MEBIBYTE = 1024 * 1024


def wait_for(work: Any) -> None:
    """Wait for a reduction as its backend does."""
    work.wait()


class GradientReducer:
    """Sum the gradients of a model over a group of replicas, and divide them by a fixed number.

    Call `begin` before every backward pass and `finish` after it. The order of reductions is that of the buckets, so
    it is the same on all ranks whatever their graphs are. A parameter without gradient counts as zeros; one that no
    rank used keeps none. A backward pass that reaches no parameter reduces nothing; it must do so on all ranks or on
    none.

    Args:
        parameters: The parameters of the model, in the same order on every rank. Frozen ones are left out.
        bucket_bytes: The size from which a bucket is full.
        first_bucket_bytes: The same for the first bucket, which should be complete early.
        overlaps: Whether reductions start during the backward pass, or after it.

    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        bucket_bytes: int = 25 * _MEBIBYTE,
        first_bucket_bytes: int = _MEBIBYTE,
        overlaps: bool = True,
    ) -> None:
        self.armed = False
        """Whether the backward pass that runs now, or next, is reduced."""
        self.signal = 0.0
        """A number that is summed with the gradients, and is as exact as their dtype."""
        trained = [param for param in parameters if param.requires_grad]
        self._buckets = buckets_of(trained, first_bucket_bytes, bucket_bytes, extra=2)
        self._handles = [
            param.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for index, param in enumerate(bucket.params)
        ]
        self._group: Any = None
        self._scale = 1.0
        self._started = 0
        self._is_reduced = False
        self._is_late = False
        self._overlaps = overlaps
        self._error: Exception | None = None

    def bind(self, group: Any, divisor: int) -> None:
        """Reduce over this group from now on (None for the default group); sums are divided by `divisor`.

        The gradients stay as they are.
        """
        self._group = group
        self._scale = 1.0 / divisor
        for bucket in self._buckets:
            bucket.allocate()
        self._expect_gradients()

    def begin(self, reduces: bool = True) -> None:
        """Prepare for a backward pass, and say whether it is reduced."""
        if self._started:  # the last pass failed, and its reductions may be under way
            for bucket in self._buckets:
                bucket.allocate()
        self._expect_gradients()
        for bucket in self._buckets:
            bucket.restore()
        self.armed = reduces

    def finish(self, wait: Callable[[Any], None] = wait_for) -> float:
        """Complete the reduction after the backward pass and store its result; return the sum of `signal`."""
        signal = self.complete(wait)
        self.store()
        return signal

    def complete(self, wait: Callable[[Any], None] = wait_for, *, again: bool = False) -> float:
        """Complete the reduction after the backward pass, without a change of `.grad`; return the sum of `signal`.

        `wait` is called with every reduction. It returns when the reduction is complete on this rank (on the device,
        not only in its queue), or raises. Then call `bind`; the same gradients can be reduced `again`, if this
        pass had any.
        """
        if not again:
            self._is_reduced = self.armed and any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets)
            self.armed = False
        if not self._is_reduced:
            return 0.0
        self._reduce(wait)
        late, signal = self._buckets[-1].numbers
        if late > 0:
            self._overlaps = False
            self._expect_gradients()
            self._reduce(wait)
        return signal

    def store(self) -> None:
        """Let the gradients become the sums of a complete reduction, if there was one."""
        if self._is_reduced:
            for bucket in self._buckets:
                bucket.store()
            self._expect_gradients()

    def release(self) -> None:
        """Forget what this rank alone has computed: the optimizer has made its step."""
        for bucket in self._buckets:
            bucket.release()

    def close(self) -> None:
        """Leave the parameters: their gradients are reduced no more."""
        for handle in self._handles:
            handle.remove()

    def _expect_gradients(self) -> None:
        for bucket in self._buckets:
            bucket.await_all()
        self._started = 0
        self._is_late = False
        self._error = None

    def _on_gradient(self, bucket: Bucket, index: int, _: Tensor) -> None:
        if not self.armed:
            return
        if bucket.work is not None:
            self._is_late = True
            return
        bucket.missing.discard(index)
        if not bucket.missing and self._overlaps and self._error is None:
            try:
                self._start_complete_buckets()
            except Exception as error:  # see [Note: a reduction is a transaction]
                self._error = error

    def _start_complete_buckets(self) -> None:
        """Start those that are complete, in order, up to the one before the last: see [Note: late gradients]."""
        while self._started < len(self._buckets) - 1 and not self._buckets[self._started].missing:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._started]
        numbers = (float(self._is_late), self.signal) if bucket.extra else ()
        flat = bucket.load(self._scale, numbers)
        bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._started += 1

    def _reduce(self, wait: Callable[[Any], None]) -> None:
        if self._error is not None:
            raise self._error
        while self._started < len(self._buckets):
            self._start()
        for bucket in self._buckets:
            wait(bucket.work)
