"""`save_state` and `load_state`: the parts of a run, the names of its checkpoints, and which of them are kept."""

from __future__ import annotations

import atexit
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..config.plugins.handlers import ProjectConfiguration
from ..errors import REQUEUE_EXIT_CODE
from ..parallel.base import Strategy, params_of
from ..parallel.modules.dtensors import any_dtensor, gathered
from ..parallel.modules.unwrapping import extract_model_from_parallel
from ..runtime.devices import device as devices
from ..runtime.group.runtime import Runtime
from ..runtime.loop.progress import while_slow
from ..watch.place import guard_of_caller
from .commit.copies import MemoryCopies, RunState
from .commit.engine import CheckpointEngine, CheckpointError, Draft, Fetched, LoadReport
from .commit.staging import Staging
from .commit.supplements import Announcements, Opened, SaveCall, Supplement, supplement_folder
from .formats import codec
from .group import CheckpointGroup
from .layout import (
    CHECKPOINTS_FOLDER,
    PROGRESS_FILE,
    SCALER_FILE,
    SHARDS,
    automatic_name,
    custom_file,
    engine_folder,
    iteration_of,
    model_folder,
    numbered,
    optimizer_folder,
    random_states_file,
    unfinished,
    unfinished_name,
)
from .parts.own import OwnModelPart, OwnOptimizerPart
from .parts.states import EnginePart, ModelPart, OptimizerPart, Part, ProgressPart, RandomPart, StatefulPart, steps_in
from .parts.transfer import DerivedRandomPart, pack, unpack
from .preemption import Preemption
from .storage.remote import RemoteStore
from .storage.store import Found, LocalStore, Store
from .trace import ResumeTrace

if TYPE_CHECKING:
    from ..tracking.trackers import Trackers

logger = logging.getLogger(__name__)

_PLAUSIBLE = 10**15

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


