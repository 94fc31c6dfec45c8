"""The façade on one process."""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from meshwright import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    DataLoaderShard,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientState,
    InitProcessGroupKwargs,
    KwargsHandler,
    MegatronLMPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    skip_first_batches,
)
from meshwright.errors import UnsupportedSettingError
from meshwright.parallel.modules.dtensors import any_dtensor
from tests.ranks import ranks
from tests.training import loss_of, make_data, make_model, parameters_of


def test_prepare_returns_objects_in_the_order_they_came_and_leaves_others_alone() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(make_data(8), batch_size=2)
    other = object()
    prepared = accelerator.prepare(scheduler, other, loader, optimizer, model)
    kinds = [type(item) for item in prepared]
    assert kinds == [AcceleratedScheduler, object, DataLoaderShard, AcceleratedOptimizer, torch.nn.Sequential]
    assert prepared[1] is other
    assert prepared[0].optimizers == [prepared[3]]
    assert accelerator.prepare(*prepared) == prepared, "preparing twice changes nothing"
    assert accelerator._models == [model]


def test_prepare_of_one_object_returns_that_object() -> None:
    model = make_model()
    assert Accelerator(cpu=True).prepare(model) is model


def test_device_placement_must_fit_the_objects() -> None:
    with pytest.raises(ValueError, match="list with 1 elements"):
        Accelerator(cpu=True).prepare(make_model(), device_placement=[True, False])


def test_one_process_trains_exactly_as_the_plain_loop() -> None:
    """Dropout, shuffling and random augmentation: the same random numbers in the same order."""

    def augment(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.stack([x for x, _ in samples])
        return features + 0.1 * torch.randn_like(features), torch.stack([y for _, y in samples])

    def run(prepare: bool) -> list[torch.Tensor]:
        model = make_model(dropout=0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        loader = DataLoader(make_data(30), batch_size=4, shuffle=True, collate_fn=augment)
        if prepare:
            accelerator = Accelerator(cpu=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(2):
            for batch in loader:
                loss = loss_of(model, batch)
                if prepare:
                    accelerator.backward(loss)
                else:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return parameters_of(model)

    assert all(torch.equal(a, b) for a, b in zip(run(prepare=True), run(prepare=False), strict=True))


def test_two_accelerators_with_other_settings_live_side_by_side() -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    second = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=3)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 3)
    assert AcceleratorState().mixed_precision == "no", "the newest answers from afar"
    assert GradientState() is second.gradient_state
    one, two = first.prepare(make_model()), second.prepare(make_model())
    with first.accumulate(one):
        first.backward(one(torch.ones(1, 12)).sum())
    assert not first.sync_gradients
    assert second.sync_gradients
    loader = first.prepare(DataLoader(make_data(4), batch_size=2))
    for _ in loader:
        assert first.gradient_state.in_dataloader
        assert not second.gradient_state.in_dataloader
    assert two is not one


def test_a_second_accelerator_has_the_number_format_of_the_first_as_in_1_15(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Accelerator(cpu=True, mixed_precision="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    second = Accelerator(cpu=True)
    assert second.mixed_precision == second.state.mixed_precision == "bf16"
    assert "mixed_precision = bf16  (the first Accelerator)" in second.settings.explain()
    with pytest.raises(ValueError, match="needs sp_size=2"):
        Accelerator(cpu=True, mixed_precision="no", parallelism_config=ParallelismConfig(sp_size=2))
    third = Accelerator(cpu=True, mixed_precision="no")  # 1.15 refuses a second format
    assert (first.mixed_precision, third.mixed_precision) == ("bf16", "no")
    assert Accelerator(cpu=True).mixed_precision == "bf16", "a format that is given is that of one Accelerator alone"


def test_an_accelerator_that_fails_leaves_nothing_to_the_next_one() -> None:
    with pytest.raises(ValueError, match="needs sp_size=2"):
        Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=ParallelismConfig(sp_size=2))
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_a_second_accelerator_compiles_like_the_first_unless_it_is_told_otherwise() -> None:
    first = Accelerator(cpu=True, dynamo_backend="eager", gradient_accumulation_steps=2)
    second, third = Accelerator(cpu=True), Accelerator(cpu=True, dynamo_backend="no", gradient_accumulation_steps=3)
    assert [str(one.state.dynamo_plugin.backend) for one in (first, second, third)] == ["EAGER", "EAGER", "NO"]
    assert [one.gradient_accumulation_steps for one in (first, second, third)] == [2, 1, 3]
    AcceleratorState._reset_state()
    assert str(Accelerator(cpu=True).state.dynamo_plugin.backend) == "NO"


@ranks(2)
def test_an_accelerator_of_several_processes_can_be_pickled() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.process_index == accelerator.process_index
    assert again.prepare(make_model()) is not model, "it prepares models like the first one"


@ranks(2)
def test_a_second_accelerator_shards_like_the_first_unless_it_is_told_otherwise() -> None:
    first = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    second = Accelerator(cpu=True)
    assert first.distributed_type == second.distributed_type == DistributedType.FSDP
    assert any_dtensor(second.prepare(make_model()).parameters())
    third = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_replicate_size=2))
    assert not any_dtensor(third.prepare(make_model()).parameters())
    AcceleratorState._reset_state()
    megatron = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(use_distributed_optimizer=True))
    assert Accelerator(cpu=True).state.megatron_lm_plugin is megatron.state.megatron_lm_plugin


