"""An accelerator with time, on any machine: the device type "gpu", whose work is done later than it is asked for.

    @on_a_simulated_accelerator
    def test_training_uses_the_device_on_a_simulated_accelerator():   # the body runs where the device exists
        assert Accelerator().device.type == "gpu"

To torch it is an accelerator like any that plugs in from outside (NPU, MLU, ...): it takes torch's `PrivateUse1` place,
`torch.accelerator` finds it, and `torch.gpu` is its module. It has an allocator with a limit, streams and events,
pinned memory, generators, autocast, and collectives. Its memory is the host's and its kernels are the CPU's, so a
result that differs from the CPU's is the fault of whoever placed, cast, seeded or ordered something wrongly.

What makes it an instrument is time. Kernels and copies take a random time on the thread of their stream, and until then
their results hold poison (NaN, -1). Whoever reads without waiting reads poison; so does whoever frees memory that
another stream still uses. `synchronization_removed()` proves that a test would notice.

Registering it changes the whole process, so tests run in worker processes that have it from the start.

Where it is less than a device: operations without a CPU kernel are missing (fused LSTM cells), and memory of one device
cannot be seen by another process.
"""

from .device_module import NAME, device_module
from .faults import set_delays, synchronization_removed
from .registration import register
from .rules import use_rules
from .running import on_a_simulated_accelerator, run_on_a_simulated_accelerator

__all__ = [
    "NAME",
    "device_module",
    "on_a_simulated_accelerator",
    "register",
    "run_on_a_simulated_accelerator",
    "set_delays",
    "synchronization_removed",
    "use_rules",
]
