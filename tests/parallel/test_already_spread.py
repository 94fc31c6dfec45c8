"""A model that is spread before `prepare` is used as it is where that is right, or refused by both layouts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from meshwright import Accelerator, LocalSGD, ParallelismConfig, PartialState
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks, run_on_ranks
from tests.sizes import cases

from .beside_one_process import off_by
from .mesh.context import cpu_attention
from .small_transformer import HEADS, WIDTH, Block, Transformer, loader, loss_of, model
from .spread_models import KINDS, KINDS_OF_FOUR, SETTINGS, shard, shard_blocks, split

SHARDED = {"fully_shard", "fully_shard of blocks", "fully_shard but one"}
USED: dict[tuple[int, str], set[str]] = {
    (2, "none"): {*SHARDED, "DDP", "replicate"},
    (2, "fsdp"): SHARDED,
    (2, "tp"): {"parallelize_module"},
    (2, "pp"): set(),
    (4, "none"): {*SHARDED, "DDP", "replicate", "HSDP"},
    (4, "fsdp"): SHARDED,
    (4, "hsdp"): {"HSDP"},
    (4, "fsdp x tp"): {"fully_shard and parallelize_module", "parallelize_module over pairs"},
    (4, "copies x tp"): {"parallelize_module over pairs"},
}
"""What is used as it is, by number of processes and settings; everything else is refused."""
ASKED = {
    "none": r"a copy of the model on each of {} processes \(DDP",
    "fsdp": r"the mesh \(dp_shard={}\)",
    "tp": r"the mesh \(tp=2\)",
    "pp": r"the mesh \(pp=2\)",
    "hsdp": r"the mesh \(dp_replicate=2, dp_shard=2\)",
    "fsdp x tp": r"the mesh \(dp_shard=2, tp=2\)",
    "copies x tp": r"the mesh \(dp_replicate=2, tp=2\)",
}
HAS = {
    "fully_shard": r"sharded by fully_shard\(\): tokens.weight is \[S.*\(0\)\] on the mesh \(.*=\d\) of ranks 0, 1",
    "fully_shard of blocks": r"blocks.0.norm1.weight is .* and 5 of its parameters are whole",
    "fully_shard divided by 1": r"set_gradient_divide_factor\(\) makes its gradients no mean",
    "parallelize_module": r"is split: blocks.0.query.weight is \[S.*\(0\)\] on the mesh \(inner=\d\) of ranks 0, 1",
    "DDP": r"is in DistributedDataParallel over ranks 0, 1.* model.module",
    "DDP of a block": r"DistributedDataParallel at blocks.0 .* only its part blocks.0 is wrapped",
    "FSDP1": r"is in FullyShardedDataParallel .*fsdp_plugin",
    "DataParallel": r"is in DataParallel .* one process per device",
    "replicate": r"is in replicate\(\) over ranks 0, 1",
    "cpu_offload": r"keeps weights on the host .* without cpu_offload",
    "HSDP": r"\[R.*, S.*\(0\)\] on the mesh \(outer=2, inner=2\) .*dp_replicate_size=2, dp_shard_size=2",
    "fully_shard and parallelize_module": r"blocks.0.query.weight is .* of ranks 0, 1, 2, 3",
    "parallelize_module over distant pairs": r"on the mesh \(outer=2\) of ranks 0, 2",
    "DDP over pairs": r"is in DistributedDataParallel over ranks 0, 1 ",
}


def _cells(world: int, setting: str) -> dict[str, Any]:
    """Train every kind of model under one setting; return how far each is off one process, or the refusal."""
    found: dict[str, Any] = {}
    for kind, spread in {**KINDS, **(KINDS_OF_FOUR if world == 4 else {})}.items():
        run_by = Accelerator(cpu=True, gradient_accumulation_steps=2, **SETTINGS[world][setting]())
        net = spread(model())
        try:
            found[kind] = off_by(run_by, net, steps=2, alone=model(), microbatches=2)
        except UnsupportedSettingError as refusal:
            found[kind] = str(refusal)
    return found


IN_THE_GATE = [(world, setting) for world, setting in USED if world == 4 or (4, setting) not in USED]
"""Four processes have all kinds of models that two have."""


@pytest.mark.parametrize(("world", "setting"), cases(gate=IN_THE_GATE, nightly=USED))
def test_a_model_is_used_as_it_is_or_refused_by_both_layouts(world: int, setting: str) -> None:
    found = run_on_ranks(world, _cells, world=world, setting=setting)[0]
    used = {kind for kind, outcome in found.items() if not isinstance(outcome, str)}
    assert used == USED[world, setting]
    for kind in used:
        assert max(found[kind].values()) < 1e-5, (kind, found[kind])
    for kind in found.keys() - used:
        assert re.search(f"this Accelerator asks for {ASKED[setting].format(world)}", found[kind]), found[kind]
        assert re.search(HAS.get(kind, "was spread before prepare"), found[kind]), found[kind]


@ranks(2)
def test_nothing_of_a_refused_model_is_changed() -> None:
    run_by = Accelerator(cpu=True, mixed_precision="bf16")
    net = split(model(), init_device_mesh("cpu", (2,)))
    forward = net.forward
    with pytest.raises(UnsupportedSettingError, match=r"ParallelismConfig\(tp_size=2\)"):
        run_by.prepare(net)
    assert net.forward == forward


@pytest.mark.parametrize("precision", ["bf16", "no"])
@ranks(2)
def test_losses_of_a_model_that_came_sharded_are_those_of_ddp(precision: str) -> None:
    losses = []
    for spread in (lambda net: net, shard, shard_blocks):
        run_by = Accelerator(cpu=True, mixed_precision=precision)
        net = spread(model())
        net, optimizer, batches = run_by.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(4))
        found = []
        for _, (inputs, targets) in zip(range(4), batches, strict=False):
            loss = F_sum(net(inputs), targets)
            run_by.backward(loss, num_items=targets.numel())
            run_by.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(run_by.reduce(loss.detach() / targets.numel(), "mean").item())
        losses.append(found)
    tolerance = 1e-5 if precision == "no" else 2e-2
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    assert losses[2] == pytest.approx(losses[0], abs=tolerance)


def F_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return loss_of(logits, targets) * targets.numel()


@ranks(2)
def test_a_model_that_came_sharded_is_saved_in_shards_and_loads_into_a_plain_one(tmp_path: Path) -> None:
    run_by = Accelerator(cpu=True)
    net = shard_blocks(model())
    net, optimizer = run_by.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    for inputs, targets in list(loader(4))[:2]:
        run_by.backward(loss_of(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    folder = str(tmp_path / "state")
    run_by.save_state(folder)
    assert (tmp_path / "state" / "pytorch_model_fsdp_0").is_dir()
    whole = run_by.get_state_dict(net)
    assert set(whole) == (set(model().state_dict()) if run_by.is_main_process else set())

    plain = Accelerator(cpu=True)
    copied = model()
    copied, by_itself = plain.prepare(copied, torch.optim.AdamW(copied.parameters(), lr=1e-2))
    plain.load_state(folder)
    again = Accelerator(cpu=True)
    second = shard(model())
    second, its_own = again.prepare(second, torch.optim.AdamW(second.parameters(), lr=1e-2))
    again.load_state(folder)
    inputs, targets = next(iter(loader(4)))
    ends = []
    for accelerator, each, stepper in ((run_by, net, optimizer), (plain, copied, by_itself), (again, second, its_own)):
        accelerator.backward(loss_of(each(inputs), targets))
        stepper.step()
        ends.append({name.removeprefix("module."): _whole(param) for name, param in each.named_parameters()})
    for other in ends[1:]:
        assert max(float((other[name] - value).abs().max()) for name, value in ends[0].items()) < 1e-6


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


@ranks(4)
def test_copies_of_a_model_that_came_sharded_start_with_the_values_of_the_first() -> None:
    run_by = Accelerator(cpu=True)
    torch.manual_seed(run_by.process_index // 2)
    net = shard(Transformer(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    net = run_by.prepare(net)
    torch.manual_seed(0)
    wanted = dict(Transformer().named_parameters())
    for name, param in net.named_parameters():
        assert torch.equal(_whole(param), wanted[name]), name


class NormPerHead(Block):
    """A block with a norm between the layers that are split, whose gradient every process sees a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.per_head = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(self.per_head(query), key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def _with_norms() -> Transformer:
    torch.manual_seed(0)
    net = Transformer()
    net.blocks = nn.ModuleList(NormPerHead() for _ in range(2))
    return net


@ranks(2, 4)
def test_partial_gradients_of_a_model_that_came_split_are_summed(world_size: int) -> None:
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "model"))
    for shards in (False, True) if world_size == 4 else (False,):
        net = split(_with_norms(), mesh["model"])
        if shards:
            shard(net, mesh=mesh["data"])
        config = ParallelismConfig(tp_size=2, dp_shard_size=world_size // 2)
        run_by = Accelerator(cpu=True, parallelism_config=config)
        assert max(off_by(run_by, net, alone=_with_norms()).values()) < 1e-5


@ranks(2)
def test_a_hook_that_may_sum_a_partial_gradient_is_refused() -> None:
    run_by = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    net = split(_with_norms(), init_device_mesh("cpu", (2,)))
    net.blocks[1].per_head.weight.register_hook(lambda gradient: gradient)
    net = run_by.prepare(net)
    with pytest.raises(UnsupportedSettingError, match=r"hook on blocks.1.per_head.weight .* summed over the tp axis"):
        net(next(iter(loader(4)))[0])


@ranks(2)
def test_a_model_that_came_sharded_trains_under_context_parallelism() -> None:
    cpu_attention.register()
    losses = []
    for spread in (lambda net: net, shard):
        run_by = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
        net = spread(model())
        net, optimizer, batches = run_by.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader(8))
        found = []
        for _, (inputs, targets) in zip(range(3), batches, strict=False):
            positions = torch.arange(inputs.shape[1]).expand(inputs.shape[0], -1).contiguous()
            cut = [inputs, targets, positions]
            with run_by.maybe_context_parallel(buffers=cut, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(cut)):
                loss = loss_of(net(inputs, positions), targets)
                run_by.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(run_by.reduce(loss.detach(), "mean").item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@ranks(2)
def test_a_model_for_evaluation_is_used_as_it_is() -> None:
    tokens = next(iter(loader(4)))[0]
    wanted = model()(tokens)
    PartialState(cpu=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.warns(UserWarning, match=r"Ranks 0, 1 compute each of its outputs together.*tp_size=2"):
        found = Accelerator(cpu=True).prepare_model(split(model(), mesh), evaluation_mode=True)(tokens)
    assert torch.allclose(found, wanted, atol=1e-5)
    for spread in (shard, shard_blocks, DistributedDataParallel):
        net = Accelerator(cpu=True).prepare_model(spread(model()), evaluation_mode=True)
        assert torch.allclose(net(tokens), wanted, atol=1e-5)


@ranks(2)
def test_a_frozen_model_with_offloaded_weights_computes_on_every_process() -> None:
    frozen = KINDS["cpu_offload"](model().requires_grad_(False))
    tokens = next(iter(loader(4)))[0]
    assert torch.allclose(Accelerator(cpu=True).prepare(frozen)(tokens), model()(tokens))


@ranks(2)
def test_what_needs_plain_layers_or_whole_copies_is_refused() -> None:
    run_by = Accelerator(cpu=True)
    net = run_by.prepare(fully_shard(model()))
    with pytest.raises(ValueError, match=r"LocalSGD needs whole copies .* or the model is sharded"):
        LocalSGD(accelerator=run_by, model=net, local_sgd_steps=2)


@ranks(2)
def test_a_data_parallel_without_devices_is_a_plain_model() -> None:
    run_by = Accelerator(cpu=True)
    inputs, targets = next(iter(loader(4)))
    mine = slice(2 * run_by.process_index, 2 * run_by.process_index + 2)
    net, alone = run_by.prepare(DataParallel(model())), model()
    run_by.backward(loss_of(net(inputs[mine]), targets[mine]))
    loss_of(alone(inputs), targets).backward()
    for own, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None
        assert torch.allclose(own.grad, wanted.grad, atol=1e-6)


def test_on_one_process_wrappers_are_used_as_they_are() -> None:
    for spread in (DataParallel, copy.deepcopy):
        assert max(off_by(Accelerator(cpu=True), spread(model()), alone=model()).values()) == 0.0
