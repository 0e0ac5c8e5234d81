"""The deployment plan counts flow steps as requests to their models."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_planning.deploy.rates import DemandRates, read_rates
from shared.errors import ConfigurationError
from tests.flows.models import CHECK, JOIN, SPLIT, catalog_of

SPELL = {
    "name": "spell",
    "input": {"text": "string"},
    "steps": [
        {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}},
        {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}},
        {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}},
    ],
    "output": "$joined",
}
CATALOG = catalog_of(SPELL)
RATE = {"mean_per_s": 0, "seconds_per_item": 0.1, "measured": "here"}
MODELS = {
    SPLIT.name: RATE,
    CHECK.name: RATE | {"mean_per_s": 2, "peak_per_s": 10, "items_per_request": 4},
    JOIN.name: RATE,
}
FLOW = {"mean_per_s": 0.5, "peak_per_s": 2, "items": {"check": 40}}


def read(folder: Path, **changes: Any) -> DemandRates:
    document = {"models": MODELS, "flows": {"spell": FLOW}} | changes
    path = folder / "rates.yaml"
    path.write_text(yaml.safe_dump(document))
    return read_rates(path, CATALOG)


def test_items_of_steps_are_requests_of_their_models(tmp_path: Path) -> None:
    models = read(tmp_path).models
    assert (models[SPLIT.name].mean_per_s, models[SPLIT.name].peak) == (0.5, 2)
    check = models[CHECK.name]
    assert (check.mean_per_s, check.peak) == (2 + 20, 10 + 80)
    # The items at peak load: 10 requests with 4 items each, and 80 with 1.
    assert check.peak * check.items_per_request == pytest.approx(10 * 4 + 80)
    assert models[JOIN.name].items_per_request == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flows": {"other": FLOW}}, "flows.other: not in the catalog, which contains: spell"),
        ({"flows": {"spell": FLOW | {"items": {}}}}, "items.check: is required"),
        ({"flows": {"spell": FLOW | {"items": {"no": 1, "check": 2}}}}, "no step 'no'"),
        ({"models": {CHECK.name: RATE}}, f"models.{SPLIT.name} is required"),
        ({"models": MODELS | {JOIN.name: {"mean_per_s": 0}}}, "seconds_per_item is required"),
    ],
)
def test_rates_that_say_too_little_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        read(tmp_path, **changes)
