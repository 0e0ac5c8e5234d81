"""`penstock deploy plan`: from the command line to a plan, printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.deploy.plan import make_plan
from infra.deploy.platform import read_platform
from infra.deploy.prices import read_prices
from infra.deploy.rates import rates_of_words, read_rates
from infra.deploy.show import as_json, text
from infra.kubernetes.deployment import Deployment, read_gpu_types
from shared.catalog import read_catalog
from shared.errors import ConfigurationError


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; 0, or 1 where something given is wrong."""
    options = _parser().parse_args(argv)
    try:
        catalog = read_catalog(options.models)
        if options.rates is not None and options.seconds:
            raise ConfigurationError(
                "--seconds goes with --rate; a file of rates has seconds_per_item", field="seconds"
            )
        if options.buffer < 0:
            raise ConfigurationError("--buffer: 0 or more", field="buffer")
        if options.rates is None:
            rates = rates_of_words(options.rate, options.seconds, catalog)
        else:
            rates = read_rates(options.rates, catalog)
        platform = read_platform(options.tfvars)
        if options.region:
            platform = platform.in_regions(list(dict.fromkeys(options.region)))
        plan = make_plan(catalog, rates, platform, read_prices(options.prices), read_gpu_types(), options.buffer)
    except ConfigurationError as error:
        print(f"penstock deploy plan: {error.message}", file=sys.stderr)
        return 1
    print(as_json(plan) if options.json else text(plan))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock deploy", description="What a deployment needs, before any apply.")
    plan = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "plan", help="GPUs, nodes, subscriptions, quotas and monthly cost for the rates one expects"
    )
    plan.add_argument("--models", type=Path, default=Path("models.yaml"), help="the catalog (default: %(default)s)")
    asked = plan.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--rates", type=Path, metavar="FILE", help="rates of all models; infra/deploy/rates.example.yaml"
    )
    asked.add_argument("--rate", action="append", metavar="MODEL=MEAN[:PEAK]", help="requests a second of one model")
    plan.add_argument(
        "--seconds", action="append", default=[], metavar="MODEL=SECONDS", help="of a worker for an item, with --rate"
    )
    plan.add_argument("--tfvars", type=Path, metavar="FILE", help="variables of infra/terraform/platform, .tfvars.json")
    plan.add_argument("--region", nargs="+", metavar="REGION", help="instead of the variable `regions`")
    plan.add_argument(
        "--prices", type=Path, metavar="FILE", help="prices that replace those of infra/deploy/prices.yaml"
    )
    plan.add_argument(
        "--buffer",
        type=int,
        default=Deployment.model_fields["buffer"].default,
        help="places kept warm per GPU class (default: %(default)s)",
    )
    plan.add_argument("--json", action="store_true", help="every name and figure, for a program")
    return parser


if __name__ == "__main__":
    sys.exit(main())
