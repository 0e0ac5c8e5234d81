"""Weights are offloaded and loaded back.

On a CPU, the same code moves them, but pinned memory is ordinary memory.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from workers.runtime.resident_models import offload

pytestmark = pytest.mark.slow

ROOM = 10**9


class Holder:
    """A model as the offloading code sees it: our object with a network somewhere inside."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.device_name = "cuda, as it were"
        self._inner = {"encoders": [network]}
        self.network = network


def holder() -> Any:
    torch.manual_seed(1)
    return Holder(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval())


def test_parked_weights_come_back_as_they_were() -> None:
    model, given = holder(), torch.ones(2, 8)
    before = model.network(given)
    addresses = [weight.data_ptr() for weight in model.network.parameters()]
    offloaded = offload(model, ROOM)
    assert offloaded is not None
    tensors = [*model.network.parameters(), *model.network.buffers()]
    assert offloaded.size_bytes == sum(tensor.nbytes for tensor in tensors)
    away = [weight.data_ptr() for weight in model.network.parameters()]
    assert set(away).isdisjoint(addresses), "the weights still lie where they lay"
    for _ in range(2):
        back: Any = offloaded.restore()
        assert back is model
        assert [weight.data_ptr() for weight in model.network.parameters()] != away
        assert torch.equal(model.network(given), before)
        offloaded.release()


def test_without_room_nothing_moves() -> None:
    model = holder()
    addresses = [weight.data_ptr() for weight in model.network.parameters()]
    assert offload(model, 100) is None
    assert [weight.data_ptr() for weight in model.network.parameters()] == addresses


def test_a_model_of_another_library_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = holder()
    monkeypatch.delitem(sys.modules, "torch")
    assert offload(model, ROOM) is None


def test_a_model_without_networks_is_not_parked() -> None:
    model = holder()
    del model.network, model._inner
    assert offload(model, ROOM) is None


@pytest.mark.parametrize(
    "kind", ["compiled in place", "compiled as a whole", "a forward of its own"]
)
def test_what_is_compiled_is_not_parked(kind: str) -> None:
    model = holder()
    if kind == "compiled in place":
        model.network[0].compile(backend="eager")
    elif kind == "compiled as a whole":
        model.network = torch.compile(model.network, backend="eager")
    else:
        model.network[0].forward = lambda given: given
    assert offload(model, ROOM) is None


def test_weights_of_a_kind_of_their_own_are_not_parked() -> None:
    class Quantized(torch.nn.Parameter):
        pass

    model = holder()
    model.network[0].weight = Quantized(torch.zeros(8, 8))
    assert offload(model, ROOM) is None
