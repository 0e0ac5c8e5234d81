"""`penstock deploy` and `penstock simulate`: options and output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.amounts import check_amount
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock_planning.deploy.rates import DemandRates
    from penstock_planning.profiles import Profiles
    from shared.models.catalog import Catalog

Words = list[str] | None
ProfilePath = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="a device profile, or a folder with profiles, from `penstock optimize --device`",
    ),
]

deploy = typer.Typer(
    help="Plan a deployment (resources, quotas and costs) before you apply it.",
    no_args_is_help=True,
)


def add_deploy(app: typer.Typer) -> None:
    """Adds `deploy` to the commands of `app`."""
    app.add_typer(deploy, name="deploy")


def add_simulate(app: typer.Typer) -> None:
    """Adds `simulate` to the commands of `app`."""
    app.command()(simulate)


@deploy.command("plan")
def plan(
    models: Annotated[Path, typer.Option(metavar="FILE", help="the catalog")] = Path("models.yaml"),
    rates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="file with the rates of all models; see tools/planning/rates.example.yaml",
        ),
    ] = None,
    rate: Annotated[
        Words, typer.Option(metavar="MODEL=MEAN[:PEAK]", help="requests per second for a model")
    ] = None,
    seconds: Annotated[
        Words,
        typer.Option(metavar="MODEL=SECONDS", help="worker seconds per item, with --rate"),
    ] = None,
    tfvars: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=".tfvars.json file with the variables for infra/terraform/platform"
        ),
    ] = None,
    region: Annotated[
        Words, typer.Option(metavar="REGION ...", help="overrides the `regions` variable")
    ] = None,
    more_regions: Annotated[Words, typer.Argument(hidden=True, metavar="REGION")] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="price file to use instead of infra/terraform/prices.yaml"
        ),
    ] = None,
    broker_round_trip: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            callback=check_amount,
            help="broker round-trip time (default: broker_round_trip_s in the rates, or 0.05, "
            "the time within a region)",
        ),
    ] = None,
    profile: ProfilePath = None,
    buffer: Annotated[int, typer.Option(help="warm slots per GPU class")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="print every name and figure as JSON for use by programs")
    ] = False,
) -> None:
    """Plan GPUs, nodes, subscriptions, quotas, and monthly cost for the expected rates."""
    if (rates is None) == (not rate):
        raise typer.BadParameter("exactly one of --rates and --rate is required")
    if more_regions and not region:
        raise typer.BadParameter(f"unexpected: {' '.join(more_regions)}")
    if buffer < 0:
        raise ConfigurationError("--buffer: must be at least 0", field="buffer")
    from infra.kubernetes.deployment import read_gpu_types
    from penstock_planning.deploy.plan import make_plan
    from penstock_planning.deploy.platform_variables import read_platform
    from penstock_planning.deploy.prices import read_prices
    from penstock_planning.deploy.rates import at_distance
    from penstock_planning.deploy.show import plan_as_json, text
    from penstock_planning.profiles import with_served_batches
    from shared.models.catalog_file import read_catalog

    profiles = _profiles(profile)
    catalog = with_served_batches(read_catalog(models), profiles)
    demand = _rates(catalog, rates, rate or [], seconds or [], profiles)
    if broker_round_trip is not None:
        demand = at_distance(demand, broker_round_trip)
    platform = read_platform(tfvars)
    if regions := list(dict.fromkeys([*(region or []), *(more_regions or [])])):
        platform = platform.in_regions(regions)
    result = make_plan(
        catalog, demand, platform, read_prices(prices), read_gpu_types(), buffer, profiles
    )
    print(plan_as_json(result) if as_json else text(result))


def _profiles(path: Path | None) -> Profiles:
    from shared.models.device_profile import read_profiles

    return () if path is None else read_profiles(path)


def _rates(
    catalog: Catalog,
    rates_file: Path | None,
    rate: list[str],
    seconds: list[str],
    profiles: Profiles,
) -> DemandRates:
    from penstock_planning.deploy.rates import rates_of_words, read_rates

    if rates_file is None:
        return rates_of_words(rate, seconds, catalog, profiles)
    if seconds:
        raise ConfigurationError(
            "--seconds: requires --rate, because a rates file has seconds_per_item", field="seconds"
        )
    return read_rates(rates_file, catalog, profiles)


def simulate(
    scenario: Annotated[str, typer.Argument(help="a file, or the name of a shipped scenario")],
    models: Annotated[
        Path | None, typer.Option(metavar="FILE", help="catalog to use instead of the scenario's")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="override a field, such as cluster.node_start_s=0"
        ),
    ] = None,
    profile: ProfilePath = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write a page with charts")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for use by programs")] = False,
) -> None:
    """Simulate a deployment under load: GPUs, latency, and cost, with the deployed rules."""
    import json

    from penstock_planning.simulation.scenario import read_scenario
    from penstock_planning.simulation.show import text
    from penstock_planning.simulation.world import simulate as run

    result = run(
        read_scenario(scenario, tuple(changes or ())),
        models_file=models,
        profiles=_profiles(profile),
    )
    typer.echo(json.dumps(result.as_dict(), indent=2) if as_json else text(result))
    if page is not None:
        from penstock_planning.simulation.page import write_page

        write_page(result, page)
