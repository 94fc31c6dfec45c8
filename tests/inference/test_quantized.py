"""Quantised models, with the real packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate.utils import CustomDtype, has_4bit_bnb_layers
from accelerate.utils.bnb import (
    get_keys_to_not_convert,
    get_parameter_device,
    get_quantized_model_device_map,
    quantize_and_offload_8bit,
    replace_with_bnb_layers,
)
from accelerate.utils.offload import load_offloaded_weight
from meshwright import BnbQuantizationConfig, init_empty_weights, load_and_quantize_model
from meshwright.checkpoint.formats.model_files import save_model_files
from meshwright.errors import UnsupportedSettingError
from meshwright.inference.estimating.sizes import Sizes
from meshwright.inference.quantized import layers_to_convert, quantized_model_size
from tests.sizes import sized

WIDTH, WORDS = 128, 64
CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4 twice": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "torchao": {"load_in_8bit": True, "backend": "torchao"},
}
# How far logits may be off, as a part of their own spread, several layers deep.
TOLERANCE = {"int8": 0.02, "torchao": 0.02, "nf4": 0.1, "fp4": 0.12, "nf4 twice": 0.1}


class Model(nn.Module):
    """Embeddings, blocks of linear layers, a table that is no weight, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) * self.table.to(self.words.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


TEXT = torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(0))


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


def config(name: str, **options: Any) -> BnbQuantizationConfig:
    """Return a config, in fp32 where nothing else is asked for, so that only quantising makes a difference."""
    pytest.importorskip("torchao" if name == "torchao" else "bitsandbytes")
    options = {"torch_dtype": "fp32", "bnb_4bit_compute_dtype": "fp32"} | options
    return BnbQuantizationConfig(**CONFIGS[name], **options)


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    expected = one(TEXT).float()
    return ((other(TEXT).float() - expected).pow(2).mean().sqrt() / expected.std()).item()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model_files(model().state_dict(), tmp_path / "w", max_shard_size="200KB", safe_serialization=True)
    assert len(list((tmp_path / "w").glob("*.safetensors"))) > 3
    return tmp_path / "w"


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_stay_close(name: str) -> None:
    quantized = load_and_quantize_model(model(), config(name))
    assert 0 < distance(model(), quantized) < TOLERANCE[name]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_16_bits(name: str, dtype: str) -> None:
    quantized = load_and_quantize_model(model(), config(name, torch_dtype=dtype, bnb_4bit_compute_dtype=dtype))
    assert quantized.norm.weight.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert quantized.table.dtype == torch.float32  # it is computed by code, and no file has it
    assert distance(model(), quantized) < TOLERANCE[name] + 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_from_files_into_a_model_without_memory(name: str, folder: Path) -> None:
    with init_empty_weights():
        empty = model()
    loaded = load_and_quantize_model(empty, config(name), weights_location=folder)
    in_memory = load_and_quantize_model(model(), config(name))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TEXT), in_memory(TEXT), rtol=0, atol=0)
    assert loaded.hf_device_map == {"": torch.device("cpu")}
    assert get_parameter_device(loaded) == torch.device("cpu")


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("nf4", 4), ("fp4", 4), ("nf4 twice", 4), ("torchao", 8)])
def test_weights_shrink_to_the_expected_part(name: str, bits: int) -> None:
    plain = model()
    layers = list(layers_to_convert(plain).values())
    before = sum(layer.weight.numel() for layer in layers)
    rest = quantized_model_size(plain) - 4 * before
    quantized = load_and_quantize_model(plain, config(name))
    scales = {"int8": 1.03, "torchao": 1.03, "nf4": 1.15, "fp4": 1.15, "nf4 twice": 1.30}[name]
    now = quantized_model_size(quantized) - rest
    assert before * bits / 8 < now < scales * before * bits / 8


