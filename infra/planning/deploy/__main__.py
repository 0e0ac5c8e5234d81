"""`penstock deploy plan`: from the command line to a plan, printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from infra.kubernetes.deployment import Deployment, read_gpu_types
from infra.planning.deploy.plan import DeployPlan, make_plan
from infra.planning.deploy.platform_variables import read_platform
from infra.planning.deploy.prices import read_prices
from infra.planning.deploy.rates import rates_of_words, read_rates
from infra.planning.deploy.show import as_json as plan_as_json
from infra.planning.deploy.show import text
from shared.catalog import read_catalog
from shared.errors import ConfigurationError

Words = list[str] | None

app = typer.Typer(
    help="What a deployment needs, before any apply.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan. Returns 0, 1 if a file or value is wrong, 2 if the usage is wrong."""
    try:
        app(argv, prog_name="penstock deploy")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@app.callback()
def _deploy() -> None:
    """Makes `plan` a command, not the program."""


@app.command()
def plan(
    models: Annotated[Path, typer.Option(metavar="FILE", help="the catalog")] = Path("models.yaml"),
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="rates of all models; infra/planning/deploy/rates.example.yaml"
        ),
    ] = None,
    rate: Annotated[
        Words, typer.Option(metavar="MODEL=MEAN[:PEAK]", help="requests per second of one model")
    ] = None,
    seconds: Annotated[
        Words,
        typer.Option(metavar="MODEL=SECONDS", help="of a worker for one item, with --rate"),
    ] = None,
    tfvars: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="variables of infra/terraform/platform, .tfvars.json"),
    ] = None,
    region: Annotated[
        Words, typer.Option(metavar="REGION ...", help="instead of the variable `regions`")
    ] = None,
    more_regions: Annotated[Words, typer.Argument(hidden=True, metavar="REGION")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="prices that replace those of infra/planning/deploy/prices.yaml"
        ),
    ] = None,
    buffer: Annotated[
        int, typer.Option(help="places kept warm per GPU class")
    ] = Deployment.model_fields["buffer"].default,
    as_json: Annotated[
        bool, typer.Option("--json", help="print every name and figure as JSON, for a program")
    ] = False,
) -> None:
    """Plan GPUs, nodes, subscriptions, quotas and monthly cost for the expected rates."""
    if (rates is None) == (not rate):
        raise typer.BadParameter("give either --rates or --rate")
    if more_regions and not region:
        raise typer.BadParameter(f"unexpected: {' '.join(more_regions)}")
    regions = [*(region or []), *(more_regions or [])]
    try:
        made = _plan(models, rates, rate or [], seconds or [], tfvars, regions, prices, buffer)
    except ConfigurationError as error:
        typer.echo(f"penstock deploy plan: {error.message}", err=True)
        raise typer.Exit(1) from error
    print(plan_as_json(made) if as_json else text(made))


def _plan(
    models: Path,
    rates_file: Path | None,
    rate: list[str],
    seconds: list[str],
    tfvars: Path | None,
    regions: list[str],
    prices: Path | None,
    buffer: int,
) -> DeployPlan:
    if buffer < 0:
        raise ConfigurationError("--buffer: 0 or more", field="buffer")
    catalog = read_catalog(models)
    if rates_file is None:
        rates = rates_of_words(rate, seconds, catalog)
    elif seconds:
        raise ConfigurationError(
            "--seconds goes with --rate; a file of rates has seconds_per_item", field="seconds"
        )
    else:
        rates = read_rates(rates_file, catalog)
    platform = read_platform(tfvars)
    if regions:
        platform = platform.in_regions(list(dict.fromkeys(regions)))
    return make_plan(catalog, rates, platform, read_prices(prices), read_gpu_types(), buffer)


if __name__ == "__main__":
    sys.exit(main())
