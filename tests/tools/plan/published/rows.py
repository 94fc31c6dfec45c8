"""Published rows as cases: what was trained, what was measured, and whether the plan can express it."""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .script.options import LLAMA, MPT, NEOX, Options

FILE = Path(__file__).parent / "published.tsv"
GIB = 2**30
ALLOCATED, EXPANDABLE = "allocated", "expandable"
"""Definitions of memory: bytes in use, and bytes reserved by the caching allocator with expandable segments."""

Row = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One published row."""

    line: int
    """In the file; the header is line 1."""
    source: str
    label: str
    options: Options | None
    """None if the plan cannot express the run."""
    cluster: str = ""
    reason: str = ""
    """Why the plan cannot express the run, its memory or its time."""
    memory: float | None = None
    """Bytes, by the definition `measure`; None if none was published or the plan cannot express it."""
    measure: str = ALLOCATED
    rate: float | None = None
    """Tokens per second and device; None as above."""
    ran: bool = True
    compiled: bool = False
    held_out: bool = False


@dataclass(frozen=True)
class Reading:
    """How one row of a source reads."""

    options: Options | None
    cluster: str
    reason: str = ""
    memory: float | None = None
    measure: str = ALLOCATED
    rate: float | None = None
    compiled: bool = False


def read_cases(path: Path = FILE) -> list[Case]:
    """Return the cases of all rows."""
    lines = path.read_text().splitlines()
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [_case(number, lines[number - 1], row) for number, row in enumerate(rows, 2)]


def _case(number: int, line: str, row: Row) -> Case:
    source = row["source"].split()[0].split("/")[1].lower()
    reading = _READERS[source](row)
    label = " ".join(row[name] for name in ("model", "mesh", "extras") if row[name])
    return Case(
        line=number,
        source=source,
        label=label,
        options=reading.options,
        cluster=f"{row['gpus']}x{reading.cluster}",
        reason=reading.reason,
        memory=reading.memory,
        measure=reading.measure,
        rate=reading.rate,
        compiled=reading.compiled,
        held_out=zlib.crc32(line.encode()) % 2 == 1,
    )


def _sizes(mesh: str) -> dict[str, int]:
    """Return the sizes in a mesh such as `fsdp8 tp8` or `l12_tp2_pp1_dp4_mbc4_cef`."""
    return {axis: int(size) for axis, size in re.findall(r"(fsdp|dp|tp|cp|pp|mbc|ep)(\d+)", mesh)}


def _shape(row: Row) -> dict[str, int]:
    names = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv": "kv_heads", "ffn": "ffn", "vocab": "vocab"}
    return {own: int(row[name]) for name, own in names.items() if row[name]}


def _number(text: str) -> float | None:
    return float(text) if text else None


def _torchtitan(row: Row) -> Reading:
    sizes = _sizes(row["mesh"])
    pp, extras, precision = sizes.get("pp", 1), row["extras"], row["precision"]
    compiled = "compile" in extras
    is_fp8 = "float8" in precision
    device = "H200" if row["gpu"].startswith("H200") else "H100-96GB"
    batch = int(row["micro_batch"])
    if pp > 1 and batch > pp:
        return Reading(None, device, "the size of a micro-batch was not published")
    options = Options(
        **_shape(row),
        dp_shard=sizes["fsdp"],
        cp=sizes.get("cp", 1),
        tp=sizes.get("tp", 1),
        pp=pp,
        batch=batch // pp,
        accumulation=pp,
        seq=int(row["seq"] or 8192),  # of the configuration that the run used
        recompute="full" if row["recompute"] == "full" else "selective",
        fused=compiled,
        loss="fused" if device == "H200" else "full",  # later versions compile the loss
    )
    untimed = "products in fp8" if is_fp8 else "asynchronous tensor parallelism" if "async TP" in extras else ""
    memory = _number(row["memory_GiB"])
    return Reading(
        options,
        device,
        reason=f"{untimed}: memory only" if untimed else "",
        memory=None if memory is None else memory * GIB,
        measure=EXPANDABLE,
        rate=None if untimed else _number(row["tok_s_gpu"]),
        compiled=compiled,
    )


def _torchtune(row: Row) -> Reading:
    extras = row["extras"]
    device = {"4090": "RTX4090", "A6000": "A6000"}.get(row["gpu"], "A100-80GB")
    if row["model"] != "Llama-3.2-3B":
        unknown = "the length of sequences" if not row["seq"] else "recompute and optimizer"
        return Reading(None, device, f"{unknown} was not published")
    if "baseline" in extras:
        return Reading(None, device, "the lengths of samples that are not packed were not published")
    if extras in ("+activation offloading", "+8-bit AdamW"):
        return Reading(None, device, "the optimizer steps inside the backward pass, and activations are offloaded")
    compiled = extras != "+packed"
    return Reading(
        Options(
            **_shape(row),
            tied=True,
            batch=2,
            seq=4096,
            precision="bf16",
            recompute=row["recompute"] or "none",
            fused=compiled,
            loss="full" if not compiled else "fused-fp32" if extras == "+compile" else "chunked-fused",
            optimizer="adamw-in-backward" if "optimizer in backward" in extras else "adamw",
            offload="LoRA" in extras,
            lora_rank=64 if "LoRA" in extras else 0,
            lora_targets="qvo gate up down",
            nf4="QLoRA" in extras,
            adam="fused",
            clip=False,
        ),
        device,
        memory=float(row["memory_GiB"]) * GIB,
        rate=float(row["tok_s_gpu"]),
        compiled=compiled,
    )


_PEAK = 989.4e12
"""FLOPs per second of an H100 in bf16, of which nanotron's MFU is a part."""


