from typing import Any

import pytest
import torch

from shared.errors import ConfigurationError
from shared.models.catalog import Catalog, Model
from workers.models.image.plan import Capability, capability_of, plan_for

pytestmark = pytest.mark.slow

CPU = Capability("cpu", (0, 0), has_triton=True, has_torchao=True)
T4 = Capability("cuda", (7, 5), has_triton=True, has_torchao=True)
L4 = Capability("cuda", (8, 9), has_triton=True, has_torchao=True)


@pytest.fixture
def entry(catalog: Catalog) -> Model:
    return catalog.default("image").model_copy(update={"precision": "auto"})


def changed(entry: Model, **image: Any) -> Model:
    return entry.model_copy(update={"image": entry.image.model_copy(update=image)})


@pytest.mark.parametrize(
    ("capability", "precision", "dtype"),
    [
        (CPU, "auto", torch.float32),
        (CPU, "int8", torch.float32),
        (CPU, "bf16", torch.bfloat16),
        (T4, "auto", torch.float16),
        (L4, "auto", torch.bfloat16),
        (L4, "int8", torch.bfloat16),
        (L4, "fp32", torch.float32),
    ],
)
def test_the_device_decides_what_auto_is(
    entry: Model, capability: Capability, precision: str, dtype: torch.dtype
) -> None:
    assert plan_for(entry.model_copy(update={"precision": precision}), capability).dtype == dtype


@pytest.mark.parametrize(
    ("capability", "asked", "is_compiled"),
    [
        (CPU, "auto", False),
        (CPU, "always", True),
        (L4, "auto", True),
        (L4, "never", False),
        (Capability("cuda", (6, 0), has_triton=True, has_torchao=True), "auto", False),
        (Capability("cuda", (8, 9), has_triton=False, has_torchao=True), "auto", False),
    ],
)
def test_only_what_triton_knows_is_compiled(
    entry: Model, capability: Capability, asked: str, is_compiled: bool
) -> None:
    assert plan_for(changed(entry, compile=asked), capability).is_compiled == is_compiled


def test_int8_needs_torchao(entry: Model) -> None:
    without = Capability("cuda", (8, 9), has_triton=True, has_torchao=False)
    assert not plan_for(entry, without).is_int8
    with pytest.raises(ConfigurationError, match=r"penstock\[gpu\]"):
        plan_for(entry.model_copy(update={"precision": "int8"}), without)


@pytest.mark.parametrize(
    ("max_items", "budget_images", "sizes"),
    [(8, 100, (1, 2, 4, 8)), (8, 3, (1, 2)), (6, 100, (1, 2, 4)), (8, 0, (1,))],
)
def test_sizes_are_those_the_budget_lets_through(
    entry: Model, max_items: int, budget_images: int, sizes: tuple[int, ...]
) -> None:
    usual = entry.image
    budget = max(1, budget_images * usual.width * usual.height * usual.steps)
    batch = entry.batch.model_copy(update={"max_items": max_items, "max_pixel_steps": budget})
    assert plan_for(entry.model_copy(update={"batch": batch}), L4).batch_sizes == sizes


def test_a_cpu_is_recognized() -> None:
    capability = capability_of(torch.device("cpu"))
    assert (capability.kind, capability.compute) == ("cpu", (0, 0))
