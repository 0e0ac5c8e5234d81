"""Parts that die are restarted, with increasing pauses, but not forever."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.local.process import LAST_LINE_CHARS, Process
from infra.local.supervision import (
    FIRST_PAUSE_S,
    FIRST_START_PAUSE_S,
    MAX_DEATHS,
    MAX_PAUSE_S,
    MAX_START_PAUSE_S,
    PATIENCE_S,
    PROGRESS_S,
    WINDOW_S,
    SupervisedPart,
    Supervisor,
)
from tests.infra.running_up import wait_until
from tests.limits import WAIT_LIMIT_S

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"


class World:
    """A part, its supervisor, and a clock that only the test moves."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.now_s = 1000.0
        self.is_ready = True
        self.reported: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            [SupervisedPart(process, lambda: self.is_ready, 60.0)],
            lambda word, facts: self.reported.append((word, facts)),
            lambda: self.now_s,
        )

    def start_of_a_worker(self, limit_s: float = 60.0) -> Supervisor:
        """A supervisor for the same process, as for a worker that has just started."""
        self.is_ready = False
        part = SupervisedPart(
            self.process, lambda: self.is_ready, limit_s, was_ready=False, is_optional=True
        )
        return Supervisor(
            [part], lambda word, facts: self.reported.append((word, facts)), lambda: self.now_s
        )

    def pause_after_death(self) -> float:
        """Kills the part and returns the number of seconds until it is restarted."""
        began_s = self.now_s
        self.process.kill()
        assert self.supervisor.look() is None
        while not self.process.is_running:
            self.now_s += FIRST_PAUSE_S / 4
            assert self.supervisor.look() is None
        return self.now_s - began_s


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], World]]:
    with ExitStack() as running:

        def start(program: str = sys.executable) -> World:
            process = Process("part", [program, "-c", SLEEPS], tmp_path)
            return World(running.enter_context(process))

        yield start


def test_part_that_dies_comes_back(run: Callable[..., World]) -> None:
    world = run()
    first = world.process.pid
    assert world.supervisor.look() is None
    assert world.reported == []
    assert world.pause_after_death() == FIRST_PAUSE_S
    assert world.process.pid != first
    assert world.supervisor.look() is None
    assert [word for word, _ in world.reported] == ["died", "back"]
    assert world.reported[0][1].startswith("part was killed by SIGKILL; ")
    assert "restarts in 0.5 s (1 of 5)" in world.reported[0][1]


def test_worker_that_starts_is_reported_until_it_is_ready(run: Callable[..., World]) -> None:
    world = run()
    supervisor = world.start_of_a_worker(limit_s=600.0)
    for waited_s in (0.0, PROGRESS_S, PROGRESS_S + 1, 2 * PROGRESS_S):
        world.now_s = 1000.0 + waited_s
        assert supervisor.look() is None
    assert [word for word, _ in world.reported] == ["waiting", "waiting"]
    assert "part · 20 s so far; " in world.reported[1][1]  # then its last line, if it has one
    assert "; log: " in world.reported[1][1]
    assert (supervisor.is_settled, supervisor.not_ready) == (False, ["part"])
    world.now_s = 1001.0 + PATIENCE_S
    assert (supervisor.is_settled, supervisor.not_ready) == (True, ["part"])
    world.is_ready = True
    assert supervisor.look() is None
    assert world.reported[-1] == ("ready", "part · warm")
    assert (supervisor.is_settled, supervisor.not_ready) == (True, [])


def test_worker_that_is_late_is_stopped_and_shown_with_its_log(run: Callable[..., World]) -> None:
    world = run()
    supervisor = world.start_of_a_worker(limit_s=5.0)
    world.process.wait_ready(lambda: "up" in world.process.log_path.read_text(), WAIT_LIMIT_S)
    world.now_s += 6
    assert supervisor.look() is None
    word, facts = world.reported[-1]
    assert word == "died"
    assert "part was not ready within 5 s; the end of " in facts
    assert ".log:\n  up" in facts
    assert (supervisor.is_settled, supervisor.not_ready) == (True, ["part"])


def test_worker_with_a_wrong_configuration_stays_down(tmp_path: Path) -> None:
    code = "print('no such package', flush=True); raise SystemExit(2)"
    with Process("part", [sys.executable, "-c", code], tmp_path) as process:
        world = World(process)
        supervisor = world.start_of_a_worker()
        wait_until(lambda: not process.is_running, WAIT_LIMIT_S)
        assert supervisor.look() is None
        word, facts = world.reported[-1]
        assert word == "down"
        assert "part exited with code 2; the end of " in facts
        assert "no such package" in facts
        world.now_s += WINDOW_S
        assert supervisor.look() is None
        assert not process.is_running
        assert (supervisor.is_settled, supervisor.not_ready) == (True, ["part"])


def test_worker_that_never_gets_ready_is_tried_after_longer_and_longer_pauses(
    run: Callable[..., World],
) -> None:
    world = run()
    supervisor = world.start_of_a_worker()
    pauses: list[float] = []
    while pauses[-2:] != [MAX_START_PAUSE_S] * 2:
        died_s = world.now_s
        world.process.kill()
        assert supervisor.look() is None
        word, facts = world.reported[-1]
        assert word == "died"
        assert "the other models are still being served" in facts
        while not world.process.is_running:
            world.now_s += FIRST_START_PAUSE_S / 2
            assert supervisor.look() is None
        pauses.append(world.now_s - died_s)
    expected = [FIRST_START_PAUSE_S * 2**n for n in range(len(pauses))]
    assert pauses == [min(one, MAX_START_PAUSE_S) for one in expected]
    assert len(pauses) > MAX_DEATHS
    world.is_ready = True
    assert supervisor.look() is None
    assert world.reported[-1] == ("ready", "part · warm")


