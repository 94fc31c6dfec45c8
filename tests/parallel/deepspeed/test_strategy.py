"""DeepSpeed trains as DDP does at every stage, and its config agrees with the script."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, AcceleratorState, DeepSpeedPlugin, DummyOptim, DummyScheduler, PartialState
from meshwright.errors import RuntimeConflictError
from tests.ranks import ranks, run_on_ranks
from tests.sizes import at_night, cases

from ..small_transformer import loader, loss_of, model
from .engines import BUCKETS, config, needs_fp16, run

zero3_linear_wrap = pytest.importorskip(
    "deepspeed.runtime.zero.linear", reason="pip install deepspeed: see .ci/install_deepspeed"
).zero3_linear_wrap

STAGES = (0, 1, 2, 3)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulation": 2},
    "clipped": {"accumulation": 2, "clip": 0.05},
    "scheduled": {"scheduled": True},
    "per item": {"accumulation": 2, "per_item": True},
}


@cache
def by_ddp(variant: str) -> dict[str, Any]:
    return run_on_ranks(2, run, stage=None, **VARIANTS[variant])[0]


@pytest.mark.parametrize(
    ("stage", "variant"),
    cases(
        gate=[*((stage, "clipped") for stage in STAGES), (3, "scheduled"), (3, "per item"), (2, "plain")],
        nightly=product(STAGES, VARIANTS),
    ),
)
def test_the_losses_are_those_of_ddp(stage: int, variant: str) -> None:
    for found in run_on_ranks(2, run, stage=stage, **VARIANTS[variant]):
        assert found["losses"] == pytest.approx(by_ddp(variant)["losses"], abs=1e-5)
        assert found["norms"] == pytest.approx(by_ddp(variant)["norms"], abs=1e-5)
        assert found["rates"] == by_ddp(variant)["rates"]
    assert all(norm > 0.05 for norm in found["norms"])  # so that something was clipped


@pytest.mark.parametrize("stage", cases(gate=[3], nightly=STAGES))
def test_one_process_is_enough(stage: int) -> None:
    [found] = run_on_ranks(1, run, stage=stage, steps=6)
    assert found["losses"] == pytest.approx(by_ddp("plain")["losses"][:6], abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_states_are_stepped_by_the_given_optimizer(stage: int) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
    found = run_on_ranks(2, run, stage=stage, sections={"zero": offload}, **VARIANTS["clipped"])[0]
    assert found["losses"] == pytest.approx(by_ddp("clipped")["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(by_ddp("clipped")["norms"], abs=1e-5)


@ranks(2)
def test_ranks_with_another_order_of_gradients_are_refused() -> None:
    if PartialState().process_index == 0:  # as after a training with ZeRO-3 on this rank alone
        torch.nn.functional.linear = zero3_linear_wrap
    for stage in (1, 2):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        net = model()
        with pytest.raises(RuntimeConflictError, match=r"linear is replaced on ranks \[0\] only"):
            accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        AcceleratorState._reset_state()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=needs_fp16)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_number_formats(stage: int, precision: str) -> None:
    in_config = {
        precision: {"enabled": "auto", "initial_scale_power": 8} if precision == "fp16" else {"enabled": "auto"}
    }
    found = run_on_ranks(2, run, stage=stage, mixed_precision=precision, sections=in_config)[0]
    assert found["losses"] == pytest.approx(by_ddp("plain")["losses"], abs=0.05)
    assert found["losses"] != pytest.approx(by_ddp("plain")["losses"], abs=1e-6)


@ranks(2)
def test_the_format_of_the_config_is_that_of_the_run() -> None:
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(1, bf16={"enabled": True}))
    )
    assert accelerator.mixed_precision == "bf16"
    net = model()
    net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    assert net.module.head.weight.dtype == torch.bfloat16
    assert net(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.float32


def prepared(stage: int | None) -> tuple[Accelerator, Any, Any, Any]:
    """Prepare the small transformer for a stage of ZeRO, or for DDP without one."""
    plugin = None if stage is None else DeepSpeedPlugin(hf_ds_config=config(stage))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    net = model()
    return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(4))


@ranks(2)
def test_two_backward_passes_make_one_step() -> None:
    losses = {}
    for stage in (None, 1, 2, 3):
        accelerator, net, optimizer, batches = prepared(stage)
        losses[stage] = []
        for _, (inputs, targets) in zip(range(4), batches, strict=False):
            first, second = loss_of(net(inputs), targets), loss_of(net(inputs.flip(1)), targets)
            if stage is None:
                accelerator.backward(first + second)
            else:
                accelerator.backward(first)
                accelerator.backward(second)
            optimizer.step()
            optimizer.zero_grad()
            losses[stage].append(second.item())
    for stage in (1, 2, 3):
        assert losses[stage] == pytest.approx(losses[None], abs=1e-5)


@ranks(2)
def test_gradients_that_no_step_used_can_be_zeroed() -> None:
    losses = {}
    for stage in (None, 0, 1, 2, 3):
        accelerator, net, optimizer, batches = prepared(stage)
        losses[stage] = []
        for number, (inputs, targets) in zip(range(6), batches, strict=False):
            loss = loss_of(net(inputs), targets)
            accelerator.backward(loss)
            if number % 2:
                optimizer.step()
            optimizer.zero_grad()
            losses[stage].append(loss.item())
    for stage in (0, 1, 2, 3):
        assert losses[stage] == pytest.approx(losses[None], abs=1e-5)


TEMPLATE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                   "total_num_steps": "auto", "warmup_type": "linear"},
    },
    "zero_optimization": {**BUCKETS, "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                          "stage3_param_persistence_threshold": "auto", "sub_group_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip


def _train_by_template() -> dict[str, Any]:
    plugin = DeepSpeedPlugin(hf_ds_config=TEMPLATE)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    net = model()
    net.config = type("Config", (), {"hidden_size": 16})()
    optimizer = DummyOptim(net.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=4)
    net, optimizer, batches, scheduler = accelerator.prepare(net, optimizer, loader(4), scheduler)
    losses, rates = [], []
    for _, (inputs, targets) in zip(range(12), batches, strict=False):
        with accelerator.accumulate(net):
            loss = loss_of(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        rates.append(scheduler.get_last_lr()[0])
    return {"losses": losses, "rates": rates, "engine": net._config._param_dict}


def test_a_template_is_filled_and_trains() -> None:
    found = run_on_ranks(2, _train_by_template)[0]
    filled = found["engine"]
    assert "auto" not in str(filled)
    assert filled["train_micro_batch_size_per_gpu"] == 4
    assert filled["train_batch_size"] == 16
    assert filled["gradient_accumulation_steps"] == 2
    assert filled["optimizer"]["params"]["lr"] == 1e-2
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2}
    assert filled["scheduler"]["params"] == {
        **rates, "warmup_num_steps": 2, "total_num_steps": 8, "warmup_type": "linear",
    }  # fmt: skip
    assert filled["zero_optimization"]["reduce_bucket_size"] == 256
    assert found["losses"][-1] < found["losses"][0]
    assert found["rates"][1] < max(found["rates"]) > found["rates"][-1]  # up, and down again


@ranks(2)
def test_what_was_auto_is_printed_with_its_origin() -> None:
    from meshwright.parallel.base import Bundle
    from meshwright.parallel.deepspeed.filling import complete_config

    Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    plugin = DeepSpeedPlugin(hf_ds_config={**TEMPLATE, "fp16": {"enabled": False}, "bf16": {"enabled": False}})
    net = model()
    optimizer = DummyOptim(net.parameters(), lr=1e-2)
    bundle = Bundle(batch_sizes=[4, 8], accumulation_steps=2)
    claims = complete_config(plugin, bundle, 2, net, optimizer, DummyScheduler(optimizer, 16, 4))
    said = claims.explain().splitlines()
    assert "train_micro_batch_size_per_gpu = 4  (the data loader, the smallest)" in said
    assert "train_batch_size = 16  (4 samples x 2 micro-batches x 2 ranks)" in said
    assert "scheduler.params.total_num_steps = 8  (DummyScheduler(total_num_steps=16), 2 batches per step)" in said
    assert "zero_optimization.sub_group_size = 1000000000  (DeepSpeed's default)" in said
    assert len(said) == str(TEMPLATE).count("'auto'") - 2


@ranks(2)
def test_a_config_that_the_script_contradicts_is_one_error() -> None:
    in_file = config(2, gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=32, gradient_clipping=1.0)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 4 in the config.*, 2 by code"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=in_file))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=in_file))
    assert accelerator.gradient_accumulation_steps == 4
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="is 32 in the config given in code, 4 by the data loader"):
        accelerator.prepare(net, optimizer, loader(4))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2, gradient_clipping=1.0)))
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader(4))
    inputs, targets = next(iter(batches))
    accelerator.backward(loss_of(net(inputs), targets))
    with pytest.raises(ValueError, match=r"gradient_clipping is 1\.0 there, and clip_grad_norm_ was given 0\.5"):
        accelerator.clip_grad_norm_(net.parameters(), 0.5)


@ranks(2)
def test_what_deepspeed_cannot_do_is_refused() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(1)))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"without the model whose parameters it has"):
        accelerator.prepare(optimizer)
    with pytest.raises(ValueError, match="2 optimizers for one Transformer"):
        accelerator.prepare(net, optimizer, torch.optim.SGD(net.parameters()))
    with pytest.raises(ValueError, match="DummyOptim stands in for the optimizer"):
        accelerator.prepare(net, DummyOptim(net.parameters()))
    with pytest.raises(RuntimeError, match="step what prepare"):
        DummyOptim(net.parameters()).step()
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader(4))
    inputs, targets = next(iter(batches))
    accelerator.backward(loss_of(net(inputs), targets))
    with pytest.raises(ValueError, match="all gradients of a model together"):
        accelerator.clip_grad_norm_(net.module.head.parameters(), 1.0)


@ranks(2)
def test_experts_are_fetched_as_a_whole() -> None:
    from deepspeed.utils import z3_leaf_module

    in_file = config(3)
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=in_file, transformer_moe_cls_names="Block")
    )
    net = model()
    net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    assert all(z3_leaf_module(block) for block in net.module.blocks)
    wrong = DeepSpeedPlugin(hf_ds_config=in_file, transformer_moe_cls_names="Expert")
    with pytest.raises(ValueError, match="names Expert, and Transformer has no such module"):
        wrong.set_moe_leaf_modules(model())


@ranks(2)
def test_weights_come_back_whole(tmp_path: Path) -> None:
    for stage in STAGES:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage)))
        net = model()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        prepared, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        assert accelerator.unwrap_model(prepared) is net
        state = accelerator.get_state_dict(prepared)
        if accelerator.is_main_process or stage < 3:
            assert state.keys() == before.keys()
            assert all(torch.equal(state[name], value) for name, value in before.items())
        else:
            assert state == {}
        accelerator.save_model(prepared, tmp_path / str(stage))
        accelerator.wait_for_everyone()
        assert (tmp_path / str(stage) / "model.safetensors").stat().st_size > 10_000
    refusing = config(3, zero={"stage3_gather_16bit_weights_on_model_save": False})
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=refusing))
    net = model()
    prepared, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save is false"):
        accelerator.get_state_dict(prepared)


@ranks(2)
def test_the_state_says_who_trains() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    assert accelerator.distributed_type == "DEEPSPEED"
    assert accelerator.state.deepspeed_plugin.zero_stage == 3
    assert accelerator.state.deepspeed_plugin.hf_ds_config.is_zero3()


def test_compiled_blocks_train() -> None:
    options = {"dynamo_backend": "aot_eager"}
    found = run_on_ranks(2, run, stage=2, steps=3, **options)[0]
    assert found["losses"] == pytest.approx(by_ddp("plain")["losses"][:3], abs=1e-5)


def _critic() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def _play(stages: tuple[int, int] | None, accumulation: int) -> list[float]:
    """Train two models against each other: one judges what the other makes, through which gradients flow back."""
    plugins = None
    if stages is not None:
        plugins = {
            name: DeepSpeedPlugin(hf_ds_config=config(stage))
            for name, stage in zip(("maker", "critic"), stages, strict=True)
        }
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, deepspeed_plugins=plugins)
    maker, critic = model(), _critic()
    makes, judges = (torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (maker, critic))
    maker, makes, batches = accelerator.prepare(maker, makes, loader(4))
    if plugins is not None:
        accelerator.state.select_deepspeed_plugin("critic")
        assert accelerator.state.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("critic")
    critic, judges = accelerator.prepare(critic, judges)
    losses = []
    for _, (inputs, targets) in zip(range(8), batches, strict=False):
        with accelerator.accumulate(maker, critic):
            real = torch.nn.functional.one_hot(targets, 32).float()
            made = maker(inputs)
            judged = critic(made.detach()).mean() - critic(real).mean()
            accelerator.backward(judged)
            judges.step()
            judges.zero_grad()
            fooled = loss_of(made, targets) - critic(made).mean()
            accelerator.backward(fooled)
            makes.step()
            makes.zero_grad()
            judges.zero_grad()
        losses += [accelerator.reduce(loss.detach(), "mean").item() for loss in (judged, fooled)]
    return losses


@pytest.mark.parametrize(("stages", "accumulation"), [at_night((2, 2), 1), at_night((3, 1), 1), ((2, 3), 2)])
def test_two_models_play_against_each_other(stages: tuple[int, int], accumulation: int) -> None:
    expected = run_on_ranks(2, _play, stages=None, accumulation=accumulation)[0]
    found = run_on_ranks(2, _play, stages=stages, accumulation=accumulation)[0]
    assert found == pytest.approx(expected, abs=1e-5)


@ranks(2)
def test_a_teacher_runs_in_partitions_beside_a_student() -> None:
    plugins = {"student": DeepSpeedPlugin(hf_ds_config=config(2)), "teacher": DeepSpeedPlugin(hf_ds_config=config(3))}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    second = Accelerator(cpu=True)  # as published: it shares the plugins of the first
    assert second.state.get_deepspeed_plugin("teacher") is plugins["teacher"]
    student, teacher = model(), model(layers=3)
    whole = teacher.state_dict()["head.weight"].clone()
    student, optimizer, batches = accelerator.prepare(student, torch.optim.AdamW(student.parameters()), loader(4))
    second.state.select_deepspeed_plugin("teacher")
    teacher = second.prepare(teacher)
    assert teacher.module.head.weight.numel() == 0  # its part is elsewhere until it runs
    inputs, _ = next(iter(batches))
    before = None
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(inputs)
        loss = torch.nn.functional.mse_loss(student(inputs), wanted)
        accelerator.backward(loss)
        optimizer.step()
        assert before is None or loss.item() < before
        before = loss.item()
    state = second.get_state_dict(teacher)
    assert not second.is_main_process or torch.equal(state["head.weight"], whole)
    with pytest.raises(ValueError, match=r"no DeepSpeed plugin 'judge': there are student, teacher"):
        accelerator.state.select_deepspeed_plugin("judge")


@ranks(2)
def test_checkpoints_hold_every_model(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
    maker, critic = model(), _critic()
    maker, makes = accelerator.prepare(maker, torch.optim.AdamW(maker.parameters(), lr=1e-2))
    critic, judges = accelerator.prepare(critic, torch.optim.AdamW(critic.parameters(), lr=1e-2))
    inputs = torch.arange(8).reshape(1, 8)

    def step() -> float:
        loss = critic(maker(inputs)).square().mean()
        accelerator.backward(loss)
        makes.step()
        judges.step()
        return float(loss)

    step()
    accelerator.save_state(tmp_path / "saved")
    losses = [step(), step()]
    accelerator.load_state(tmp_path / "saved")
    assert [step(), step()] == pytest.approx(losses, abs=1e-6)
    assert (tmp_path / "saved" / "pytorch_model_1").is_dir()


@ranks(2)
def test_a_model_that_was_spread_before_is_refused_by_both_layouts() -> None:
    from ..spread_models import KINDS

    for kind in ("fully_shard", "parallelize_module", "DDP", "replicate", "cpu_offload"):
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2)))
        net = KINDS[kind](model())
        with pytest.raises(ValueError, match=r"spread before .* asks for DeepSpeed's own layout .*2 processes \(ZeRO"):
            accelerator.prepare(net, torch.optim.AdamW(net.parameters()))


@ranks(2)
def test_an_engine_of_deepspeed_and_its_partitions_are_refused_without_a_plugin() -> None:
    import deepspeed

    Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(3)))
    own = {**config(3), "train_batch_size": 2}
    with deepspeed.zero.Init(config_dict_or_path=own):
        partitioned = model()
    engine, *_ = deepspeed.initialize(model=model(), config={**own, "zero_optimization": {"stage": 0}})
    AcceleratorState._reset_state()  # a second Accelerator would have the plugin of the first
    plain = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"partitions of deepspeed.zero.Init .*deepspeed_plugin"):
        plain.prepare(partitioned)
    with pytest.raises(ValueError, match=r"is in DeepSpeedEngine .*deepspeed_plugin"):
        plain.prepare(engine)
