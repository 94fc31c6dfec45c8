"""Who this process is, by torchrun, Slurm and the MPIs, and where the processes of a job meet."""

from __future__ import annotations

import pytest

from meshwright.runtime.process import ProcessInfo, first_slurm_host

RENDEZVOUS_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_orte_local_daemon_uri",
    "PBS_JOBID",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RENDEZVOUS_VARIABLES, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def started_with(monkeypatch: pytest.MonkeyPatch, **variables: object) -> ProcessInfo:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return ProcessInfo.from_environment()


def slurm_step(
    rank: int, world_size: int, tasks_per_node: str, node: int, local_rank: int, **more: object
) -> dict[str, object]:
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": world_size,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_NODEID": node,
        "SLURM_LOCALID": local_rank,
    } | more


def openmpi(rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, object]:
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world_size,
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_world_size,
    }


def test_a_process_that_nobody_launched_is_alone() -> None:
    info = ProcessInfo.from_environment()
    assert info == ProcessInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, launcher=None)
    assert info.rendezvous_address() is None


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert info == ProcessInfo(rank=5, world_size=8, local_rank=1, local_world_size=4, launcher="torchrun")
    assert info.rendezvous_address() is None, "torch reads MASTER_ADDR and MASTER_PORT itself"


def test_ranks_set_by_hand_on_one_host_need_no_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert (info.local_rank, info.local_world_size) == (1, 2)


def test_openmpi(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, **openmpi(rank=3, world_size=4, local_rank=1, local_world_size=2))
    assert info == ProcessInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="OpenMPI")


def test_mvapich(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(
        monkeypatch,
        MV2_COMM_WORLD_RANK=3,
        MV2_COMM_WORLD_SIZE=4,
        MV2_COMM_WORLD_LOCAL_RANK=1,
        MV2_COMM_WORLD_LOCAL_SIZE=2,
    )
    assert info == ProcessInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="MVAPICH")


def test_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, PMI_RANK=3, PMI_SIZE=4, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2)
    assert info == ProcessInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="MPICH")


def test_srun_with_pmi2_is_slurm_and_not_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, PMI_RANK=3, PMI_SIZE=4, **slurm_step(3, 4, "2(x2)", node=1, local_rank=1))
    assert info == ProcessInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, launcher="Slurm")


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "local_world_size"),
    [
        ("4", 0, 4),
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("1,3(x2)", 0, 1),
        ("1,3(x2)", 2, 3),
        ("2(x3), 1", 3, 1),
    ],
)
def test_slurm_tells_how_many_tasks_are_on_this_node(
    monkeypatch: pytest.MonkeyPatch, tasks_per_node: str, node: int, local_world_size: int
) -> None:
    info = started_with(monkeypatch, **slurm_step(0, 7, tasks_per_node, node, local_rank=0))
    assert info.local_world_size == local_world_size


def test_a_slurm_task_list_that_cannot_be_read_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE='2x3' cannot be read: expected `2\(x3\),1`"):
        started_with(monkeypatch, **slurm_step(0, 6, "2x3", node=0, local_rank=0))


def test_the_body_of_a_batch_script_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(
        monkeypatch, SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_LOCALID=0, SLURM_NTASKS=8, SLURM_TASKS_PER_NODE="4(x2)"
    )
    assert info == ProcessInfo()


def test_the_nearest_launcher_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm_step(0, 2, "1(x2)", node=0, local_rank=0).items():
        monkeypatch.setenv(name, str(value))
    assert started_with(monkeypatch).launcher == "Slurm"
    assert started_with(monkeypatch, **openmpi(1, 4, 1, 2)).launcher == "OpenMPI", "mpirun starts its daemons by srun"
    inner = started_with(monkeypatch, RANK=3, WORLD_SIZE=8, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4)
    assert (inner.launcher, inner.rank, inner.world_size) == ("torchrun", 3, 8)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_rank_is_refused_with_the_variables_to_check(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int
) -> None:
    with pytest.raises(ValueError, match=f"torchrun says this is rank {rank} of {world_size}.*Check RANK and WORLD_S"):
        started_with(monkeypatch, RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=0)


def test_the_variables_to_check_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Slurm says .* Check SLURM_PROCID and SLURM_STEP_NUM_TASKS"):
        started_with(monkeypatch, **slurm_step(4, 4, "4", node=0, local_rank=0))


def test_ranks_that_are_not_numbers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"torchrun .* \(RANK, WORLD_SIZE, ...\) that are not numbers: .*'one'"):
        started_with(monkeypatch, RANK="one", WORLD_SIZE=2)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("login1,gpu[003-007]", "login1"),
        ("gpu[9,11-13]", "gpu9"),
        ("node07", "node07"),
        ("rack[2-3]-node[08-09],other", "rack2-node08"),
        ("gpu[01-02].cluster.example.org", "gpu01.cluster.example.org"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",gpu1", "gpu[a-b]", "gpu[001-003"])
