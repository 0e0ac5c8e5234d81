"""Output of concurrent predictions: each one gets every line it printed and no other lines."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.errors import ModelFailed
from shared.messages import PrintedLogs
from shared.models.tasks.custom import CustomResult
from tests.workers.models.custom.classes import output_of, prepared, write_class
from tests.workers.models.custom.cog_server import serve_by_cog
from tests.workers.models.custom.started import OperatorsLog, StartClass, StartedClass, StepEnd
from workers.models.custom.checking import inspect_folder

TENANTS = ("acme", "globex")

PRINTS_IN_EVERY_WAY = """
import logging, threading
logging.basicConfig(format="%(message)s", level="INFO")

class Predictor(BasePredictor):
    def setup(self) -> None:
        self.inside = 0
        self.all_inside = asyncio.Event()

    async def predict(self, tenant: str, number: int, among: int) -> ConcatenateIterator[str]:
        self.inside += 1
        if self.inside == among:
            self.all_inside.set()
        await self.all_inside.wait()
        me = f"{tenant} {number}"
        print(f"<{me} printed>")
        await asyncio.sleep(0)
        print(f"<{me} in ", end="")
        await asyncio.sleep(0)
        print("parts>", file=sys.stderr)
        yield tenant
        logging.info(f"<{me} logged>")
        await asyncio.to_thread(print, f"<{me} in a thread>")
        await asyncio.create_task(self.print_long(me))
        sys.stdout.buffer.write(f"<{me} as bytes>\\n".encode())
        yield f"-{number}"
        threading.Thread(target=print, args=(f"<{me} unattributed>",)).start()
        os.write(1, f"<{me} unattributed>\\n".encode())
        if number % 5 == 0:
            raise ValueError(f"<{me} raised>")

    async def print_long(self, me: str) -> None:
        print(f"<{me} long {'x' * 9000}>")
"""


def expected_lines(tenant: str, number: int) -> str:
    me = f"{tenant} {number}"
    ways = ("printed", "in parts", "logged", "in a thread", f"long {'x' * 9000}", "as bytes")
    return "".join(f"<{me} {way}>\n" for way in ways)


def start_concurrent(start_class: StartClass, folder: Path, body: str, most: int) -> StartedClass:
    cog_yaml = f"predict: predict.py:Predictor\nconcurrency: {{max: {most}}}\n"
    return start_class(write_class(folder, body, cog_yaml))


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow(about_s=20))])
def test_concurrent_predictions_have_their_own_lines_and_no_others(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog, count: int
) -> None:
    """All of them run at the same time: each waits until all have started."""
    model = start_concurrent(start_class, tmp_path, PRINTS_IN_EVERY_WAY, count)
    tenants = dict(zip(range(count), itertools.cycle(TENANTS), strict=False))
    for number, tenant in tenants.items():
        values = {"tenant": tenant, "number": number, "among": count}
        model.admit(number, prepared(values, is_streamed=True))
    waiting = dict(tenants)
    while waiting:
        end = model.step()
        for number, logs in model.look_at_logs().items():
            assert expected_lines(tenants[number], number).startswith(logs.text)
        for number, chunk in model.take_chunks().items():
            assert chunk.text in (tenants[number], f"-{number}", f"{tenants[number]}-{number}")
        for number, result in end.results.items():
            check_end(number, waiting.pop(number), result, end.logs[number].text)
    model.close()
    unattributed = operators_log.look()
    assert "unattributed>\n" in unattributed
    assert not any(f"{way}>" in unattributed for way in ("printed", "parts", "logged", "bytes"))


def check_end(number: int, tenant: str, result: object, logs: str) -> None:
    lines = expected_lines(tenant, number)
    if number % 5:
        assert isinstance(result, CustomResult)
        assert result.output == [tenant, f"-{number}"]
        assert logs == lines
        return
    assert isinstance(result, ModelFailed)
    assert result.message == f"ValueError: <{tenant} {number} raised>"
    assert logs.startswith(lines + "Traceback")
    assert logs.endswith(f"ValueError: <{tenant} {number} raised>\n")


def test_a_prediction_that_runs_alone_has_output_of_its_commands_in_order(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    import subprocess

    class Predictor(BasePredictor):
        async def predict(self, turns: int) -> int:
            for turn in range(turns):
                print("print", turn)
                subprocess.run(["echo", f"command {turn}"])
                if not os.fork():
                    print("child", turn, flush=True)
                    os._exit(0)
                os.wait()
            return turns
    """
    model = start_concurrent(start_class, tmp_path, body, 2)
    model.admit(0, prepared({"turns": 20}))
    lines = model.steps_until(0).logs[0].text.splitlines()
    ways = ("print", "command", "child")
    assert lines == [f"{way} {turn}" for turn in range(20) for way in ways]


