"""Run the processes of this machine until they end."""

from __future__ import annotations

import signal
from contextlib import nullcontext

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from ....errors import LaunchError
from ...console import loggers_silenced
from ..guard import Guard
from ..signals import handled_by
from .agent import Agent
from .job import ElasticJob, LocalOutcome, PortInUse
from .surviving import SurvivingAgent


def run(job: ElasticJob, guard: Guard) -> LocalOutcome:
    """Run the processes of this machine until they end."""
    agent = (SurvivingAgent if job.survive else Agent)(job, guard)
    # The verdict reports failures, once and in full, so torchelastic need not.
    quiet = nullcontext() if job.debug else loggers_silenced("torch.distributed.elastic")
    try:
        with quiet, handled_by(agent.on_signal):
            agent.run()
    except SignalException:
        pass
    except (RendezvousError, DistError) as error:
        if "address already in use" in str(error).lower():
            raise PortInUse from error
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise LaunchError(
            f"The rendezvous of the machines failed, or a machine was lost, at {job.address}:{job.port}: {reason} Is "
            "the launch on that machine still running? The run cannot continue without it."
        ) from error
    finally:
        if agent.exchange is not None:
            if agent.outcome.failed:  # Slurm terminates all when the first launcher ends, but the panel comes first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            agent.exchange.exit_barrier()
        agent.rendezvous.shutdown()
    agent.report()
    return agent.outcome