class CheckpointLocation(NamedTuple):
    """The store and the name of a checkpoint; the name is None if the store holds no checkpoint."""

    store: Store
    name: str | None


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The objects that one Accelerator has prepared; the lists are shared with it."""

    models: list[nn.Module]
    optimizers: list[Any]
    schedulers: list[Any]
    loaders: list[Any]
    window: Any
    strategy: Strategy
    trackers: Trackers | None = None


class Checkpointer:
    """Make and load the checkpoints of one Accelerator."""

    def __init__(self, runtime: Runtime, project: ProjectConfiguration, prepared: Prepared) -> None:
        self.runtime = runtime
        self.project = project
        self.prepared = prepared
        self.custom_objects: list[Any] = []
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._engine: CheckpointEngine | None = None
        self.staging = Staging()
        self._background: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._preemption: Preemption | None = None
        self._warned_target = self._warned_other_target = self._warned_other_run = False
        self._last_saved: int | None = None
        """The number of the last automatic checkpoint of this run."""
        self.copies: MemoryCopies | None = None
        """The copies in host memory, if they are enabled."""
        self.trace: ResumeTrace | None = None
        """The trace of a run that is being verified. Its checkpoints go to the folder of the trace."""

    # --- parts ----------------------------------------------------------------------------------------------------

    def register(self, *objects: Any) -> None:
        """Add objects to the checkpoint; raise for those without `state_dict` and `load_state_dict`."""
        unable = [
            f"Item at index {index}, `{type(item).__name__}`"
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if unable:
            raise ValueError(
                f"register_for_checkpointing takes objects with state_dict and load_state_dict; these have none: "
                f"{'; '.join(unable)}."
            )
        self.custom_objects += objects

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call a function before every save."""
        return _register_hook(self.save_hooks, hook)

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call a function before every load."""
        return _register_hook(self.load_hooks, hook)

    @property
    def engine(self) -> CheckpointEngine:
        """The engine. Its process group is created on first use, by all ranks."""
        if self._engine is None or self.runtime.member is not None:  # ranks change with the members
            self._engine = CheckpointEngine(
                CheckpointGroup.of_all_ranks(self.runtime, on_each_node=self.project.save_on_each_node)
            )
        return self._engine

    @property
    def announcements(self) -> Announcements:
        """The messages from the coordinator of a save to the other ranks."""
        return Announcements(self.runtime, on_each_node=self.project.save_on_each_node)

    def _unwrapped_models(self) -> list[nn.Module]:
        return [extract_model_from_parallel(model, keep_torch_compile=False) for model in self.prepared.models]

    def _parts(self, models: Sequence[nn.Module], scaler: Any, form: str, rank: int) -> list[Part]:
        """Return all parts, with models and optimizers in one of three forms: SHARDS, .safetensors, .bin.

        Models and optimizers that an engine owns have the form of the engine.
        """
        parts = self._engine_parts(models, form) or (
            self._sharded_parts(models) if form == SHARDS else self._file_parts(models, form)
        )
        return parts + self._common_parts(scaler, rank)

    def _common_parts(self, scaler: Any, rank: int) -> list[Part]:
        """Return the parts besides models and optimizers; the generators are the last one."""
        parts: list[Part] = [
            StatefulPart(numbered("scheduler", index, ""), numbered("scheduler", index, ".bin"), scheduler)
            for index, scheduler in enumerate(self.prepared.schedulers)
        ]
        if scaler is not None:
            parts.append(StatefulPart("scaler", SCALER_FILE, scaler))
        parts += [
            StatefulPart(numbered("registered object", index, ""), custom_file(index), item)
            for index, item in enumerate(self.custom_objects)
        ]
        parts.append(ProgressPart(self.prepared.loaders, self.prepared.optimizers, self.prepared.trackers))
        parts.append(RandomPart(random_states_file(rank), self.runtime, self.prepared.window))
        return parts

    def _engine_parts(self, models: Sequence[nn.Module], suffix: str) -> list[Part]:
        """Return the parts of models that an engine owns; a model without an optimizer may have no engine."""
        engines = self.prepared.strategy.engine_states(models)
        if not any(engines):
            return []
        return [
            ModelPart(numbered("model", index, ""), numbered(_stem(suffix), index, suffix), model)
            if engine is None
            else EnginePart(numbered("model", index, ""), engine_folder(index), engine)
            for index, (model, engine) in enumerate(zip(models, engines, strict=True))
        ]

    def _file_parts(self, models: Sequence[nn.Module], suffix: str) -> list[Part]:
        is_whole = self.prepared.strategy.holds_whole_models
        return [
            *(
                ModelPart(
                    numbered("model", index, ""), numbered(_stem(suffix), index, suffix), model, is_whole=is_whole
                )
                for index, model in enumerate(models)
            ),
            *(
                OptimizerPart(
                    numbered("optimizer", index, ""),
                    numbered("optimizer", index, ".bin"),
                    optimizer,
                    models,
                    is_whole=is_whole,
                )
                for index, optimizer in enumerate(self.prepared.optimizers)
            ),
        ]

    def _sharded_parts(self, models: Sequence[nn.Module]) -> list[Part]:
        from .parts.shards import ShardedModelPart, ShardedOptimizerPart

        is_whole = self.prepared.strategy.holds_whole_models
        return [
            *(
                ShardedModelPart(numbered("model", index, ""), model_folder(index), model, is_whole=is_whole)
                for index, model in enumerate(models)
            ),
            *(
                ShardedOptimizerPart(
                    numbered("optimizer", index, ""), optimizer_folder(index), optimizer, models, self.engine.group
                )
                for index, optimizer in enumerate(self.prepared.optimizers)
            ),
        ]

    def own_parts(self, scaler: Any) -> list[Part]:
        """Return all parts as this rank holds them, with its own shards of models and optimizers."""
        models, is_whole = self._unwrapped_models(), self.prepared.strategy.holds_whole_models
        return [
            *(
                OwnModelPart(numbered("model", i, ""), "memory", model, is_whole=is_whole)
                for i, model in enumerate(models)
            ),
            *(
                OwnOptimizerPart(numbered("optimizer", index, ""), "memory", optimizer, models, is_whole=is_whole)
                for index, optimizer in enumerate(self.prepared.optimizers)
            ),
            *self._common_parts(scaler, self.runtime.process_index),
        ]

    # --- save -----------------------------------------------------------------------------------------------------

    def save(self, target: str | None, *, scaler: Any, safe_serialization: bool, wait: bool) -> str:
        """Make a checkpoint of everything; return its path.

        If each rank holds a part of a model, all ranks make it. Otherwise the coordinator makes it and waits for no
        other rank: see [Note: who commits] in supplements.py.
        """
        self.wait()
        self._warn_of_open_window()
        models = self._unwrapped_models()
        form = ".safetensors" if safe_serialization else ".bin"
        if self.needs_all_ranks(models):
            self._refuse_one_rank_only()
            form = SHARDS if self.prepared.strategy.saves_shards else form
            wait = wait or self.runtime.member is not None  # its collectives are in the group of training
            return self._save_checkpoint(self.engine, target, models, scaler, form, call=None, wait=wait)
        call = self.announcements.next_save(target, self.prepared.window.step, self.prepared.loaders)
        engine = CheckpointEngine(
            CheckpointGroup.of_one_rank(self.runtime, on_each_node=self.project.save_on_each_node)
        )
        if not self.announcements.is_coordinator:
            return self._save_supplement(engine, target, models, form, call=call, wait=wait)
        with self.announcements.announcing_failure(call.save, call.lines):
            return self._save_checkpoint(engine, target, models, scaler, form, call=call, wait=wait)

    def _save_checkpoint(
        self,
        engine: CheckpointEngine,
        target: str | None,
        models: list[nn.Module],
        scaler: Any,
        form: str,
        *,
        call: SaveCall | None,
        wait: bool,
    ) -> str:
        store, name = self._target(target, engine)
        save = "" if call is None else call.save
        draft = engine.open(store, name, step=self.prepared.window.step, save=save)
        if call is not None:
            opened = Opened(save=save, path=draft.path, name=draft.name, token=draft.token, iteration=draft.iteration)
            self.announcements.announce_opened(call, opened)
        if form == SHARDS or any(self.prepared.strategy.engine_states(models)):
            self._refuse_separate_disks()
        with engine.consensus(f"checkpoint {draft.path} was not made", draft):
            models, weights = self._run_save_hooks(models, draft.folder, form)
            draft.parts = self._parts(models, scaler, form, self.runtime.process_index)
            draft.states = {part.name: part.capture() for part in draft.parts if part.is_collective or part.is_folder}
            model_parts = [part for part in draft.parts if isinstance(part, ModelPart)]
            draft.states |= {part.name: part.named(state) for part, state in zip(model_parts, weights, strict=False)}
            if not wait:
                own = engine.written_here(draft.parts)
                draft.states |= {part.name: self.staging.copy(part.name, draft.state_of(part)) for part in own}
        if wait:
            with while_slow(lambda: f"Saving {draft.path}: {_size_in_mb(draft.folder):,} MB written"):
                self._finish(engine, draft)
        else:
            self._pending = self._background_thread().submit(self._finish, engine, draft)
            logger.info("Saving %s in the background from %d MB of copies", draft.path, self.staging.num_bytes >> 20)
        if draft.iteration is not None:
            self.project.iteration = draft.iteration + 1
        return str(draft.path)

    def _save_supplement(
        self,
        engine: CheckpointEngine,
        target: str | None,
        models: list[nn.Module],
        form: str,
        *,
        call: SaveCall,
        wait: bool,
    ) -> str:
        """Add the files of this rank to the checkpoint that the coordinator makes."""
        name: str | None = None
        if target is None or self.project.automatic_checkpoint_naming:
            store = self._automatic_store("save_state")
        else:
            store, name = self._locate(target)
        opened = self.announcements.wait_until_opened(call, store, name)
        save = opened.save
        if save != call.save or not _sees(store, opened):
            self._warn_of_other_target(target or str(store.path(opened.name)), opened.path)
            store, _ = _locate(opened.path)
        folder = supplement_folder(opened.name)
        try:
            with engine.consensus(f"checkpoint {store.path(opened.name)} has no files of this rank"):
                self._run_save_hooks(models, folder, form)
        except CheckpointError:
            self.announcements.announce_added(save)  # the coordinator waits for no files of this rank
            raise
        part = RandomPart(random_states_file(self.runtime.process_index), self.runtime, self.prepared.window)
        added = Supplement(store=store, save=save, opened=opened, folder=folder, part=part, state=part.capture())
        if wait:
            added.add(self.announcements, engine)
        else:
            self._pending = self._background_thread().submit(added.add, self.announcements, engine)
        if opened.iteration is not None:
            self.project.iteration = opened.iteration + 1
        return added.path

    def needs_all_ranks(self, models: Sequence[nn.Module]) -> bool:
        """Tell whether all ranks must save, because each holds a part of a model."""
        strategy = self.prepared.strategy
        return (
            strategy.saves_shards
            or not strategy.holds_whole_models
            or any(strategy.engine_states(models))
            or any(any_dtensor(model.parameters()) for model in models)
        )

    @property
    def writes_shards(self) -> bool:
        """Tell whether every rank writes its own shards, without a collective that gathers them."""
        return self.prepared.strategy.saves_shards

    def _refuse_one_rank_only(self) -> None:
        """Raise for a call that the other ranks will not make, before it waits for them."""
        guard = guard_of_caller() if self.runtime.num_processes > 1 else ""
        if guard:
            raise CheckpointError(
                f"save_state() was called on rank {self.runtime.process_index} only: the call is inside {guard}. The "
                "model is spread over the ranks, and each of them saves its part. Move the call out of the condition, "
                "so that every rank calls save_state()."
            )

    def _refuse_separate_disks(self) -> None:
        if self.project.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True keeps a checkpoint on every host, and no host has all shards. Save to a folder "
                'that all machines share, or use state_dict_type="FULL_STATE_DICT".'
            )

    def _warn_of_open_window(self) -> None:
        window = self.prepared.window
        if not window.gradient_state.sync_gradients and self.runtime.is_main_process:
            logger.warning(
                "save_state() was called in the middle of an accumulation window: the gradients of its first %d of %d "
                "micro-batches are not part of a checkpoint, and a run that resumes here steps without them. Save "
                "`if accelerator.sync_gradients`.",
                window.step % window.gradient_state.num_steps,
                window.gradient_state.num_steps,
            )

    def _run_save_hooks(
        self, models: list[nn.Module], folder: Path, form: str
    ) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        """Run the hooks. The weights that they leave in the list are saved, with the values they have then."""
        if not self.save_hooks:
            return models, []
        if any(self.prepared.strategy.engine_states(models)):
            # Hooks may write files, but the engine saves its models in any case.
            whole = [self.prepared.strategy.full_state_dict(model) for model in models]
            for hook in self.save_hooks.values():
                hook(list(models), list(whole), str(folder))
            return models, []
        own = [model.state_dict() for model in models]
        before = own if form == SHARDS else [gathered(state) for state in own]
        handed, weights = list(models), list(before)
        for hook in self.save_hooks.values():
            hook(handed, weights, str(folder))
        owners = {id(state): model for state, model in zip(before, models, strict=True)}
        last = len(models) - 1
        return [owners.get(id(state), models[min(index, last)]) for index, state in enumerate(weights)], weights

    def _finish(self, engine: CheckpointEngine, draft: Draft) -> None:
        self.staging.synchronize()
        with self.announcements.announcing_failure(draft.save) if draft.save else nullcontext():
            engine.finish(draft, lambda: self.announcements.wait_for_files(draft.save) if draft.save else None)
        if draft.save:
            self.announcements.announce_committed(draft.save)
        draft.states.clear()
        if draft.iteration is not None and engine.group.is_coordinator:
            self._apply_total_limit(draft.store)
        logger.info("Saved %s", draft.path)

    def _tell_of_earlier_run(self, store: Store, name: str) -> None:
        """Say that checkpoints of another run are in the folder, and which of them the first save deletes."""
        deleted = [found.name for found in self._beyond_limit(store, to_come=1)]
        logger.warning(
            "%s has checkpoints of an earlier run: those of this run begin with %s.%s Give each run a project_dir of "
            "its own, or load_state() to go on.",
            store.path(""),
            name,
            f" total_limit={self.project.total_limit} counts both: this save deletes {', '.join(deleted)}."
            if deleted
            else "",
        )

    def _beyond_limit(self, store: Store, to_come: int = 0) -> list[Found]:
        """Return the oldest checkpoints that `total_limit` does not keep, when `to_come` more are there."""
        limit = self.project.total_limit
        if limit is None:
            return []
        kept = [found for found in _automatic(store) if found.problem is None]
        kept.sort(key=lambda found: iteration_of(found.name) or 0)
        return kept[: max(0, len(kept) + to_come - max(1, limit))]

    def _apply_total_limit(self, store: Store) -> None:
        for found in self._beyond_limit(store):
            try:
                store.remove(found.name)
            except OSError as error:  # the new one is committed
                logger.warning("total_limit: %s could not be deleted: %s.", store.path(found.name), error)

    def _background_thread(self) -> ThreadPoolExecutor:
        if self._background is None:
            self._background = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix="checkpoint",
                initializer=devices.activate,  # the current device of a new thread is the first one
                initargs=(self.runtime.device,),
            )
            atexit.register(self.wait)
        return self._background

    def wait(self) -> None:
        """Wait for a save in the background, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def make_copies(self, every: int, folder: Path, scaler: Callable[[], Any]) -> MemoryCopies:
        """Let copies of the state be made in host memory every few steps."""
        run = RunState(
            runtime=self.runtime,
            strategy=self.prepared.strategy,
            optimizers=self.prepared.optimizers,
            parts=lambda: self.own_parts(scaler()),
            group=lambda: self.engine.group,
        )
        self.copies = MemoryCopies(run, every, folder / f"{self.runtime.num_copying}")
        self.runtime.num_copying += 1
        self.runtime.shutdown_hooks.append(self.copies.shut_down)
        return self.copies

    def end(self) -> None:
        """Wait for a save in the background. The run has ended: its copies in memory are not needed any more."""
        self.wait()
        self.staging.clear()
        if self.copies is not None:
            self.copies.end()

    # --- locations ------------------------------------------------------------------------------------------------

    def _target(self, target: str | None, engine: CheckpointEngine) -> tuple[Store, str | Callable[[], int]]:
        """Return the store, and the name of the next checkpoint or, for an automatic one, what chooses its number."""
        given = engine.group.broadcast(target)
        if given != target and not self.project.save_on_each_node:
            self._warn_of_other_target(target, given)
            target = given
        if target is not None and not self.project.automatic_checkpoint_naming:
            return self._locate(target)
        if target is not None and not self._warned_target and self.runtime.is_main_process:
            self._warned_target = True
            logger.warning("save_state(%r): the folder is not used, because names are automatic here.", target)
        store = self._automatic_store("save_state")
        return store, lambda: self._next_iteration(store)

    def _next_iteration(self, store: Store) -> int:
        """Return a number above those of all automatic checkpoints whose name is free; nothing is replaced."""
        numbers = [(iteration_of(found.name) or 0, found) for found in _automatic(store)]
        # A folder without a record may have any name: one with a huge number does not count.
        above = [1 + number for number, found in numbers if found.record is not None or number < _PLAUSIBLE]
        iteration = max([self.project.iteration, *above])
        while store.is_taken(automatic_name(iteration)):
            iteration += 1
        if iteration > self.project.iteration == 0:
            self._tell_of_earlier_run(store, automatic_name(iteration))
        if self._last_saved is not None and iteration > self._last_saved + 1:
            self._warn_of_another_run(store)
        self._last_saved = iteration
        return iteration

    def _warn_of_another_run(self, store: Store) -> None:
        """Say, once, that another run saves into the folder of this one at the same time."""
        if not self._warned_other_run:
            self._warned_other_run = True
            logger.warning(
                "Another run saves into %s, too: resume() takes the newest checkpoint, whichever run made it, and "
                "total_limit deletes those of both. Give each run a project_dir of its own.",
                store.path(""),
            )

    def _warn_of_other_target(self, own: str | None, target: str | None) -> None:
        """Say, once, that this rank uses the folder of rank 0 instead of its own."""
        if not self._warned_other_target:
            self._warned_other_target = True
            logger.warning(
                "A checkpoint is one folder: rank 0 gave %s, and rank %d gave %s. All ranks use that of rank 0.",
                target or "none",
                self.runtime.process_index,
                own or "none",
            )

    def _automatic_store(self, caller: str) -> Store:
        if self.project.project_dir is None:
            raise ValueError(
                f"{caller}() was called without a folder, and no project folder was given: pass one, or use "
                "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
            )
        folder = f"{self.project.project_dir}/{CHECKPOINTS_FOLDER}"
        return _store(folder if self.trace is None else self.trace.redirected(folder))

    def _locate(self, target: str) -> tuple[Store, str]:
        return _locate(target if self.trace is None else self.trace.redirected(target))

    def find(self, source: str | None) -> CheckpointLocation:
        """Return the location of the named checkpoint, or else of the newest committed one."""
        self.wait()
        store, name = (self._automatic_store("load_state"), None) if source is None else self._locate(source)
        with self.engine.consensus(f"{source or 'the newest checkpoint'} was not loaded"):
            if self.engine.group.is_coordinator:
                store.recover(name)
            if source is None and self.runtime.is_main_process:
                name = _newest(store)
        own = name
        name, path = self.engine.group.broadcast((name, "" if name is None else str(store.path(name))))
        if name is not None and (own not in (None, name) or (path != str(store.path(name)) and not store.exists(name))):
            self._warn_of_other_target(source or str(store.path(name)), path)
            store, _ = _locate(path)
        return CheckpointLocation(store, name)

    def exists(self, location: CheckpointLocation) -> bool:
        """Tell whether the checkpoint exists; all ranks get the same answer."""
        return self.engine.group.broadcast(location.name is not None and location.store.exists(location.name))

    def step_of(self, location: CheckpointLocation) -> int | None:
        """Return the number of optimizer steps of a checkpoint, or None if it does not say; the same on all ranks."""
        steps: list[int] = []
        if self.runtime.is_main_process and location.name is not None:
            folder = location.store.fetch(location.name, lambda file: file == PROGRESS_FILE, 0)
            if (folder / PROGRESS_FILE).is_file():
                with suppress(ValueError):  # the load says what is wrong with it
                    steps = steps_in(codec.read(folder / PROGRESS_FILE))
            location.store.release(folder)
        return self.engine.group.broadcast(max(steps, default=None))

    # --- load -----------------------------------------------------------------------------------------------------

    def load(
        self,
        location: CheckpointLocation,
        *,
        scaler: Any,
        seek: bool,
        strict: bool,
        verify: str,
        load_options: dict[str, Any],
        model_options: dict[str, Any],
    ) -> LoadReport:
        """Restore all parts, or raise an error that lists every mismatch.

        With `seek` the loaders continue at the next batch. Otherwise they restart their epoch, for scripts that skip
        batches themselves.
        """
        if verify not in ("size", "hash"):
            raise ValueError(f"verify={verify!r} is unknown: choose size (quick) or hash (reads every byte).")
        store, name = location
        if name is None:
            raise FileNotFoundError(f"load_state() found no checkpoint in {self.project.project_dir}.")
        with (
            while_slow(lambda: f"Loading {store.path(name)}"),
            self.engine.fetched(store, name, self._is_needed, verify) as fetched,
        ):
            models = self._unwrapped_models()
            with self.engine.consensus(f"{fetched.path} was not loaded"):
                for hook in self.load_hooks.values():
                    hook(models, str(fetched.folder))
            parts = self._parts(models, scaler, self._format_of(fetched.folder), self.runtime.process_index)
            for part in parts:
                if isinstance(part, ModelPart):
                    part.load_options |= model_options
                elif isinstance(part, ProgressPart):
                    part.seeks = seek
            changes = self._derive_missing_generators(parts, fetched)
            optional = ["progress"] if fetched.record is None else []  # accelerate 1.x keeps no positions
            report = self.engine.load(fetched, parts, strict=strict, load_options=load_options, optional=optional)
        report.changes = changes
        report.step = next(part.step for part in parts if isinstance(part, ProgressPart))
        iteration = iteration_of(name)
        if iteration is not None:
            self.project.iteration = iteration + 1
        self._log_report(report)
        return report

    # --- another process --------------------------------------------------------------------------------------------

    def pack(self, scaler: Any, *, complete: bool) -> bytes:
        """Return the state for another process: everything, or models and optimizers with their gradients."""
        parts = self._parts(self._unwrapped_models(), scaler, ".bin", self.runtime.process_index)
        if complete:
            return pack(parts)
        parts = [part for part in parts if isinstance(part, (ModelPart, OptimizerPart)) or part.file == SCALER_FILE]
        return pack(parts, [param.grad for param in self._parameters()])

    def unpack(self, content: bytes, scaler: Any, rank: int) -> None:
        """Restore what another process packed."""
        parts = self._parts(self._unwrapped_models(), scaler, ".bin", self.runtime.process_index)
        unpack(content, parts, self._parameters(), rank)

    def _parameters(self) -> list[Any]:
        return [param for optimizer in self.prepared.optimizers for param in params_of(optimizer)]

    # --- preemption -----------------------------------------------------------------------------------------------

    def preempted(self) -> str | None:
        """Return why the run is requested to stop, or None; all ranks get the same answer."""
        if self._preemption is None:
            self._preemption = Preemption(self.project.project_dir)
        preemption = self._preemption
        if self.runtime.member is not None:  # replacements count their calls from 0
            return self.runtime.run_collective(lambda: preemption.agreed(self.engine.group.gather, at_once=True))
        return preemption.agreed(self.engine.group.gather)

    def exit_preempted(self, path: str, reason: str) -> NoReturn:
        """Log the saved checkpoint, and exit with the code that requests a restart."""
        assert self._preemption is not None
        if self.runtime.is_main_process:
            self._preemption.clear_trigger()
            logger.warning("Stop requested by %s: saved %s. Exit code %d.", reason, path, REQUEUE_EXIT_CODE)
        raise SystemExit(REQUEUE_EXIT_CODE)

    def _format_of(self, folder: Path) -> str:
        if (folder / model_folder(0)).is_dir():
            return SHARDS
        return ".bin" if (folder / "pytorch_model.bin").is_file() else ".safetensors"

    def _is_needed(self, file: str) -> bool:
        """Tell whether this rank reads a file: of the generators, its own and those of rank 0 to derive others from."""
        own = (random_states_file(self.runtime.process_index), random_states_file(0))
        return not file.startswith("random_states_") or file in own

    def _derive_missing_generators(self, parts: list[Part], fetched: Fetched) -> list[str]:
        """Derive the generators of ranks that are not in the checkpoint; return sentences on which and why."""
        there, here = fetched.num_processes, self.runtime.num_processes
        if there == 0:
            return []
        world_changed = there != here
        derives = world_changed or not fetched.has(parts[-1].file)
        if derives:
            parts[-1] = DerivedRandomPart(random_states_file(0), self.runtime, self.prepared.window)
        ranks = [rank for rank, derived in enumerate(self.engine.group.gather(derives)) if derived]
        if world_changed:
            return [
                f"saved on {there} processes, loaded on {here}: the positions of the loaders are global and were kept",
                "rank 0 keeps its generators; those of the other ranks were derived from them, the step and the rank",
            ]
        if not ranks:
            return []
        return [
            f"save_state() was not called, or not finished, on {_ranks(ranks)}: the generators there were derived from "
            "those of rank 0, the step and the rank"
        ]

    def _log_report(self, report: LoadReport) -> None:
        if self.runtime.is_main_process:
            logger.log(logging.WARNING if report.differences else logging.INFO, "%s", report)


