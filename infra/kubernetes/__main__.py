"""`python -m infra.kubernetes`: writes one region's overlay from models.yaml and Terraform."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.kubernetes.deployment import read_deployment
from infra.kubernetes.overlay import write_overlay
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the overlay. Returns 0, or 2 if an argument is invalid."""
    options = _parser().parse_args(argv)
    try:
        deployment = read_deployment(
            options.deployments,
            options.region,
            image=options.image,
            buffer=options.buffer,
        )
        catalog = read_catalog(options.models_file)
        write_overlay(options.out, catalog, options.models_file, deployment)
    except ConfigurationError as error:
        print(f"infra.kubernetes: {error.message}", file=sys.stderr)
        return 2
    print(
        f"{options.out}: {len(catalog.models)} models; render with: kubectl kustomize {options.out}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.kubernetes", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the overlay to")
    parser.add_argument(
        "--deployments",
        type=Path,
        required=True,
        help="file containing the output of `terraform output -json deployments`",
    )
    parser.add_argument("--region", required=True, help="name of the deployment to render")
    parser.add_argument("--image", required=True, help="the worker image, by digest or tag")
    parser.add_argument(
        "--models-file", type=Path, default=Path("models.yaml"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--buffer",
        type=int,
        default=1,
        help="slots kept warm per GPU class (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
