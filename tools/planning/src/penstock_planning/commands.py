"""`penstock deploy` and `penstock simulate`: their options, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose arguments, `--help` included, go to another program."""


def add_deploy(app: typer.Typer) -> None:
    """Adds `deploy` to the commands of `app`."""
    app.command(context_settings=FORWARDED)(deploy)


def add_simulate(app: typer.Typer) -> None:
    """Adds `simulate` to the commands of `app`."""
    app.command()(simulate)


def deploy(context: typer.Context) -> None:
    """Plan a deployment: resources, quotas and costs, before any apply."""
    from penstock_planning.deploy.__main__ import main as plan

    raise typer.Exit(plan(context.args))


def simulate(
    scenario: Annotated[str, typer.Argument(help="a file, or the name of a shipped scenario")],
    models: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a catalog instead of the scenario's")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="change a field: cluster.node_start_s=0"),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a page with charts")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for a program")] = False,
) -> None:
    """Simulate a deployment under load: GPUs, latency and cost, with the rules that deploy."""
    import json

    from penstock_planning.simulation.scenario import read_scenario
    from penstock_planning.simulation.show import text
    from penstock_planning.simulation.world import simulate as run

    result = run(read_scenario(scenario, tuple(changes or ())), models_file=models)
    if page is not None:
        from penstock_planning.simulation.page import write_page

        write_page(result, page)
    typer.echo(json.dumps(result.as_dict(), indent=2) if as_json else text(result))