def _nanotron(row: Row) -> Reading:
    sizes, shape = _sizes(row["mesh"]), _shape(row)
    accumulation = int(re.findall(r"grad accumulation (\d+)", row["extras"])[0])
    shards = "ZeRO-1" in row["extras"]
    pp, dp, seq = sizes["pp"], sizes["dp"], int(row["seq"])
    options = Options(
        **shape,
        tied=shape["hidden"] < 4096 and pp == 1,  # two stages cannot share a weight; each has one of its own there
        dp_shard=dp if shards else 1,
        dp_replicate=1 if shards else dp,
        tp=sizes["tp"],
        pp=pp,
        schedule="1f1b" if accumulation >= pp else "gpipe",
        reshard=False,
        batch=int(row["micro_batch"]),
        accumulation=accumulation,
        seq=seq,
        precision="mixed" if dp > 1 else "master",
        fused=True,
        adam="fused",
        clip=dp > 1,
        keep_gradients=not shards,  # FSDP2 sums whole gradients beside the shards' own from the second micro-batch on
    )
    unlike = "ZeRO-1 with one micro-batch keeps fp32 gradients whole, FSDP2 does not: time only"
    return Reading(
        options,
        "H100",
        reason=unlike if shards and accumulation == 1 else "",
        memory=None if shards and accumulation == 1 else float(row["memory_GiB"]) * 1e9,
        rate=float(row["MFU_pct"]) / 100 * _PEAK / flops_per_token(options),
        compiled=True,
    )


def flops_per_token(options: Options) -> float:
    """Return the FLOPs of a token, forward and backward, with attention in full."""
    attention = 2 * options.seq * options.hidden
    return 6.0 * (options.layers * (block_parameters(options) + attention) + options.hidden * options.vocab)


def block_parameters(options: Options) -> int:
    """Return the elements of the matrices of a block."""
    gated = options.hidden * options.ffn * (3 if options.family == LLAMA else 2)
    keys = options.kv_heads * options.hidden // options.heads
    return options.hidden * (2 * options.hidden + 2 * keys) + gated