def test_handlers_are_checked() -> None:
    class Unknown(KwargsHandler):
        pass

    with pytest.raises(TypeError, match="kwargs_handlers takes objects such as"):
        Accelerator(kwargs_handlers=[{"find_unused_parameters": True}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="only pass one DistributedDataParallelKwargs"):
        Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(), DistributedDataParallelKwargs()])
    with pytest.raises(UnsupportedSettingError, match="Unknown"):
        Accelerator(kwargs_handlers=[Unknown()])
    handler = InitProcessGroupKwargs(backend="gloo")
    assert Accelerator(cpu=True, kwargs_handlers=[handler]).init_handler is handler


def test_facts_about_one_process() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.device == torch.device("cpu")
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.is_last_process
    assert not accelerator.use_distributed
    assert not accelerator.multi_device
    assert not accelerator.is_fsdp2
    assert accelerator.parallelism_config is None
    assert accelerator.torch_device_mesh is None
    assert accelerator.scaler is None
    assert "rank 0 of 1 on cpu" in repr(accelerator)
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()


def test_loader_settings_can_be_read_and_even_batches_written() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, non_blocking=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, split_batches=True)
    assert accelerator.split_batches
    assert accelerator.use_seedable_sampler
    assert accelerator.non_blocking
    assert accelerator.dispatch_batches is None
    assert not accelerator.use_stateful_dataloader
    accelerator.even_batches = False
    assert config.even_batches is False


def test_project_directories() -> None:
    accelerator = Accelerator(cpu=True, project_dir="runs/a")
    assert (accelerator.project_dir, accelerator.logging_dir) == ("runs/a", "runs/a")
    config = ProjectConfiguration(project_dir="runs/b", logging_dir="logs", iteration=3)
    accelerator = Accelerator(cpu=True, project_config=config)
    assert (accelerator.project_dir, accelerator.logging_dir) == ("runs/b", "logs")
    assert accelerator.save_iteration == 3


def test_free_memory_forgets_what_was_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    seen = weakref.ref(model)
    (model,) = accelerator.free_memory(model)
    gc.collect()
    assert model is None
    assert seen() is None
    assert accelerator._models == []
    assert accelerator.clear(1, 2) == [None, None]


def test_free_memory_forgets_the_model_that_accumulated_last() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
    held = weakref.ref(model)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert held() is None


def test_gathering_on_one_process_returns_the_data_itself() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
    seen = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    assert seen == [[0, 1], [2, 3], [4]]
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    assert accelerator.pad_across_processes(torch.ones(2)).tolist() == [1, 1]


def test_skip_first_batches_continues_where_it_was_told() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(7), batch_size=2))
    skipped = accelerator.skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in skipped] == [[4, 5], [6]]
    assert len(skipped) == 2


def test_loaders_are_registered_in_the_order_in_which_they_were_given() -> None:
    """A checkpoint numbers the files of loaders by it."""
    other = Accelerator(cpu=True).prepare(DataLoader(range(9)))
    accelerator = Accelerator(cpu=True)
    plain = DataLoader(range(8))
    first, skipping, *rest = accelerator.prepare(plain, skip_first_batches(plain, 2), other, DataLoader(range(3)))
    assert accelerator._dataloaders == [first, skipping, *rest]
    assert [len(loader) for loader in accelerator._dataloaders] == [8, 6, 9, 3]
    assert rest[0] is other
    assert accelerator.prepare(first, other) == (first, other)
    assert len(accelerator._dataloaders) == 4


def test_saving_and_loading_a_state_dict(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    path = tmp_path / "weights.pt"
    accelerator.save(accelerator.get_state_dict(model), path)
    again = make_model(seed=9)
    again.load_state_dict(torch.load(path, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


def test_backward_hands_options_on() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    loss = loss_of(model, make_data(4)[:])
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)


def test_published_attributes_that_libraries_write_can_be_written() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    accelerator.native_amp = False
    accelerator.scaler = None
    accelerator.gradient_accumulation_steps = 5
    accelerator.sync_gradients = False
    accelerator.step = 3
    assert accelerator.gradient_accumulation_steps == 5
    assert accelerator.precision.scaler is None
    assert accelerator.step == 3


def test_settings_say_where_they_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.settings.explain().splitlines() == [
        "mixed_precision = bf16  (environment variable ACCELERATE_MIXED_PRECISION)",
        "gradient_accumulation_steps = 2  (code)",
    ]


def test_a_second_accelerator_takes_over_what_the_first_prepared() -> None:
    """As when the cells of a notebook run again with other settings."""
    model = make_model()
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, step_size=1)
    loader = DataLoader(make_data(8), batch_size=2)
    first = Accelerator(cpu=True, mixed_precision="bf16").prepare(model, plain_optimizer, scheduler, loader)
    second = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = prepared = second.prepare(*first)
    assert second.prepare(*prepared) == prepared
    assert model.forward.autocast().fast_dtype == torch.float16
    assert model._original_forward.__func__ is torch.nn.Sequential.forward, "the first one's autocast is gone"
    assert optimizer.optimizer is plain_optimizer
    assert optimizer.scaler is second.scaler
    assert scheduler.optimizers == [optimizer]
    assert {thing.gradient_state for thing in (optimizer, scheduler, loader)} == {second.gradient_state}
    before = parameters_of(model)
    for batch in loader:
        with second.accumulate(model):
            second.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    moved = max((a - b).abs().max().item() for a, b in zip(before, parameters_of(model), strict=True))
    assert 0 < moved < 1, "scaled gradients were unscaled"


def test_settings_that_only_a_prepared_optimizer_obeys_are_named_at_the_line_of_the_script() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=4)
    model = accelerator.prepare(make_model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            accelerator.backward(loss_of(model, make_data(4)[:]))
    assert [str(warning.message).partition(" was given")[0] for warning in caught] == [
        "gradient_accumulation_steps=4, but no optimizer",
        "fp16 losses are scaled, but no optimizer",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.backward(loss_of(model, make_data(4)[:]))
