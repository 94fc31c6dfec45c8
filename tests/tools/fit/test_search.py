"""Batch sizes that fit: the global batch and the losses are those by hand, whichever rank runs out of memory where."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Accelerator, FullyShardedDataParallelPlugin, MegatronLMPlugin, set_seed
from meshwright.errors import UnsupportedSettingError
from tests.parallel.small_transformer import loader as text_loader, model
from tests.parallel.ways import WAYS, passes
from tests.ranks import ranks, run_on_ranks
from tests.simulated_accelerator import device_module, run_on_a_simulated_accelerator
from tests.simulated_accelerator.faults import moves_in_place

from .training import by_hand, make_loader, make_net, steps, train


def settings_of(way: str) -> dict[str, Any]:
    settings: dict[str, Callable[[], dict[str, Any]]] = {
        "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "fp16": lambda: {"mixed_precision": "fp16"},
        "compiled": lambda: {"dynamo_backend": "aot_eager"},
    }
    return settings[way]() if way in settings else {}


def searched(way: str = "one", start: int = 32, least: int = 8, seed: int = 7, **options: Any) -> dict[str, Any]:
    """Search from a size on; the last rank has memory for `least` rows, the others for all."""
    accelerator = Accelerator(cpu=True, **settings_of(way))
    set_seed(seed, device_specific=True)
    most_rows = least if accelerator.is_last_process else None
    fitted = accelerator.fit_batch_size(start, remember=options.pop("remember", False))(train)
    losses = fitted(accelerator, most_rows=most_rows, **options)
    return {
        "losses": losses,
        "tries": [(each.batch_size, each.accumulation_steps, each.fits) for each in fitted.tries],
        "results": [each.result for each in fitted.tries],
        "steps": accelerator.gradient_accumulation_steps,
    }


def trained_by_hand(way: str, batch_size: int, accumulation: int, **options: Any) -> list[float]:
    return by_hand(batch_size, accumulation, settings={"cpu": True, **settings_of(way)}, **options)


@pytest.mark.parametrize("way", ["one", "fp16", "compiled", "ddp2", "fsdp2"])
def test_the_losses_are_those_of_the_same_batch_size_by_hand(way: str) -> None:
    world_size = WAYS[way][0] if way in WAYS else 1
    exact = way == "fsdp2"  # FSDP2 does not average the buffers of a batch norm
    found = run_on_ranks(world_size, searched, way=way, exact=exact)
    expected = run_on_ranks(world_size, trained_by_hand, way=way, batch_size=8, accumulation=4, exact=exact)
    last = world_size - 1
    for rank in range(world_size):
        assert found[rank]["losses"] == expected[rank], "bitwise, with the random numbers and the schedule"
        assert found[rank]["tries"] == [(32, 1, False), (16, 2, False), (8, 4, True)]
        assert found[rank]["results"][:2] == [f"rank {last}: out of memory: tried to allocate 2.00 GiB"] * 2
        assert found[rank]["steps"] == 4


def test_the_global_batch_is_that_of_the_size_that_does_not_fit() -> None:
    found = run_on_ranks(2, searched, way="ddp2", exact=True)[0]["losses"]
    expected = run_on_ranks(2, trained_by_hand, way="ddp2", batch_size=32, accumulation=1, exact=True)[0]
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@ranks(2)
def test_a_rank_that_fails_in_a_collective_of_others_leaves_nobody_waiting() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.fit_batch_size(4, remember=False)
    def fitted(batch_size: int) -> int:
        net = make_net()
        net, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), make_loader(batch_size)
        )
        if accelerator.is_last_process and batch_size > 2:
            raise torch.OutOfMemoryError("out of memory")
        accelerator.wait_for_everyone()
        accelerator.gather(torch.ones(1))
        accelerator.reduce(torch.ones(1))
        steps(accelerator, net, optimizer, loader)
        return batch_size

    assert fitted() == 2
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1], (
        "collectives are real again"
    )


def transformer_that_does_not_fit(way: str) -> tuple[int, list[str]]:
    accelerator = Accelerator(cpu=True, **WAYS[way][1]())

    @accelerator.fit_batch_size(4, remember=False)
    def fitted(batch_size: int) -> int:
        net = model()
        net, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), text_loader(batch_size)
        )
        for _, (inputs, targets) in zip(range(4), loader, strict=False):
            with accelerator.accumulate(net):
                if accelerator.is_last_process and len(inputs) > 2:
                    raise torch.OutOfMemoryError("out of memory")  # the other is in the first all-reduce of a block
                passes(accelerator, way, net, inputs, targets)
                optimizer.step()
                optimizer.zero_grad()
        return batch_size

    return fitted(), [each.result for each in fitted.tries]  # type: ignore[attr-defined]


def test_layers_that_are_split_over_ranks_leave_nobody_waiting() -> None:
    found = run_on_ranks(2, transformer_that_does_not_fit, way="tp2")
    assert found == [(2, ["rank 1: out of memory", "fits"])] * 2


@ranks(2)
def test_an_error_that_is_not_about_memory_ends_the_search_on_every_rank() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.fit_batch_size(4, remember=False)
    def fitted(batch_size: int) -> None:
        if accelerator.is_last_process:
            raise KeyError("a bug")
        train(batch_size, accelerator)

    with pytest.raises(
        *((KeyError,) if accelerator.is_last_process else (RuntimeError,)),
        match="a bug" if accelerator.is_last_process else "Rank 0 ends its search .* rank 1 failed .*a bug",
    ):
        fitted()


def test_what_was_prepared_before_gets_its_values_back() -> None:
    def run(fits: int) -> list[float]:
        accelerator = Accelerator(cpu=True)
        set_seed(3)
        net = make_net()
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        start = 8 if fits == 8 else 32
        accelerator.gradient_accumulation_steps = 32 // start

        def trained(batch_size: int) -> list[float]:
            loader = accelerator.prepare(make_loader(batch_size))
            return steps(accelerator, net, optimizer, loader, most_rows=fits)

        return accelerator.fit_batch_size(start, remember=False)(trained)() if start == 32 else trained(8)  # type: ignore[no-any-return]

    expected = run(8)
    assert run(9) == expected, "9 rows fit, and 8 is the next size that divides 32"


def test_a_model_that_outlives_the_function_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    net = make_net()

    @accelerator.fit_batch_size(4, remember=False)
    def fitted(batch_size: int) -> None:
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), make_loader(batch_size)
        )
        steps(accelerator, model, optimizer, loader)

    with pytest.raises(ValueError, match="Rank 0: Sequential was prepared in the function and outlives it"):
        fitted()


def test_a_loader_of_another_batch_size_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(make_loader(16))

    @accelerator.fit_batch_size(8, remember=False)
    def fitted(batch_size: int) -> None:
        net = make_net()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        steps(accelerator, net, optimizer, loader)

    with pytest.raises(ValueError, match=r"prepared before the call and has batches of 16 .* while 8 are tried"):
        fitted()


def test_a_loop_that_does_not_accumulate_is_refused() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.fit_batch_size(8, global_batch_size=16, remember=False)
    def fitted(batch_size: int) -> None:
        net = make_net()
        net, loader = accelerator.prepare(net, make_loader(batch_size))
        for features, _ in loader:
            accelerator.backward(net(features).sum())

    with pytest.raises(ValueError, match=r"does not use accelerator.accumulate\(model\)"):
        fitted()


def test_a_try_logs_and_saves_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    sizes: list[int] = []

    @accelerator.fit_batch_size(8, remember=False)
    def fitted(batch_size: int) -> None:
        sizes.append(batch_size)
        accelerator.init_trackers("run")
        accelerator.log({"batch_size": batch_size})
        accelerator.save_state(tmp_path / f"from {len(sizes)}")
        train(batch_size, accelerator, most_rows=4)

    fitted()
    accelerator.end_training()
    assert sizes == [8, 4, 4], "two tries, and the training"
    assert [path.name for path in tmp_path.glob("from*")] == ["from 3"]
    logged = "".join(file.read_text() for file in tmp_path.rglob("*.jsonl"))
    assert re.findall(r'"batch_size": ?([0-9]+)', logged) == ["4"]


def test_no_size_that_fits_ends_with_the_sizes() -> None:
    accelerator = Accelerator(cpu=True)

    @accelerator.fit_batch_size(6, remember=False)
    def fitted(batch_size: int) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(RuntimeError, match=r"did not suffice for any of \[6, 3, 2, 1\]"):
        fitted()


def test_what_a_trial_cannot_do_is_refused_by_name() -> None:
    accelerator = Accelerator(cpu=True)
    for options, message in (
        ({"global_batch_size": 0}, "A global batch of 0 cannot be kept"),
        ({"starting_batch_size": 0}, "at least 1, and got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            accelerator.fit_batch_size(**{"starting_batch_size": 4, **options})(train)(accelerator)
    by_megatron = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    with pytest.raises(UnsupportedSettingError, match=r"fit_batch_size with MegatronLMPlugin.*`meshwright plan`"):
        by_megatron.fit_batch_size(4)(train)


# --- Remembered sizes -------------------------------------------------------------------------------------------------


def remembered(path: Path, **options: Any) -> tuple[list[Any], str]:
    found = searched(remember=path, **options)
    return found["tries"], found["results"][0]


def test_the_next_start_begins_with_the_size_that_fits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sizes.json"
    assert remembered(path)[0] == [(32, 1, False), (16, 2, False), (8, 4, True)]
    tries, result = remembered(path)
    assert tries == [(8, 4, True)]
    assert result == f"remembered from an earlier start ({path})"
    assert searched(remember=path)["losses"] == trained_by_hand("one", 8, 4)
    lines = capfd.readouterr().err.splitlines()
    assert lines[:4] == [
        "Global batch of 32 = batch size x accumulation steps x 1 process that reads data:",
        "     32 x 1     rank 0: out of memory: tried to allocate 2.00 GiB",
        "     16 x 2     rank 0: out of memory: tried to allocate 2.00 GiB",
        "      8 x 4     fits",
    ]
    path.unlink()
    assert len(remembered(path)[0]) == 3, "a deleted file is forgotten"


def test_a_size_of_other_models_or_settings_is_not_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sizes.json"
    remembered(path)
    tries, _ = remembered(path, hidden=32, least=16)
    assert [size for size, _, fits in tries if not fits] == [32]
    assert tries[-1] == (16, 2, True)
    lines = capfd.readouterr().err
    assert "the remembered size is not used: the function prepared Sequential, 1,281 parameters" in lines
    assert remembered(path, hidden=32, start=64, least=16)[0] == [(64, 1, False), (32, 2, False), (16, 4, True)]
    assert "an earlier size is not used: samples_per_step was 32 and is 64" in capfd.readouterr().err


def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text("{nothing")
    assert len(remembered(path)[0]) == 3
    assert len(remembered(path)[0]) == 1
    assert len(remembered(tmp_path)[0]) == 3, "a folder cannot be written"


def fails_later(batch_size: int, accelerator: Accelerator, calls: list[int]) -> list[float]:
    """Run out of memory with 8 samples in the second epoch only, after the first steps."""
    calls.append(batch_size)
    net = make_net()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), make_loader(batch_size)
    )
    losses = steps(accelerator, net, optimizer, loader)
    return losses + steps(accelerator, net, optimizer, loader, most_rows=4)


def test_a_size_that_turns_out_too_large_later_is_not_tried_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    calls: list[int] = []
    fitted = accelerator.fit_batch_size(8, remember=tmp_path / "sizes.json")(fails_later)
    set_seed(0)
    losses = fitted(accelerator, calls)
    assert calls == [8, 8, 4, 4], "each is tried, then trained with"
    set_seed(0)
    accelerator.gradient_accumulation_steps = 2
    assert fails_later(4, accelerator, []) == losses
    calls.clear()
    accelerator.gradient_accumulation_steps = 1
    fitted(accelerator, calls)
    assert calls == [4]


def start_that_fails_later(path: Path) -> list[int]:
    accelerator = Accelerator(cpu=True)
    calls: list[int] = []
    with pytest.raises(torch.OutOfMemoryError):  # on every rank, at the same step
        accelerator.fit_batch_size(8, remember=path)(fails_later)(accelerator, calls)
    return calls


def start_after_it(path: Path) -> list[int]:
    accelerator = Accelerator(cpu=True)
    calls: list[int] = []
    accelerator.fit_batch_size(8, remember=path)(fails_later)(accelerator, calls)
    return calls


def test_processes_end_and_the_next_start_takes_the_next_size(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    assert run_on_ranks(2, start_that_fails_later, path=path) == [[8, 8]] * 2
    assert run_on_ranks(2, start_after_it, path=path) == [[4, 4]] * 2


# --- Real memory ------------------------------------------------------------------------------------------------------


def on_a_device(limit: int | None, start: int = 32) -> dict[str, Any]:
    """Search on a device whose memory is limited on the last rank; or train by hand with the size and tell the peak."""
    accelerator = Accelerator()
    index = accelerator.process_index
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(index)
    with moves_in_place():
        if limit is None:
            losses = by_hand(start, 32 // start, hidden=2048)
            return {"losses": losses, "peak": torch.accelerator.max_memory_reserved(index)}
        set_seed(7, device_specific=True)
        limited = device_module.memory_limit(limit, index) if accelerator.is_last_process else nullcontext()
        with limited:
            fitted = accelerator.fit_batch_size(32, remember=False)(train)
            losses = fitted(accelerator, hidden=2048)
    return {"losses": losses, "tries": [(each.batch_size, each.result) for each in fitted.tries]}


def test_a_rank_with_less_memory_decides_on_simulated_accelerators() -> None:
    peaks = {
        size: run_on_a_simulated_accelerator(on_a_device, world_size=2, limit=None, start=size) for size in (8, 16)
    }
    limit = (peaks[8][1]["peak"] + peaks[16][1]["peak"]) // 2
    found = run_on_a_simulated_accelerator(on_a_device, world_size=2, limit=limit)
    for rank in range(2):
        assert found[rank]["losses"] == peaks[8][rank]["losses"]
        tries = found[rank]["tries"]
        assert [size for size, _ in tries] == [32, 16, 8]
        assert [result.startswith("rank 1: ") and "out of memory" in result for _, result in tries] == [
            True,
            True,
            False,
        ]
        assert tries[2][1].startswith("fits, peak ")
