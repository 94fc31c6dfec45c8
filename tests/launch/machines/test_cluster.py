"""What a launcher reads from the variables of Slurm and the MPIs. The real ones are in tests/clusters."""

from __future__ import annotations

import os

import pytest

from meshwright.config.launch.settings import LaunchSettings
from meshwright.errors import LaunchError
from meshwright.launch.machines.cluster import TASKS_PER_MACHINE, Cluster, expand_node_list, find_cluster
from meshwright.launch.plan import make_plan


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI_", "PMI", "MASTER_", TASKS_PER_MACHINE)):
            monkeypatch.delenv(name)


def found(monkeypatch: pytest.MonkeyPatch, **variables: object) -> Cluster | None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return find_cluster()


# As Slurm 22.05 sets them.
JOB = {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": 2, "SLURM_TASKS_PER_NODE": "1(x2)"}
STEP = JOB | {
    "SLURM_STEP_ID": 0,
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": 2,
    "SLURM_STEP_NUM_TASKS": 2,
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": 1,
    "SLURM_NODEID": 1,
    "SLURM_LOCALID": 0,
    "SLURMD_NODENAME": "n2",
}
BODY = JOB | {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURMD_NODENAME": "n1"}


def test_a_machine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch) is None
    assert found(monkeypatch, RANK=1, WORLD_SIZE=2) is None, "torchrun's variables name the processes of a launch"


def test_one_launch_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = found(monkeypatch, **STEP)
    assert cluster is not None
    assert (cluster.name, cluster.is_rank, cluster.is_head) == ("Slurm", False, False)
    assert (cluster.num_machines, cluster.machine_rank, cluster.address) == (2, 1, "n1")
    assert cluster.port is not None
    assert cluster.hosts == "n[1-2]"


def test_a_step_on_one_machine_is_a_machine_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0}
    cluster = found(monkeypatch, **STEP | one | {"SLURM_STEP_TASKS_PER_NODE": "1"})
    assert cluster == Cluster(name="Slurm", hosts="n2"), "`srun --pty bash` inside a larger job"


def test_one_launch_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    three = {"SLURM_STEP_NUM_TASKS": 3, "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": 2}
    assert found(monkeypatch, **STEP | three) == Cluster(name="Slurm", is_rank=True, machine_rank=2, num_processes=3)


def test_one_launch_per_rank_by_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = found(monkeypatch, OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2, **BODY)
    assert cluster == Cluster(name="OpenMPI", is_rank=True, machine_rank=1, num_processes=2), "inside an sbatch, too"


@pytest.mark.parametrize(
    ("variables", "is_head", "tasks"),
    [
        (BODY, True, None),
        (BODY | {"SLURM_NTASKS": 4, "SLURM_TASKS_PER_NODE": "2(x2)"}, True, 2),
        (BODY | {"SLURM_JOB_NUM_NODES": 1, "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": 2}, False, 2),
        (BODY | {"SLURM_JOB_NUM_NODES": 1, "SLURM_TASKS_PER_NODE": "8"}, False, None),  # sbatch --exclusive
        (JOB | {"SLURM_JOB_NUM_NODES": 1}, True, None),  # salloc: this shell is not on the machine
    ],
    ids=["two nodes", "two tasks on each", "two tasks on one node", "one node", "salloc"],
)
def test_the_body_of_a_job(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], is_head: bool, tasks: int | None
) -> None:
    cluster = found(monkeypatch, **variables)
    assert cluster is not None
    assert (cluster.is_head, cluster.is_rank, cluster.tasks_per_machine) == (is_head, False, tasks)
    assert cluster.num_machines == variables["SLURM_JOB_NUM_NODES"]


