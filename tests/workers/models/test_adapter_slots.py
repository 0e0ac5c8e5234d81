"""Adapters in fixed slots: they leave in any order, and a single row applies to a whole batch."""

from __future__ import annotations

import pytest
import torch

from workers.models.image.adapter_slots import AdapterSlots
from workers.models.image.low_rank import Layers, LowRankModule, LowRankPair

pytestmark = pytest.mark.slow
NAME = "attentions.0"
SLOTS = 4


class Network(torch.nn.Module):
    """One layer with slots."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attentions[0](rows)
        return result


def write_adapter() -> Layers:
    return {NAME: LowRankPair(torch.randn(2, 4), torch.randn(4, 2))}


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def slots(network: Network) -> AdapterSlots:
    return AdapterSlots(LowRankModule(network).layers, count=SLOTS, rows=4, rank=2)


def compute(network: Network, slots: AdapterSlots, rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(), slots.use():
        return network.forward(rows)


@pytest.mark.parametrize("gone", [0, 1])
def test_an_adapter_leaves_while_other_slots_are_empty(
    network: Network, slots: AdapterSlots, gone: int
) -> None:
    adapters = [write_adapter(), write_adapter()]
    rows = torch.randn(1, 3, 4)
    for adapter in adapters:
        assert slots.place([(adapter, 1.0)])
    other = adapters[1 - gone]
    assert slots.place([(other, 1.0)])
    before = compute(network, slots, rows)
    slots.forget(adapters[gone])
    assert slots.place([(other, 1.0)])
    assert torch.equal(compute(network, slots, rows), before)


def test_a_single_row_applies_to_the_whole_batch(network: Network, slots: AdapterSlots) -> None:
    first, second = write_adapter(), write_adapter()
    rows = torch.randn(1, 3, 4).repeat(2, 1, 1)
    assert slots.place([(first, 1.0), (first, 1.0)])
    both = compute(network, slots, rows)
    assert slots.place([(second, 1.0)])
    changed = compute(network, slots, rows)
    assert torch.allclose(changed[0], changed[1])
    assert not torch.allclose(changed[1], both[1])
