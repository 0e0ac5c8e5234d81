"""The cost of replies on either topic of an inbox."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from penstock_planning.deploy.plan import DeployPlan
from penstock_planning.deploy.platform_variables import Platform
from penstock_planning.deploy.prices import read_prices
from shared.models.blob import SLOT_INLINE_LIMIT_BYTES
from shared.models.catalog import Model
from shared.models.entry import Replies
from tools.planning.tests.deploy.planning import entry, plan_of, rate

MIN_REPLY_BYTES = 1000


def painter(replies: Replies = "slots") -> Model:
    return Model.model_validate(
        {
            "name": "painter",
            "task": "image",
            "source": "hf:a/b",
            "batch": {"max_pixel_steps": 4096},
            "replies": replies,
        }
    )


def planned(model: Model, output_bytes: int, slots: int = 8) -> DeployPlan:
    variables = {"inboxes": {"per_region": 8, "slots": slots}}
    demand = rate(200, seconds_per_item=0.01, input_bytes=100, output_bytes=output_bytes)
    return plan_of(
        model,
        rates={model.name: demand},
        platform=Platform.model_validate(variables),
        prices=read_prices(),
    )


def replies_of(plan: DeployPlan) -> dict[str, float | None]:
    return {cost.item: cost.mean_usd for cost in plan.costs if "repl" in cost.item}


def test_a_vector_is_billed_twice_whatever_the_slots() -> None:
    few, many = (replies_of(planned(entry(), 5000, slots)) for slots in (1, 80))
    direct = "Pub/Sub, direct replies: 1 publish, 1 delivery"
    assert few[direct] == many[direct] != 0
    assert few["Pub/Sub, replies to slots: 1 publish, 1 delivery"] == 0
    assert many["Pub/Sub, replies to slots: 1 publish, 80 deliveries"] == 0


@pytest.mark.parametrize("output_bytes", [SLOT_INLINE_LIMIT_BYTES + 1, 40_000, 400_000])
def test_an_image_costs_each_slot_no_more_than_the_least(output_bytes: int) -> None:
    plan = planned(painter(), output_bytes)
    costs = {cost.item: cost.mean for cost in plan.costs}
    least = 200 * 730 * 3600 * MIN_REPLY_BYTES / 2**40
    assert costs["Pub/Sub, replies to slots: 1 publish, 8 deliveries"] == pytest.approx(9 * least)
    stored = costs["large results of 7 days"]
    assert stored == pytest.approx(200 * 730 * 3600 * output_bytes * 7 * 24 / 730 / 2**30)


def test_a_direct_image_travels_in_its_reply_if_it_is_small() -> None:
    costs = {cost.item: cost.mean for cost in planned(painter("direct"), 40_000).costs}
    assert costs["large results of 7 days"] == 0
    billed = costs["Pub/Sub, direct replies: 1 publish, 1 delivery"]
    assert billed is not None
    assert billed > 2 * 200 * 730 * 3600 * 40_000 / 2**40


def test_both_costs_are_told() -> None:
    (note,) = (note for note in planned(entry(), 5000).notes if "the replies of" in note)
    assert note.startswith("the replies of texts: about ")
    assert " with 8 slots; models.yaml has direct, " in note


def test_it_is_told_what_replies_that_share_messages_cost() -> None:
    direct, shared, count = told(planned(entry(), 5000).notes)
    assert 1 < count <= entry().batch.max_items
    # A vector exceeds the minimum billed size, so sharing saves only the cost of the attributes.
    assert 0.9 * direct < shared < direct


def told(notes: Sequence[str]) -> tuple[float, float, int]:
    """Returns the costs of direct replies and shared messages, and how many replies share one."""
    (note,) = (note for note in notes if "the replies of" in note)
    match = re.search(r"about ([\d,.]+) USD per month direct.*, ([\d,.]+) if (\d+) share", note)
    assert match is not None, note
    direct, shared = (float(amount.replace(",", "")) for amount in match.groups()[:2])
    return direct, shared, int(match[3])


def test_images_share_no_message() -> None:
    (note,) = (note for note in planned(painter(), 40_000).notes if "the replies of" in note)
    assert note.endswith("models.yaml has slots")
