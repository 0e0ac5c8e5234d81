import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from infra.local import process
from infra.local.process import Process, answers, free_port, listens
from infra.local.redis_server import RedisServer
from shared.errors import Unavailable
from tests.conftest import emptied
from tests.limits import WAIT_LIMIT_S

SERVER = """
import signal, socket, sys
print("about to listen", flush=True)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""


def python(
    name: str, code: str, folder: Path, *arguments: object, stop_limit_s: float = 5.0
) -> Process:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return Process(name, command, folder, stop_limit_s=stop_limit_s)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_runs_until_the_context_is_left(tmp_path: Path) -> None:
    port = free_port()
    with python("server", SERVER, tmp_path, port) as server:
        server.wait_ready(lambda: listens(port), WAIT_LIMIT_S)
        assert server.is_running
        assert (tmp_path / "server.log").read_text() == "about to listen\n"
    assert not listens(port)
    assert server.ending == "was not started"


def test_early_end_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    with (
        python("broken", code, tmp_path) as broken,
        pytest.raises(
            Unavailable,
            match=r"broken exited with code 3 before it was ready; the end of .*broken\.log:\n  80",
        ),
    ):
        broken.wait_ready(lambda: False, WAIT_LIMIT_S)


def test_killed_process_is_told_by_its_signal(tmp_path: Path) -> None:
    with (
        python("killed", "import os; os.kill(os.getpid(), 9)", tmp_path) as killed,
        pytest.raises(
            Unavailable,
            match="killed was killed by SIGKILL before it was ready; its log is empty: ",
        ),
    ):
        killed.wait_ready(lambda: False, WAIT_LIMIT_S)


def test_readiness_has_a_limit(tmp_path: Path) -> None:
    with (
        python("slow", SERVER, tmp_path, free_port()) as slow,
        pytest.raises(Unavailable, match=r"slow was not ready within 0\.1 s"),
    ):
        slow.wait_ready(lambda: False, 0.1)


def test_wait_done_wants_success(tmp_path: Path) -> None:
    with python("maker", "print('made')", tmp_path) as maker:
        maker.wait_done(WAIT_LIMIT_S)
    with (
        python("maker", "raise SystemExit('no disk')", tmp_path) as maker,
        pytest.raises(Unavailable, match="no disk"),
    ):
        maker.wait_done(WAIT_LIMIT_S)
    with (
        python("maker", SERVER, tmp_path, free_port()) as maker,
        pytest.raises(Unavailable, match="did not exit within"),
    ):
        maker.wait_done(0.1)


def test_deaf_process_and_its_children_are_killed(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", {SERVER!r}, sys.argv[1]])
    time.sleep(600)
    """
    with python("deaf", code, tmp_path, port, stop_limit_s=0.2) as deaf:
        deaf.wait_ready(lambda: listens(port), WAIT_LIMIT_S)
    wait_until(lambda: not listens(port))


def test_child_left_behind_is_killed(tmp_path: Path) -> None:
    port = free_port()
    code = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SERVER!r}, sys.argv[1]])"
    )
    parent = python("parent", code, tmp_path, port)
    with parent:
        parent.wait_done(WAIT_LIMIT_S)
        wait_until(lambda: listens(port))
    wait_until(lambda: not listens(port))


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="asks for the state of what has ended")
def test_id_is_not_free_before_the_group_was_killed(tmp_path: Path) -> None:
    def is_kept(pid: int) -> bool:
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return False

    server = python("server", "raise SystemExit(3)", tmp_path)
    server.start()
    wait_until(lambda: not server.is_running)
    first = server.pid
    assert is_kept(first)
    assert server.ending == "exited with code 3"
    server.start()
    assert not is_kept(first)
    server.kill()
    second = server.pid
    assert is_kept(second)
    assert server.ending in ("was killed by SIGKILL", "exited with code 3")
    server.send_signal(signal.SIGTERM)
    server.stop()
    assert not is_kept(second)


def test_no_group_of_a_start_that_failed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    once = Process("once", [str(program)], tmp_path)
    once.start()
    wait_until(lambda: not once.is_running)
    program.unlink()
    with pytest.raises(Unavailable, match="can't run on this machine"):
        once.start()
    once.stop()
    assert killed == []


def test_ended_redis_says_so_to_the_next_test(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "data", tmp_path) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            emptied(server)
            assert client.dbsize() == 0
        server.ask_to_stop()
        wait_until(lambda: not server.is_running)
        with pytest.raises(
            pytest.fail.Exception, match=r"redis exited with code 0; the end of .*redis\.log:\n"
        ):
            emptied(server)


def test_paused_process_can_be_stopped(tmp_path: Path) -> None:
    port = free_port()
    with python("server", SERVER, tmp_path, port) as server:
        server.wait_ready(lambda: listens(port), WAIT_LIMIT_S)
        server.pause()
        server.resume()
        server.pause()
    assert not listens(port)
    with pytest.raises(Unavailable, match="server is not running"):
        server.pause()


def test_runs_on_after_the_thread_that_started_it(tmp_path: Path) -> None:
    sleeps = python("sleeps", "import time; time.sleep(0.3)", tmp_path)
    starter = threading.Thread(target=sleeps.start)
    starter.start()
    starter.join()
    sleeps.wait_done(WAIT_LIMIT_S)
    sleeps.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
    import sys, time
    from pathlib import Path
    from infra.local.process import Process, listens
    command = [sys.executable, "-c", {SERVER!r}, sys.argv[1]]
    with Process("server", command, Path(sys.argv[2])) as server:
        server.wait_ready(lambda: listens(int(sys.argv[1])), {WAIT_LIMIT_S})
        print("ready", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(port), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not listens(port))


def test_missing_program_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match="nothing: /no/such/program can't run on this machine: No such file"
    ):
        Process("nothing", ["/no/such/program"], tmp_path).start()


def test_answers_wants_200(tmp_path: Path) -> None:
    port = free_port()
    assert not answers(port, "/")
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with Process("http", command, tmp_path) as server:
        server.wait_ready(lambda: answers(port, "/"), WAIT_LIMIT_S)
        assert not answers(port, "/none")


def test_free_ports_are_claimed_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(process, "FREE_PORTS", (first, first + 1))
    monkeypatch.setattr(process, "PORT_TRIES", 3)
    with pytest.raises(Unavailable, match="no free port between"):
        free_port()
    code = (
        "from infra.local import process;"
        f" process.FREE_PORTS = ({first}, {first + 1}); process.free_port()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert "no free port between" in done.stderr
