"""Damage inputs: bytes, and pickles opcode by opcode."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct
from collections.abc import Sequence

_INTERESTING = [
    b"",
    b"\0",
    b"\xff" * 4,
    b"9" * 30,
    b"NaN",
    b"Infinity",
    b"null",
    b"{}",
    b"[]",
    b'"\\ud800"',
    b"-1",
    b"1e999",
]
_TEXTS = ["", "a", "__class__", "__dict__", "items", "__setstate__", "model.weight", "../x", "0", "cpu", "latin1"]
_GLOBALS = [
    tuple(name.split())
    for name in """
os system
builtins eval
builtins getattr
builtins bytearray
builtins list
builtins range
builtins set
builtins dict
collections OrderedDict
collections Counter
pathlib PosixPath
pathlib Path
torch Size
torch Tensor
torch float32
torch FloatStorage
torch UntypedStorage
torch load
torch._utils _rebuild_tensor_v2
torch._utils _rebuild_parameter
torch._tensor _rebuild_from_type_v2
torch.serialization _get_layout
torch.serialization load
torch._utils _rebuild_sparse_tensor
numpy dtype
numpy ndarray
numpy._core.multiarray _reconstruct
numpy._core.multiarray scalar
datetime datetime
datetime timedelta
decimal Decimal
fractions Fraction
_codecs encode
copyreg _reconstructor
torch.distributed.checkpoint.filesystem _StorageInfo
""".splitlines()
    if name
] + [
    ("torch.distributed.checkpoint.metadata", name)
    for name in [
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "STORAGE_TYPES",
        "ChunkStorageMetadata",
        "os",
        "TensorProperties",
        "StorageMeta",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ]
]
_PLAIN = b"N\x88\x89)]}(0.Q\x85\x86\x87tbeasuRp\x81\x94\x8f\x90\x912"
_HOSTILE = [
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"\x8e" + b"\xff" * 8,
    b"\x96" + b"\xff" * 7 + b"\x7f",
    b"\x95" + b"\xff" * 8, b"\x8d" + b"\xff" * 8, b"\x8a\xff", b"\x82\x01",
    b"i" + b"os\nsystem\n", b"o", b"P1\n", b"\x97", b"\x98",
]  # fmt: skip


def damaged(source: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few flips, cuts, repetitions and insertions."""
    data = bytearray(source)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if where < len(data):
                data[where] ^= 1 << rng.randrange(8)
            case 1:
                del data[where : where + rng.randint(1, 16)]
            case 2:
                data[where:where] = rng.choice(_INTERESTING)
            case 3:
                first = rng.randrange(len(data) + 1)
                data[where:where] = data[first : first + rng.randint(1, 40)]
            case _:
                del data[rng.randrange(len(data) + 1) :]
    return bytes(data)


def program(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a pickle: opcodes of real ones in another order, with others between them; or made of nothing."""
    pieces = _opcodes_of(rng.choice(seeds)) if rng.random() < 0.8 else []
    for _ in range(rng.randint(1, 6) if pieces else rng.randint(1, 40)):
        where = rng.randrange(len(pieces) + 1)
        match rng.randrange(4):
            case 0 if pieces:
                del pieces[where : where + rng.randint(1, 3)]
            case 1 if pieces:
                first = rng.randrange(len(pieces))
                pieces[where:where] = pieces[first : first + rng.randint(1, 6)]
            case _:
                pieces[where:where] = [_opcode(rng)]
    return b"".join(pieces) + b"."


_known: dict[bytes, list[bytes]] = {}


def _opcodes_of(source: bytes) -> list[bytes]:
    if source not in _known:
        starts = [position for _, _, position in pickletools.genops(source)]
        _known[source] = [source[first:last] for first, last in zip(starts, [*starts[1:], len(source)], strict=True)][
            :-1
        ]
    return list(_known[source])


def _opcode(rng: random.Random) -> bytes:
    match rng.randrange(8):
        case 0:
            return bytes([rng.choice(_PLAIN)])
        case 1:
            text = rng.choice(_TEXTS).encode()
            return pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        case 2:
            return pickle.BININT + struct.pack("<i", rng.choice([-1, 0, 1, 3, 1 << 20, (1 << 31) - 1]))
        case 3:
            module, name = rng.choice(_GLOBALS)
            return pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case 4:
            return rng.choice([pickle.BINGET, pickle.BINPUT]) + bytes([rng.randrange(40)])
        case 5:
            return rng.choice(_HOSTILE)
        case _:
            return bytes([rng.randrange(256)])
