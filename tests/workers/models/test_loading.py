"""A folder that can't be loaded is a configuration error, whatever the libraries raise for it. A
device that is full or lost is not the folder's fault.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPVisionModelWithProjection,
)

from shared.errors import ConfigurationError
from shared.models.catalog import Catalog
from tests.workers.models import (
    ip_adapter_files,
    test_controls,
    test_cross_encoder,
    test_ip_adapters,
)
from tests.workers.models.batches import model_for
from tests.workers.models.generation import tiny
from workers.models.base import GpuLost, OutOfMemory
from workers.models.device import Device
from workers.models.embedding.cross_encoder import CrossEncoderModel
from workers.models.embedding.encoder_torch import TorchEncoder
from workers.models.embedding.model_folder import SentenceFolder

pytestmark = pytest.mark.slow(about_s=20)

CPU = Device("cpu", 1, 1.0)
BERT = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=1,
)


def open_encoder(folder: Path) -> None:
    TorchEncoder(SentenceFolder(folder, 64, False, "", ("mean",), True), CPU, "fp32").open()


def open_cross_encoder(folder: Path) -> None:
    CrossEncoderModel(test_cross_encoder.entry(), folder, CPU).setup()


def open_decoder(folder: Path) -> None:
    tiny.open_model(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[[Path], None], Path]:
    """Folders that can be loaded, by the function that opens them."""
    folders: dict[Callable[[Path], None], Path] = {
        opener: tmp_path_factory.mktemp("whole")
        for opener in (open_encoder, open_cross_encoder, open_decoder)
    }
    BertModel(BERT, add_pooling_layer=False).save_pretrained(folders[open_encoder])
    BertForSequenceClassification(BERT).save_pretrained(folders[open_cross_encoder])
    tiny.write_folder(folders[open_decoder])
    for opener, folder in folders.items():
        opener(folder)
    return folders


def with_config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def with_pickle(data: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(data)

    return damage


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


DAMAGES = {
    "truncated weights": (truncate_weights, "SafetensorError"),
    "garbage in a pickle": (with_pickle(b"garbage" * 30), "UnpicklingError"),
    "empty pickle": (with_pickle(b""), "EOFError"),
    "weights of other sizes": (with_config(hidden_size=64), "RuntimeError"),
    "no heads": (with_config(num_attention_heads=0), "ZeroDivisionError"),
    "unknown activation": (with_config(hidden_act="nosuch"), "KeyError: 'nosuch'"),
    "unknown family": (with_config(model_type="nosuch"), "nosuch"),
    "text for a number": (with_config(hidden_size="x"), "hidden_size"),
    "package that is not installed": (
        with_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "ImportError",
    ),
}


@pytest.mark.parametrize("opener", [open_encoder, open_cross_encoder, open_decoder])
@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_folders_are_configuration_errors(
    whole: dict[Callable[[Path], None], Path],
    tmp_path: Path,
    opener: Callable[[Path], None],
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole[opener], folder)
    damage(folder)
    with pytest.raises(ConfigurationError, match=reason) as raised:
        opener(folder)
    assert raised.value.field == "source"
    assert raised.value.message.startswith(f"{folder}: ")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), GpuLost),
    ],
    ids=["full", "lost"],
)
@pytest.mark.parametrize("part", ["pipeline", "control", "IP-Adapter"])
def test_a_full_or_lost_device_is_no_fault_of_an_image_models_folder(
    catalog: Catalog,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    raised: Exception,
    expected: type[BaseException],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    entry = catalog.default("image")
    if part == "pipeline":
        monkeypatch.setattr(diffusers.DiffusionPipeline, "to", fail)
    elif part == "control":
        folder = test_controls.write_control(tmp_path / "control", tiny_folder, 1)
        entry = test_controls.entry_with(catalog, depth=folder)
        monkeypatch.setattr(diffusers.ControlNetModel, "from_pretrained", fail)
    else:
        folder = ip_adapter_files.write(tmp_path / "ip", tiny_folder, 1)
        entry = test_ip_adapters.entry_with(entry, {"style": folder})
        monkeypatch.setattr(CLIPVisionModelWithProjection, "forward", fail)
    with pytest.raises(expected):
        model_for(entry, tiny_folder, "cpu").setup()
