"""`penstock load`: replays a day or a trace, or checks a replay's ledger."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.amounts import check_amount
from infra.reports.commands import parse_numbers
from shared.errors import BadInput, ConfigurationError

if TYPE_CHECKING:
    from penstock_load.comparison import Comparison
    from penstock_load.plan import LoadPlan
    from penstock_load.replay import Pace
    from penstock_load.target import Target

REQUESTS_OF_A_DAY = 1_400_000
TENANTS_WITHOUT_KEYS = 20
SHOWN = 50
FACT_WIDTH = 14
GIB = 1024**3


def add_load(app: typer.Typer) -> None:
    """Adds `load` to the commands of `app`."""
    app.command()(load)


def load(
    url: Annotated[str, typer.Option(metavar="URL", help="API URL")] = "http://127.0.0.1:8080",
    key: Annotated[
        str, typer.Option(metavar="KEY", help="API key for all requests", envvar="LOAD_KEY")
    ] = "",
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV with the columns tenant and key")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="trace to send instead of a simulated day (CSV or JSONL)"
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=0,
            help="requests in the simulated day (default: 1,400,000), or the first N of a trace",
        ),
    ] = 0,
    speed: Annotated[
        float,
        typer.Option(
            min=0.001,
            callback=check_amount,
            help="seconds of the simulated day or trace to send per second",
        ),
    ] = 1.0,
    duration: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", callback=check_amount, help="stop sending after this time"
        ),
    ] = 0.0,
    tenants: Annotated[
        int,
        typer.Option(
            min=0, help="number of tenants in the simulated day (default: 20, or all in --keys)"
        ),
    ] = 0,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=SHARE]",
            help=("a model to use in the simulated day (default: all served models)"),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed produces the same requests")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=NUMBER",
            help="a setting for the simulated day, such as repeat_share=0.2",
        ),
    ] = None,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=1, max=50_000, help="maximum requests in flight; excess requests are not sent"
        ),
    ] = 1000,
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE", help="new file for the ledger (load-….jsonl)")
    ] = None,
    write_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=("write the arrivals without sending them")),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="LEDGER", help="compare a ledger with BigQuery")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", callback=check_amount, help="how long --check waits for rows"
        ),
    ] = 60.0,
    max_gib: Annotated[
        float,
        typer.Option(min=0.001, callback=check_amount, help="maximum GiB that a query may read"),
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for use by programs")] = False,
) -> None:
    """Send a day of requests, or a trace, and check the charges."""
    if check is not None:
        raise typer.Exit(_check(check, wait, int(max_gib * GIB), as_json=as_json))
    if find_spec("httptools") is None:
        raise ConfigurationError("sending requires the `api` extra: pip install 'penstock[api]'")
    from penstock_load.plan import DayOptions, plan_day, plan_trace
    from penstock_load.replay import Pace
    from penstock_load.target import Target, read_keys

    if key and keys:
        raise BadInput("key and keys are mutually exclusive", field="key")
    target = Target(url, key, read_keys(keys) if keys else None)
    if trace is not None and (tenants or model or changes):
        raise BadInput("trace: already contains tenants and models", field="trace")
    options = DayOptions(
        requests or REQUESTS_OF_A_DAY,
        tenants or len(target.keys) or TENANTS_WITHOUT_KEYS,
        tuple(model or ()),
        seed,
        parse_numbers(changes or ()),
    )
    plan = plan_day(target, options) if trace is None else plan_trace(target, trace, requests)
    if write_trace is not None:
        _write(plan, write_trace)
        return
    pace = Pace(speed=speed, most_in_flight=max_in_flight, duration_s=duration)
    raise typer.Exit(_send(target, plan, pace, seed, ledger, as_json=as_json))


def _write(plan: LoadPlan, path: Path) -> None:
    from penstock_load.trace import write_trace

    write_trace(path, plan.arrivals)
    typer.echo(f"wrote {len(plan.arrivals):,} requests to {path}")


def _send(
    target: Target, plan: LoadPlan, pace: Pace, seed: int, ledger: Path | None, *, as_json: bool
) -> int:
    """Returns 130, as a shell does, if it was interrupted."""
    from penstock_load.plan import run_id
    from penstock_load.session import replay

    run = run_id()
    path = ledger or Path(f"{run}.jsonl")
    summary = replay(target, plan, pace, run=run, seed=seed, path=path)
    _show_summary(summary, as_json=as_json)
    return 130 if summary["was_stopped"] else 0


def _show_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps(summary, indent=2))
        return
    from shared.money.amounts import dollars

    outcomes = ", ".join(f"{name}: {count:,}" for name, count in summary["outcomes"].items())
    _print_facts(
        {
            "requests": f"{summary['due']:,} due, {summary['not_sent']:,} of them not sent",
            "endings": outcomes or "none",
            "rate": f"{summary['rate_per_s']:,} a second, over {summary['took_s']:,} s",
            "answered in": f"{summary['p50_ms']:,} ms at the median, {summary['p95_ms']:,} ms at "
            f"p95, {summary['p99_ms']:,} ms at p99",
            "charged": f"{dollars(summary['cost_usd'])}, with {summary['tokens']:,} tokens",
            "ledger": summary["ledger"],
        }
    )
    print(f"\nCompare it with BigQuery: penstock load --check {summary['ledger']}")


def _check(path: Path, wait_s: float, most_bytes: int, *, as_json: bool) -> int:
    """Returns 1 if there are differences."""
    import json

    from rich.console import Console

    from penstock_load.comparison import check
    from penstock_load.ledger import read_ledger
    from penstock_load.rows import open_rows
    from shared.settings import Settings, read_settings

    ledger = read_ledger(path)
    if ledger.cut_lines:
        typer.echo(f"{path}: skipped the last line, which is incomplete", err=True)
    waiting = Console(stderr=True).status("waiting for the rows")
    with waiting, open_rows(read_settings(Settings), most_bytes) as rows:
        comparison = check(ledger, rows, wait_s)
    if as_json:
        differences = [difference._asdict() for difference in comparison.differences]
        report = vars(comparison) | {"differences": differences}
        print(json.dumps(report, indent=2, default=str))
    else:
        _show_comparison(comparison)
    return 1 if comparison.differences else 0


def _show_comparison(comparison: Comparison) -> None:
    from shared.money.amounts import dollars

    known = ", ".join(
        f"{name}: {count:,}" for name, count in sorted(comparison.told_by_rows.items())
    )
    _print_facts(
        {
            "ledger": f"{comparison.lines:,} requests, {comparison.tokens:,} tokens, "
            f"{dollars(comparison.cost_usd)}",
            "rows": f"{comparison.rows:,}, and {comparison.copies:,} copies, which count once",
            "known from rows only": known or "nothing: all requests were answered",
            "others": f"{comparison.others:,} requests by other callers of these tenants, "
            "counted apart",
            "report": f"{comparison.groups:,} groups of hour, tenant and model",
            "differences": f"{len(comparison.differences):,}",
        }
    )
    for difference in comparison.differences[:SHOWN]:
        print(
            f"  {difference.kind}: {difference.what} ({difference.tenant or '-'}, "
            f"{difference.model}): {difference.facts}"
        )
    if len(comparison.differences) > SHOWN:
        print(f"  and {len(comparison.differences) - SHOWN:,} more; use --json to list them all")


def _print_facts(facts: dict[str, str]) -> None:
    for name, value in facts.items():
        print(f"  {name:<{FACT_WIDTH}}{value}")
