"""`python -m tests.anywhere [ENVIRONMENT...]`: tries the README's commands on other kinds of
machines.

Each environment is a copy of this tree in which setup, `make demo`, `make up` with one request, and
tests run under particular conditions: as a different user, in a different folder, behind a proxy,
or without parts of the kernel. `--list` names all environments. Prints a table, and fails if a step
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.text_table import table
from tests.anywhere.environments import (
    CONDITIONS,
    ENVIRONMENTS,
    NO_PROXY_VARIABLES,
    PROXY_VARIABLES,
    Machine,
    cache_variables,
    find_python,
    prepare_machine,
    usual_variables,
)
from tests.anywhere.launcher import SKIPPED, CannotRestrict, unmount
from tests.source_files import source_files

ROOT = Path(__file__).parents[2]
LAUNCHER = Path("tests/anywhere/launcher.py")
STEP_LIMIT_S = 7200.0
LAST_LINES = 40
DELETIONS = 8
"""Number of concurrent deletions."""
STEPS = ("demo", "up", "test")


@dataclass(frozen=True)
class Result:
    """The result of one step in one environment. `cpu_s` includes all child processes."""

    environment: str
    step: str
    outcome: str
    wall_s: float
    cpu_s: float
    last_lines: str = ""


def copy_tree(machine: Machine) -> None:
    """Copies this tree's sources, and its history if git is installed, to the machine's folder."""
    folder = machine.folder
    if (ROOT / ".git").exists() and shutil.which("git") and not folder.exists():
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)]
        subprocess.run(clone, check=True)
    sources = source_files(ROOT)
    for path in sources:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
    if folder.exists():
        for path in set(source_files(folder)).difference(sources):
            (folder / path).unlink()
    if os.geteuid() == 0 and machine.user:
        for place in (folder, *folder.rglob("*")):
            if ".venv" not in place.parts:
                os.chown(place, machine.user, machine.user, follow_symlinks=False)


def variables_of(machine: Machine, caches: Path, *, is_setup: bool) -> dict[str, str]:
    """A step's complete environment, as in a new shell for the machine's user."""
    variables = dict(usual_variables()) | machine.variables
    if machine.home is not None:
        variables["HOME"] = str(machine.home)
        if machine.home.exists() and "read_only" not in machine.options:
            variables |= cache_variables(caches / str(machine.user))
    variables.setdefault("LANG", "C.UTF-8")
    if is_setup:
        for name in (*PROXY_VARIABLES, *NO_PROXY_VARIABLES):
            if name in os.environ:
                variables[name] = os.environ[name]
        return variables
    variables["PYTEST_WORKERS"] = os.environ.get("PYTEST_WORKERS", "2")
    return variables | machine.step_variables


class Run:
    """One environment: its machine, and its steps, which run sequentially."""

    def __init__(self, name: str, machine: Machine, caches: Path) -> None:
        self._name = name
        self._machine = machine
        self._caches = caches

    def run_all(self, steps: Sequence[str], tests: str) -> Iterator[Result]:
        """Copies the tree and sets it up, if it is a copy, then yields each step's result.

        Stops if setup fails.
        """
        if self._machine.folder != ROOT:
            caches = self._caches / str(self._machine.user)
            caches.mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(caches, self._machine.user, self._machine.user)
            copy_tree(self._machine)
            yield (result := self._step("setup", ["make", "setup"]))
            if result.outcome != "passed":
                return
        for step in steps:
            yield self._step(step, self._command(step, tests))

    def _command(self, step: str, tests: str) -> list[str]:
        if step == "up":
            return [".venv/bin/python", "tests/anywhere/steps.py"]
        if step == "test" and tests:
            pytest = [".venv/bin/pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
            return [*pytest, *tests.split()]
        return ["make", step]

    def _step(self, step: str, command: Sequence[str]) -> Result:
        machine, is_setup = self._machine, step == "setup"
        options = machine.options | ({} if is_setup else machine.step_options)
        began_s, began_cpu_s = time.monotonic(), children_cpu_s()
        with busy_loops(0 if is_setup else machine.busy_loops, options.get("cores")):
            done = subprocess.run(
                [find_python(), str(ROOT / LAUNCHER), json.dumps(options), *command],
                cwd=machine.folder,
                env=variables_of(machine, self._caches, is_setup=is_setup),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=STEP_LIMIT_S,
                check=False,
            )
        output = done.stdout.decode(errors="replace")
        (machine.base / f"{step}.log").write_text(output)
        outcome = {0: "passed", SKIPPED: output.strip()}.get(done.returncode, "failed")
        lines = output.splitlines()[-LAST_LINES:] if outcome == "failed" else []
        wall_s, cpu_s = time.monotonic() - began_s, children_cpu_s() - began_cpu_s
        return Result(self._name, step, outcome, wall_s, cpu_s, "\n".join(lines))


def children_cpu_s() -> float:
    """CPU seconds used by all processes that this one has waited for, and by their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def busy_loops(count: int, cores: Sequence[int] | None) -> Iterator[None]:
    """Runs busy-looping processes on these cores."""
    program = f"import os; os.sched_setaffinity(0, {cores or sorted(os.sched_getaffinity(0))})"
    command = [sys.executable, "-c", f"{program}\nwhile True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def remove_tree(folder: Path) -> None:
    """Deletes as much of a folder as it can.

    A virtual environment has 60,000 files, and each deletion may wait for the disk, so threads
    delete them in parallel.
    """
    with ThreadPoolExecutor(DELETIONS) as threads:
        for parent, _, names in os.walk(folder):
            for name in names:
                threads.submit(os.unlink, f"{parent}/{name}")
    shutil.rmtree(folder, ignore_errors=True)


def chosen_environments(
    names: Sequence[str], conditions: str | None
) -> list[tuple[str, Sequence[str]]]:
    """The environments with these names, or one with these conditions."""
    if conditions is not None:
        return [("chosen", [name for name in conditions.split(",") if name])]
    return [(name, ENVIRONMENTS[name]) for name in names or ENVIRONMENTS]


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere", description=__doc__)
    parser.add_argument("environments", metavar="ENVIRONMENT", nargs="*", help="default: all")
    parser.add_argument("--with", dest="conditions", metavar="CONDITION,…", help="one of your own")
    parser.add_argument("--do", default="demo,up", metavar="STEP,…", help=",".join(STEPS))
    parser.add_argument("--tests", default="", metavar="FILE…", help="files for the step test")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the copies; default: none")
    parser.add_argument(
        "--here", action="store_true", help="in this tree with its .venv, without copy and setup"
    )
    parser.add_argument("--list", action="store_true", help="name environments and conditions")
    given = parser.parse_args(words)
    if unknown := set(given.environments) - ENVIRONMENTS.keys():
        parser.error(f"no environment {', '.join(sorted(unknown))}; see --list")
    if given.conditions and (unknown := set(given.conditions.split(",")) - CONDITIONS.keys()):
        parser.error(f"no condition {', '.join(sorted(unknown))}; see --list")
    if unknown := set(given.do.split(",")) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; --do takes {', '.join(STEPS)}")
    return given


def try_all(given: argparse.Namespace, base: Path) -> list[Result]:
    """Runs every chosen environment, and prints each result as it arrives."""
    results = []
    for name, conditions in chosen_environments(given.environments, given.conditions):
        print(f"{name}: {', '.join(conditions) or 'root'}", flush=True)
        try:
            machine = prepare_machine(base / name, conditions)
            if given.here:
                machine.folder = ROOT
        except CannotRestrict as error:
            results.append(Result(name, "setup", f"skipped: {error}", 0, 0))
            continue
        run = Run(name, machine, base / "caches")
        for result in run.run_all(given.do.split(","), given.tests):
            print(f"  {result.step}: {result.outcome}, {result.wall_s:.0f} s", flush=True)
            if result.last_lines:
                print(result.last_lines, flush=True)
            results.append(result)
        if machine.is_in_memory:
            unmount(str(machine.folder.parent))
        if given.keep is None:
            remove_tree(machine.base)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Returns 1 if a step failed."""
    given = arguments_of(words)
    if given.list:
        for name, conditions in ENVIRONMENTS.items():
            print(f"{name:<16} {', '.join(conditions)}")
        print(f"\nconditions: {', '.join(CONDITIONS)}")
        return 0
    base = (given.keep or Path(tempfile.mkdtemp(prefix="penstock-anywhere-"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    base.chmod(0o755)
    try:
        results = try_all(given, base)
    finally:
        if given.keep is None:
            remove_tree(base)
    rows = [
        (one.environment, one.step, one.outcome, round(one.wall_s), round(one.cpu_s))
        for one in results
    ]
    print(f"\n{table(('environment', 'step', 'outcome', 'seconds', 'CPU seconds'), rows)}")
    return 1 if any(one.outcome == "failed" for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
