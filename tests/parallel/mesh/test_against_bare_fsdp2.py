"""FSDP2 through the library equals FSDP2 by hand, bit for bit, whatever is asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from meshwright import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs
from tests.ranks import ranks
from tests.sizes import at_night, cases

from ..small_transformer import VOCABULARY, WIDTH, Transformer, loader, loss_of, model

STEPS = 8


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return this rank's share, as a sharded loader assigns it: whole batches, round robin."""
    rank = torch.distributed.get_rank()
    return list(loader(4))[rank::2]


def by_hand(
    net: Transformer,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    recompute: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    policy = options.pop("mp_policy", None)
    inner = {"mp_policy": MixedPrecisionPolicy(policy, torch.float32)} if policy else {}
    outer = {"mp_policy": MixedPrecisionPolicy(policy, torch.float32, torch.float32)} if policy else {}
    for block in net.blocks:
        if recompute:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        fully_shard(block, mesh=mesh, **options, **inner)
    fully_shard(net, mesh=mesh, **options, **outer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step, (inputs, targets) in enumerate(batches()[:STEPS], start=1):
        closes = step % accumulation == 0
        net.set_requires_gradient_sync(closes)
        loss = loss_of(net(inputs), targets)
        scaled = loss / accumulation if accumulation > 1 else loss
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        if closes:
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_the_library(
    net: Transformer,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    mixed_precision: str = "no",
    handlers: list[Any] | None = None,
    **fields: Any,
) -> list[float]:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=handlers,
        fsdp_plugin=FullyShardedDataParallelPlugin(**fields),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader(4))
    losses = []
    for _, (inputs, targets) in zip(range(STEPS), batches, strict=False):
        with accelerator.accumulate(net):
            loss = loss_of(net(inputs), targets)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "kept after forward": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
    "bf16": ({"mp_policy": torch.bfloat16}, {"mixed_precision": "bf16"}),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"cpu_offload": True}),
    "recomputed": ({"recompute": True}, {"activation_checkpointing": True}),
    "recomputed, inputs on the host": (
        {"recompute": True},
        {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    ),
    "accumulating 4": ({"accumulation": 4}, {"accumulation": 4}),
    "clipped": ({"clip": 0.5}, {"clip": 0.5}),
    "from the first process": ({}, {"cpu_ram_efficient_loading": True}),
}


@pytest.mark.parametrize("tied", [at_night(False), True])
@pytest.mark.parametrize("case", cases(gate=[case for case in CASES if case != "recomputed"], nightly=CASES))
@ranks(2)
def test_the_losses_are_the_same_bits(case: str, tied: bool) -> None:
    bare, ours = CASES[case]
    Accelerator(cpu=True)  # opens the process group for both
    assert through_the_library(model(tied=tied), **ours) == by_hand(model(tied=tied), **bare)


@ranks(2)
def test_fp16_scales_and_skips_as_by_hand() -> None:
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    ours = through_the_library(
        model(), mixed_precision="fp16", handlers=[GradScalerKwargs(init_scale=2.0**20, growth_interval=2)]
    )
    assert ours == by_hand(model(), mp_policy=torch.float16, scaler=scaler)


@ranks(2)
def test_two_models_train_side_by_side_as_by_hand() -> None:
    """A teacher that is not trained, and a student that imitates it."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())

    def losses(student: nn.Module, teacher: nn.Module, optimizer: Any, backward: Any) -> list[float]:
        values = []
        for inputs, _ in batches()[:STEPS]:
            with torch.no_grad():
                wanted = teacher(inputs)
            loss = (student(inputs) - wanted).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    def pair() -> tuple[Transformer, Transformer]:
        teacher = model(layers=3).requires_grad_(False)
        return model(), teacher

    student, teacher = pair()
    student, teacher, optimizer = accelerator.prepare(
        student, teacher, torch.optim.AdamW(student.parameters(), lr=1e-2)
    )
    ours = losses(student, teacher, optimizer, accelerator.backward)
    student, teacher = pair()
    mesh = init_device_mesh("cpu", (2,))
    for net in (student, teacher):
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    by_hand = losses(student, teacher, torch.optim.AdamW(student.parameters(), lr=1e-2), lambda loss: loss.backward())
    assert ours == by_hand


@ranks(2)
def test_losses_per_item_are_those_of_one_big_batch() -> None:
    """Ragged numbers of tokens on two ranks and in two micro-batches: every token counts once."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=FullyShardedDataParallelPlugin())
    inputs, targets = next(iter(loader(8)))
    kept = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(3)) > 0.6
    whole = model()
    logits = whole(inputs)[kept]
    (nn.functional.cross_entropy(logits, targets[kept], reduction="sum") / kept.sum()).backward()
    net = accelerator.prepare(model())
    for step in range(2):
        rows = slice(2 * (2 * step + accelerator.process_index), 2 * (2 * step + accelerator.process_index) + 2)
        with accelerator.accumulate(net):
            mine = kept[rows]
            loss = nn.functional.cross_entropy(net(inputs[rows])[mine], targets[rows][mine], reduction="sum")
            accelerator.backward(loss, num_items=mine.sum())
    expected = dict(whole.named_parameters())
    for name, param in net.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name].grad, atol=1e-6, rtol=1e-5)


