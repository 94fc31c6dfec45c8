"""The published choices: closed sets whose members are plain strings."""

from __future__ import annotations

import pickle

import pytest

from meshwright.config.enums import (
    BaseEnum,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    RNGType,
)

PUBLISHED = [
    (PrecisionType, {"no", "fp8", "fp16", "bf16"}),
    (
        RNGType,
        {"torch", "cuda", "mlu", "sdaa", "musa", "npu", "xla", "xpu", "hpu", "neuron", "generator"},
    ),
    (DDPCommunicationHookType, {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"}),
    (
        DynamoBackend,
        {
            *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI"),
            *("FX2TRT", "ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM"),
            *("HPU_BACKEND", "NEURON"),
        },
    ),
]


@pytest.mark.parametrize(("choices", "values"), PUBLISHED)
def test_the_values_are_the_published_ones(choices: type[BaseEnum], values: set[str]) -> None:
    assert set(choices.list()) == values
    assert len(choices.list()) == len(values)


@pytest.mark.parametrize("choices", [choices for choices, _ in PUBLISHED])
def test_a_member_is_its_string(choices: type[BaseEnum]) -> None:
    for member in choices:
        assert member == member.value
        assert str(member) == f"{member}" == member.value
        assert hash(member) == hash(member.value)
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize(("choices", "values"), PUBLISHED)
def test_membership_is_asked_by_value(choices: type[BaseEnum], values: set[str]) -> None:
    assert all(value in choices for value in values)
    assert all(member in choices for member in choices)
    assert "fp17" not in choices
    assert 3 not in choices
    assert None not in choices


def test_an_unknown_value_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'fp17' is not a PrecisionType: choose one of no, fp8, fp16, bf16"):
        PrecisionType("fp17")


def test_distributed_types_print_with_their_class_name() -> None:
    assert str(DistributedType.MULTI_CPU) == f"{DistributedType.MULTI_CPU}" == "DistributedType.MULTI_CPU"
    assert DistributedType.MULTI_CPU == "MULTI_CPU"


def test_fp8_backends_print_with_their_class_name() -> None:
    assert str(FP8BackendType.AO) == "FP8BackendType.AO"
    assert {member.value for member in FP8BackendType} == {"NO", "AO", "TE", "MSAMP"}


def test_distributed_types_are_the_published_ones() -> None:
    devices = {"CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"}
    engines = {"NO", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM"}
    assert {member.value for member in DistributedType} == engines | {f"MULTI_{device}" for device in devices}
    assert all(member.name == member.value for member in DistributedType)
