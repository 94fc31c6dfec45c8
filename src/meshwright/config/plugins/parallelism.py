"""`ParallelismConfig`: the axes of the device mesh and their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..environment import read_parallelism
from ..meshes import build_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""From the outermost axis to the innermost, which communicates most."""
VIEWS = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp", "sp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
}
"""Published names of flattened axes. Processes of `sp` have different tokens, as those of `cp` do."""
EXPERT_AXES = ("ep_replicate", "ep_shard", "ep")
"""The axes of the mesh of experts: processes with the same experts copy or shard them, and `ep` holds all experts."""
REST = -1


@dataclass
class TorchTensorParallelConfig:
    """Tune tensor parallelism."""

    enable_async_tp: bool = False
    """Overlap communication with the matrix products; needs `torch.compile` on CUDA."""
    sequence_parallel: bool = field(default=False, kw_only=True)
    """Split sequences where layers are not split: between attention and MLP of a block, and from block to block."""


@dataclass
class TorchTensorParallelPlugin:
    """Ask for tensor parallelism: the older form of `ParallelismConfig(tp_size=...)`, which it becomes."""

    tp_size: int = 1
    """Processes that split each layer; the others see different samples."""
    torch_device_mesh: Any = None
    """A mesh whose size along "tp" is `tp_size`. The run makes a mesh of its own."""

    def __post_init__(self) -> None:
        if not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ValueError(f"TorchTensorParallelPlugin(tp_size={self.tp_size!r}): expected 1 or more.")
        names = getattr(self.torch_device_mesh, "mesh_dim_names", None) or ()
        if self.torch_device_mesh is not None and ("tp" not in names or self._size_of_mesh() != self.tp_size):
            raise ValueError(
                f"TorchTensorParallelPlugin(tp_size={self.tp_size}): torch_device_mesh needs an axis tp of that size."
            )

    def _size_of_mesh(self) -> int:
        return int(self.torch_device_mesh["tp"].size())

    def parallelism(self) -> ParallelismConfig:
        """Return the mesh: the other axes as the environment says, and copies on the rest of the processes."""
        copies, shards = read_parallelism("dp_replicate_size"), read_parallelism("dp_shard_size")
        if copies in (None, 1):
            copies = 1 if shards == REST else REST
        return ParallelismConfig(tp_size=self.tp_size, dp_replicate_size=copies)


@dataclass
class TorchContextParallelConfig:
    """Tune context parallelism."""

    cp_comm_strategy: str | None = None
    """How keys and values are exchanged: "allgather" (default) or "alltoall", which passes them around a ring."""

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or read_parallelism("cp_comm_strategy") or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"cp_comm_strategy={self.cp_comm_strategy!r} is unknown: choose allgather or alltoall.")