@pytest.mark.parametrize(("name", "dtype"), [("int8", "int8"), ("nf4", "int4")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_estimate_is_exact(name: str, dtype: str, tied: bool) -> None:
    real = load_and_quantize_model(model(tied=tied), config(name, torch_dtype="fp16"))
    assert Sizes(model(tied=tied), dtype).total() == quantized_model_size(real)
    if dtype == "int8":  # bitsandbytes packs 4-bit weights anew when they first compute on a CPU
        with torch.no_grad():
            real(TEXT)
        assert Sizes(model(tied=tied), dtype).total() == quantized_model_size(real)


@pytest.mark.parametrize("name", ["int8", "nf4", "torchao"])
def test_what_is_skipped_is_untouched(name: str) -> None:
    chosen = config(name, skip_modules=["blocks.1", "head"], keep_in_fp32_modules=["norm", "blocks.2.0"])
    quantized, plain = load_and_quantize_model(model(), chosen), model()
    for path in ("blocks.1.0", "blocks.1.2", "blocks.2.0", "head", "norm", "words"):
        module = quantized.get_submodule(path)
        assert type(module) is type(plain.get_submodule(path))
        assert torch.equal(module.weight, plain.get_submodule(path).weight)
    for path in ("blocks.0.0", "blocks.0.2", "blocks.2.2"):
        weight = quantized.get_submodule(path).weight
        assert type(weight.data) is not Tensor or not weight.is_floating_point()
    assert quantized.is_loaded_in_8bit == (name != "nf4")
    assert has_4bit_bnb_layers(quantized) == (name == "nf4")


def test_modules_kept_in_fp32() -> None:
    quantized = load_and_quantize_model(model(), config("int8", torch_dtype="fp16", keep_in_fp32_modules=["norm"]))
    assert quantized.norm.weight.dtype == torch.float32
    assert quantized.words.weight.dtype == torch.float16


def test_ties_stay_ties(tmp_path: Path) -> None:
    save_model_files(model(tied=True).state_dict(), tmp_path, max_shard_size="1GB", safe_serialization=True)
    with init_empty_weights():
        empty = model(tied=True)
    loaded = load_and_quantize_model(empty, config("int8"), weights_location=tmp_path)
    assert loaded.head.weight is loaded.words.weight
    assert distance(model(tied=True), loaded) < TOLERANCE["int8"]


def test_one_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    both = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(WIDTH, 2))
    quantized = load_and_quantize_model(both, config("int8", skip_modules=["3"]))
    assert quantized[0] is quantized[2]
    assert quantized[0] is not shared


@pytest.mark.parametrize("name", CONFIGS)
def test_the_state_can_be_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    quantized = load_and_quantize_model(model(), config(name))
    torch.save(quantized.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=name != "torchao")
    assert set(model().state_dict()) <= set(state)
    if name == "torchao":
        again: nn.Module = load_and_quantize_model(model(), config(name))
        again.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(again(TEXT), quantized(TEXT))
    elif name != "nf4 twice":
        save_model_files(quantized.state_dict(), tmp_path, max_shard_size="1GB", safe_serialization=True)
        assert (tmp_path / "model.safetensors").is_file()


def test_gradients_pass_through() -> None:
    """Adapters on top of quantised layers learn; the layers themselves do not."""
    quantized = load_and_quantize_model(model(), config("nf4"))
    quantized(TEXT).sum().backward()
    assert quantized.words.weight.grad is not None
    assert quantized.blocks[0][0].weight.grad is None


def test_memory_stays_at_the_quantised_model_and_one_layer(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    program = tmp_path / "program.py"
    program.write_text(PEAK)
    beyond = {}
    for layers in sized(gate=(24,), nightly=(12, 48)):
        (tmp_path / str(layers)).mkdir()
        command = [sys.executable, str(program), str(layers)]
        printed = subprocess.check_output(command, text=True, cwd=tmp_path / str(layers), timeout=300)
        quantized, peak, layer = map(int, printed.split()[-3:])
        beyond[layers] = (peak - quantized) / layer
    # bitsandbytes' quantiser makes some five copies of a layer on a CPU. What matters is that they go with the layer:
    # without the more layers being let go, the second number would be larger by three quarters of their number.
    assert all(number < 8 for number in beyond.values()), beyond


PEAK = """
import sys, torch
from torch import nn
from meshwright import init_empty_weights
from meshwright.checkpoint.formats.model_files import save_model_files
from meshwright import BnbQuantizationConfig, load_and_quantize_model
from pathlib import Path

torch.set_num_threads(1)
config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=[], torch_dtype="bf16")

def now(key):
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024

WIDTH, LAYERS = 1536, int(sys.argv[1])
layer = 4 * WIDTH * WIDTH
for number in range(LAYERS):  # one by one, so that the file is the only place that ever had them all
    save_model_files({f"{number}.weight": torch.randn(WIDTH, WIDTH)}, Path(f"w{number}"), max_shard_size="1GB",
                     safe_serialization=True)
import json
Path("w").mkdir()
for number in range(LAYERS):
    Path(f"w{number}/model.safetensors").rename(f"w/{number}.safetensors")
names = {f"{number}.weight": f"{number}.safetensors" for number in range(LAYERS)}
Path("w/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
load_and_quantize_model(nn.Sequential(nn.Linear(64, 64)), config)  # what is imported is in memory before
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = now("VmRSS")
load_and_quantize_model(model, config, weights_location="w")
print(LAYERS * (WIDTH * WIDTH + 4 * WIDTH), now("VmHWM") - before, layer)
"""


# --- Places -----------------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_not_quantised_and_computes(tmp_path: Path, folder: Path) -> None:
    with init_empty_weights():
        empty = model()
    places = {"words": "cpu", "blocks": "cpu", "blocks.1": "disk", "norm": "cpu", "table": "cpu", "head": "cpu"}
    loaded = load_and_quantize_model(
        empty, config("int8"), weights_location=folder, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert type(loaded.blocks[1][0]) is nn.Linear
    assert loaded.blocks[1][0].weight.is_meta
    assert loaded.blocks[0][0].weight.dtype == torch.int8
    assert distance(model(), loaded) < TOLERANCE["int8"]


def test_a_plan_knows_the_sizes_after_quantising() -> None:
    plan = get_quantized_model_device_map(model(), config("int8"), "auto", {"cpu": "400KB", "disk": "1GB"})
    assert "disk" not in plan.values()
    plain = get_quantized_model_device_map(
        model(), config("int8", skip_modules=["blocks"]), "auto", {"cpu": "400KB", "disk": "1GB"}
    )
    assert "disk" in plain.values()
    assert get_quantized_model_device_map(model(), config("int8"), {"": "cpu"}) == {"": "cpu"}


# --- What is refused --------------------------------------------------------------------------------------------------


def test_mistakes_raise(folder: Path, tmp_path: Path) -> None:
    with init_empty_weights():
        empty = model()
    with pytest.raises(ValueError, match="weights_location="):
        load_and_quantize_model(empty, config("int8"))
    with pytest.raises(ValueError, match="device_map='gpu' is unknown"):
        load_and_quantize_model(model(), config("int8"), device_map="gpu")
    with pytest.raises(ValueError, match="offload_folder="):
        load_and_quantize_model(model(), config("int8"), device_map={"": "disk"})
    with pytest.raises(ValueError, match=r"has no device for words\.weight"):
        load_and_quantize_model(model(), config("int8"), device_map={"blocks": "cpu", "head": "cpu"})
    (folder / "model.safetensors.index.json").unlink()
    save_model_files(
        {"head.weight": torch.ones(2, 2)}, tmp_path / "other", max_shard_size="1GB", safe_serialization=True
    )
    with pytest.raises(ValueError, match=r"no values for \d+ parameters"):
        load_and_quantize_model(empty, config("int8"), weights_location=tmp_path / "other")
    state = model().state_dict() | {"head.weight": torch.ones(2, 2), "stranger": torch.ones(1)}
    save_model_files(state, tmp_path / "shape", max_shard_size="1GB", safe_serialization=True)
    with (
        pytest.warns(UserWarning, match="does not have: stranger"),
        pytest.raises(ValueError, match=r"head\.weight is torch\.float32 of shape"),
    ):
        load_and_quantize_model(empty, config("int8"), weights_location=tmp_path / "shape")
    with pytest.warns(UserWarning, match="no linear layer to quantise"):
        load_and_quantize_model(nn.Sequential(nn.Conv1d(2, 2, 1)), config("int8"))


@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_a_missing_package_raises_with_its_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    plain = model()
    backend: Any = package
    with pytest.raises(ImportError, match=f"pip install {package}"):
        load_and_quantize_model(plain, BnbQuantizationConfig(load_in_8bit=True, backend=backend))
    assert type(plain.blocks[0][0]) is nn.Linear
    assert plain.words.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both True"),
        ({"load_in_8bit": 1}, "is not True or False"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "x"}, "choose one of fp4, nf4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}, "choose one of fp32, fp16, bf16"),
        ({"load_in_8bit": True, "torch_dtype": 3}, "nor a torch.dtype"),
        ({"load_in_8bit": True, "skip_modules": "head"}, "not a list of names"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": [1]}, "not a list of names"),
        ({"load_in_8bit": True, "llm_int8_threshold": "x"}, "is not a number"),
        ({"load_in_8bit": True, "backend": "x"}, "choose one of bitsandbytes, torchao"),
    ],
)
def test_a_config_that_makes_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BnbQuantizationConfig(**options)


def test_defaults_as_published() -> None:
    eight, four = BnbQuantizationConfig(load_in_8bit=True), BnbQuantizationConfig(load_in_4bit=True)
    assert (eight.torch_dtype, eight.target_dtype) == (torch.float16, torch.int8)
    assert (four.torch_dtype, four.target_dtype, four.bnb_4bit_quant_type) == (torch.float16, CustomDtype.INT4, "fp4")
    assert BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16").torch_dtype == torch.bfloat16
    with pytest.raises(UnsupportedSettingError, match="load_in_4bit with backend='torchao'"):
        BnbQuantizationConfig(load_in_4bit=True, backend="torchao")


def test_what_stays_in_16_bits_by_default() -> None:
    """As 1.15 answers."""
    assert get_keys_to_not_convert(model()) == ["head"]
    assert set(get_keys_to_not_convert(model(tied=True))) == {"words", "head"}
    body = model()
    body.base_model_prefix = "body"  # type: ignore[assignment]
    assert get_keys_to_not_convert(body) == []
    whole = nn.Module()
    whole.base_model_prefix = "body"  # type: ignore[assignment]
    whole.body, whole.out = body, nn.Linear(2, 2)
    assert get_keys_to_not_convert(whole) == ["out"]
    assert get_keys_to_not_convert(nn.Linear(2, 2)) == []


def test_layers_whose_weights_a_kernel_reads_are_left() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    both = nn.Sequential(nn.Linear(4, 16), encoder, nn.Linear(16, 2))
    assert list(layers_to_convert(both)) == ["0"]


def test_layers_are_exchanged_and_quantise_when_they_move() -> None:
    exchanged = replace_with_bnb_layers(model(), config("nf4"), modules_to_not_convert=["head", "blocks.2"])
    assert has_4bit_bnb_layers(exchanged)
    assert type(exchanged.blocks[2][0]) is nn.Linear
    assert exchanged.blocks[0][0].weight.is_floating_point()
    exchanged.to("cpu")
    assert exchanged.blocks[0][0].weight.dtype == torch.uint8
    assert distance(model(), exchanged) < TOLERANCE["nf4"]
    inner = replace_with_bnb_layers(model().blocks, config("int8"), ["blocks.0"], ["blocks"])
    assert [type(block[0]).__name__ for block in inner] == ["Linear", "Linear8bitLt", "Linear8bitLt"]
    assert not has_4bit_bnb_layers(inner)


@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_weight_is_quantised_into_a_folder_and_comes_back(is_quantised: bool, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = nn.Sequential(bnb.nn.Linear8bitLt(32, 16, bias=False, has_fp16_weights=False))
    torch.manual_seed(0)
    weight = torch.randn(16, 32)
    quantised = bnb.nn.Int8Params(weight.half(), requires_grad=False, has_fp16_weights=False).to("cpu")
    given = (quantised.data, quantised.SCB) if is_quantised else (weight, None)
    index: dict[str, Any] = {}
    quantize_and_offload_8bit(layer, given[0], "0.weight", torch.float16, tmp_path, index, given[1])
    assert layer[0].weight.is_meta
    assert index == {"0.weight": {"dtype": "int8", "shape": [16, 32]}, "0.SCB": {"dtype": "float32", "shape": [16]}}
    stored = {name: load_offloaded_weight(tmp_path / f"{name}.dat", index[name]) for name in index}
    restored = stored["0.weight"].float() * stored["0.SCB"].unsqueeze(1) / 127
    assert (restored - weight).abs().max() < 0.02


def test_other_weights_are_offloaded_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain, index = nn.Sequential(nn.Linear(2, 2)), {}
    quantize_and_offload_8bit(plain, torch.ones(2), "0.bias", torch.float16, tmp_path, index, None)
    assert index == {"0.bias": {"dtype": "float16", "shape": [2]}}