def test_a_slurm_node_list_that_cannot_be_read_is_shown(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"node list .* cannot be read: expected"):
        first_slurm_host(nodes)


def test_processes_of_one_host_meet_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started_with(monkeypatch, **openmpi(1, 2, 1, 2)).rendezvous_address() == "tcp://127.0.0.1:29500"


def test_slurm_tasks_of_several_hosts_meet_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    step = slurm_step(3, 4, "2(x2)", node=1, local_rank=1, SLURM_STEP_NODELIST="gpu[003-004]")
    place = started_with(monkeypatch, **step).rendezvous_address()
    assert place is not None
    assert place.startswith("tcp://gpu003:")


def test_what_the_user_says_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    step = slurm_step(3, 4, "2(x2)", node=1, local_rank=1, SLURM_STEP_NODELIST="gpu[003-004]")
    info = started_with(monkeypatch, MASTER_ADDR="10.0.0.1", MASTER_PORT="4242", **step)
    assert info.rendezvous_address() == "tcp://10.0.0.1:4242"


def test_mpi_on_several_hosts_needs_a_rendezvous_address(monkeypatch: pytest.MonkeyPatch) -> None:
    info = started_with(monkeypatch, **openmpi(rank=3, world_size=4, local_rank=1, local_world_size=2))
    with pytest.raises(
        ValueError, match=r"OpenMPI started 4 processes on several hosts \(this is rank 3\).*MASTER_ADDR"
    ):
        info.rendezvous_address()
    monkeypatch.setenv("MASTER_ADDR", "head")
    assert info.rendezvous_address() == "tcp://head:29500"


@pytest.mark.parametrize(
    ("daemon", "host"),
    [
        ("943325184.0;tcp://10.0.0.1:49469", "10.0.0.1"),
        ("943325184.0;tcp://10.0.0.1,192.168.0.1:49469", "10.0.0.1"),
        ("943325184.0;tcp6://[fd00::1]:49469", "fd00::1"),
    ],
)
def test_openmpi_tells_where_mpirun_was_typed(monkeypatch: pytest.MonkeyPatch, daemon: str, host: str) -> None:
    place = {"OMPI_MCA_orte_hnp_uri": daemon, "OMPI_MCA_ess_base_jobid": 7}
    for rank in (0, 1):
        own = daemon if rank == 0 else "943325184.1;tcp://10.0.0.2:55427"
        info = started_with(monkeypatch, **openmpi(rank, 2, 0, 1), **place, OMPI_MCA_orte_local_daemon_uri=own)
        address = info.rendezvous_address()
        assert address is not None
        assert address.startswith(f"tcp://{host}:" if "::" not in host else f"tcp://[{host}]:")


def rendezvous_addresses(monkeypatch: pytest.MonkeyPatch, *ranks: dict[str, object]) -> list[str | None]:
    places = []
    for variables in ranks:
        with monkeypatch.context() as patch:
            places.append(started_with(patch, **variables).rendezvous_address())
    return places


def test_all_ranks_of_a_slurm_step_agree_and_other_steps_and_jobs_meet_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(index: int, **more: object) -> dict[str, object]:
        node, local = divmod(index, 2)
        return slurm_step(index, 4, "2(x2)", node, local, SLURM_STEP_NODELIST="gpu[003-004]", **more)

    agreed = rendezvous_addresses(monkeypatch, *(rank(index) for index in range(4)))
    assert len(set(agreed)) == 1
    other_step, other_job = rendezvous_addresses(monkeypatch, rank(0, SLURM_STEP_ID=1), rank(0, SLURM_JOB_ID=4712))
    assert len({agreed[0], other_step, other_job}) == 3


@pytest.mark.parametrize("job", ["OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID", "PBS_JOBID"])
def test_all_ranks_of_an_mpi_job_agree_and_other_jobs_meet_elsewhere(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    first, second, other = rendezvous_addresses(
        monkeypatch,
        {**openmpi(0, 2, 0, 2), job: "prte@1"},
        {**openmpi(1, 2, 1, 2), job: "prte@1"},
        {**openmpi(1, 2, 1, 2), job: "prte@2"},
    )
    assert first == second != other


def test_mpirun_inside_a_slurm_job_agrees_though_only_remote_ranks_are_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside_mpirun = {**openmpi(0, 2, 0, 1), "MASTER_ADDR": "head", "SLURM_JOB_ID": 7}
    under_its_daemon = {**openmpi(1, 2, 0, 1), "MASTER_ADDR": "head", "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 3}
    here, there = rendezvous_addresses(monkeypatch, beside_mpirun, under_its_daemon)
    assert here == there


def test_ports_are_free_for_users_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for job in range(50):
        (place,) = rendezvous_addresses(monkeypatch, {**openmpi(0, 2, 0, 2), "SLURM_JOB_ID": job})
        assert place is not None
        assert 1024 < int(place.rpartition(":")[2]) < 65536
