"""An image model's weights reach the device without being in host memory as a whole."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workers.models.image.pipeline import load_part

pytestmark = pytest.mark.slow


weak_reference: Any = reductions.StorageWeakRef


class HostBytes(TorchDispatchMode):
    """The peak of the host memory taken by operators' results that are in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if _is_on_host(leaf)}
        for leaf in tree_leaves(result):
            if _is_on_host(leaf) and (place := _storage_of(leaf)) not in known:
                storage = leaf.untyped_storage()
                self._live[place] = weak_reference(storage), storage.nbytes()
        self._live = {at: live for at, live in self._live.items() if not live[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _is_on_host(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_converted_one_tensor_at_a_time(
    tiny_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Uses the meta device instead of a GPU."""
    unet: Any = diffusers.UNet2DConditionModel.from_pretrained(tiny_folder / "unet")
    unet.half().save_pretrained(tmp_path)
    with HostBytes() as moved_whole:
        whole = diffusers.UNet2DConditionModel.from_pretrained(tmp_path, dtype=dtype).to("meta")
    with HostBytes() as moved:
        loaded = load_part(diffusers.UNet2DConditionModel, tmp_path, torch.device("meta"), dtype)
    assert {(weight.dtype, weight.device.type) for weight in loaded.parameters()} == {
        (dtype, "meta")
    }
    largest = max(weight.nbytes for weight in whole.parameters())
    total = sum(weight.nbytes for weight in whole.parameters())
    assert moved.peak <= 2 * largest
    if dtype != torch.float16:
        assert moved_whole.peak >= total > 10 * largest