_LLAMA_405B = {"hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256}


def _simumax(row: Row) -> Reading:
    if row["model"].startswith("deepseek"):
        return Reading(None, "B200", "latent attention and experts of a shape that was not published")
    sizes = _sizes(row["mesh"])
    shape = _shape(row) if row["hidden"] else {"layers": int(row["layers"]), **_LLAMA_405B}
    dp, cp, pp, count = sizes["dp"], sizes.get("cp", 1), sizes["pp"], sizes["mbc"]
    shards = dp * cp > 1
    seq = int(row["seq"] or 4096)
    options = Options(
        **shape,
        dp_shard=dp,
        cp=cp,
        tp=sizes["tp"],
        pp=pp,
        reshard=False,
        batch=1,
        accumulation=count,
        seq=seq,
        precision="mixed" if shards else "master",
        fused=True,
        grouped=True,
        loss="fused",
        adam="fused",
        clip=shards,
    )
    seconds = float(re.findall(r"measured ([\d.]+) ms", row["extras"])[0]) / 1000
    return Reading(
        options,
        "B200",
        memory=float(row["memory_GiB"]) * GIB,
        rate=dp * count * seq / seconds / int(row["gpus"]),
        compiled=True,
    )


_LITGPT = {
    "phi-1.5": {"layers": 24, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 51200, "shared_norm": True},
    "StableLM": {"layers": 16, "hidden": 4096, "heads": 32, "ffn": 16384, "vocab": 50688},
    "Llama 2 7": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000},
    "Llama 2 13": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000},
}


def _litgpt(row: Row) -> Reading:
    extras, device = row["extras"], "A100-40GB"
    if "Adapter" in extras:
        return Reading(None, device, "adapters inside of attention")
    if "quantization None" not in extras:
        return Reading(None, device, "what bitsandbytes keeps for its backward pass depends on its version")
    if row["mesh"] != "single":
        return Reading(None, device, "FSDP1 with flat parameters that are frozen in part")
    (shape,) = (shape for name, shape in _LITGPT.items() if row["model"].startswith(name))
    is_llama = row["model"].startswith("Llama")
    return Reading(
        Options(
            **shape,  # type: ignore[arg-type]
            family=LLAMA if is_llama else NEOX,
            kv_heads=shape["heads"],
            packed=True,
            batch=int(row["micro_batch"]),
            seq=1304 if is_llama else 1034,  # the longest sample of the data set, by the tokenizers' extremes
            precision="bf16",
            loss="chunked",
            chunk=128,
            lora_rank=8,
            lora_dropout=0.05,
            clip=False,
        ),
        device,
        memory=float(row["memory_GiB"])
        * 1e9,  # rows of one model that differ in the micro-batch agree in no other unit
    )


def _foundry(row: Row) -> Reading:
    device = {"h100_80gb": "H100", "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB"}[row["gpu"]]
    is_fp8 = "fp8" in row["precision"]
    options = Options(
        **_shape(row),
        family=MPT,
        tied=True,
        packed=True,
        dp_shard=int(row["gpus"]),
        reshard=row["mesh"] == "FULL_SHARD",
        batch=int(row["micro_batch"]),
        accumulation=int(re.findall(r"grad accumulation (\d+)", row["extras"])[0]),
        seq=int(row["seq"]),
        precision="mixed-bf16" if "PURE" in row["precision"] else "mixed",
        recompute=row["recompute"],
        sync_each=True,
        loss="fused",
    )
    return Reading(
        options,
        device,
        reason="products in fp8: memory only" if is_fp8 else "",
        rate=None if is_fp8 else float(row["tok_s_gpu"]),
    )


_READERS: dict[str, Callable[[Row], Reading]] = {
    "torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "nanotron": _nanotron,
    "simumax": _simumax,
    "litgpt": _litgpt,
    "llm-foundry": _foundry,
}
