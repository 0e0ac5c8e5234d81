"""`python -m bench [NAME ...]`: lists the benchmarks, or runs some and stores the results."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import textwrap
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.report import Outcome, keep, machine, table
from shared.process.loopback import exempt_loopback_from_proxies

MODULES = {
    "overhead": "overhead",
    "throughput": "throughput",
    "request_cost": "request_cost",
    "item_cost": "item_cost",
    "host_cost": "host_cost",
    "overlap": "overlap",
    "cold_start": "cold_start",
    "far_broker": "far_broker",
    "images": "images",
    "custom_batches": "custom_batches",
    "generation_load": "generation.load",
    "generation_cpu": "generation.cpu",
    "schemas": "generation.schemas",
    "streams": "streams",
    "bad_neighbor": "bad_neighbor.rounds",
    "soak": "soak",
    "recovery": "recovery",
    "rows": "rows",
    "row_outage": "row_outage",
    "reports": "reports",
}
"""Modules in this package whose `run()` returns an Outcome, by benchmark name."""
PROGRAMS = ("peers", "gpu")
"""Subpackages that are programs with their own options, such as `python -m bench.peers`."""
HAVE_SHORT_FORM = frozenset({"bad_neighbor", "far_broker", "generation_load"})
"""Benchmarks whose `run` accepts `quick`."""
LINE_WIDTH, NAME_WIDTH = 100, 17


def main(argv: Sequence[str] | None = None) -> int:
    """Lists the benchmarks if no names are given; otherwise, runs the named ones.

    Returns 1 if a benchmark failed, or if `--check` was passed and a metric exceeds its limit.
    """
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measures the pipeline on this machine."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="without one, lists them all")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a figure misses its limit"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a few minutes instead of many: {', '.join(sorted(HAVE_SHORT_FORM))}",
    )
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(MODULES):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if options.quick and (too_long := set(options.names) - HAVE_SHORT_FORM):
        parser.error(f"--quick: no short form of {', '.join(sorted(too_long))}")
    if not options.names:
        print(listing())
        return 0
    return _run(options.names, is_quick=options.quick, is_checked=options.check)


def listing() -> str:
    """Returns one sentence for each benchmark and program."""
    named = (f"{name:<{NAME_WIDTH}} {find_summary(module)}" for name, module in MODULES.items())
    programs = (find_summary(f"{name}.__main__") for name in PROGRAMS)
    return "\n".join(
        [
            "Run them with `python -m bench NAME ...`:",
            *(_wrap(line, indent=NAME_WIDTH + 3) for line in named),
            "Programs with their own options (`--help`):",
            *(_wrap(line, indent=4) for line in programs),
        ]
    )


def find_summary(module: str) -> str:
    """Returns the first paragraph of a module's docstring, without importing the module."""
    spec = find_spec(f"bench.{module}")
    assert spec is not None
    assert spec.origin is not None
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def _wrap(line: str, indent: int) -> str:
    return textwrap.fill(
        f"  {line}", LINE_WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _run(names: Sequence[str], *, is_quick: bool, is_checked: bool) -> int:
    short = {"quick": True} if is_quick else {}
    where, outcomes = machine(), dict[str, Outcome]()
    print(f"{where['cpu']}, {where['cores']} cores, load {where['load_before']}", flush=True)
    for name in names:
        began_s = time.time()
        print(f"{name} …", flush=True)
        outcomes[name] = importlib.import_module(f"bench.{MODULES[name]}").run(**short)
        path = keep(name, outcomes[name], where, began_s)
        print(
            f"  {time.time() - began_s:.0f} s, kept in {path.relative_to(path.parents[2])}",
            flush=True,
        )
    print(f"\n{table(outcomes)}")
    missed = [
        figure for outcome in outcomes.values() for figure in outcome.figures if not figure.is_met
    ]
    failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures or (is_checked and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