ENDS_WITH_A_FILE = """
FOLDER = os.environ["TMPDIR"]  # /tmp is shared with other tests where mounts are not possible

class Predictor(BasePredictor):
    async def predict(self, name: str, task: bool = False, fails: bool = False) -> str:
        print("begin", name)
        if task:
            self.task = asyncio.create_task(self.print_later(name))
            return name
        if fails:
            self.failing = asyncio.create_task(self.fail(name))
        while not os.path.exists(f"{FOLDER}/{name}"):
            await asyncio.sleep(0.01)
            if name.startswith("quick"):
                break
        if name == "quick":
            open(f"{FOLDER}/first", "w").close()
            open(f"{FOLDER}/background", "w").close()
            await asyncio.sleep(0.1)
        print("end", name)
        return name

    async def print_later(self, name: str) -> None:
        while not os.path.exists(f"{FOLDER}/background"):
            await asyncio.sleep(0.01)
        print("later", name)
"""


def test_each_of_two_has_its_lines_whenever_the_other_joins(
    tmp_path: Path, start_class: StartClass
) -> None:
    model = start_concurrent(start_class, tmp_path, ENDS_WITH_A_FILE, 2)
    model.admit(0, prepared({"name": "first"}))
    assert model.wait_for_logs(0) == PrintedLogs("begin first\n")
    model.admit(1, prepared({"name": "quick"}))
    ends = StepEnd()
    while len(ends.results) < 2:
        end = model.step()
        ends.results |= end.results
        ends.logs |= end.logs
    assert ends.logs[0] == PrintedLogs("begin first\nend first\n")
    assert ends.logs[1] == PrintedLogs("begin quick\nend quick\n")