def test_worker_that_dies_too_often_while_it_serves_does_not_end_the_others(
    run: Callable[..., World],
) -> None:
    world = run()
    supervisor = world.start_of_a_worker()
    world.is_ready = True
    for _ in range(MAX_DEATHS + 1):
        assert supervisor.look() is None
        world.process.kill()
        assert supervisor.look() is None
        world.now_s += MAX_PAUSE_S
        assert supervisor.look() is None
    assert world.reported[-1][0] == "down"
    assert "will not be restarted; the other models are still being served" in world.reported[-1][1]


def last_line_shown(tmp_path: Path, said: str) -> str:
    """The last log line in the progress line about a worker that prints `said` and 70."""
    code = f"import sys, time; sys.stdout.write({said!r}); sys.stdout.flush(); time.sleep(600)"
    with Process("part", [sys.executable, "-c", code], tmp_path) as process:
        wait_until(lambda: "70" in process.log_path.read_text(), WAIT_LIMIT_S)
        world = World(process)
        supervisor = world.start_of_a_worker()
        world.now_s += PROGRESS_S
        assert supervisor.look() is None
        _, facts = world.reported[-1]
        return facts.partition("last log line: ")[2].partition(";")[0]


def test_what_a_slow_worker_said_last_is_shown(tmp_path: Path) -> None:
    said = "0 %\r50 %\r" + "x" * 9999 + " 70 %\r\x1b[K\n\n"
    shown = last_line_shown(tmp_path, said)
    assert shown.endswith("x 70 %")
    assert len(shown) == LAST_LINE_CHARS


def test_message_of_a_slow_workers_last_entry_is_shown(tmp_path: Path) -> None:
    entry = {"severity": "INFO", "message": "model loading", "model": "m" * 200, "percent": 70}
    assert last_line_shown(tmp_path, json.dumps(entry) + "\n") == "model loading"


def test_log_still_says_why_the_last_one_ended(run: Callable[..., World], tmp_path: Path) -> None:
    world = run()
    with (tmp_path / "part.log").open("a") as log:
        log.write("out of memory\n")
    world.pause_after_death()
    assert "out of memory" in (tmp_path / "part.log").read_text()


def test_pauses_grow_and_it_ends_when_a_part_dies_too_often(run: Callable[..., World]) -> None:
    world = run()
    pauses = [world.pause_after_death() for _ in range(MAX_DEATHS)]
    assert pauses == [min(FIRST_PAUSE_S * 2**n, MAX_PAUSE_S) for n in range(MAX_DEATHS)]
    world.process.kill()
    failure = world.supervisor.look()
    assert failure is not None
    assert failure.startswith("part was killed by SIGKILL; ")
    assert failure.endswith(f"part died {MAX_DEATHS + 1} times within 600 s")
    assert not world.process.is_running


def test_deaths_long_ago_are_forgiven(run: Callable[..., World]) -> None:
    world = run()
    for _ in range(2 * MAX_DEATHS):
        assert world.pause_after_death() == FIRST_PAUSE_S
        world.now_s += WINDOW_S
        assert world.supervisor.look() is None


def test_part_that_does_not_get_ready_counts_as_dead(run: Callable[..., World]) -> None:
    world = run()
    world.is_ready = False
    world.pause_after_death()
    world.now_s += 61
    assert world.supervisor.look() is None
    assert not world.process.is_running
    assert "part was not ready within 60 s" in world.reported[-1][1]
    assert "(2 of 5)" in world.reported[-1][1]


def test_program_that_is_gone_counts_as_dead(run: Callable[..., World], tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    world = run(str(program))
    program.unlink()
    world.process.kill()
    assert world.supervisor.look() is None
    world.now_s += FIRST_PAUSE_S
    assert world.supervisor.look() is None
    assert "part did not start: part: " in world.reported[-1][1]
    assert "can't run on this machine: No such file" in world.reported[-1][1]


def test_worker_that_cannot_start_for_days_ends_nothing(
    run: Callable[..., World], tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    world = run(str(program))
    supervisor = world.start_of_a_worker()
    program.unlink()
    world.process.kill()
    for _ in range(1100):
        assert supervisor.look() is None
        world.now_s += MAX_START_PAUSE_S
    assert f"restarts in {MAX_START_PAUSE_S:g} s" in world.reported[-1][1]
    assert len(world.reported) == 1100


def test_restart_is_no_death(run: Callable[..., World]) -> None:
    world = run()
    first, started = world.process.pid, []
    world.supervisor.restart("part", lambda: started.append(world.process.pid))
    while not started:
        assert world.supervisor.look() is None
    assert started == [world.process.pid] != [first]
    assert world.supervisor.look() is None
    assert [word for word, _ in world.reported] == ["back"]
    assert world.pause_after_death() == FIRST_PAUSE_S, "a later death is the first one"


def test_part_that_is_not_ready_after_a_restart_stays_down_until_the_next(
    run: Callable[..., World],
) -> None:
    world = run()
    world.is_ready = False
    for _ in range(MAX_DEATHS + 2):
        started: list[bool] = []
        world.supervisor.restart("part", lambda: started.append(True))  # noqa: B023  called below
        while not started:
            assert world.supervisor.look() is None
        world.process.kill()
        assert world.supervisor.look() is None
        world.now_s += MAX_PAUSE_S
        assert world.supervisor.look() is None
        assert not world.process.is_running
    assert {word for word, _ in world.reported} == {"down"}
    world.is_ready = True
    world.supervisor.restart("part", lambda: None)
    while "back" not in dict(world.reported):
        assert world.supervisor.look() is None
