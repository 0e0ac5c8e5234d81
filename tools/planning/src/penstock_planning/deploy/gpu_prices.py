"""`python -m penstock_planning.deploy.gpu_prices`: writes the `gpu_prices` view from price lists.

Run this after changing prices.yaml or gpus.yaml. A test compares the files. A node has one GPU, so
its machine's price is the GPU's price plus the prices of its cores and memory.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import infra
from infra.kubernetes.deployment import GpuType, read_gpu_types
from penstock_planning.deploy.prices import Prices, read_prices

VIEW_FILE = Path(infra.__file__).parent / "bigquery" / "views" / "gpu_prices.sql"
KINDS = {"on-demand": False, "spot": True}
ALWAYS = dt.date(1970, 1, 1)
"""Start of a machine's oldest price, because no older price is known."""
_HEAD = """\
-- Made by penstock_planning.deploy.gpu_prices from prices.yaml and gpus.yaml. Change those.
-- What an hour of a node with one GPU costs, in US dollars before discounts. The price of an hour
-- is the one with the last valid_from up to it. The oldest one also stands for the time before.
"""


class GpuPrice(NamedTuple):
    """The hourly price of a node with one GPU in a region, from a day on (UTC)."""

    gpu_type: str
    spot: bool
    region: str
    usd_per_hour: float
    valid_from: dt.date


def gpu_prices(prices: Prices, gpu_types: Mapping[str, GpuType]) -> Iterator[GpuPrice]:
    """Yields the prices of all GPU types that have prices. Machines do not have stepped prices."""
    for gpu_type, node in gpu_types.items():
        for kind, spot in KINDS.items():
            price = prices.prices.get(f"machine/{node.machine_type}/{kind}")
            if price is None:
                continue
            for number, (since, usd) in enumerate(price.history()):
                for region, hourly in usd.items():
                    if not isinstance(hourly, tuple):
                        yield GpuPrice(gpu_type, spot, region, hourly, since if number else ALWAYS)


def view_sql(prices: Prices, gpu_types: Mapping[str, GpuType]) -> str:
    skus = list(gpu_prices(prices, gpu_types))
    first, *others = (
        f"SELECT '{price.gpu_type}', {str(price.spot).upper()}, '{price.region}', "
        f"{price.usd_per_hour!r}, TIMESTAMP '{price.valid_from} 00:00:00+00'"
        for price in skus
    )
    names = GpuPrice._fields
    named = [f"{value} AS {name}" for value, name in zip(first[7:].split(", "), names, strict=True)]
    return _HEAD + "\nUNION ALL ".join(["SELECT " + ", ".join(named), *others]) + "\n"


if __name__ == "__main__":
    VIEW_FILE.write_text(view_sql(read_prices(), read_gpu_types()), encoding="utf-8")
