from pathlib import Path

import pytest
import yaml

from meshwright.runtime.devices.catalogue import DEVICES, UnknownDeviceError, cluster, load


@pytest.mark.parametrize(
    ("text", "device", "size", "per_node"),
    [
        ("64xH100", "H100-SXM", 64, 8),
        ("8xa100-80gb", "A100-80GB", 8, 8),
        ("8 x A100 80GB", "A100-80GB", 8, 8),
        ("2x8xH100", "H100-SXM", 16, 8),
        ("4x2xH100", "H100-SXM", 8, 2),
        ("4090", "RTX4090", 1, 8),
        ("2x4090", "RTX4090", 2, 8),
        ("NVIDIA B200", "B200", 1, 8),
        ("cpu", "cpu", 1, 64),
    ],
)
def test_a_text_names_a_cluster(text: str, device: str, size: int, per_node: int) -> None:
    found = cluster(text)
    assert (found.device.name, found.size, found.node.devices) == (device, size, per_node)


def test_an_unknown_name_lists_close_ones() -> None:
    with pytest.raises(UnknownDeviceError, match=r"'H10'.*H100-SXM"):
        cluster("8xH10")
    with pytest.raises(UnknownDeviceError, match=r"Known names: .*A100-80GB"):
        cluster("8xzzzzzzzz")


@pytest.mark.parametrize("text", ["", "0xH100", "8x"])
def test_a_text_without_devices_is_refused(text: str) -> None:
    with pytest.raises(UnknownDeviceError):
        cluster(text)


def test_memory_of_the_context_is_not_usable() -> None:
    assert 78 < cluster("H100").device.memory / 2**30 < 79.1


def test_another_memory_can_be_given() -> None:
    assert cluster("8xH100").with_memory(10 << 30).device.memory == 10 << 30


def test_a_format_that_a_device_lacks_runs_as_a_wider_one() -> None:
    ampere, volta = cluster("A100").device, cluster("V100").device
    assert ampere.peak("float8_e4m3fn") == ampere.peak("bfloat16") == 312e12
    assert volta.peak("bfloat16") == volta.peak("float16") == 125e12
    assert volta.peak("tf32") == volta.peak("float32") == 15.7e12
    assert ampere.peak("float64") == ampere.peak("float32") / 2
    assert cluster("TPU-v5p").device.peak("float32") == 459e12


def test_every_device_has_a_source_and_known_parts() -> None:
    data = yaml.safe_load(DEVICES.read_text(encoding="utf-8"))
    for name, entry in data["devices"].items():
        assert entry["source"], name
        assert entry["node"] in data["nodes"], name
        assert entry["family"] in data["families"], name
    assert all(entry["source"] for entry in data["nodes"].values())


def test_no_two_devices_share_a_name() -> None:
    data = yaml.safe_load(DEVICES.read_text(encoding="utf-8"))
    names = sum(1 + len(entry.get("names", ())) for entry in data["devices"].values())
    assert len(load().aliases) == names


def test_a_file_of_the_user_adds_devices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "devices:\n"
        "  Mine: {family: hopper, node: my-node, total_gib: 32.6, tflops: {bf16: 100}, gb_s: 1000, source: me}\n"
        "nodes:\n  my-node: {devices: 4, link_gb_s: 100, link_us: 1, network_gb_s: 10, network_us: 5}\n"
    )
    found = cluster("8xmine", path)
    assert (found.device.memory, found.node.devices, found.device.bandwidth) == (32 << 30, 4, 1e12)
    assert cluster("H100", path).device.name == "H100-SXM"


def test_a_file_of_the_user_changes_single_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("families: {hopper: {attention: 0.75}}\ndevices: {H100-SXM: {gb_s: 3000}}\ncontext_gib: 1.1\n")
    plain, changed = cluster("H100").device, cluster("H100", path).device
    assert (changed.efficiency.attention, changed.bandwidth) == (0.75, 3e12)
    assert changed.efficiency.matmul == plain.efficiency.matmul
    assert plain.memory - changed.memory == 1 << 29


def test_a_file_in_another_form_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("devices:\n  Mine: {family: unknown}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml"):
        load(path)


def test_a_device_without_published_rows_has_a_wider_interval() -> None:
    known, unknown = cluster("H100").interval, cluster("MI300X").interval
    assert unknown.low < known.low < 1 < known.high < unknown.high


def test_ranks_fill_one_node_after_the_other() -> None:
    assert cluster("64xH100").nodes_of((0, 1, 7, 8, 63)) == {0: 3, 1: 1, 7: 1}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A1000 Laptop GPU", None),
    ],
)
def test_the_name_that_a_driver_gives_is_recognised(name: str, device: str | None) -> None:
    found = load().recognised(name)
    assert (None if found is None else found.name) == device
