"""What a runner must do, as tests of behavior in time: streams, cancellation, logs, death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.class_runners.outcome import ClassRunner, Outcome, Request

AT_ONCE_S = 1.5
NOISY_LINES = 200_000
TENANTS = 8


class Probe(NamedTuple):
    """A class, and a check that returns what is wrong, or an empty text."""

    name: str
    methods: str
    """Of a class whose head is `_HEAD`."""
    check: Callable[[ClassRunner, str], Awaitable[str]]
    concurrency: int = 1

    @property
    def source(self) -> str:
        """The text of predict.py."""
        return _HEAD + self.methods


def _wrong(is_right: bool, outcome: Any) -> str:
    return "" if is_right else str(outcome)[:160]


async def _stream_async(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    is_right = len(outcome.pieces_s) == 3 and outcome.pieces_s[0] < 0.4 < outcome.pieces_s[1]
    return _wrong(is_right and outcome.pieces_s[2] > 0.9, outcome)


async def _cancel(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}, cancel_after_s=0.5))
    if outcome.status != "canceled" or outcome.seconds > AT_ONCE_S:
        return _wrong(is_right=False, outcome=outcome)
    after = await runner.predict(Request({"seconds": 0}))
    return _wrong(after.status == "succeeded", after)


async def _three_files(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    digests = {piece["file"] for piece in outcome.pieces}
    return _wrong(len(digests) == 3, outcome)


async def _nested_name(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    is_right = outcome.status == "succeeded" and outcome.output["at"][0].get("name") == "named.txt"
    return _wrong(is_right, outcome)


async def _subprocess_logs(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    has_all = all(word in outcome.logs for word in ("printed", "by a child", "to stderr"))
    return _wrong(has_all, outcome)


async def _constraints(runner: ClassRunner, failure: str) -> str:
    wrong: list[dict[str, Any]] = [{"number": 0}, {"size": "l"}, {"code": "abc"}, {"number": "x"}]
    for values in wrong:
        outcome = await runner.predict(Request(values))
        if outcome.status == "succeeded":
            return _wrong(is_right=False, outcome=(values, outcome))
    outcome = await runner.predict(Request({}))
    return _wrong(outcome.status == "succeeded", outcome)


async def _noisy(runner: ClassRunner, failure: str) -> str:
    before_s = time.process_time()
    outcome = await runner.predict(Request({"lines": NOISY_LINES}))
    cpu_s = time.process_time() - before_s
    return _wrong(outcome.status == "succeeded" and cpu_s < 1.0, f"{cpu_s:.1f} s of CPU here")


async def _setup_output(runner: ClassRunner, failure: str) -> str:
    return _wrong("no weights here" in failure, failure)


async def _exit_now(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    return _wrong(outcome.status == "died" and outcome.seconds < AT_ONCE_S, outcome)


async def _sys_exit(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({"code": 3}))
    after = await runner.predict(Request({"code": 0}))
    return _wrong(outcome.status == "failed" and after.status == "succeeded", (outcome, after))


async def _together(runner: ClassRunner, failure: str) -> str:
    began_s = time.monotonic()
    outcomes = await _all_tenants(runner)
    seconds = time.monotonic() - began_s
    are_right = all(one.status == "succeeded" for one in outcomes)
    return _wrong(are_right and seconds < 3.0, f"{seconds:.1f} s, {outcomes[0]}")


async def _own_logs(runner: ClassRunner, failure: str) -> str:
    outcomes = await _all_tenants(runner)
    for number, outcome in enumerate(outcomes):
        others = [one for one in range(TENANTS) if one != number and f"<{one}>" in outcome.logs]
        if others:
            return f"logs of {number} have lines of {others}"
    return ""


async def _logs_at_all(runner: ClassRunner, failure: str) -> str:
    outcomes = await _all_tenants(runner)
    missing = [n for n, one in enumerate(outcomes) if one.logs.count(f"<{n}>") != 3]
    return f"lines are missing in the logs of {missing}" if missing else ""


async def _all_tenants(runner: ClassRunner) -> list[Outcome]:
    request = (Request({"tenant": number}) for number in range(TENANTS))
    return list(await asyncio.gather(*map(runner.predict, request)))


async def _not_ours(runner: ClassRunner, failure: str) -> str:
    """The file has the variables of the process that opens it."""
    outcome = await runner.predict(Request({}))
    size_bytes = outcome.output["bytes"] if isinstance(outcome.output, dict) else 0
    own_bytes = len(await asyncio.to_thread(Path("/proc/self/environ").read_bytes))
    return _wrong(size_bytes != own_bytes, f"{size_bytes} bytes of this process's variables")


async def _metrics(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({"key": "abc"}))
    expected = {"tokens": 3, "parts": {"deep": 0.5}, "steps": 3}
    return _wrong(outcome.metrics == expected and outcome.output == "cba", outcome)


async def _signals(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({}))
    return _wrong(not failure and outcome.output is True, failure or outcome)


async def _large(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({"text": "x" * 9_000_000}))
    return _wrong(outcome.status == "succeeded" and outcome.output == 9_000_000, outcome.error)


async def _large_out(runner: ClassRunner, failure: str) -> str:
    outcome = await runner.predict(Request({"count": 9_000}))
    return _wrong(outcome.status == "succeeded" and len(outcome.output) == 9_000, outcome.error)


_HEAD = """
import asyncio, os, signal, subprocess, sys, threading, time
from typing import *
from cog import BasePredictor, ConcatenateIterator, Input, Path, Secret, current_scope