def test_the_shell_that_salloc_opens_on_the_first_machine_is_the_head_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = {"SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NUM_TASKS": 1}
    cluster = found(monkeypatch, **STEP | shell | {"SLURM_PROCID": 0, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert cluster is not None
    assert (cluster.is_head, cluster.num_machines) == (True, 2)


def plan_of(cluster: Cluster | None, **flags: object):  # type: ignore[no-untyped-def]
    return make_plan(LaunchSettings.resolve({"cpu": True, **flags}, None), ("train.py",), cluster)


def test_the_head_tells_its_launchers_how_many_tasks_the_job_has_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    head = plan_of(found(monkeypatch, **BODY | {"SLURM_NTASKS": 4, "SLURM_TASKS_PER_NODE": "2(x2)"}))
    assert head.method == "srun"
    launcher = plan_of(found(monkeypatch, **STEP | {TASKS_PER_MACHINE: head.variables[TASKS_PER_MACHINE]}))
    assert (launcher.method, launcher.processes_here) == ("elastic", 2)
    assert (launcher.num_machines, launcher.machine_rank) == (2, 1)


def test_the_numbers_of_a_rank_are_not_up_for_discussion() -> None:
    ranks = [Cluster(name="Slurm", is_rank=True, machine_rank=rank, num_processes=4) for rank in range(2)]
    asked = {"num_processes": 8, "num_machines": 2, "machine_rank": 1, "main_process_ip": "n1"}
    plans = [plan_of(rank, **asked) for rank in ranks]
    assert [plan.method for plan in plans] == ["exec", "exec"]
    assert plans[0].notes == (
        "num_processes = 8 (flag --num_processes) has no effect: Slurm has started 4 processes, with a launch in each.",
    )
    assert plans[1].notes == (), "one of them says it"


def test_flags_win_over_the_batch_system_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = found(monkeypatch, **STEP)
    by_flag = plan_of(cluster, machine_rank=0, main_process_ip="10.0.0.9", main_process_port=4242)
    assert (by_flag.machine_rank, by_flag.address, by_flag.port) == (0, "10.0.0.9", 4242)
    assert plan_of(cluster).machine_rank == 1


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[003-005,9],login1", ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]),
        ("rack[2-3]-node[08,10]", ["rack2-node08", "rack2-node10", "rack3-node08", "rack3-node10"]),
        ("gpu[09-10].example.org", ["gpu09.example.org", "gpu10.example.org"]),
    ],
)
def test_all_names_of_a_slurm_list(nodes: str, names: list[str]) -> None:
    assert expand_node_list(nodes) == names


@pytest.mark.parametrize(
    "nodes",
    [
        "gpu[0-99999999]",
        "gpu[1-300]x[1-300]",
        "a[0-9],b[1-99999]",
        "gpu[" + "9" * 5000 + "]",
        "gpu[1-x]",
        "gpu[--help]",
    ],
)
def test_a_list_without_end_or_sense_is_refused_by_name(nodes: str) -> None:
    with pytest.raises(LaunchError, match=r"The Slurm node list '(gpu|a)") as refused:
        expand_node_list(nodes)
    assert len(str(refused.value)) < 400


ESCAPE = "\x1b[2J\x07"


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (JOB | {"SLURM_JOB_NUM_NODES": ESCAPE}, "SLURM_JOB_NUM_NODES"),
        (JOB | {"SLURM_JOB_NUM_NODES": "9" * 5000}, "SLURM_JOB_NUM_NODES"),
        (JOB | {"SLURM_NTASKS": 2, "SLURM_TASKS_PER_NODE": "x"}, "SLURM_TASKS_PER_NODE"),
        (STEP | {TASKS_PER_MACHINE: "two"}, TASKS_PER_MACHINE),
        (STEP | {"SLURM_STEP_NODELIST": f"n{ESCAPE}[1-2]"}, "Slurm node list"),
        (STEP | {"SLURM_PROCID": ESCAPE}, "Slurm"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x999999999999)"}, "TASKS_PER_NODE"),
    ],
)
def test_words_of_the_batch_system_that_are_none_are_refused_by_name(
    variables: dict[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((LaunchError, ValueError), match=name) as refused:
        found(monkeypatch, **variables)
    assert str(refused.value).isprintable()
