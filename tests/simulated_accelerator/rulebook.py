"""The rules of NCCL, streams, graphs and allocators that the simulated accelerator obeys, with their sources.

Sources are those of torch 2.13 and NCCL 2.30; "PG" is torch/csrc/distributed/c10d/ProcessGroupNCCL. Rules were read
there; none was seen on hardware by us. The numbers are names: rules that no simulation can show are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])

RULES: dict[int, tuple[str, str]] = {
    1: ("`wait()` makes the current stream wait and returns; the host goes on", "PG.cpp WorkNCCL::wait"),
    2: ("`wait(timeout)` blocks the host until the collective has ended", "PG.cpp WorkNCCL::wait"),
    3: ("its time counts from the creation of the work, not from the call", "PG.cpp WorkNCCL::checkTimeout"),
    4: ("when it runs out, the communicator is aborted and `DistBackendError` raised", "PG.cpp WorkNCCL::wait"),
    5: ("such a work counts as completed, and raises again at every `wait`", "PG.cpp WorkNCCL::isCompleted"),
    6: ("`is_completed()` is True when the kernel has ended, and changes nothing", "PG.cpp WorkNCCL::isCompleted"),
    8: ("`synchronize()` is `wait()`; `is_success()` raises", "PG.hpp WorkNCCL"),
    9: ("a collective that is not asynchronous runs on the current stream and gives no work", "PG.cpp collective"),
    10: ("the host meets a lost peer where it next waits for the device; an abort by another thread ends it", "PG.cpp"),
    11: (
        "after an abort the device's wait returns without an error, and outputs hold anything",
        "NCCL guide: ncclCommAbort",
    ),
    13: ("`get_error()` of the backend tells what the watchdog has found", "Backend.hpp ErrorType; PG.cpp getError"),
    14: ("`get_future()` is done at once; its value is ready in the order of streams", "PG.cpp collective"),
    15: ("TORCH_NCCL_BLOCKING_WAIT=1: every wait blocks up to the group's timeout; no watchdog", "PG.cpp constructor"),
    16: ("a barrier that is not asynchronous waits for the current stream", "PG.cpp barrier"),
    17: ("a timeout given to a single call is ignored", "PG.cpp assignTimeoutToWork"),
    18: ("a new timeout of a group is for later works", "PG.cpp assignTimeoutToWork"),
    19: ("the watchdog looks every 100 ms, at errors of the communicator and at timeouts", "PG.cpp Watchdog::runLoop"),
    20: ("the timeout counts from the call of the host, whatever is enqueued before", "PG.cpp WorkNCCL::checkTimeout"),
    21: ("on an error the watchdog sleeps four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, then acts", "PG.cpp runLoop"),
    22: ("in mode 3, the default, it ends the process by SIGABRT; in mode 2 it aborts; in mode 0 neither", "PG.hpp"),
    23: ("the mode is read when a group is made", "PG.cpp constructor"),
    24: ("after an error the monitor of the first group ends the process in any mode", "PG.cpp HeartbeatMonitor"),
    28: ("the loss of a peer on the same machine may give no error at all", "NCCL guide: asynchronous errors"),
    30: ("the defaults of the variables TORCH_NCCL_*", "PG.cpp constructor; NCCLUtils.cpp"),
    31: ("destroying a group with a pending collective may wait for ever", "PG.cpp shutdown; NCCL guide: finalize"),
    33: ("aborts of several groups one after another can wait for each other; in one group call they do not", "c10d"),
    34: ("an aborted communicator stays: later calls of its group raise at once", "NCCLUtils.cpp getNcclComm"),
    35: ("a second abort does nothing; a group that was aborted is destroyed at once", "NCCLUtils.cpp; init.cc"),
    36: ("a process may end with a pending collective in a group that nobody destroyed", "PG.cpp destructor"),
    38: ("connecting has no work: neither watchdog nor recorder knows of it", "PG.cpp initNCCLComm"),
    39: ("ranks wait for the id of rank 0 up to the group's timeout, and name it", "PG.cpp broadcastUniqueNCCLID"),
    40: ("only non-blocking communicators bound the time to connect", "NCCLUtils.cpp"),
    45: ("a communicator is made at the first collective of its group", "PG.hpp"),
    46: ("it takes memory at the first collective of each kind", "NCCL guide: NCCL_RUNTIME_CONNECT"),
    47: ("that memory is not in torch's statistics, but in `mem_get_info`", "nccl#964, nccl#1685"),
    48: ("where it is missing, the error is not `OutOfMemoryError`", "nccl#2363"),
    49: ("each rank of a communicator has a device of its own", "NCCL guide: communicators"),
    50: ("ranks that call different collectives wait for ever, without an error", "NCCL guide: ordering"),
    51: ("collectives of two groups in different order on two ranks wait for ever", "NCCL guide: concurrent use"),
    54: ("messages from any source are refused, tags are ignored, and there is always a work", "PG.cpp pointToPoint"),
    57: ("`monitored_barrier` is gloo's only", "distributed_c10d.py"),
    58: ("objects travel by the backend of the host where the group has one", "distributed_c10d.py"),
    59: ("int16 and unsigned types but uint8 are not carried; nor the mean of booleans", "PG.cpp getNcclDataType"),
    60: ("bitwise reductions are refused", "PG.cpp getNcclReduceOp"),
    61: ("sizes that do not fit are refused on the rank that has them", "PG.cpp _allgather_base"),
    64: ("NCCL_P2P_DISABLE counts if it is set before the first communicator", "NCCL guide: NCCL_P2P_DISABLE"),
    66: ("a collective begins after the current stream; another stream needs a wait of its own", "PG.cpp syncStream"),
    67: ("side streams come from a pool of 32", "c10/cuda/CUDAStream.cpp"),
    68: ("tensors of an asynchronous collective live until its `wait`", "PG.cpp stash"),
    70: ("freed memory is reused by the stream that it was allocated on", "CUDACachingAllocator.cpp"),
    72: ("pinned memory is rounded up to a power of two, and kept when it is freed", "CachingHostAllocator.h"),
    73: ("two settings limit what is rounded and kept; `empty_host_cache` gives it back", "AllocatorConfig.h"),
    74: ("a pinned block with a pending copy is not used again", "CachingHostAllocator.h"),
    76: ("new pinned memory is a call of the driver", "CachingHostAllocator.h; pytorch#175425"),
    77: (
        "`.item()`, `nonzero`, masks, and copies of pageable memory wait for the device",
        "torch notes: CUDA semantics",
    ),
    78: ("during a capture in global mode a query by another thread fails and invalidates it", "CUDA runtime API"),
    79: ("during one in mode thread_local, queries of other threads are legal", "CUDA runtime API"),
    80: ("an event that was recorded in a capture must not be queried", "CUDA error 907"),
    81: ("a thread whose own mode is relaxed harms no capture of another one", "cudaThreadExchangeStreamCaptureMode"),
    82: ("on ROCm a query of another thread invalidates captures of every mode", "PG.cpp; pytorch#176251"),
    83: ("a loader's thread that pins memory breaks a capture in global mode", "pytorch#174724"),
    88: ("`graph` synchronises the device and empties both caches; only its thread may end a capture", "graphs.py"),
    89: ("a query of an event holds Python's lock; `synchronize` does not", "torch/csrc/Event.cpp"),
    90: ("`elapsed_time` raises before both events have passed", "CUDAEvent.h"),
    91: ("a new thread begins on device 0 and its default stream", "c10/cuda/CUDAFunctions.h"),
    92: ("a child that is forked after the first use cannot use the device", "torch/cuda/__init__.py"),
    94: (
        "the recorder calls a running collective `scheduled` unless TORCH_NCCL_ENABLE_TIMING=1",
        "FlightRecorderDetail.hpp",
    ),
    95: ("collectives are numbered per group from its creation", "FlightRecorder.hpp"),
    98: (
        "XCCL: `wait(timeout)` raises and aborts nothing; `abort()` does nothing",
        "torch-xpu-ops ProcessGroupXCCL.cpp",
    ),
    100: ("HCCL: `wait(timeout)` ignores the timeout", "Ascend ProcessGroupHCCL.cpp"),
    101: ("HCCL: no float64, and no mean", "CANN HcclAllReduce"),
    104: ("destroying a group waits for its watchdog, also while that sleeps", "PG.cpp shutdown"),
    106: ("`abort()` of a group goes to all its backends; gloo's does nothing", "ProcessGroup.hpp"),
}


def shows(*numbers: int) -> Callable[[F], F]:
    """Mark a test as one that shows these rules."""

    def mark(test: F) -> F:
        test.rules = numbers  # type: ignore[attr-defined]
        return test

    return mark
