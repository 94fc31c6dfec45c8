"""Process groups on accelerators are aborted together, so that none of the aborts waits for another group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from meshwright import PartialState
from meshwright.runtime.group import aborting
from tests.ranks import ranks


class SimulatedBackend:
    """A backend that notes what it is asked for, as NCCL's is; without `_group_start` it is like XCCL's."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self._calls.append(f"abort {self._name}")


class SimulatedNCCL(SimulatedBackend):
    def _group_start(self) -> None:
        self._calls.append("start")

    def _group_end(self) -> None:
        self._calls.append("end")


class SimulatedGroup:
    def __init__(self, **backends: Any) -> None:
        self._backends = backends

    @property
    def _device_types(self) -> list[str]:
        return list(self._backends)

    def _get_backend(self, device: str) -> Any:
        return self._backends[device]


def test_all_groups_are_aborted_in_one_call_of_a_simulated_backend() -> None:
    calls: list[str] = []
    gloo = SimulatedBackend("gloo", calls)
    groups = [SimulatedGroup(cpu=gloo, gpu=SimulatedNCCL(name, calls)) for name in ("one", "other")]
    aborting.abort(groups)
    assert calls == ["start", "abort one", "abort other", "end"]
    assert all(aborting.can_abort(group) for group in groups)


def test_a_simulated_backend_whose_abort_does_nothing_is_known() -> None:
    calls: list[str] = []
    assert not aborting.can_abort(
        SimulatedGroup(cpu=SimulatedBackend("gloo", calls), xpu=SimulatedBackend("xccl", calls))
    )


@ranks(2)
def test_groups_of_gloo_stay_as_they_are() -> None:
    state = PartialState(cpu=True)
    aborting.abort(aborting.open_groups())
    found: list[Any] = [None, None]
    dist.all_gather_object(found, state.process_index)
    assert found == [0, 1]
