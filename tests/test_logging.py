"""The logger: once per run, in order when asked, and always with the caller's own line."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright import PartialState, get_logger
from meshwright.logging import MultiProcessAdapter
from tests.ranks import ranks, run_on_ranks


class Recorder(logging.Handler):
    """Keep what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


def recorded(name: str, log_level: str | None = "DEBUG") -> tuple[MultiProcessAdapter, Recorder]:
    logger, recorder = get_logger(name, log_level), Recorder()
    logger.logger.handlers[:] = [recorder]
    return logger, recorder


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    before = logging.root.level
    yield
    logging.root.setLevel(before)


def test_it_logs_before_any_state_exists_and_makes_none() -> None:
    logger, recorder = recorded("before")
    logger.info("hello %s", "world")
    logger.info("everywhere", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    assert recorder.messages == ["[RANK 0] hello world", "[RANK 0] everywhere", "[RANK 0] in order"]
    assert PartialState._shared_state == {}


def test_before_any_state_exists_the_launcher_says_who_is_main(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, recorder = recorded("launched")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")  # on several hosts, and no address to connect to
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    for rank in ("0", "3"):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
        logger.info("main on %s", rank)
        logger.info("all on %s", rank, main_process_only=False)
    assert recorder.messages == ["[RANK 0] main on 0", "[RANK 0] all on 0", "[RANK 3] all on 3"]


def log_on_a_rank() -> list[str]:
    PartialState()
    logger, recorder = recorded("ranks")
    logger.info("main by default")
    logger.info("main", main_process_only=True)
    logger.info("all", main_process_only=False)
    logger.debug("in order", in_order=True)
    return recorder.messages


def test_only_the_main_process_speaks_unless_all_are_asked_to() -> None:
    main, *others = run_on_ranks(3, log_on_a_rank)
    assert main == [f"[RANK 0] {text}" for text in ("main by default", "main", "all", "in order")]
    assert others == [[f"[RANK {rank}] all", f"[RANK {rank}] in order"] for rank in (1, 2)]


@ranks(2, 3)
def test_in_order_one_rank_speaks_after_the_other(tmp_path: Path, world_size: int) -> None:
    state = PartialState()
    logger, _ = recorded("order")
    shared = logging.FileHandler(tmp_path / f"log-{world_size}")
    logger.logger.handlers[:] = [shared]
    for turn in range(3):
        time.sleep(0.05 * (world_size - state.process_index))  # the first rank comes last
        everyone = {"main_process_only": False} if turn else {}  # which in_order implies
        logger.warning("%d from %d", turn, state.process_index, in_order=True, **everyone)
    state.wait_for_everyone()
    expected = [f"[RANK {rank}] {turn} from {rank}" for turn in range(3) for rank in range(world_size)]
    assert Path(shared.baseFilename).read_text().splitlines() == expected
    shared.close()


@ranks(2)
def test_in_order_ranks_stay_together_though_one_of_them_hears_nothing() -> None:
    state = PartialState()
    logger, recorder = recorded("quiet")
    if state.process_index == 1:
        logger.setLevel(logging.ERROR)
    logger.warning("hello", main_process_only=False, in_order=True)
    state.wait_for_everyone()
    assert recorder.messages == (["[RANK 0] hello"] if state.is_main_process else [])


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def log_through_a_helper(logger: MultiProcessAdapter) -> None:
    logger.info("helper", stacklevel=3)  # as published: 2 is the line that logs


def test_the_line_shown_is_the_callers() -> None:
    logger, recorder = recorded("lines")
    lines = []
    logger.info("by level"), lines.append(line())
    logger.log(logging.ERROR, "by number"), lines.append(line())
    logger.warning("all", main_process_only=False), lines.append(line())
    logger.warning_once("once"), lines.append(line())
    log_through_a_helper(logger), lines.append(line())
    PartialState(cpu=True)
    logger.info("with a state", main_process_only=False, in_order=True), lines.append(line())
    try:
        raise KeyError
    except KeyError:
        logger.exception("caught"), lines.append(line())
    assert [(record.filename, record.lineno) for record in recorder.records] == [
        (Path(__file__).name, number) for number in lines
    ]
    assert recorder.records[-1].exc_info is not None


def test_a_warning_is_given_once_for_the_same_arguments() -> None:
    logger, recorder = recorded("once")
    for _ in range(3):
        logger.warning_once("careful")
        logger.warning_once("careful with %s", "that")
    logger.warning_once("careful with %s", "this")
    assert recorder.messages == [f"[RANK 0] {text}" for text in ("careful", "careful with that", "careful with this")]
    assert {record.levelname for record in recorder.records} == {"WARNING"}


def test_the_level_comes_from_the_call_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    logger, recorder = recorded("level from environment", None)
    logger.warning("too quiet")
    logger.error("loud enough")
    assert recorder.messages == ["[RANK 0] loud enough"]
    assert logging.root.level == logging.ERROR
    assert get_logger("level from call", "debug").isEnabledFor(logging.DEBUG)


def test_without_a_level_the_logging_module_decides() -> None:
    logging.root.setLevel(logging.CRITICAL)
    logger, recorder = recorded("no level", None)
    logger.error("not heard")
    assert recorder.messages == []
    assert logging.root.level == logging.CRITICAL


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        get_logger("unknown level", "loud")


def test_extra_fields_reach_the_record() -> None:
    logger, recorder = recorded("extra")
    logger.info("hello", extra={"step": 3})
    assert recorder.records[0].step == 3  # type: ignore[attr-defined]


def test_the_logger_of_a_rank_that_torchrun_started_is_silent_unless_it_is_main() -> None:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2"}
    try:
        logger, recorder = recorded("torchrun")
        logger.info("hello")
        assert recorder.messages == []
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
