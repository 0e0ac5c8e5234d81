"""`python -m bench [NAME ...]`: runs benchmarks, prints and keeps their figures."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

from bench.report import Outcome, keep, machine, table
from shared.loopback import exempt_loopback_from_proxies

MODULES = {
    "overhead": "overhead",
    "throughput": "throughput",
    "hits": "cache_hits",
    "multi_model": "multi_model",
    "shapes": "shapes",
    "image_steps": "image_steps",
    "adapters": "adapters",
    "judged_images": "judged_images",
    "shortcuts": "shortcuts",
    "broker": "broker",
    "item_cost": "item_cost",
    "request_cost": "request_cost",
    "soak": "soak",
    "footprint": "footprint",
    "overload": "overload",
    "images": "images",
    "fairness": "fairness.all_parts",
    "recovery": "recovery",
    "rows": "rows",
    "row_outage": "row_outage",
    "batches": "batches",
    "custom_batches": "custom_batches",
    "shared_flow": "shared_flow",
    "long_recording": "long_recording",
    "long_texts": "long_texts",
    "tracing": "tracing",
    "keys": "keys",
    "limits": "limits",
    "lone_request": "lone_request",
    "shared_limits": "shared_limits",
    "simulation": "simulation",
    "bad_neighbor": "bad_neighbor.rounds",
    "attacks": "attacks",
    "far_broker": "far_broker",
    "far_redis": "far_redis",
    "far_objects": "far_objects",
    "reports": "reports",
    "day": "day",
    "generation": "generation.engine",
    "generation_load": "generation.load",
    "generation_cpu": "generation.cpu",
    "generation_lookup": "generation.lookup",
    "schemas": "generation.schemas",
    "streams": "streams",
    "profile": "time_profile",
}
"""Modules here whose `run()` returns an Outcome, by the name of the benchmark."""
HAVE_SHORT_FORM = frozenset({"bad_neighbor", "far_broker"})
"""Benchmarks whose `run` takes `quick`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks.

    Returns 1 if one failed, or if `--check` was given and a figure misses its limit.
    """
    exempt_loopback_from_proxies()
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measures the pipeline on this machine."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(MODULES)}"
    )
    parser.add_argument("--profile", action="store_true", help="the same as the name profile")
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
    names = [*options.names, *(["profile"] if options.profile else [])] or list(MODULES)
    if options.quick and (too_long := set(names) - HAVE_SHORT_FORM):
        parser.error(f"--quick: no short form of {', '.join(sorted(too_long))}")
    short = {"quick": True} if options.quick else {}
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
    return 1 if failures or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
