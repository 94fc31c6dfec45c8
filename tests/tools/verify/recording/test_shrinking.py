"""Configs of transformers get fewer layers and smaller widths that every mesh can still split."""

from __future__ import annotations

from types import SimpleNamespace

from meshwright.tools.verify.recording.shrinking import shrink


def llama() -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, head_dim=128,
    )  # fmt: skip


def test_layers_and_widths_shrink_and_the_vocabulary_stays() -> None:
    config = llama()
    shrink(config, layers=2, processes=4)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 4)
    assert (config.hidden_size, config.intermediate_size) == (512, 1792)
    assert (config.vocab_size, config.head_dim) == (128256, 128)


def test_every_kind_of_layer_is_kept() -> None:
    config = llama()
    config.layer_types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 26
    shrink(config, layers=3, processes=2)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.num_hidden_layers == 3


def test_a_small_config_stays_as_it_is() -> None:
    config = SimpleNamespace(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    shrink(config, layers=2, processes=2)
    assert vars(config) == {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
