"""Each model process's choice of GPU. The fake torch functions are as strict as the real ones."""

from __future__ import annotations

import pytest
import torch

from shared.errors import ConfigurationError
from workers.models.device import Device, attention_without_plans

pytestmark = pytest.mark.slow(about_s=3)

GPUS = 2


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """A machine with two GPUs. Maps each GPU's number to the share of its memory that was set."""
    kept: dict[int, float] = {}

    def set_fraction(fraction: float, device: torch.device) -> None:
        if device.index is None:  # same as torch._utils._get_device_index
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got:{device}"
            )
        kept[device.index] = fraction

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return kept


@pytest.mark.parametrize(
    ("requested", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)]
)
def test_a_share_of_the_gpu_that_is_meant(
    requested: str, number: int, shares: dict[int, float]
) -> None:
    device, name = Device(requested, threads=1, memory_fraction=0.25).open()
    assert (device, name) == (torch.device("cuda", number), f"GPU {number}")
    assert shares == {number: 0.25}


@pytest.mark.parametrize("requested", ["cuda:2", "tpu", "mps"])
def test_a_device_that_is_not_there(requested: str, shares: dict[int, float]) -> None:
    with pytest.raises(ConfigurationError, match="device") as refusal:
        Device(requested, threads=1, memory_fraction=1.0).open()
    assert refusal.value.field == "device"
    assert not shares


@pytest.mark.parametrize("kind", ["cuda:1", "cpu"])
def test_attention_of_changing_shapes_does_not_use_cudnn_on_a_gpu(kind: str) -> None:
    allowed = torch.backends.cuda
    states: list[tuple[bool, bool, bool]] = []

    def note() -> None:
        flags = ("cudnn_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled")
        cudnn, flash, efficient = (bool(getattr(allowed, flag)()) for flag in flags)
        states.append((cudnn, flash, efficient))

    note()
    with attention_without_plans(torch.device(kind)):
        note()
    note()
    before, within, after = states
    assert before == after == (True, True, True)
    assert within == (kind == "cpu", True, True)