_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Describe sequences for Ulysses (`sp_size`), which runs without DeepSpeed here."""

    sp_seq_length: int | None = None
    """Length of the sequences; needed if it is the same for all batches. Any length works: nothing reads it."""
    sp_seq_length_is_variable: bool | None = None
    """Whether lengths differ from batch to batch; by default they do."""
    sp_attn_implementation: str | None = None
    """Attention of the model: "sdpa" or one of flash attention's. It runs by torch's kernels in any case."""

    def __post_init__(self) -> None:
        for name in ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"):
            if getattr(self, name) is None:
                setattr(self, name, read_parallelism(name))
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ValueError(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False): sp_seq_length must be provided, in "
                "code or by the variable PARALLELISM_CONFIG_SP_SEQ_LENGTH."
            )
        chosen = self.sp_attn_implementation
        if chosen is not None and chosen not in _ATTENTION and "/" not in chosen:  # a kernel of the hub has a slash
            raise ValueError(
                f"Invalid sp_attn_implementation: {chosen}. Sequence parallelism takes {', '.join(_ATTENTION)} or the "
                "name of a flash attention kernel on the hub, such as kernels-community/flash-attn2."
            )


SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass
class PipelineConfig:
    """Configure where a model is cut into stages, and the schedule of the micro-batches."""

    split_at: Sequence[str] | None = None
    """Names of the modules with which a new stage begins; by default the repeated blocks are divided evenly."""
    schedule: str = "1f1b"
    """"1f1b" (a backward pass as soon as possible), "gpipe" (all forward passes first), or "interleaved" (1f1b with
    several stages on every process)."""
    microbatches: int | None = None
    """Into how many parts a process's batch is cut; by default as many as there are stages."""
    stages_per_rank: int | None = None
    """Stages on every process: 2 by default with "interleaved", and 1 with the others."""
    example_inputs: Any = None
    """What the model is called with: a tensor, a tuple, a dict of keyword arguments, or a function that makes one.
    Needed only where modules are registered in another order than they run in."""
    layers_per_stage: int | None = field(default=None, kw_only=True)
    """Blocks of a stage, with "interleaved", instead of `stages_per_rank`."""

    def __post_init__(self) -> None:
        self.schedule = self.schedule.lower()
        if self.schedule not in SCHEDULES:
            raise ValueError(f"PipelineConfig(schedule={self.schedule!r}): choose one of {', '.join(SCHEDULES)}.")
        interleaved = self.schedule == "interleaved"
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if interleaved else 1
        if self.stages_per_rank < 1 or (self.stages_per_rank > 1) != interleaved:
            raise ValueError(
                f"PipelineConfig(schedule={self.schedule!r}, stages_per_rank={self.stages_per_rank}): several stages "
                'on a process are "interleaved", and that schedule needs at least 2; the others have 1.'
            )
        if self.layers_per_stage is not None and (self.layers_per_stage < 1 or not interleaved):
            raise ValueError(
                f"PipelineConfig(schedule={self.schedule!r}, layers_per_stage={self.layers_per_stage}): it is the "
                'number of blocks of a stage, 1 or more, and for schedule="interleaved" only.'
            )
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"PipelineConfig(microbatches={self.microbatches}): a batch has at least 1 part.")

    def fitted(self, num_blocks: int, pp_size: int) -> PipelineConfig:
        """Return the configuration for a model with this many blocks, which `layers_per_stage` divides into stages."""
        if self.layers_per_stage is None:
            return self
        per_rank, rest = divmod(num_blocks, self.layers_per_stage * pp_size)
        if rest or per_rank < 2:
            fit = [n for n in range(1, num_blocks // pp_size) if num_blocks % (n * pp_size) == 0]
            raise ValueError(
                f"PipelineConfig(layers_per_stage={self.layers_per_stage}): {num_blocks} blocks on {pp_size} processes "
                f"with several equal stages each. Numbers that work: {', '.join(map(str, fit)) or 'none'}."
            )
        return replace(self, stages_per_rank=per_rank, layers_per_stage=None)

    def stages_of(self, rank: int, pp_size: int) -> list[int]:
        """Return the stages of a process; stages are assigned round-robin."""
        return [rank + pp_size * index for index in range(self.stages_per_rank or 1)]

    def microbatches_for(self, pp_size: int) -> int:
        """Return the number of micro-batches, or refuse one that the schedule cannot run."""
        stages = pp_size * (self.stages_per_rank or 1)
        count = stages if self.microbatches is None else self.microbatches
        if self.schedule == "1f1b" and count < stages:
            raise ValueError(
                f'PipelineConfig(microbatches={count}): "1f1b" on {stages} stages needs at least {stages}; "gpipe" '
                "runs with any number."
            )
        if self.schedule == "interleaved" and count % max(1, count // pp_size):
            fit = [n for n in range(1, 4 * stages + 1) if n % max(1, n // pp_size) == 0]
            raise ValueError(
                f'PipelineConfig(microbatches={count}): "interleaved" on {pp_size} processes passes them on in equal '
                f"rounds. Numbers that work: {', '.join(map(str, fit[-12:]))}."
            )
        return count


@dataclass
class ParallelismConfig:
    """Configure the size of each mesh axis; their product is the number of processes.

    A size of -1 on one of the two data axes means "whatever is left". A field that is left out comes from the
    environment (`PARALLELISM_CONFIG_TP_SIZE` and so on), or has its default.
    """

    dp_replicate_size: int | None = None
    """Copies of the model, whose gradients are averaged."""
    dp_shard_size: int | None = None
    """Processes that share one copy: FSDP2. With `dp_replicate_size` this is HSDP."""
    tp_size: int | None = None
    """Processes that split every layer: tensor parallelism."""
    cp_size: int | None = None
    """Processes that split every sequence: context parallelism."""
    cp_backend: str | None = None
    """Implementation of context parallelism: "torch", the only choice."""
    sp_size: int | None = None
    """Processes that split every sequence, and the heads in attention: Ulysses."""
    sp_backend: str | None = None
    """Name of the implementation of sequence parallelism. Any name stands for the one here, without DeepSpeed."""
    tp_handler: TorchTensorParallelConfig | None = None
    """Details of tensor parallelism."""
    cp_handler: TorchContextParallelConfig | None = None
    """Details of context parallelism."""
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    """Details of sequence parallelism."""
    pp_size: int | None = None
    """Processes that each hold some of the layers: pipeline parallelism."""
    pp_handler: PipelineConfig | None = None
    """Where the model is cut, and in which order micro-batches pass."""
    tp_plan: Mapping[str, Any] | None = None
    """Module name patterns -> how to split: `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`. Without one the
    plan that the model carries is taken."""
    ep_size: int | None = None
    """Processes that hold all experts of a module between them: expert parallelism. It adds no processes: it divides
    `dp_shard_size` x `cp_size` x `sp_size` x `tp_size`, or `dp_replicate_size` where these are 1."""
    ep_plan: Mapping[str, str] | None = None
    """Module name patterns -> "experts": `{"layers.*.mlp.experts": "experts"}`. Without one the plan that the model
    carries is taken, as models of transformers do."""

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size", "ep_size"):
            setattr(self, name, self._checked_size(name))
        if self.dp_replicate_size == self.dp_shard_size == REST:
            raise ValueError("ParallelismConfig: only one of dp_replicate_size and dp_shard_size can be -1.")
        self.cp_backend = self.cp_backend or read_parallelism("cp_backend") or "torch"
        self.sp_backend = self.sp_backend or read_parallelism("sp_backend") or "deepspeed"
        if self.cp_backend != "torch":
            raise ValueError(f"ParallelismConfig(cp_backend={self.cp_backend!r}) is unknown: choose torch.")
        if self.tp_handler is None and self.tp_enabled:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_handler is None and self.cp_enabled:
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_handler is None and self.sp_enabled:
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        if self.pp_handler is None and self.pp_enabled:
            self.pp_handler = PipelineConfig()
        self.device_mesh: DeviceMesh | None = None

    def _checked_size(self, name: str) -> int:
        """Return a size as given, else from the environment, else 1; refuse an invalid one."""
        size = getattr(self, name)
        if size is None:
            size = read_parallelism(name)
        if size is None:
            return 1
        may_be_rest = name.startswith("dp_")
        if not isinstance(size, int) or (size < 1 and not (may_be_rest and size == REST)):
            raise ValueError(
                f"ParallelismConfig({name}={size!r}): a size is a whole number of processes, 1 or more"
                f"{', or -1 for what is left' if may_be_rest else ''}."
            )
        return size

    # --- sizes of axes ----------------------------------------------------------------------------------------------

    def size(self, axis: str) -> int:
        """Return the number of processes along an axis."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def dp_replicate_enabled(self) -> bool:
        """Return whether there are several copies."""
        return self.size("dp_replicate") != 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Return whether parameters are sharded."""
        return self.size("dp_shard") != 1

    @property
    def tp_enabled(self) -> bool:
        """Return whether layers are split."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Return whether sequences are split."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Return whether sequences are split by Ulysses."""
        return self.size("sp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Return whether the layers are spread over a pipeline."""
        return self.size("pp") > 1

    @property
    def ep_enabled(self) -> bool:
        """Return whether experts are spread."""
        return self.size("ep") > 1

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        """Return the sizes of `EXPERT_AXES`, or refuse an `ep_size` that fits no group of processes."""
        ep, copies = self.size("ep"), self.size("dp_replicate")
        sharing = self.size("dp_shard") * self.size("cp") * self.size("sp") * self.size("tp")
        if sharing % ep == 0:
            return copies, sharing // ep, ep
        if sharing == 1 and copies % ep == 0:
            return copies // ep, 1, ep
        most = copies if sharing == 1 else sharing
        fit = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        raise ValueError(
            f"ParallelismConfig(ep_size={ep}): experts are spread over the {most} processes that "
            f"{'copy' if sharing == 1 else 'share'} the model, and ep_size must divide that: {fit}."
        )

    @property
    def data_parallel_size(self) -> int:
        """Return the number of processes that see different samples."""
        return self.size("dp_replicate") * self.size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Return the number of processes that work on the same samples."""
        return self.size("tp") * self.size("cp") * self.size("pp") * self.size("sp")

    @property
    def total_size(self) -> int:
        """Return the number of processes."""
        return self.data_parallel_size * self.non_data_parallel_size

    # --- names of axes ----------------------------------------------------------------------------------------------

    @property
    def active_mesh_dims(self) -> list[str]:
        """Return the axes that have more than one process, from the outermost."""
        return [axis for axis in AXES if self.size(axis) != 1]

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.size(axis) != 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Return the axes whose processes see different samples."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Return the axes whose processes work on the same samples."""
        return self._active("pp", "cp", "sp", "tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Return the axes over which parameters are sharded."""
        return self._active("dp_shard", "cp", "sp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Return the axes whose processes see different tokens."""
        return self._active("dp_replicate", "dp_shard", "cp", "sp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Return the axes of the mesh that FSDP2 works on."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    # --- the mesh ---------------------------------------------------------------------------------------------------

    def fitted(self, num_processes: int) -> ParallelismConfig:
        """Fill in what is left to the data axes, and refuse sizes whose product is not the number of processes."""
        for name in ("dp_replicate_size", "dp_shard_size"):
            if getattr(self, name) == REST:
                others = abs(self.total_size)
                if num_processes % others == 0:
                    setattr(self, name, num_processes // others)
        if self.total_size != num_processes:
            raise ValueError(self._size_error(num_processes))
        if self.ep_enabled:
            _ = self.expert_sizes  # refuses sizes that do not fit
        return self

    def _size_error(self, num_processes: int) -> str:
        asked = " x ".join(f"{axis}_size={self.size(axis)}" for axis in self.active_mesh_dims) or "1"
        fixed = self.non_data_parallel_size
        if num_processes % fixed == 0:
            left = num_processes // fixed
            pairs = [(r, left // r) for r in range(1, left + 1) if left % r == 0]
            remedy = "Sizes that fit: " + "; ".join(f"dp_replicate_size={r}, dp_shard_size={s}" for r, s in pairs[:6])
        else:
            fits = [n for n in range(1, num_processes + 1) if num_processes % n == 0]
            remedy = f"The axes without data make {fixed}, which must be one of {', '.join(map(str, fits))}"
        if REST not in (self.dp_replicate_size, self.dp_shard_size):
            remedy += f". Or start {self.total_size} processes: --num_processes {self.total_size}"
        return (
            f"ParallelismConfig needs {asked} = {abs(self.total_size)} processes"
            f"{' or a multiple' if REST in (self.dp_replicate_size, self.dp_shard_size) else ''}, and the run has "
            f"{num_processes}. {remedy}."
        )

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """Return the names and the sizes of the axes that have more than one process; nothing where none has."""
        axes = tuple(self.active_mesh_dims)
        return (axes, tuple(map(self.size, axes))) if axes else ()

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the mesh of all processes, with the flattened views `dp`, `dp_shard_cp` and `dp_cp` where they exist."""
        if mesh := self._get_mesh():
            self.device_mesh = build_mesh(*mesh, device_type, VIEWS)
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, made on first use; None where no axis has more than one process."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError(
                    "get_device_mesh() was called before there is a mesh: you need to pass a device_type, such as "
                    '"cuda", to build it.'
                )
            self.build_device_mesh(device_type)
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return the sizes and handlers as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "device_mesh"}
