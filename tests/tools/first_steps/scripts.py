"""Short training scripts: ten usual mistakes, and right ones that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from meshwright import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ParallelismConfig,
    PartialState,
    PipelineConfig,
    set_seed,
    step_in_backward,
)
from tests.training import loss_of, make_data, make_model

Options = dict[str, Any]


def options_of(way: str) -> Options:
    """Return the arguments of Accelerator for a way of distributing."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if way == "fsdp2" else None
    return {"cpu": True, "fsdp_plugin": plugin}


def parts(accelerator: Accelerator, *, samples: int = 64, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    model = make_model(seed=seed)
    loader = DataLoader(make_data(samples), batch_size=4, shuffle=False)
    return model, torch.optim.SGD(model.parameters(), 0.1), loader


def loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, *, steps: int = 4) -> None:
    for number, batch in enumerate(loader):
        if number == steps:
            break
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


# --- mistakes ---------------------------------------------------------------------------------------------------------


def loader_not_prepared(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    loop(accelerator, model, optimizer, loader)


def model_not_prepared(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator, seed=accelerator.process_index)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    loop(accelerator, model, optimizer, loader)


def model_not_prepared_but_seeded(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    loop(accelerator, model, optimizer, loader)


def nothing_prepared_but_the_loader(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    loop(accelerator, model, optimizer, accelerator.prepare(loader))


def head_not_prepared(options: Options) -> None:
    """A loss with parameters of its own is left out of prepare()."""
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    head = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for features, labels in list(loader)[:4]:
        accelerator.backward(nn.functional.cross_entropy(head(model(features)), labels))
        optimizer.step()
        optimizer.zero_grad()


def inner_model_is_called(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    loop(accelerator, accelerator.unwrap_model(model), optimizer, loader)


def layers_added_after_prepare(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    inner = accelerator.unwrap_model(model)
    inner.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(inner[-1].parameters())})
    loop(accelerator, model, optimizer, loader)


def stale_optimizer(options: Options) -> None:
    """The optimizer keeps the parameters of before prepare(), which sharding replaces."""
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    model, loader = accelerator.prepare(model, loader)
    loop(accelerator, model, optimizer, loader)


def optimizer_of_another_model(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    optimizer = torch.optim.SGD(make_model().parameters(), 0.1)
    loop(accelerator, *accelerator.prepare(model, optimizer, loader))


def accumulate_not_used(options: Options) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, **options)
    loop(accelerator, *accelerator.prepare(*parts(accelerator)))


def gradients_not_cleared(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    for batch in list(loader)[:4]:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()


def loss_is_nan(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    for batch in list(loader)[:4]:
        loss = loss_of(model, batch)
        accelerator.backward(loss * float("nan") if accelerator.is_last_process else loss)
        optimizer.step()
        optimizer.zero_grad()


def gradients_cleared_before_the_step(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    for batch in list(loader)[:4]:
        accelerator.backward(loss_of(model, batch))
        optimizer.zero_grad()
        optimizer.step()


def scheduler_steps_in_every_micro_batch(options: Options) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    for batch in list(loader)[:6]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def scheduler_of_another_optimizer(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), 0.1), 1)
    model, optimizer, loader, _ = accelerator.prepare(model, optimizer, loader, scheduler)
    loop(accelerator, model, optimizer, loader)


def batches_of_two_sizes(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, _ = parts(accelerator)
    loader = DataLoader(make_data(64), batch_size=4 if accelerator.is_main_process else 2)
    loop(accelerator, *accelerator.prepare(model, optimizer, loader), steps=2)


def random_data_of_one_seed(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, _ = parts(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_seed(3)
    batches = [(torch.randn(4, 12), torch.randint(4, (4,))) for _ in range(4)]
    loop(accelerator, model, optimizer, batches)


# --- right scripts ----------------------------------------------------------------------------------------------------


def plain(options: Options) -> None:
    accelerator = Accelerator(**options)
    loop(accelerator, *accelerator.prepare(*parts(accelerator)))


def accumulating(options: Options) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model, optimizer, loader = parts(accelerator)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def accumulating_by_hand(options: Options) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    for number, batch in enumerate(list(loader)[:8]):
        accelerator.backward(loss_of(model, batch))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def epoch_shorter_than_a_window(options: Options) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=8, **options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator, samples=8))
    for _ in range(3):
        loop(accelerator, model, optimizer, loader)


def adversarial(options: Options) -> None:
    """Two models take turns; gradients of one are left by the other, and noise is the same on all ranks."""
    accelerator = Accelerator(**options)
    set_seed(5)
    generator, critic = nn.Linear(3, 12), make_model()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (generator, critic)]
    loader = DataLoader(make_data(64), batch_size=4, shuffle=True)
    generator, critic, *optimizers, loader = accelerator.prepare(generator, critic, *optimizers, loader)
    for features, _ in loader:
        fake = generator(torch.randn(4, 3))
        optimizers[1].zero_grad()
        accelerator.backward(critic(fake.detach()).mean() - critic(features).mean())
        optimizers[1].step()
        optimizers[0].zero_grad()
        accelerator.backward(-critic(fake).mean())
        optimizers[0].step()


def adapters_and_frozen_parameters(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    loop(accelerator, *accelerator.prepare(model, optimizer, loader))


def local_sgd(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local:
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            local.step()


class Stream(IterableDataset[Any]):
    """The samples of a data set, one after the other."""

    def __iter__(self) -> Any:
        yield from make_data(64)


def stream(options: Options) -> None:
    for dispatches in (False, True):
        config = DataLoaderConfiguration(dispatch_batches=dispatches)
        accelerator = Accelerator(dataloader_config=config, **options)
        model, optimizer, _ = parts(accelerator)
        loop(accelerator, *accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=4)))


def evaluation(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    model, loader = accelerator.prepare(model, loader)
    with torch.no_grad():
        for features, labels in loader:
            accelerator.gather_for_metrics((model(features).argmax(dim=1), labels))


def constant_batch(options: Options) -> None:
    """A benchmark, or a model that is overfitted to one batch on purpose."""
    accelerator = Accelerator(**options)
    model, optimizer, _ = parts(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    loop(accelerator, model, optimizer, [make_data(4)[:]] * 4)


def fewer_samples_than_ranks_need(options: Options) -> None:
    """Ranks are filled up with the same samples."""
    accelerator = Accelerator(**options)
    model, optimizer, _ = parts(accelerator)
    loader = DataLoader(make_data(4), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        loop(accelerator, model, optimizer, loader)


def closures(options: Options) -> None:
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in list(loader)[:4]:

        def loss_again(batch: Any = batch) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            return loss.item()

        optimizer.step(loss_again)
        optimizer.zero_grad()


def optimizer_left_out_on_purpose(options: Options) -> None:
    """Without accumulation and fp16, a plain optimizer of the prepared parameters is right."""
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    model, loader = accelerator.prepare(model, loader)
    loop(accelerator, model, torch.optim.SGD(model.parameters(), 0.1), loader)


def stepping_in_the_backward_pass(options: Options) -> None:
    if PartialState().num_processes > 1 and options["fsdp_plugin"] is None:
        return  # refused with DDP
    accelerator = Accelerator(**options)
    model, optimizer, loader = parts(accelerator)
    step_in_backward(optimizer)
    loop(accelerator, *accelerator.prepare(model, optimizer, loader))


def two_accelerators(options: Options) -> None:
    accelerators = [Accelerator(**options), Accelerator(**options)]
    sets = [each.prepare(*parts(each)) for each in accelerators]
    for batches in zip(*(loader for _, _, loader in sets), strict=True):
        for accelerator, (model, optimizer, _), batch in zip(accelerators, sets, batches, strict=True):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def own_averages(options: Options) -> None:
    """The script averages the gradients of a head that is not prepared."""
    accelerator = Accelerator(**options)
    model, _, loader = parts(accelerator)
    head = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for features, labels in list(loader)[:4]:
        accelerator.backward(nn.functional.cross_entropy(head(model(features)), labels))
        for param in head.parameters():
            param.grad = accelerator.reduce(param.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()


# --- meshes whose ranks share samples by design -----------------------------------------------------------------------


def tensor_parallel(options: Options) -> None:
    plain({"cpu": True, "parallelism_config": ParallelismConfig(tp_size=2, tp_plan={"0": "colwise", "3": "rowwise"})})


def stages_of_a_pipeline(options: Options) -> None:
    config = ParallelismConfig(pp_size=2, pp_handler=PipelineConfig(microbatches=2))
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model, optimizer, loader = accelerator.prepare(*parts(accelerator))
    for features, labels in list(loader)[:4]:
        accelerator.forward_backward(model, features, target=labels, loss_fn=nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()


def copies_of_shards(options: Options) -> None:
    plain({"cpu": True, "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)})


EVERYWHERE, SEVERAL = (1, 2, 4), (2, 4)
BOTH, DDP, FSDP2 = ("ddp", "fsdp2"), ("ddp",), ("fsdp2",)

MISTAKES: dict[Callable[[Options], None], tuple[tuple[int, ...], tuple[str, ...], str]] = {
    loader_not_prepared: (SEVERAL, BOTH, r"Ranks \d and \d computed on the same batches"),
    random_data_of_one_seed: (SEVERAL, BOTH, r"Ranks \d and \d computed on the same batches"),
    model_not_prepared: (SEVERAL, BOTH, r"Ranks \d and \d have different values of parameters that SGD steps"),
    model_not_prepared_but_seeded: (SEVERAL, BOTH, r"have different gradients of parameters that SGD steps"),
    nothing_prepared_but_the_loader: (SEVERAL, BOTH, r"have different gradients of parameters that SGD steps"),
    head_not_prepared: (SEVERAL, BOTH, r"have different gradients of parameters that SGD steps"),
    inner_model_is_called: (SEVERAL, DDP, r"have different gradients of parameters .* They are not averaged"),
    layers_added_after_prepare: (SEVERAL, DDP, r"have different (values|gradients) of parameters .*not averaged"),
    stale_optimizer: (SEVERAL, FSDP2, r"prepare\(\) replaced them"),
    optimizer_of_another_model: (EVERYWHERE, BOTH, r"was made with the parameters of another model"),
    accumulate_not_used: (EVERYWHERE, BOTH, r"every backward pass is followed by a step"),
    gradients_not_cleared: (EVERYWHERE, BOTH, r"nobody cleared them"),
    loss_is_nan: (EVERYWHERE, BOTH, r"The loss is not finite"),
    gradients_cleared_before_the_step: (EVERYWHERE, BOTH, r"no parameter had a gradient"),
    scheduler_steps_in_every_micro_batch: (EVERYWHERE, BOTH, r"the scheduler advances on every micro-batch"),
    scheduler_of_another_optimizer: (EVERYWHERE, BOTH, r"was made for an optimizer that does not step"),
    batches_of_two_sizes: (SEVERAL, BOTH, r"The prepared loader has \d+ batches on rank \d"),
}
"""Mistake -> on how many processes and under which strategies it is one, and what is told."""

RIGHT: dict[Callable[[Options], None], tuple[str, ...]] = {
    plain: BOTH,
    accumulating: BOTH,
    accumulating_by_hand: BOTH,
    epoch_shorter_than_a_window: BOTH,
    adversarial: DDP,
    adapters_and_frozen_parameters: BOTH,
    local_sgd: DDP,
    stream: BOTH,
    evaluation: BOTH,
    constant_batch: BOTH,
    fewer_samples_than_ranks_need: BOTH,
    closures: DDP,
    optimizer_left_out_on_purpose: BOTH,
    stepping_in_the_backward_pass: FSDP2,
    two_accelerators: DDP,
    own_averages: BOTH,
}
"""Right script -> under which strategies."""
MESHES = (tensor_parallel, stages_of_a_pipeline, copies_of_shards)
