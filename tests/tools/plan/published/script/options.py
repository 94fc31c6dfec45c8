"""What a published run trained and how: the one argument of `train.py`, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LLAMA, MPT, NEOX = "llama", "mpt", "neox"


@dataclass(frozen=True)
class Options:
    """A decoder, the mesh that it is spread over, and how it is trained."""

    family: str = LLAMA
    """llama (RMSNorm, rotary positions, SwiGLU), mpt (LayerNorm, learned positions, GELU) or neox (attention and MLP
    side by side)."""
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 128
    vocab: int = 256
    tied: bool = False
    """Whether the head has the weight of the embedding."""
    packed: bool = False
    """Whether queries, keys and values are one product."""
    grouped: bool = False
    """Whether attention takes fewer heads of keys and values; otherwise they are repeated before it."""
    shared_norm: bool = False
    """Whether attention and MLP of a neox block have one norm."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    reshard: bool = True
    """Whether a block's gathered weights are freed after its forward pass."""
    schedule: str = "1f1b"
    batch: int = 1
    """Samples of a rank in one backward pass, or in one micro-batch of a pipeline."""
    seq: int = 64
    accumulation: int = 1
    """Backward passes, or micro-batches of a pipeline, in one optimizer step."""

    sync_each: bool = False
    """Whether gradients are reduced in every backward pass; otherwise in the last one of a step."""

    precision: str = "mixed"
    """mixed (fp32 weights, bf16 computation), mixed-bf16 (gradients are reduced in bf16 too), bf16 (all) or master
    (bf16 weights, with fp32 copies and gradients)."""
    recompute: str = "none"
    """none, full (blocks keep their inputs), or selective (every second product of matrices is kept, and attention)."""
    offload: bool = False
    """Whether what recomputed blocks keep is kept on the host."""
    fused: bool = False
    """Whether norms, rotary positions and SwiGLU are one kernel each, as torch.compile makes them."""
    loss: str = "full"
    """full (fp32 logits at once), chunked (eight parts), fused (one kernel on bf16 logits), fused-fp32 (one kernel on
    fp32 logits) or chunked-fused."""
    chunk: int = 0
    """Positions of a part, with a chunked loss; 0 makes eight parts."""
    optimizer: str = "adamw"
    """adamw, adamw-8bit, or adamw-in-backward and adamw-8bit-in-backward, which step inside the backward pass."""
    adam: str = "foreach"
    """How torch's AdamW runs: foreach or fused."""
    clip: bool = True
    keep_gradients: bool = False
    """Whether gradients are set to zero after a step, not freed."""
    lora_rank: int = 0
    lora_targets: str = "qv"
    """Layers that are corrected, such as `qv` (projections of queries and values), or `all` of a block."""
    lora_dropout: float = 0.0
    nf4: bool = False
    """Whether frozen weights are kept in four bits."""
    steps: int = 2

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def parts(self) -> int:
        """Parts of a sequence that logits are made in."""
        if not self.loss.startswith("chunked"):
            return 1
        return -(-self.seq // self.chunk) if self.chunk else 8

    def to_json(self) -> str:
        """Return the options that are not the defaults."""
        default = asdict(Options())
        return json.dumps({name: value for name, value in asdict(self).items() if value != default[name]})


def read_options(text: str) -> Options:
    """Return the options of a JSON object."""
    return Options(**json.loads(text))
