"""Small functions that libraries take from here and nothing inside uses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

from accelerate import Accelerator, dispatch_model
from accelerate.accelerator import get_state_dict_offloaded_model
from accelerate.utils import (
    MegatronLMDummyDataLoader,
    PrepareForLaunch,
    are_libraries_initialized,
    check_cuda_p2p_ib_support,
    convert_bytes,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    get_module_children_bottom_up,
    get_pretty_name,
    ignorant_find_batch_size,
    is_port_in_use,
    load,
    merge_dicts,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    recursive_getattr,
)
from accelerate.utils.dataclasses import get_module_class_from_name
from accelerate.utils.other import get_free_port, has_repeated_blocks, is_repeated_blocks
from meshwright.errors import UnsupportedSettingError
from tests.ranks import ranks


def tree() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh()))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1500, "1.46 KB"),
        (2**31 + 1, "2.0 GB"),
        (2**53, "8.0 PB"),
    ],
)
def test_bytes_for_people(size: int, text: str) -> None:
    assert convert_bytes(size) == text


def test_modules_come_from_the_inside_out() -> None:
    model = tree()
    assert [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)] == ["0", "1.0", "1.1", "1", ""]
    assert get_module_children_bottom_up(model)[-1] is model


def test_names_and_classes() -> None:
    model = tree()
    assert get_module_class_from_name(model, "Tanh") is nn.Tanh
    assert get_module_class_from_name(model, "Sigmoid") is None
    assert recursive_getattr(model, "1.0") is model[1][0]  # type: ignore[index]
    assert [get_pretty_name(thing) for thing in (model, nn.Linear, len)] == ["Sequential", "Linear", "len"]
    assert is_repeated_blocks(nn.ModuleList([nn.ReLU(), nn.ReLU()]))
    assert not has_repeated_blocks(model)


def test_dicts_are_merged() -> None:
    merged = merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 4}, "c": 7})
    assert merged == {"a": {"d": 4, "b": 1}, "c": 2}


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_FLAG", "yes")
    monkeypatch.setenv("A_NUMBER", "7")
    monkeypatch.delenv("NOT_SET", raising=False)
    assert parse_flag_from_env("A_FLAG")
    assert not parse_flag_from_env("NOT_SET")
    assert (parse_choice_from_env("A_FLAG"), parse_choice_from_env("NOT_SET")) == ("yes", "no")
    assert (get_int_from_env(["NOT_SET", "A_NUMBER"], 3), get_int_from_env(["NOT_SET"], 3)) == (7, 3)
    assert convert_dict_to_env_variables({"a": "b", "c": "d e", "x;": "1"}) == ["a=b\n"]
    assert are_libraries_initialized("torch", "no_such_package") == ["torch"]


def test_what_a_function_leaves_in_the_environment_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_BEFORE", "kept")

    @purge_accelerate_environment
    def careless() -> None:
        os.environ.update({"ACCELERATE_AFTER": "gone", "ACCELERATE_BEFORE": "changed"})

    careless()
    assert "ACCELERATE_AFTER" not in os.environ
    assert os.environ["ACCELERATE_BEFORE"] == "kept"


def test_what_test_methods_leave_in_the_environment_goes_also_those_of_subclasses() -> None:
    derived = []

    @purge_accelerate_environment
    class Tests:
        def __init_subclass__(cls, **kwargs: str) -> None:
            derived.append((cls.__name__, kwargs))

        def test_of_the_class(self) -> None:
            os.environ["ACCELERATE_AFTER"] = "gone"

    class More(Tests, mark="fast"):
        def test_of_the_subclass(self) -> None:
            os.environ["ACCELERATE_AFTER"] = "gone"

    class EvenMore(More):
        def test_of_its_subclass(self) -> None:
            os.environ["ACCELERATE_AFTER"] = "gone"

    tests = EvenMore()
    for test in (tests.test_of_the_class, tests.test_of_the_subclass, tests.test_of_its_subclass):
        test()
        assert "ACCELERATE_AFTER" not in os.environ, test.__name__
    assert derived == [("More", {"mark": "fast"}), ("EvenMore", {})]


def test_ports() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert is_port_in_use(listening.getsockname()[1])
    assert not is_port_in_use(str(get_free_port()))


def test_batch_sizes_that_are_not_there() -> None:
    assert ignorant_find_batch_size({"a": torch.zeros(3)}) == 3
    assert ignorant_find_batch_size(5) is None


def test_code_in_a_file_is_refused(tmp_path: Path) -> None:
    torch.save({"model": tree()}, tmp_path / "code.pt")
    with pytest.raises(Exception, match="weights_only"):
        load(tmp_path / "code.pt")
    assert isinstance(load(tmp_path / "code.pt", weights_only=False)["model"], nn.Sequential)


def test_gpus_that_are_not_here_reach_each_other() -> None:
    if not torch.cuda.is_available():
        assert check_cuda_p2p_ib_support()


@ranks(2)
def test_the_place_of_a_process() -> None:
    here = get_cpu_distributed_information()
    accelerator = Accelerator(cpu=True)
    assert (here.rank, here.world_size) == (accelerator.process_index, accelerator.num_processes)


def test_what_needs_megatron_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedSettingError, match="MegatronLMDummyDataLoader"):
        MegatronLMDummyDataLoader(data_path="text")


def _note_rank(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(1.0 + accelerator.process_index)).item()
    (Path(folder) / str(accelerator.process_index)).write_text(str(total))
    accelerator.end_training()


def test_a_function_is_told_its_rank(tmp_path: Path) -> None:
    rendezvous = {"world_size": 2, "master_addr": "127.0.0.1", "master_port": get_free_port(), "omp_num_threads": 1}
    with patch_environment(**rendezvous):
        launched = PrepareForLaunch(_note_rank, distributed_type="MULTI_CPU")
        multiprocessing.start_processes(launched, args=(str(tmp_path),), nprocs=2, start_method="spawn")  # type: ignore[no-untyped-call]
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["3.0", "3.0"]


def test_a_function_is_debugged_on_processes_that_meet_at_a_file(tmp_path: Path) -> None:
    store = {"world_size": 2, "accelerate_debug_rdv_file": tmp_path / "store", "omp_num_threads": 1}
    with patch_environment(**store, gloo_socket_ifname="lo"):
        launched = PrepareForLaunch(_note_rank, debug=True)
        multiprocessing.start_processes(launched, args=(str(tmp_path),), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    assert [(tmp_path / rank).read_text() for rank in ("0", "1")] == ["3.0", "3.0"]


# --- offloaded weights ----------------------------------------------------------------------------------------------


def offloaded(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = {"0": "cpu", "1": "disk"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def test_the_state_of_an_offloaded_model_has_its_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(offloaded(tmp_path / "away"), evaluation_mode=True)
    assert any(param.is_meta for param in model.parameters())
    for state in (accelerator.get_state_dict(model), get_state_dict_offloaded_model(model)):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    accelerator.save_model(model, tmp_path / "saved")
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    from safetensors.torch import load_file

    fresh.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert torch.equal(fresh[1].weight, expected["1.weight"])


def test_weights_that_are_away_are_not_trained(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = offloaded(tmp_path)
    with pytest.raises(ValueError, match=r"2 weights .* on disk \(1\.weight, 1\.bias"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    here = [param for param in model.parameters() if not param.is_meta]
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(here, lr=0.1))
    before = here[0].detach().clone()
    accelerator.backward(prepared(torch.ones(2, 4)).sum())
    optimizer.step()
    assert not torch.equal(here[0], before)


def test_a_model_that_is_mapped_is_not_moved(tmp_path: Path) -> None:
    model = offloaded(tmp_path)
    before = [param.device for param in model.parameters()]
    prepared = Accelerator(cpu=True).prepare_model(model, device_placement=True)
    assert [param.device for param in prepared.parameters()] == before
