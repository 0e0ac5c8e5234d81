"""`python -m infra.rollout`: rolls out after an apply, or rolls back."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from infra.rollout.google import GoogleClient, default_credentials
from infra.rollout.judge import CanaryJudge
from infra.rollout.rollout import Rollout, smoke
from infra.rollout.service import CloudRunService
from shared.errors import MALFORMED, ConfigurationError, PenstockError
from shared.models.catalog_file import read_catalog


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands. Returns the exit status."""
    options = _parser().parse_args(argv)
    # Cloud Build sends SIGTERM when a step times out, which triggers a rollback.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        rollout = _rollout(options)
        commands: dict[str, Callable[[], None]] = {
            "hold": rollout.hold,
            "held": rollout.require_held,
            "try": rollout.try_candidate,
            "roll": rollout.roll,
            "back": partial(rollout.go_back, options.revision),
        }
        commands[options.command]()
    except PenstockError as error:
        print(f"rollout: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infra.rollout", description="Rolls the API out on Cloud Run."
    )
    parser.add_argument(
        "command",
        choices=["hold", "held", "try", "roll", "back"],
        help="hold: pin traffic to the serving revision, so that the next one gets none; "
        "held: fail unless it is pinned; try: send real requests to the newest one; "
        "roll: move all traffic to it in steps; back: move all to --revision",
    )
    parser.add_argument("--project", required=True)
    parser.add_argument("--regions", required=True, help="comma-separated, in rollout order")
    parser.add_argument("--service", default="penstock-api")
    parser.add_argument("--revision", default="", help="revision to return to, for back")
    parser.add_argument("--models-file", type=Path, default=Path("models.yaml"))
    parser.add_argument(
        "--key-secret",
        default="penstock-release-key",
        help="secret that contains the API key for requests",
    )
    parser.add_argument(
        "--urls-file",
        type=Path,
        help="Terraform's output api_urls, as JSON; checked after each step",
    )
    parser.add_argument(
        "--steps", type=_steps, default="5,25,50,100", help="percent (default: %(default)s)"
    )
    parser.add_argument(
        "--watch-s", type=_amount, default=360.0, help="how long to watch each step"
    )
    parser.add_argument(
        "--error-ratio", type=_amount, default=0.02, help="share of responses that may be 5xx"
    )
    parser.add_argument(
        "--least-requests",
        type=int,
        default=50,
        help=("minimum number of requests to judge a revision"),
    )
    return parser


def _rollout(options: argparse.Namespace) -> Rollout:
    if options.command == "back" and not options.revision:
        raise ConfigurationError("back requires --revision", field="revision")
    urls = _read_urls(options.urls_file) if options.urls_file else {}
    google = GoogleClient(default_credentials())
    catalog = read_catalog(options.models_file)
    where = f"projects/{options.project}/locations"
    services = {
        region: CloudRunService(google, f"{where}/{region}/services/{options.service}")
        for region in options.regions.split(",")
    }
    judge = CanaryJudge(
        google,
        options.project,
        options.service,
        error_ratio=options.error_ratio,
        least_requests=options.least_requests,
    )

    def check(url: str) -> list[str]:
        # Read only when needed, because the first apply creates the secret.
        key = google.secret(options.project, options.key_secret).strip()
        return smoke(url, key, catalog)

    return Rollout(
        services, judge, check, urls, steps_percent=options.steps, watch_s=options.watch_s
    )


def _steps(text: str) -> list[int]:
    steps = [int(percent) for percent in text.split(",")]
    if not all(0 < percent <= 100 for percent in steps):
        raise argparse.ArgumentTypeError(f"must be percentages from 1 to 100, got {text}")
    return steps


def _amount(text: str) -> float:
    amount = float(text)
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, got {text}")
    return amount


def _read_urls(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(f"{path}: {error}", field="urls-file") from error


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
