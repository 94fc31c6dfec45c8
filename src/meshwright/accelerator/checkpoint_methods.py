"""The methods of `Accelerator` that write models and checkpoints, and read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..checkpoint.formats.saving import save
from ..config.environment import read_setting
from ..data.loaders.base import PreparedLoader
from ..errors import UnsupportedSettingError
from ..errors.callers import misspelt, warn
from ..logging import get_logger
from ..optimizer import AcceleratedOptimizer
from ..parallel.modules.unwrapping import extract_model_from_parallel
from ..program import program_name
from ..runtime import phases
from ..runtime.loop.gradient_state import GradientState
from ..scheduler import AcceleratedScheduler
from .accumulation import AccumulationWindow
from .effects import effect
from .process_methods import ProcessMethods

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from ..checkpoint.checkpointer import Checkpointer, CheckpointLocation
    from ..checkpoint.commit.copies import MemoryCopies
    from ..checkpoint.commit.engine import LoadReport
    from ..instruments import Instruments
    from ..parallel.replicas.recovery import Recovery
    from ..parallel.replicas.surviving import SurvivingReplicas
    from ..tracking.trackers import Trackers
    from ..weights.weights import Weights

logger = get_logger("meshwright.accelerator")

_LOAD_OPTIONS = {"input_dir", "load_kwargs", "strict", "verify"}


class CheckpointMethods(ProcessMethods):
    """The part of `Accelerator` that saves and loads: models for other tools, and checkpoints of the run."""

    gradient_state: GradientState
    window: AccumulationWindow
    instruments: Instruments
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[PreparedLoader]
    _trackers: Trackers | None
    _checkpointer: Checkpointer | None

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own model from under what `prepare` put around it.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether outputs are still converted to fp32 under mixed precision.
            keep_torch_compile: Whether a compiled model stays compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's whole state, with the names the user's own model gives.

        Where a model is spread over processes, all of them call it: the main process gets the state, the others an
        empty one.

        Args:
            model: A prepared model.
            unwrap: Whether the names are those of the user's own model; otherwise those of what `prepare` returned.
        """
        own = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        if any(param.is_meta for param in own.parameters()):  # its weights are on the host or on disk
            from ..inference.offload.offloaded import get_state_dict_offloaded_model

            return get_state_dict_offloaded_model(own)
        return self.strategy.full_state_dict(own)

    @effect()
    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object to disk once: on the main process, or once per host with `save_on_each_node`.

        Args:
            obj: What is saved.
            f: The file.
            safe_serialization: Whether a state dict is written by safetensors instead of `torch.save`.
        """
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    @effect()
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights where other tools find them, in shards where they are large.

        The main process writes and waits for nobody, so it may be the only one to call this; where a model is spread
        over processes, all of them call it. Of tied weights the first name is stored. Old files go when the new ones
        are there.

        Args:
            model: The model, prepared or not.
            save_directory: Folder of the files. It is made where it does not exist.
            max_shard_size: Largest size of a file, in bytes or as "5GB"; a larger model is split, with an index.
            safe_serialization: Whether to write safetensors; otherwise files of `torch.save`.
        """
        from ..checkpoint.formats.model_files import save_model_files

        if isinstance(model, Mapping):
            raise TypeError(
                f"save_model() takes a model, and was given a {type(model).__name__}. Give it the model itself, whose "
                "weights it collects; accelerator.save(state_dict, file) writes a state that you have."
            )
        if os.path.isfile(save_directory):
            raise ValueError(f"save_model needs a folder, and {os.fspath(save_directory)} is a file.")
        state = self.get_state_dict(model)
        empty = [name for name, value in state.items() if getattr(value, "is_meta", False)]
        if empty:
            raise RuntimeError(
                "You can't save the model since some parameters are on the meta device and have no values: "
                f"{', '.join(empty[:4])}{', ...' if len(empty) > 4 else ''}. Load them first."
            )
        on_each_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if on_each_node else self.is_main_process:
            save_model_files(
                state, Path(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )
        if self.checkpointer.needs_all_ranks([]):  # all are here: none goes on before the files are there
            self.wait_for_everyone()

    def weights(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        adapter: str = "merged",
        bucket_size: int | str = "1GB",
    ) -> Weights:
        """Return the weights of a model for an engine that serves it, or for a folder of Hugging Face files.

        Nothing is moved yet. What is returned yields full tensors under the names of the checkpoint, on any mesh, in a
        bounded buffer; all processes iterate over it together.

        Args:
            model: A prepared model.
            dtype: The dtype that floating-point weights are converted to before they are sent.
            adapter: What to do with LoRA of PEFT: "merged" into the weights, which stay as they are in the model, or
                the tensors of the adapter "only".
            bucket_size: About how much memory a pass takes beside the model, in bytes or as "1GB"; the two largest
                tensors may take more.
        """
        from ..checkpoint.formats.model_files import parse_size
        from ..weights.weights import Weights

        return Weights(model, self.strategy, dtype=dtype, adapter=adapter, bucket_size=parse_size(bucket_size))

    # --- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """What makes and loads the checkpoints of everything that was prepared."""
        if self._checkpointer is None:
            from ..checkpoint.checkpointer import Checkpointer, Prepared

            prepared = Prepared(
                models=self._models,
                optimizers=self._optimizers,
                schedulers=self._schedulers,
                loaders=self._dataloaders,
                window=self.window,
                strategy=self.strategy,
                trackers=self._trackers,
            )
            self._checkpointer = Checkpointer(self.state._started, self.project_configuration, prepared)
        return self._checkpointer

    @effect(instead=lambda self, output_dir=None, *args, **kwargs: os.fspath(output_dir or ""))
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        wait: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save everything that was prepared or registered, and return where: whole, or not at all.

        Call it on all processes. Where each of them holds the whole model (one process, DDP) the main process may call
        it alone; the checkpoint then lacks the random states of the others.

        Args:
            output_dir: Folder or fsspec URL of the checkpoint. With `automatic_checkpoint_naming` it is left out, and
                the name is chosen.
            safe_serialization: Whether models that are not sharded are written as safetensors; otherwise by
                `torch.save`.
            wait: Whether to return only when the checkpoint is committed. With False training goes on once the state
                is copied; the next save, load or `end_training` waits for the files, and raises what went wrong.
            **save_model_func_kwargs: Accepted with a warning, because the interface has it; nothing here reads it.

        Returns:
            The path of the checkpoint.
        """
        if save_model_func_kwargs:
            near = misspelt(save_model_func_kwargs, ("output_dir", "safe_serialization", "wait"))
            remedy = "".join(f" Did you mean {meant} with {name}?" for name, meant in near.items())
            warn(
                f"save_state() was given {', '.join(save_model_func_kwargs)}, which nothing reads here."
                f"{remedy or ' Leave it out.'}"
            )

        def save() -> str:
            return self.checkpointer.save(
                None if output_dir is None else os.fspath(output_dir),
                scaler=self.scaler,
                safe_serialization=safe_serialization,
                wait=wait,
            )

        with phases.during(phases.SAVING):
            if self.recovery is None:
                path = save()
            elif self.checkpointer.writes_shards:  # all members save together
                path = self.recovery.run_collective(save, carries_data=False)
            else:
                path = self.recovery.retry(save)
        for notify in self.instruments.saved:
            notify(self, path)
        return path

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        strict: bool = True,
        verify: str = "size",
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        """Restore everything from a checkpoint, or raise and list what does not fit.

        Loaders begin the epoch they were in again, in its order, and the script skips what it has seen; `resume` lets
        them go on at the next batch.

        Args:
            input_dir: Folder or URL of a checkpoint. Without it the newest committed one of the project is taken.
            load_kwargs: Arguments of `torch.load`, for the files that it reads.
            strict: Whether a difference between checkpoint and run is an error. With False what fits is loaded, and
                the report lists the rest.
            verify: What is checked before anything is restored: "size" of every file, or "hash", which reads every
                byte.
            **load_model_func_kwargs: Arguments of `load_state_dict` of the models.

        Returns:
            What was loaded, and what differs.
        """
        load_kwargs = _with_location(load_kwargs, load_model_func_kwargs)
        self._check_load_options("load_state", load_model_func_kwargs)
        place = self.checkpointer.find(None if input_dir is None else os.fspath(input_dir))
        report = self._restore(place, load_kwargs, seek=False, strict=strict, verify=verify, **load_model_func_kwargs)
        return self._loaded(report)

    def resume(self, input_dir: str | os.PathLike[str] | None = None, **options: Any) -> LoadReport | None:
        """Continue from the newest committed checkpoint, if there is one, and say so; otherwise return None.

        Every loader goes on at the next batch. A copy in host memory (`--memory_copies_every`) that has more steps
        than the checkpoint takes its place.

        Args:
            input_dir: Folder or URL of a checkpoint. Without it the newest automatic checkpoint is looked for.
            **options: Those of `load_state`.
        """
        options["load_kwargs"] = _with_location(options.get("load_kwargs"), options)
        self._check_load_options("resume", options.keys() - _LOAD_OPTIONS)
        if self.recovery is not None:
            self.recovery.is_prepared = True
            if not self.recovery.member.has_joined:
                return self._loaded(self._join())
        in_memory_only = input_dir is None and self.project_dir is None and (self.recovery or self._copies) is not None
        place: CheckpointLocation | None = None
        if not in_memory_only:
            found = self.checkpointer.find(None if input_dir is None else os.fspath(input_dir))
            place = found if self.checkpointer.exists(found) else None
        report = self._recall(place, **options)
        if report is None and place is not None:
            report = self._restore(place, **options, seek=True)
        if report is None:
            logger.info("There is no checkpoint in %s: the run begins.", input_dir or self.project_dir)
        if self._copies is not None:
            self._copies.begin()
        return None if report is None else self._loaded(report)

    def _loaded(self, report: LoadReport) -> LoadReport:
        for notify in self.instruments.loaded:
            notify(self, report.path)
        return report

    def _check_load_options(self, method: str, names: Iterable[str]) -> None:
        """Raise for options of a load that no model takes, before anything is loaded."""
        for name, meant in misspelt(names, _LOAD_OPTIONS).items():
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}. Did you mean {meant}?")
        for name, model in product(names, self._models):
            parameters = signature(self.unwrap_model(model, keep_torch_compile=False).load_state_dict).parameters
            if name not in parameters and all(found.kind != Parameter.VAR_KEYWORD for found in parameters.values()):
                raise TypeError(
                    f"{method}() got an unexpected keyword argument {name!r}: it is not one of load_kwargs, strict and "
                    f"verify, and {type(model).__name__}.load_state_dict does not take it."
                )

    def _start_copies(self) -> None:
        """With `meshwright launch --memory_copies_every`, copy the state into host memory every few steps."""
        self._copies: MemoryCopies | None = None
        every, folder = read_setting("memory_copies_every"), read_setting("memory_copies_dir")
        if every is None:
            return
        if folder is None:
            raise UnsupportedSettingError(
                "MESHWRIGHT_MEMORY_COPIES_EVERY",
                "nothing says which folder the copies of this run are in.",
                f"Start it with `{program_name()} launch`, or set MESHWRIGHT_MEMORY_COPIES_DIR to a folder of the run.",
            )
        self._copies = self.checkpointer.make_copies(every, Path(folder), lambda: self.scaler)
        self.instruments.add(self._copies)

    def _recall(
        self, place: CheckpointLocation | None, load_kwargs: dict[str, Any] | None = None, **_: Any
    ) -> LoadReport | None:
        """Go on from the copies in memory, if they are newer than a checkpoint."""
        if self._copies is None:
            return None
        from ..checkpoint.commit.recall import recall

        disk_step = None if place is None else self.checkpointer.step_of(place)
        return recall(self._copies, disk_step, load_kwargs or {})

    def _start_recovery(self) -> None:
        """Under `meshwright launch --survive`, let the processes go on when one of them is lost."""
        self._start_copies()
        self.recovery: Recovery | None = None
        if self.state._runtime.member is None:
            return
        from ..parallel.replicas.joining import Joining
        from ..parallel.replicas.recovery import Recovery, State

        def capture(complete: bool) -> bytes:
            return self.checkpointer.pack(self.scaler, complete=complete)

        def restore(content: bytes) -> None:
            self.checkpointer.unpack(content, self.scaler, self.strategy.data_rank)

        state = State(
            loaders=self._dataloaders,
            gradient_state=self.gradient_state,
            capture=capture,
            restore=restore,
        )
        self.recovery = Recovery(cast("SurvivingReplicas", self.strategy), state)
        self._joining = Joining(self.recovery)

    def _join(self) -> LoadReport:
        """As a replacement of a lost process, take the state of another one and join the run."""
        from ..checkpoint.commit.engine import LoadReport

        self._joining.join()
        if self._copies is not None:
            self._copies.begin()
        report = LoadReport(path="the memory of another replica", step=max(o.steps_taken for o in self._optimizers))
        logger.info("%s", report)
        return report

    def _restore(
        self,
        place: CheckpointLocation,
        load_kwargs: dict[str, Any] | None = None,
        *,
        seek: bool,
        strict: bool = True,
        verify: str = "size",
        **load_model_func_kwargs: Any,
    ) -> LoadReport:
        return self.checkpointer.load(
            place,
            scaler=self.scaler,
            seek=seek,
            strict=strict,
            verify=verify,
            load_options=load_kwargs or {},
            model_options=load_model_func_kwargs,
        )

    def save_if_preempted(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Save and leave if the run was asked to, by SIGTERM or by a file `PREEMPT` in the project folder.

        All processes call it, as the last thing of a step, and agree about once per second, or at every 20th call. The
        program ends with exit code 75, which `meshwright launch` and a batch system take as "start me again".

        Args:
            output_dir: The checkpoint's folder, as for `save_state`.
        """
        reason = self.checkpointer.preempted()
        if reason is not None:
            self.checkpointer.exit_preempted(self.save_state(output_dir), reason)

    def _trace_backward(self) -> None:
        """Note every backward pass, for `meshwright check --resume`."""
        from ..checkpoint.trace import ResumeTrace

        trace = self.checkpointer.trace = ResumeTrace.from_environment(self.process_index)
        self.checkpointer.register(trace)
        self.instruments.add(trace)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects, which have `state_dict` and `load_state_dict`, with everything else.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.
        """
        self.checkpointer.register(*objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before every save; weights it removes are not saved again.

        Args:
            hook: The function.
        """
        return self.checkpointer.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, input_dir)` before every load; models it removes are not loaded again.

        Args:
            hook: The function.
        """
        return self.checkpointer.add_load_hook(hook)


def _with_location(load_kwargs: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any] | None:
    """Take the published option `map_location` out of those for models; what is loaded goes to where its owner is."""
    location = options.pop("map_location", None)
    return load_kwargs if location in (None, "on_device") else {"map_location": location, **(load_kwargs or {})}