def test_a_task_that_outlives_its_prediction_prints_to_the_operators_log(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    model = start_concurrent(start_class, tmp_path, ENDS_WITH_A_FILE, 2)
    model.admit(0, prepared({"name": "left", "task": True}))
    assert model.steps_until(0).logs[0].text == "begin left\n"
    model.admit(1, prepared({"name": "quick"}))
    assert model.steps_until(1).logs[1].text == "begin quick\nend quick\n"
    model.close()
    assert "later left\n" in operators_log.look()


def test_errors_that_are_noticed_later_are_in_no_logs(
    tmp_path: Path, start_class: StartClass, operators_log: OperatorsLog
) -> None:
    """A garbage collection raises them, in any prediction's context."""
    body = """
    import gc

    class Broken:
        def __init__(self, name: str) -> None:
            self.name, self.me = name, self

        def __del__(self) -> None:
            raise ValueError(f"destructor of {self.name}")

    async def fail(name: str) -> None:
        raise ValueError(f"task of {name}")

    class Predictor(BasePredictor):
        async def predict(self, name: str) -> str:
            if name == "other":
                gc.enable()
                gc.collect()
                print("collected")
                return name
            gc.disable()
            Broken(name)
            task = asyncio.create_task(fail(name))
            task.me = [task]
            await asyncio.sleep(0)
            return name
    """
    model = start_concurrent(start_class, tmp_path, body, 2)
    model.admit(0, prepared({"name": "acme"}))
    model.steps_until(0)
    model.admit(1, prepared({"name": "other"}))
    assert model.steps_until(1).logs[1].text == "collected\n"
    model.close()
    log = operators_log.look()
    assert "task of acme" in log
    assert "destructor of acme" in log


def test_a_secret_in_two_parts_is_hidden_in_each_log(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        async def predict(self, name: str) -> str:
            secret = os.environ["API_KEY"]
            print(name, secret[:9], end="")
            await asyncio.sleep(0.1)
            print(secret[9:])
            print(name, secret[:9], end="")
            return name
    """
    (tmp_path / "key").write_text("sk-0123456789")
    folder = tmp_path / "class"
    folder.mkdir()
    write_class(folder, body, "predict: predict.py:Predictor\nconcurrency: {max: 8}\n")
    model = start_class(folder, secrets={"API_KEY": f"local:{tmp_path / 'key'}"})
    for number in range(8):
        model.admit(number, prepared({"name": f"n{number}"}))
    ends = StepEnd()
    while len(ends.results) < 8:
        end = model.step()
        for logs in model.look_at_logs().values():
            assert "sk-0" not in logs.text
        ends.results |= end.results
        ends.logs |= end.logs
    for number in range(8):
        assert ends.logs[number].text == f"n{number} [secret]\nn{number} sk-012345"


def test_a_prediction_whose_process_ends_keeps_its_lines(
    tmp_path: Path, start_class: StartClass
) -> None:
    body = """
    class Predictor(BasePredictor):
        async def predict(self, name: str) -> str:
            print("begin", name)
            await asyncio.sleep(0.1)
            if name == "bad":
                os._exit(4)
            await asyncio.sleep(0.1)
            print("end", name)
            return name
    """
    model = start_concurrent(start_class, tmp_path, body, 2)
    model.admit(0, prepared({"name": "bad"}))
    model.admit(1, prepared({"name": "good"}))
    ends = StepEnd()
    while len(ends.results) < 2:
        end = model.step()
        ends.results |= end.results
        ends.logs |= end.logs
    assert ends.logs[0].text == "begin bad\n"
    assert ends.logs[1].text == "begin good\nend good\n"
    assert output_of(ends, 1) == "good"


SAME_AS_COG = """
import logging, threading
logging.basicConfig(format="%(message)s", level="INFO")

class Predictor(BasePredictor):
    async def predict(self, name: str) -> str:
        for turn in range(3):
            print(name, "printed", turn)
            await asyncio.sleep(0.05)
            logging.info("%s logged %s", name, turn)
            await asyncio.create_task(self.print_in_task(name))
        return name

    async def print_in_task(self, name: str) -> None:
        await asyncio.sleep(0.01)
        print(name, "in a task", file=sys.stderr)
        await asyncio.to_thread(print, name, "in a thread")
"""


def test_logs_of_concurrent_predictions_are_those_of_cog(
    tmp_path: Path, start_class: StartClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{number}" for number in range(8)]
    model = start_concurrent(start_class, tmp_path, SAME_AS_COG, len(names))
    for number, name in enumerate(names):
        model.admit(number, prepared({"name": name}))
    ours: dict[int, str] = {}
    while len(ours) < len(names):
        ours |= {number: logs.text for number, logs in model.step().logs.items()}
    monkeypatch.setenv("COG_MAX_CONCURRENCY", str(len(names)))
    with (
        serve_by_cog(tmp_path, inspect_folder(tmp_path).interface) as server,
        ThreadPoolExecutor(len(names)) as threads,
    ):
        theirs = list(threads.map(lambda name: server.predict({"name": name}).logs, names))
    assert [ours[number] for number in range(len(names))] == theirs


def test_parts_of_lines_are_not_mixed_as_by_cog(
    tmp_path: Path, start_class: StartClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    class Predictor(BasePredictor):
        def setup(self) -> None:
            self.begun = {name: asyncio.Event() for name in ("acme", "globex")}

        async def predict(self, name: str) -> str:
            self.begun[name].set()
            print(f"<{name} ", end="")
            for begun in self.begun.values():
                await begun.wait()
            await asyncio.sleep(0.1)
            print(f"{name}>")
            return name
    """
    model = start_concurrent(start_class, tmp_path, body, 2)
    for number, name in enumerate(TENANTS):
        model.admit(number, prepared({"name": name}))
    ours: dict[int, str] = {}
    while len(ours) < 2:
        ours |= {number: logs.text for number, logs in model.step().logs.items()}
    assert ours == {number: f"<{name} {name}>\n" for number, name in enumerate(TENANTS)}
    monkeypatch.setenv("COG_MAX_CONCURRENCY", "2")
    with (
        serve_by_cog(tmp_path, inspect_folder(tmp_path).interface) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        theirs = list(threads.map(lambda name: server.predict({"name": name}).logs, TENANTS))
    assert any(other in logs for logs, other in zip(theirs, reversed(TENANTS), strict=True)), (
        "Cog keeps them apart by now: remove the row of the page"
    )
