"""`ray_launcher`: run a function on the nodes of a Ray cluster."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....config.environment import export_settings, read_setting
from ....config.packages import has_package
from ....config.settings import check_precision
from ....errors import REQUEUE_EXIT_CODE, UnsupportedSettingError
from ....launch.notebook.launcher import refuse_nesting
from ....launch.processes.verdict import collateral_text, describe
from .placement import STRATEGIES, ClusterRequest

if TYPE_CHECKING:
    from ....launch.notebook.failures import WorkerFailedError
    from .run import RayOutcome

__all__ = ["ray_launcher"]


def ray_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_workers: int | tuple[int, int] | None = None,
    *,
    resources_per_worker: Mapping[str, float] | None = None,
    mixed_precision: str = "no",
    max_restarts: int = 0,
    address: str | None = None,
    placement_strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    start_timeout: float = 600.0,
    elastic_timeout: float = 30.0,
    grace_period: float = 30.0,
) -> Any:
    """Run `function(*args)` on workers of a Ray cluster, one actor per rank, and return what rank 0 returned.

    If a worker fails, the others are ended, and `WorkerFailedError` names the rank that failed first. With
    `max_restarts` all of them start again, on the nodes that there are then: the function has to go on from a
    checkpoint (`accelerator.resume()`). Where Ray is not connected yet, it is connected for this call.

    Args:
        function: Called on every worker. It creates the `Accelerator`.
        args: Its arguments, sent to every worker once.
        num_workers: The number of ranks; by default one per GPU of the cluster, or one per node without GPUs. A pair
            (min, max) is elastic: every start takes as many workers as there is room for.
        resources_per_worker: Ray's resources of each worker; by default one CPU, and one GPU if the cluster has any.
        mixed_precision: As for `Accelerator`, whose default it is.
        max_restarts: How often all workers start again after a failure.
        address: Of the cluster, for `ray.init`; not needed where Ray is connected.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD: how Ray puts workers on nodes.
        runtime_env: Ray's runtime environment of the workers, such as `{"working_dir": "."}`.
        start_timeout: Seconds to wait for room in the cluster.
        elastic_timeout: Seconds to wait for the highest number of workers, before fewer are taken.
        grace_period: Seconds to save and end after Ctrl-C or SIGTERM.
    """
    check_precision(mixed_precision, "ray_launcher(mixed_precision=...)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"ray_launcher() takes args as a tuple, such as args=({args!r},), not {type(args).__name__}.")
    refuse_nesting("ray_launcher")
    refuse_missing_ray("ray_launcher")
    from .run import Work, run

    with connected(address):
        import ray

        request = make_request(num_workers, resources_per_worker, placement_strategy, start_timeout, elastic_timeout)
        settings = {"mixed_precision": mixed_precision, "cpu": None if "GPU" in request.resources else True}
        outcome = run(
            Work(
                method="run_function",
                arguments=(ray.put((function, tuple(args))),),
                variables=export_settings(settings),
                max_restarts=max_restarts,
                grace_period=grace_period,
                runtime_env=runtime_env,
            ),
            request,
            _say,
        )
        if outcome.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if outcome.signal is not None and not outcome.asks_for_restart:
            raise SystemExit(128 + outcome.signal if outcome.failed else 0)
        if outcome.asks_for_restart:
            raise SystemExit(REQUEUE_EXIT_CODE)
        if outcome.failed:
            raise _failure(outcome)
        return outcome.answers[0].result


def _say(message: str) -> None:
    print(f"ray_launcher: {message}", file=sys.stderr, flush=True)


def refuse_missing_ray(what: str) -> None:
    """Raise if Ray is not installed."""
    if not has_package("ray"):
        raise UnsupportedSettingError(what, "Ray is not installed.", 'Run `pip install "meshwright[ray]"`.')


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to Ray for the block, unless this process is connected already."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(address=address)
    try:
        yield
    finally:
        ray.shutdown()


def make_request(
    num_workers: int | tuple[int, int] | None,
    resources: Mapping[str, float] | None,
    strategy: str = "PACK",
    start_timeout: float = 600.0,
    elastic_timeout: float = 30.0,
    *,
    cpu: bool = False,
) -> ClusterRequest:
    """Fill in what was left open, from what the cluster has."""
    import ray

    if strategy not in STRATEGIES:
        raise ValueError(f"placement_strategy={strategy!r} is unknown: choose one of {', '.join(STRATEGIES)}.")
    gpus = 0 if cpu or read_setting("cpu") else int(ray.cluster_resources().get("GPU", 0))
    if resources is None:
        resources = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    if num_workers is None:
        num_workers = gpus if gpus and "GPU" in resources else sum(node["Alive"] for node in ray.nodes())
    least, most = (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    if not 1 <= least <= most:
        raise ValueError(f"num_workers={num_workers!r}: give a number of 1 or more, or a pair (min, max).")
    return ClusterRequest(
        least=least,
        most=most,
        resources={name: number for name, number in resources.items() if number},
        strategy=strategy,
        seconds=start_timeout,
        elastic_seconds=elastic_timeout,
    )


def _failure(outcome: RayOutcome) -> WorkerFailedError:
    from ....launch.notebook.failures import WorkerFailedError

    verdict = outcome.verdict()
    culprit = verdict.culprit
    reason = culprit.record["text"] if culprit.record is not None else describe(culprit)
    details = [outcome.answers[culprit.rank].details] if culprit.rank in outcome.answers else []
    if culprit.crash:
        details.append(culprit.crash.partition("Extension modules")[0].strip())
    details.append(verdict.headline[:1].upper() + verdict.headline[1:] + ".")
    if culprit.record is not None and culprit.record["cause"]:
        details.append(f"Caused by {culprit.record['cause']}")
    if verdict.collateral:
        text = collateral_text(verdict.collateral)
        details.append(text[:1].upper() + text[1:] + ".")
    if outcome.attempts > 1:
        details.append(f"This was attempt {outcome.attempts}, the last one.")
    return WorkerFailedError(culprit.rank, reason, "\n\n".join(details), diagnosis=culprit.diagnosis)
