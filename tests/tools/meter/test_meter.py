"""What the meter says of a loop, beside what is counted and clocked by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright import Accelerator, AcceleratorState, FullyShardedDataParallelPlugin, ParallelismConfig
from meshwright.runtime import phases
from meshwright.tools.meter import meter
from meshwright.tools.meter.meter import Meter
from meshwright.tools.meter.reading import Reading
from tests.ranks import ranks

LENGTH, REAL, VOCABULARY, SAMPLES, BATCH = 16, 12, 40, 46, 4


class HandClock:
    """A clock that only `pause` advances: no test depends on how busy the machine is."""

    now: float | None = None
    """None where time is real: on the ranks of a process group."""


def pause(seconds: float) -> None:
    if HandClock.now is None:
        time.sleep(seconds)
    else:
        HandClock.now += seconds


@pytest.fixture(autouse=True)
def hand_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandClock, "now", 100.0)
    for module in (meter, phases):
        monkeypatch.setattr(module, "perf_counter", lambda: HandClock.now)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.down(self.up(self.embedding(input_ids)))


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    """Make a batch with padding."""
    mask = torch.ones(len(samples), LENGTH, dtype=torch.long)
    mask[:, REAL:] = 0
    return {"input_ids": torch.stack(samples), "attention_mask": mask}


class Run:
    """A small training, whose batches of training are counted and clocked by hand."""

    def __init__(self, samples: int = SAMPLES, step_seconds: float = 0.01, **options: Any) -> None:
        self.step_seconds = step_seconds
        self.accelerator = Accelerator(cpu=True, **{"meter": True, **options})
        torch.manual_seed(0)
        model, data = LanguageModel(), [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(samples)]
        loaders = [DataLoader(data, batch_size=BATCH, collate_fn=collate) for _ in range(2)]
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        self.model, self.optimizer, self.loader, self.other = self.accelerator.prepare(model, optimizer, *loaders)
        self.seconds: list[float] = []

    @property
    def meter(self) -> Meter:
        return self.accelerator.meter()

    def train(self, after_step: Callable[[int], None] | None = None) -> None:
        """Train for an epoch."""
        for number, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                pause(self.step_seconds)
                self.accelerator.backward(self.model(**batch).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.seconds.append(self.step_seconds)
            if after_step is not None:
                after_step(number)

    def evaluate(self) -> None:
        for batch in self.other:
            with torch.no_grad():
                pause(0.005)
                self.model(**batch)

    def stop(self) -> None:
        self.meter.stop()


def reading_of(run: Run) -> Reading:
    reading = run.meter.read()
    assert reading is not None
    return reading


def test_rates_are_those_counted_by_hand() -> None:
    run = Run()
    run.train()
    run.train()
    reading, seconds = reading_of(run), sum(run.seconds[1:])
    samples = 2 * SAMPLES - BATCH  # the first batch is left out
    assert reading.samples_per_second == pytest.approx(samples / seconds, rel=0.01)
    assert reading.tokens_per_second == pytest.approx(samples * REAL / seconds, rel=0.01)
    assert reading.steps_per_second == pytest.approx((2 * len(run.loader) - 1) / seconds, rel=0.01)
    flops = 3 * 2 * LENGTH * 2 * 32 * 64  # of a sample; padding is computed, too
    assert reading.flops_per_second == pytest.approx(samples * flops / seconds, rel=0.01)
    assert reading.utilization is not None
    assert 0 < reading.utilization < 1
    assert reading.memory_peak > 50 << 20
    assert sum(reading.shares.values()) == pytest.approx(1)
    assert reading.shares["forward"] > 0.5  # it sleeps there
    run.stop()


def test_evaluation_in_between_does_not_count() -> None:
    run = Run()
    run.evaluate()  # before training: with gradients enabled where batches are handed out
    for _ in range(2):
        run.train(lambda number: run.evaluate() if number == 3 else None)
        run.evaluate()
    assert run.meter._totals[1] == 2 * SAMPLES
    reading, samples = reading_of(run), 2 * SAMPLES - BATCH
    assert reading.samples_per_second == pytest.approx(samples / sum(run.seconds[1:]), rel=0.01)
    flops = 3 * 2 * LENGTH * 2 * 32 * 64
    assert reading.flops_per_second == pytest.approx(flops * reading.samples_per_second, rel=1e-6)
    run.stop()


def test_an_evaluation_inside_of_the_first_step_is_not_counted_as_its_flops() -> None:
    run = Run()
    run.train(lambda number: run.evaluate())
    reading = reading_of(run)
    flops = 3 * 2 * LENGTH * 2 * 32 * 64
    assert reading.flops_per_second == pytest.approx(flops * reading.samples_per_second, rel=1e-6)
    run.stop()


def test_accumulation_counts_micro_batches_and_optimizer_steps() -> None:
    run = Run(gradient_accumulation_steps=3)
    run.train()
    reading = reading_of(run)
    assert run.meter._totals[:2] == (len(run.loader), SAMPLES)
    per_step = reading.samples_per_second / reading.steps_per_second
    assert per_step == pytest.approx((SAMPLES - BATCH) / 4)  # 12 micro-batches make 4 steps
    run.stop()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_short_steps_are_measured_together_and_all_of_them_count(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    enter = phases.PhaseClock.enter
    monkeypatch.setattr(phases.PhaseClock, "enter", lambda clock, phase: entered.append(phase) or enter(clock, phase))
    batches = 100 * accumulation
    run = Run(BATCH * batches, step_seconds=0.001, gradient_accumulation_steps=accumulation)
    run.train(lambda number: run.evaluate() if number == 50 else None)
    assert run.meter._totals[:2] == (batches, BATCH * batches)
    assert entered.count(phases.STEP) < 25, "the clock rests until an evaluation begins"
    reading = reading_of(run)
    assert reading.samples_per_second == pytest.approx(BATCH / 0.001, rel=0.01)
    assert reading.tokens_per_second == pytest.approx(REAL * BATCH / 0.001, rel=0.01)
    assert reading.steps_per_second == pytest.approx(1 / 0.001 / accumulation, rel=0.02)
    assert reading.shares["forward"] == pytest.approx(1)  # it sleeps there
    with pytest.raises(StopIteration):
        run.train(lambda number: next(iter(())) if number == 60 * accumulation - 1 else None)
    assert run.meter._totals[0] == batches + 60 * accumulation, "also where the loop is left"
    run.stop()


def test_short_batches_without_training_among_others_are_left_out() -> None:
    run = Run(BATCH * 100, step_seconds=0.001)
    for number, batch in enumerate(run.loader):
        outputs = run.model(**batch)
        pause(0.001)
        if number % 40 == 39:
            pause(1.0)  # it looks at them
            continue
        run.accelerator.backward(outputs.square().mean())
        run.optimizer.step()
    assert 40 < run.meter._totals[0] < 100
    assert reading_of(run).samples_per_second == pytest.approx(BATCH / 0.001, rel=0.01)
    run.stop()


def test_a_meter_that_is_stopped_in_a_loop_of_short_steps_stays_stopped() -> None:
    run = Run(BATCH * 100, step_seconds=0.001)
    run.train(lambda number: run.stop() if number == 20 else None)
    assert phases.clock is None


def test_a_loop_that_is_left_early_counts_its_last_batch() -> None:
    run = Run()
    with pytest.raises(StopIteration):
        run.train(lambda number: next(iter(())) if number == 4 else None)
    assert run.meter._totals[0] == 5
    run.stop()


def test_the_time_left_is_that_of_the_steps_that_are_left() -> None:
    run = Run(meter={"steps": 36})
    run.train()
    left = reading_of(run).seconds_left
    per_step = sum(run.seconds[1:]) / len(run.seconds[1:])
    assert left == pytest.approx(per_step * (36 - len(run.loader)), rel=0.1)
    run.train()
    run.train()
    assert reading_of(run).seconds_left == 0
    run.stop()


def test_a_resumed_run_has_only_the_rest_left(tmp_path: Path) -> None:
    run = Run(meter={"steps": 36})
    run.train()
    run.train(lambda number: run.accelerator.save_state(tmp_path / "state") if number == 5 else None)
    run.stop()
    run = Run(meter={"steps": 36})
    run.accelerator.load_state(tmp_path / "state")
    run.loader = run.accelerator.skip_first_batches(run.loader, 6)
    run.train()
    assert run.meter._totals[0] == 6  # the second half of the second epoch
    assert run.meter._end() == (24, 36)
    run.stop()


def test_without_a_number_of_steps_the_epoch_ends() -> None:
    run = Run()
    ends = []
    run.train(lambda number: ends.append(run.meter._end()))
    length = len(run.loader)
    assert ends[1:] == [(number + 1, length) for number in range(1, length)]
    assert run.meter._end() == (length, length)
    run.meter.epochs = 3
    assert run.meter._end() == (length, 3 * length)
    run.stop()


def test_flops_and_tokens_that_were_given_are_used() -> None:
    run = Run(meter={"tokens": lambda batch: 7, "flops_per_sample": 1e9, "peak_flops": 1e15})
    run.train()
    reading = reading_of(run)
    assert reading.flops_per_second == pytest.approx(1e9 * reading.samples_per_second)
    assert reading.utilization == pytest.approx(reading.flops_per_second / 1e15)
    batches_per_second = reading.steps_per_second
    assert reading.tokens_per_second == pytest.approx(7 * batches_per_second)
    run.stop()


def test_samples_without_a_prepared_loader_are_added_by_the_loop() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in range(6):
        accelerator.meter().add(samples=10, tokens=100)
        pause(0.02)
    reading = accelerator.meter().read()
    assert reading is not None
    assert reading.samples_per_second == pytest.approx(10 / 0.02)
    assert reading.tokens_per_second == pytest.approx(100 / 0.02)
    accelerator.meter().stop()


def test_other_arguments_for_a_running_meter_are_refused() -> None:
    accelerator = Accelerator(cpu=True, meter={"steps": 10})
    assert accelerator.meter() is accelerator.meter(steps=10)
    with pytest.raises(ValueError, match="runs already"):
        accelerator.meter(steps=20)
    accelerator.meter().stop()


def test_nothing_is_said_before_two_batches() -> None:
    run = Run()
    assert run.meter.read() is None
    run.stop()


def test_metrics_are_added_to_what_the_loop_logs(tmp_path: Path) -> None:
    run = Run(log_with="jsonl", project_dir=tmp_path, meter={"log_every": 0.0})
    run.accelerator.init_trackers("metered", init_kwargs={"jsonl": {"run": "one"}})
    run.train(lambda number: run.accelerator.log({"loss": 1.0}, step=number))
    run.accelerator.end_training()
    records = [json.loads(line) for line in (tmp_path / "metered" / "one" / "metrics.jsonl").open()]
    logged = [record["values"] for record in records if "values" in record]
    assert "meter/samples_per_second" not in logged[0]  # before there were two batches
    names = {name for name in logged[-1] if name.startswith("meter/")}
    assert {"meter/samples_per_second", "meter/tokens_per_second", "meter/tflops", "meter/seconds_left"} <= names
    assert "meter/share/forward" in names
    run.stop()


def wait_for_all_ranks(run: Run) -> Reading:
    """Train until the main process has heard of all ranks; the others train as long."""
    while True:
        run.train()
        reading = reading_of(run)
        heard = torch.tensor(
            float(reading.ranks == run.accelerator.num_processes or not run.accelerator.is_main_process)
        )
        if run.accelerator.reduce(heard, "min").item():
            return reading


@ranks(2)
def test_the_main_process_sums_over_ranks() -> None:
    run = Run(samples=64)
    reading = wait_for_all_ranks(run)
    if run.accelerator.is_main_process:
        assert reading.ranks == 2
        per_step = reading.samples_per_second / reading.steps_per_second
        assert per_step == pytest.approx(2 * BATCH, rel=0.35)  # of two ranks, over seconds that are not the same
        assert reading.tokens_per_second == pytest.approx(REAL * reading.samples_per_second)
    run.stop()


@ranks(2)
def test_ranks_of_a_tensor_parallel_group_count_their_samples_once() -> None:
    run = Run(parallelism_config=ParallelismConfig(tp_size=2, tp_plan={"up": "colwise", "down": "rowwise"}))
    run.train()
    reading = reading_of(run)  # what is not heard of yet is taken to be as fast
    per_step = reading.samples_per_second / reading.steps_per_second
    if reading.ranks == 1:
        assert per_step == pytest.approx((SAMPLES - BATCH) / (len(run.loader) - 1))
    else:
        assert per_step == pytest.approx(BATCH, rel=0.35)
    flops = 3 * 2 * LENGTH * 2 * 32 * 64  # of a sample: each rank computes a half
    assert reading.flops_per_second == pytest.approx(flops * reading.samples_per_second, rel=0.01)
    run.stop()


@ranks(2)
def test_the_flops_of_sharded_parameters_are_those_of_whole_ones() -> None:
    run = Run(samples=64, fsdp_plugin=FullyShardedDataParallelPlugin())
    run.train()
    reading = reading_of(run)
    flops = 3 * 2 * LENGTH * 2 * 32 * 64  # of a sample
    assert reading.flops_per_second == pytest.approx(flops * reading.samples_per_second, rel=0.01)
    assert run.meter._totals[1] == 32, "each rank counts its own"
    run.stop()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


@ranks(2)
def test_stages_of_a_pipeline_count_their_samples_once_and_their_own_flops() -> None:
    accelerator = Accelerator(cpu=True, meter=True, parallelism_config=ParallelismConfig(pp_size=2))
    model, loader = Blocks(), DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    for (inputs,) in loader:
        accelerator.forward_backward(model, inputs, loss_fn=lambda outputs: outputs.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    reading = accelerator.meter().read()
    assert reading is not None
    assert accelerator.meter()._totals[:2] == (8, 64), "each rank reads all samples"
    per_step = reading.samples_per_second / reading.steps_per_second
    assert per_step == pytest.approx(8, rel=0.35)
    flops = 2 * 32 * 32 * (4 + 4 + 3)  # of a sample on both stages: the first block needs no gradient of its input
    assert reading.flops_per_second == pytest.approx(flops * reading.samples_per_second, rel=0.35)
    accelerator.meter().stop()


def test_a_meter_ends_with_the_state_of_its_accelerator() -> None:
    Accelerator(cpu=True, meter=True)
    assert phases.meter is not None
    AcceleratorState._reset_state(reset_partial_state=True)
    assert phases.meter is None, "the watcher's thread would ask it for ever"
    assert phases.clock is None