@ranks(2)
def test_a_model_on_the_meta_device_gets_its_weights_shard_by_shard() -> None:
    with torch.device("meta"):
        net = Transformer(tied=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    torch.manual_seed(accelerator.process_index)  # the first process's numbers count
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert net.head.weight is net.tokens.weight
    assert not any(param.is_meta for param in net.parameters())
    assert all(param.isfinite().all() for param in net.parameters())
    gathered = accelerator.gather(net.blocks[0].up.weight.full_tensor().sum().reshape(1))
    assert gathered[0] == gathered[1]
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert {id(param) for param in net.parameters()} == {
        id(param) for group in optimizer.param_groups for param in group["params"]
    }


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@ranks(2)
def test_a_module_that_cannot_be_initialised_is_named_and_takes_an_init_fn() -> None:
    with torch.device("meta"):
        net = nn.Sequential(WithoutReset())
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    with pytest.raises(ValueError, match=r"A WithoutReset was made on the meta device and has no reset_parameters"):
        accelerator.prepare(net)
    with torch.device("meta"):
        net = nn.Sequential(WithoutReset())

    def ones(module: nn.Module) -> None:
        nn.init.ones_(module.weight)

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(param_init_fn=ones))
    assert accelerator.prepare(net)[0].weight.full_tensor().sum() == 16


@ranks(2)
def test_ignored_modules_stay_whole() -> None:
    plugin = FullyShardedDataParallelPlugin(ignored_modules="head")
    net = Accelerator(cpu=True, fsdp_plugin=plugin).prepare(model())
    assert net.head.weight.shape == net.head.weight.detach().clone().shape == (VOCABULARY, WIDTH)
    assert not hasattr(net.head.weight, "device_mesh")
    assert hasattr(net.blocks[0].up.weight, "device_mesh")


@ranks(4)
def test_a_rank_holds_a_quarter_of_parameters_gradients_and_moments() -> None:
    def bytes_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        tensors = [*net.parameters(), *(param.grad for param in net.parameters())]
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)

    def after_a_step(accelerator: Accelerator | None) -> int:
        net: Any = model(layers=4)
        optimizer: Any = torch.optim.AdamW(net.parameters())
        if accelerator is not None:
            net, optimizer = accelerator.prepare(net, optimizer)
        net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
        return bytes_of(net, optimizer)

    spread = after_a_step(Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()))
    assert spread / after_a_step(None) <= 0.30


@ranks(2)
def test_an_optimizer_that_has_stepped_brings_its_moments_along() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    moment = optimizer.state[net.head.weight]["exp_avg"].clone()
    optimizer.zero_grad()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net, optimizer = accelerator.prepare(net, optimizer)
    assert torch.equal(optimizer.state[net.head.weight]["exp_avg"].full_tensor(), moment)


@ranks(2)
def test_the_published_attributes_say_what_it_is() -> None:
    from meshwright import AcceleratorState, DistributedType

    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.distributed_type == DistributedType.FSDP == AcceleratorState().distributed_type
    assert accelerator.is_fsdp2
    assert accelerator.state.fsdp_plugin is plugin
    assert accelerator.parallelism_config.dp_shard_size == 2
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_shard",)
    assert accelerator.data_parallel_rank == accelerator.data_parallel_shard_rank == accelerator.process_index
    assert accelerator.tensor_parallel_rank == accelerator.context_parallel_rank == 0
    AcceleratorState._reset_state()  # a second Accelerator would share the plugin
    plain = Accelerator(cpu=True)
    assert plain.distributed_type == DistributedType.MULTI_CPU
    assert not plain.is_fsdp2
    assert plain.parallelism_config is None


@ranks(2)
def test_evaluation_and_moving_averages_work_on_shards() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    net, optimizer, batches = accelerator.prepare(
        net := model(), torch.optim.SGD(net.parameters(), lr=0.1), loader(4, samples=20)
    )
    average = {name: param.detach().clone() for name, param in net.named_parameters()}
    update = get_ema_multi_avg_fn(0.5)
    assert AveragedModel is not None
    seen = 0
    for inputs, targets in batches:
        accelerator.backward(loss_of(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            update(list(average.values()), [param.detach() for param in net.parameters()], torch.tensor(0))
    net.eval()
    with torch.no_grad():
        for inputs, _ in batches:
            seen += len(accelerator.gather_for_metrics(net(inputs)))
    assert seen == 20
    assert not torch.equal(average["head.weight"].full_tensor(), net.head.weight.full_tensor())
    assert accelerator.unwrap_model(net) is net


@ranks(2)
def test_a_step_gathers_no_more_often_than_by_hand() -> None:
    """The backward pass begins with the outermost unit, so it stays gathered until then."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    inputs, targets = batches()[0]

    def collectives(net: nn.Module) -> dict[Any, int]:
        with CommDebugMode() as seen:
            loss_of(net(inputs), targets).backward()
        return dict(seen.get_comm_counts())

    by_hand = model()
    for unit in (*by_hand.blocks, by_hand):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    ours = accelerator.prepare(model())
    assert collectives(ours) == collectives(by_hand)
    with torch.no_grad():
        ours(inputs)
    assert all(isinstance(param, DTensor) for param in ours.parameters()), "an evaluation leaves shards behind"
