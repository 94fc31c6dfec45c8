"""The plan of a launch: numbers of processes, addresses and variables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.launch import plan as planning
from meshwright.launch.machines.cluster import Cluster
from meshwright.launch.plan import LaunchPlan, make_plan, worker_command
from meshwright.launch.processes.run import _export_flags
from tests.recorded_machines import on_machine


@pytest.fixture(autouse=True)
def four_cores_and_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "count_cores", lambda: 4)
    monkeypatch.setattr(planning, "count_accelerators", lambda: 0)
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def plan(cluster: Cluster | None = None, **flags: Any) -> LaunchPlan:
    return make_plan(LaunchSettings.resolve(flags, None), ["train.py", "--lr", "1"], cluster)


def test_one_process_takes_the_place_of_the_launcher_and_keeps_torchs_threads() -> None:
    made = plan()
    assert (made.method, made.num_processes, made.threads) == ("exec", 1, None)
    assert "OMP_NUM_THREADS" not in made.variables


def test_cpu_and_a_number_mean_that_number_of_processes() -> None:
    made = plan(cpu=True, num_processes=4)
    assert (made.method, made.processes_here, made.address, made.port_is_free) == ("elastic", 4, "127.0.0.1", True)
    assert made.variables["OMP_NUM_THREADS"] == "1"
    assert made.variables["ACCELERATE_USE_CPU"] == "True"


def test_ray_chooses_nodes_devices_and_ports() -> None:
    made = plan(ray=True, num_processes=4, mixed_precision="bf16")
    assert (made.method, made.num_processes, made.port, made.threads) == ("ray", 4, 0, None)
    assert made.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not {"RANK", "MASTER_ADDR", "OMP_NUM_THREADS"} & made.variables.keys()
    assert "one per GPU of the cluster" in plan(ray=True).origins["num_processes"]


def test_cores_are_shared_out_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(num_processes=2).threads == 2
    assert plan(num_processes=2, num_cpu_threads_per_process=7).threads == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan(num_processes=2).threads == 3


def test_a_launch_on_tpus_leaves_the_processes_to_torch_xla() -> None:
    made = plan(tpu=True, main_training_function="main", num_processes=8, mixed_precision="bf16", downcast_bf16=True)
    assert (made.method, made.num_processes, made.device, made.notes) == ("exec", 1, "XLA devices", ())
    assert (made.variables["USE_TORCH_XLA"], made.variables["XLA_DOWNCAST_BF16"]) == ("1", "1")
    settings = LaunchSettings.resolve({"tpu": True, "main_training_function": "main", "num_processes": 8}, None)
    command = worker_command(settings, ["train.py", "--lr", "1"], recorded=False)
    assert command[1:] == ["-m", "meshwright.launch.processes.on_xla", "main", "8", "train.py", "--lr", "1"]


def test_without_a_function_one_process_uses_all_tpus() -> None:
    made = plan(tpu=True, num_processes=8, downcast_bf16=True)
    assert "has no effect: one process uses all XLA devices" in made.notes[0]
    assert "XLA_DOWNCAST_BF16" not in made.variables, "without bf16"
    assert worker_command(LaunchSettings.resolve({"tpu": True}, None), ["a.py"], recorded=False)[1:] == ["a.py"]


def test_restarts_need_somebody_who_watches() -> None:
    assert plan(max_restarts=1).method == "elastic"


def test_multi_gpu_without_a_gpu_says_so_and_runs() -> None:
    made = plan(multi_gpu=True, num_processes=4)
    assert made.num_processes == 4
    assert "no GPU" in made.notes[0]
    assert "--multi_gpu" in made.notes[0]
    assert plan(gpu_ids="0,1,2,3").num_processes == 4


def test_accelerators_decide_the_number_and_limit_it_pretended_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "count_accelerators", lambda: 2)
    monkeypatch.setattr(planning, "_visible_devices_variable", lambda: "CUDA_VISIBLE_DEVICES")
    assert plan().num_processes == 2
    assert plan(gpu_ids="1").variables["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ValueError, match="there are 2"):
        plan(num_processes=3)
    assert plan(num_processes=3, cpu=True).num_processes == 3


def test_processes_are_counted_over_all_machines() -> None:
    made = plan(num_processes=6, num_machines=3, machine_rank=1, main_process_ip="127.0.0.1")
    assert (made.processes_here, made.num_machines, made.machine_rank, made.port) == (2, 3, 1, 29500)
    assert made.variables["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"num_processes": 0}, "num_processes is 0"),
        ({"num_processes": 3, "num_machines": 2, "machine_rank": 0, "main_process_ip": "a"}, "a multiple of 2"),
        ({"num_machines": 2, "main_process_ip": "a"}, "give --machine_rank"),
        ({"num_machines": 2, "machine_rank": 0}, "give --main_process_ip"),
        ({"num_machines": 2, "machine_rank": 2, "main_process_ip": "a"}, "use 0 to 1"),
        ({"num_machines": 0}, "1 or more"),
        ({"nnodes": "3:2", "main_process_ip": "a"}, "MIN:MAX"),
        ({"nnodes": "two", "main_process_ip": "a"}, "MIN:MAX"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plan(**flags)


def test_elastic_machines_meet_by_c10d() -> None:
    made = plan(nnodes="2:3", main_process_ip="127.0.0.1")
    assert (made.min_machines, made.num_machines, made.backend) == (2, 3, "c10d")


def test_slurm_says_which_machine_this_is() -> None:
    slurm = Cluster(name="Slurm", num_machines=2, machine_rank=1, address="n1", port=20123, hosts="n[1-2]")
    made = plan(slurm, num_processes=4)
    assert (made.num_machines, made.machine_rank, made.address, made.port) == (2, 1, "n1", 20123)
    assert made.origins["num_machines"] == "Slurm (n[1-2])"
    assert plan(slurm, num_machines=1).num_machines == 1, "a flag beats the batch system"


def test_a_rank_of_an_mpi_runs_the_script_itself() -> None:
    assert plan(Cluster(name="OpenMPI", is_rank=True)).method == "exec"


def test_mpirun_knows_its_own_hosts() -> None:
    made = plan(mpirun_hostfile="hosts", num_machines=2, num_processes=4)
    assert (made.method, made.num_processes) == ("mpirun", 4)


def test_the_name_of_an_interface_is_not_exported_to_other_machines() -> None:
    """By mpirun go the variables of the plan, by srun the whole environment; other machines have other interfaces."""
    by_mpirun = plan(mpirun_hostfile="hosts", num_machines=2, num_processes=4)
    assert "GLOO_SOCKET_IFNAME" not in by_mpirun.variables
    assert "GLOO_SOCKET_IFNAME" not in _export_flags(by_mpirun)
    head = Cluster(name="Slurm", is_head=True, num_machines=2, hosts="n[1-2]")
    assert "GLOO_SOCKET_IFNAME" not in plan(head, main_process_ip="127.0.0.1").variables


def test_a_batch_script_on_several_machines_goes_through_srun() -> None:
    made = plan(Cluster(name="Slurm", is_head=True, num_machines=2, hosts="n[1-2]"))
    assert (made.method, made.num_machines) == ("srun", 2)


@pytest.mark.parametrize("chosen", [{}, {"NCCL_P2P_DISABLE": "0"}, {"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0"}])
def test_what_nccl_was_told_by_the_user_is_kept_of_recorded_machines(
    chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "count_accelerators", lambda: 2)
    with on_machine("rtx_4090_old_driver"):
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        made = plan()
        names = [name for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in chosen]
        assert {name: made.variables.get(name) for name in names} == dict.fromkeys(names, "1")
        assert not chosen.keys() & made.variables.keys()
        assert ["are set to 1" in note for note in made.notes] == [True] * bool(names)
        assert not plan(cpu=True).notes


def test_the_head_of_a_job_leaves_nccl_to_the_launchers_of_recorded_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "count_accelerators", lambda: 2)
    with on_machine("rtx_4090_old_driver"):
        head = plan(Cluster(name="Slurm", is_head=True, num_machines=2, hosts="n[1-2]"))
        assert "NCCL_P2P_DISABLE" not in head.variables
        ranks = [plan(Cluster(name="OpenMPI", is_rank=True, machine_rank=rank, num_processes=2)) for rank in (0, 1)]
    assert [len(made.notes) for made in ranks] == [1, 0], "said once, and not by every rank"
    assert [made.variables["NCCL_P2P_DISABLE"] for made in ranks] == ["1", "1"]


def test_the_children_are_told_where_each_setting_came_from() -> None:
    origins = json.loads(plan(mixed_precision="bf16").variables["MESHWRIGHT_LAUNCH_ORIGINS"])
    assert origins["mixed_precision"] == "flag --mixed_precision"
    assert origins["debug"] == "default"