def _store(folder: str) -> Store:
    return RemoteStore(folder) if "://" in folder else LocalStore(os.path.abspath(os.path.expanduser(folder)))


def _locate(target: str) -> tuple[Store, str]:
    """Return the store and the name of a folder or URL."""
    if "://" not in target:
        target = os.path.abspath(os.path.expanduser(target))
        if os.path.islink(target):  # replace the target of the link and not the link
            target = os.path.realpath(target)
    parent, _, name = target.rstrip("/").rpartition("/")
    return _store(parent or "/"), name


def _sees(store: Store, opened: Opened) -> bool:
    """Tell whether the checkpoint that the coordinator has opened is in a store of this rank; paths may differ."""
    if str(store.path(opened.name)) == opened.path:
        return True
    names = (opened.name, unfinished_name(opened.name, "partial", opened.token))
    return any(found.name in names for found in store.found())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _stem(suffix: str) -> str:
    return "model" if suffix == ".safetensors" else "pytorch_model"


def _size_in_mb(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*")) >> 20


def _register_hook(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _automatic(store: Store) -> list[Found]:
    return [found for found in store.found() if iteration_of(found.name) is not None]


def _newest(store: Store) -> str | None:
    for found in sorted(store.found(), key=_iteration_number, reverse=True):
        if _iteration_number(found) < 0:
            continue
        if found.problem is None:
            return found.name
        logger.warning("Passed over %s: %s.", store.path(found.name), found.problem)
    return None


def _iteration_number(found: Found) -> int:
    """Return the number of an automatic checkpoint, finished or not, and -1 for anything else."""
    on_its_way = unfinished(found.name)
    number = iteration_of(found.name if on_its_way is None else on_its_way[0])
    return -1 if number is None else number


__all__ = ["CheckpointError", "Checkpointer", "LoadReport", "Prepared"]