class Predictor(BasePredictor):
"""
_TENANTS = """
    async def predict(self, tenant: int) -> str:
        for turn in range(3):
            print(f"<{tenant}> turn {turn}")
            await asyncio.sleep(0.2)
        return str(tenant)
"""
PROBES: Sequence[Probe] = (
    Probe(
        "an async generator streams",
        """
    async def predict(self) -> AsyncIterator[str]:
        for number in range(3):
            yield str(number)
            await asyncio.sleep(0.5)
""",
        _stream_async,
    ),
    Probe(
        "canceled in time.sleep at once",
        """
    def predict(self, seconds: float = 8.0) -> str:
        time.sleep(seconds)
        return "slept"
""",
        _cancel,
    ),
    Probe(
        "canceled in subprocess.run at once",
        """
    def predict(self, seconds: float = 8.0) -> str:
        subprocess.run(["sleep", str(seconds)])
        return "slept"
""",
        _cancel,
    ),
    Probe(
        "canceled in a loop at once",
        """
    def predict(self, seconds: float = 8.0) -> str:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            pass
        return "looped"
""",
        _cancel,
    ),
    Probe(
        "canceled in an await at once",
        """
    async def predict(self, seconds: float = 8.0) -> str:
        await asyncio.sleep(seconds)
        return "slept"
""",
        _cancel,
    ),
    Probe(
        "three yields of one path are three files",
        """
    def predict(self) -> Iterator[Path]:
        for number in range(3):
            Path("/tmp/probe.txt").write_text(str(number))
            yield Path("/tmp/probe.txt")
""",
        _three_files,
    ),
    Probe(
        "a file in a dict keeps its name",
        """
    def predict(self) -> dict[str, Any]:
        os.makedirs("/tmp/probe-named", exist_ok=True)
        Path("/tmp/probe-named/named.txt").write_text("text")
        return {"at": [Path("/tmp/probe-named/named.txt")]}
""",
        _nested_name,
    ),
    Probe(
        "output of a subprocess is in logs",
        """
    def predict(self) -> str:
        print("printed")
        subprocess.run(["echo", "by a child"])
        subprocess.run("echo to stderr >&2", shell=True)
        return "done"
""",
        _subprocess_logs,
    ),
    Probe(
        "constraints of inputs hold without the API",
        r"""
    def predict(
        self,
        number: int = Input(default=1, ge=1),
        size: str = Input(default="s", choices=["s", "m"]),
        code: str = Input(default="ab1", regex=r"(?=.*\d)\w+"),
    ) -> str:
        return "taken"
""",
        _constraints,
    ),
    Probe(
        "200,000 printed lines cost the parent under 1 s",
        """
    def predict(self, lines: int) -> str:
        for number in range(lines):
            print("line", number)
        return "printed"
""",
        _noisy,
    ),
    Probe(
        "the error of a failed setup is known",
        """
    def setup(self):
        print("looking for weights")
        raise RuntimeError("no weights here")

    def predict(self) -> str:
        return ""
""",
        _setup_output,
    ),
    Probe(
        "os._exit is noticed at once",
        """
    def predict(self) -> str:
        os._exit(3)
""",
        _exit_now,
    ),
    Probe(
        "os._exit is noticed at once with a forked child left",
        """
    def predict(self) -> str:
        if os.fork() == 0:
            time.sleep(6)
            os._exit(0)
        os._exit(3)
""",
        _exit_now,
    ),
    Probe(
        "sys.exit fails the prediction only",
        """
    def predict(self, code: int) -> str:
        if code:
            sys.exit(code)
        return "here"
""",
        _sys_exit,
    ),
    Probe("8 async predictions at once", _TENANTS, _together, TENANTS),
    Probe("logs of concurrent predictions are apart", _TENANTS, _own_logs, TENANTS),
    Probe("logs of concurrent predictions are complete", _TENANTS, _logs_at_all, TENANTS),
    Probe(
        "Path('/proc/self/environ') is not this process's",
        """
    def predict(self) -> Path:
        return Path("/proc/self/environ")
""",
        _not_ours,
    ),
    Probe(
        "secrets and metrics",
        """
    def predict(self, key: Secret) -> str:
        scope = current_scope()
        scope.record_metric("tokens", 3)
        scope.record_metric("parts.deep", 0.5)
        scope.record_metric("steps", 1, mode="incr")
        scope.record_metric("steps", 2, mode="incr")
        return key.get_secret_value()[::-1]
""",
        _metrics,
    ),
    Probe(
        "signal handlers in setup (main thread)",
        """
    def setup(self):
        signal.signal(signal.SIGUSR2, lambda number, frame: None)

    def predict(self) -> bool:
        return threading.current_thread() is threading.main_thread()
""",
        _signals,
    ),
    Probe(
        "9 MB of JSON as input",
        """
    def predict(self, text: str) -> int:
        return len(text)
""",
        _large,
    ),
    Probe(
        "9 MB of JSON as output",
        """
    def predict(self, count: int) -> list[str]:
        return ["x" * 1000] * count
""",
        _large_out,
    ),
)
