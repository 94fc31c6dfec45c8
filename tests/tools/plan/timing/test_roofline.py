from dataclasses import replace

import pytest

from meshwright.runtime.devices.catalogue import cluster
from meshwright.tools.plan.timing.roofline import (
    ATTENTION,
    BANDWIDTH,
    ELEMENTWISE,
    FLOPS,
    LATENCY,
    MATMUL,
    OPTIMIZER,
    estimate,
)
from meshwright.tools.plan.trace import FORWARD, UPDATE, Operation

H100 = cluster("H100").device


def matmul(n: int, dtype: str = "bfloat16") -> Operation:
    return Operation(0, "aten.mm", "", FORWARD, 0, 2 * n**3, 6 * n**2, dtype, (n, n, n))


def add(size: int, phase: str = FORWARD) -> Operation:
    return Operation(0, "aten.add", "", phase, 0, 0, size, "bfloat16")


def test_a_large_product_is_bound_by_arithmetic() -> None:
    found = estimate(matmul(8192), H100)
    assert (found.kind, found.bound) == (MATMUL, FLOPS)
    assert 0.5 < 2 * 8192**3 / 989.4e12 / found.seconds < 1


def test_a_small_product_reaches_less_of_the_peak() -> None:
    def per_flop(n: int) -> float:
        return estimate(matmul(n), H100).seconds / n**3

    assert per_flop(512) > 1.5 * per_flop(8192)


def test_a_product_with_one_row_is_bound_by_memory() -> None:
    found = estimate(
        Operation(0, "aten.mm", "", FORWARD, 0, 2 * 8192**2, 2 * 8192**2, "bfloat16", (1, 8192, 8192)), H100
    )
    assert found.bound == BANDWIDTH or found.seconds > 2 * 8192**2 / 3.35e12


@pytest.mark.parametrize(("phase", "kind"), [(FORWARD, ELEMENTWISE), (UPDATE, OPTIMIZER)])
def test_an_elementwise_operation_is_bound_by_memory(phase: str, kind: str) -> None:
    found = estimate(add(10**9, phase), H100)
    assert (found.kind, found.bound) == (kind, BANDWIDTH)
    assert found.seconds > 10**9 / 3.35e12


def test_a_tiny_operation_is_bound_by_latency() -> None:
    assert estimate(add(512), H100).bound == LATENCY


def test_causal_attention_takes_half_the_time() -> None:
    full = Operation(0, "aten._scaled_dot_product_flash_attention", "", FORWARD, 0, 10**15, 10**6, "bfloat16")
    whole, half = estimate(full, H100), estimate(replace(full, causal=True), H100)
    assert whole.kind == ATTENTION
    assert half.seconds == pytest.approx(whole.seconds / 2, rel=1e-3)


def test_eight_bits_are_faster_than_sixteen_and_thirty_two_slower() -> None:
    assert estimate(matmul(8192, "float8_e4m3fn"), H100).seconds < estimate(matmul(8192), H100).seconds
    assert estimate(matmul(8192, "float32"), H100).seconds > 5 * estimate(matmul(8192), H100).seconds


def test_a_compiler_saves_traffic_of_elementwise_operations_only() -> None:
    for operation, faster in ((add(10**9), True), (matmul(8192), False), (add(10**9, UPDATE), False)):
        compiled = estimate(replace(operation, compiled=True), H100)
        assert (compiled.seconds < estimate(operation, H100).seconds) == faster
