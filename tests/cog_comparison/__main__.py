"""`python -m tests.cog_comparison FOLDER`: Cog's server and Penstock run the same classes.

FOLDER has Cog projects or test scripts, such as a copy of the `integration-tests` and `examples`
folders from https://github.com/replicate/cog. Nothing is fetched, but packages that a class
requires are installed. Without FOLDER, this package's own classes run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from api.tasks.custom import validator_of
from shared.errors import PenstockError
from shared.models.interface import ModelInterface
from tests.cog_comparison.cog_server import CogServer
from tests.cog_comparison.comparison import differences, have_equal_shape
from tests.cog_comparison.fixtures import Fixture, read_fixtures
from tests.cog_comparison.outcome import ClassRunner, Outcome, Request
from tests.cog_comparison.penstock_runner import PenstockRunner
from workers.models.custom.checking import inspect_folder, write_interface
from workers.models.custom.environments import python_for

OWN = Path(__file__).with_name("classes")
FIXTURE_LIMIT_S = 180.0


class Row(NamedTuple):
    """One fixture's result."""

    fixture: Fixture
    state: str
    """"right", "different" or "skipped"."""
    differing: Sequence[str] = ()


def main(words: Sequence[str] | None = None) -> int:
    """Compares, and prints a table. Returns 1 if anything is different."""
    parser = argparse.ArgumentParser(prog="python -m tests.cog_comparison", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=OWN, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="names that contain it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="fixtures at a time")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="cog-comparison-") as work:
        fixtures = read_fixtures(arguments.folder, Path(work))
        wanted = [one for one in fixtures if arguments.only in one.name]
        rows = asyncio.run(compare_all(wanted, arguments.jobs))
    show(rows)
    return int(any(row.state == "different" for row in rows))


async def compare_all(fixtures: Sequence[Fixture], jobs: int) -> list[Row]:
    """Compares fixtures, several at a time. Prints each result as soon as it's ready."""
    limit = asyncio.Semaphore(jobs)

    async def compare_one(fixture: Fixture) -> Row:
        async with limit:
            row = await compare_bounded(fixture)
        print(f"{row.state:9} {fixture.name}", flush=True)
        return row

    return list(await asyncio.gather(*map(compare_one, fixtures)))


async def compare_bounded(fixture: Fixture) -> Row:
    """Compares one fixture within a time limit."""
    if fixture.skipped:
        return Row(fixture, "skipped", [fixture.skipped])
    try:
        differing = await asyncio.wait_for(compare_fixture(fixture), FIXTURE_LIMIT_S)
    except TimeoutError:
        differing = [f"not compared in {FIXTURE_LIMIT_S:g} s"]
    except PenstockError as error:
        return Row(fixture, "skipped", [f"its packages can't be installed: {error.message[:200]}"])
    return Row(fixture, "different" if differing else "right", differing)


async def compare_fixture(fixture: Fixture) -> list[str]:
    """Runs a fixture both ways. Returns the differences."""
    python = await asyncio.to_thread(python_for, fixture.folder)
    theirs = await run_with_cog(fixture, python)
    ours = await run_with_penstock(fixture)
    differing = []
    for number, (request, oracle, own) in enumerate(
        zip(fixture.requests, theirs, ours, strict=True)
    ):
        differing += [f"input {number}: {one}" for one in differences(oracle, own, request)]
    if differing and all(": output:" in one or ": pieces:" in one for one in differing):
        again = await run_with_cog(fixture, python)
        if again != theirs and all(map(_have_equal_shape, theirs, again, ours)):
            return []  # this class's output differs from run to run
    return differing


def _have_equal_shape(theirs: Outcome, again: Outcome, ours: Outcome) -> bool:
    is_repeatable = theirs.output == again.output
    return (
        theirs.output == ours.output
        if is_repeatable
        else have_equal_shape(theirs.output, ours.output)
    )


async def run_with_cog(fixture: Fixture, python: str) -> list[Outcome]:
    """Starts Cog's server with a copy of a class, and sends its inputs one at a time."""
    with copied(fixture) as folder:
        server = CogServer(
            folder,
            fixture.reference,
            python=python,
            environment=fixture.environment,
            concurrency=fixture.concurrency,
            streams=fixture.streams,
        )
        return await run_all(server, fixture.requests, None)


async def run_with_penstock(fixture: Fixture) -> list[Outcome]:
    """Starts a copy of a class as a worker does, and computes its inputs one at a time."""
    with copied(fixture) as folder:
        try:
            interface = await asyncio.to_thread(check, folder)
        except PenstockError as error:
            reason = error.message.removeprefix(f"{folder}: ")
            return [Outcome("not loaded", error=reason)] * len(fixture.requests)
        return await run_all(PenstockRunner(folder, interface), fixture.requests, interface)


@contextmanager
def copied(fixture: Fixture) -> Iterator[Path]:
    """Yields a copy of a class's folder, because the class may write into it."""
    with tempfile.TemporaryDirectory(prefix="class-") as work:
        folder = Path(work) / "src"
        shutil.copytree(fixture.folder, folder, symlinks=True)
        yield folder


async def run_all(
    runner: ClassRunner, requests: Sequence[Request], interface: ModelInterface | None
) -> list[Outcome]:
    """Starts a class, computes inputs one at a time, and stops it.

    Args:
        interface: checks each input as the API does. None: the runner checks.
    """
    try:
        if failure := await runner.start():
            return [Outcome("not loaded", error=failure)] * len(requests)
        return [await predict(runner, interface, request) for request in requests]
    finally:
        await runner.stop()


def check(folder: Path) -> ModelInterface:
    """Checks a class as `penstock models check` does."""
    interface = inspect_folder(folder).interface
    write_interface(folder, interface)
    return interface


async def predict(
    runner: ClassRunner, interface: ModelInterface | None, request: Request
) -> Outcome:
    """Computes one input, if the API accepts it."""
    if interface is not None and (reason := wrong_input(interface, request)):
        return Outcome("refused", error=reason)
    return await runner.predict(request)


def wrong_input(interface: ModelInterface, request: Request) -> str:
    """Checks an input as the API does. Returns what is wrong, or an empty string."""
    values = {name: value for name, value in request.values.items() if value is not None}
    for file in request.files:
        name = str(file.at[0])
        is_list = len(file.at) > 1
        values[name] = [file.data_uri] * len(values.get(name, [])) if is_list else file.data_uri
    try:
        validator_of(interface).model_validate(values, strict=True)
    except ValidationError as error:
        return str(error)
    return ""


def show(rows: Sequence[Row]) -> None:
    """Prints differences, the reasons for skipped fixtures, and totals."""
    print("\nDifferences (Cog's server / this runner):")
    for row in rows:
        if row.state == "different":
            print(f"  {row.fixture.name}")
            print("".join(f"    {one}\n" for one in row.differing), end="")
    reasons = Counter(row.differing[0] for row in rows if row.state == "skipped")
    print("\nSkipped:")
    print("".join(f"  {count} x {reason}\n" for reason, count in reasons.most_common()), end="")
    states = Counter(row.state for row in rows)
    origins = Counter(row.fixture.origin for row in rows if row.state != "skipped")
    print(f"\n{len(rows)} fixtures: " + ", ".join(f"{n} {state}" for state, n in states.items()))
    print("Inputs from: " + ", ".join(f"{origin} {count}" for origin, count in origins.items()))


if __name__ == "__main__":
    sys.exit(main())
