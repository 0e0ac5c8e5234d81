"""Every encoder agrees with the folder's transformer, computed text by text in torch fp32."""

import dataclasses
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnxruntime.quantization
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from shared.errors import ConfigurationError, ModelFailed
from shared.models.catalog import Catalog
from shared.models.tasks.embedding import TextInput
from tests.workers.models.batches import model_for
from workers.models.backend import Backend
from workers.models.base import PreparedText, Preparer
from workers.models.device import Device
from workers.models.embedding.encoder_onnx import OnnxEncoder
from workers.models.embedding.encoder_torch import TorchEncoder
from workers.models.embedding.model import Encoder
from workers.models.embedding.model_folder import (
    POOLING_MODES,
    SentenceFolder,
    read_sentence_folder,
)
from workers.optimize.calibration import calibration_texts
from workers.optimize.embedding import export_graph, fuse_graph, load_transformer

pytestmark = pytest.mark.slow

WIDTH, VOCABULARY = 32, 60
LENGTHS = np.array([7, 1, 12, 12, 3])
POOLINGS = [*[(mode,) for mode in POOLING_MODES], ("mean", "cls")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer with random weights, with its graph in the same folder."""
    folder = tmp_path_factory.mktemp("tiny")
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    export_graph(load_transformer(folder), folder / "typed.onnx", has_types=True)
    export_graph(load_transformer(folder), folder / "plain.onnx", has_types=False)
    return folder


def settings_of(
    folder: Path, pooling: tuple[str, ...] = ("mean",), *, normalize: bool = True
) -> SentenceFolder:
    return SentenceFolder(folder, 64, False, "", pooling, normalize)


def opened(settings: SentenceFolder, name: str) -> Encoder:
    encoder: Encoder
    if name.startswith("torch"):
        encoder = TorchEncoder(settings, Device("cpu", 1, 1.0), name.removeprefix("torch-"))
    else:
        graph = settings.transformer / f"{name.removeprefix('onnx-')}.onnx"
        encoder = OnnxEncoder(settings, graph, device="cpu", threads=1)
    assert encoder.open() == WIDTH * len(settings.pooling)
    assert encoder.device_name == "cpu"
    return encoder


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token IDs and types, [items, longest], with noise beyond each item's length."""
    draw = np.random.default_rng(5)
    shape = (len(LENGTHS), int(LENGTHS.max()))
    return draw.integers(0, VOCABULARY, shape), draw.integers(0, 2, shape)


def join(values: np.ndarray) -> np.ndarray:
    """All items' values, concatenated."""
    joined: np.ndarray = values[np.arange(values.shape[1]) < LENGTHS[:, None]]
    return joined


def expected(settings: SentenceFolder, ids: np.ndarray, types: np.ndarray) -> np.ndarray:
    """sentence-transformers' formulas, applied to each text individually."""
    model = AutoModel.from_pretrained(settings.transformer).eval()
    rows = []
    for row, length in enumerate(LENGTHS):
        with torch.inference_mode():
            given = {"input_ids": ids, "token_type_ids": types}
            states = model(
                **{
                    name: torch.from_numpy(all[row : row + 1, :length])
                    for name, all in given.items()
                }
            )
        alone = states.last_hidden_state[0].numpy().astype(np.float64)
        by_mode = {
            "cls": alone[0],
            "max": alone.max(axis=0),
            "mean": alone.mean(axis=0),
            "mean_sqrt_len_tokens": alone.sum(axis=0) / np.sqrt(length),
        }
        vector = np.concatenate([by_mode[mode] for mode in settings.pooling])
        rows.append(vector / np.linalg.norm(vector) if settings.normalize else vector)
    return np.stack(rows)


@pytest.mark.parametrize("pooling", POOLINGS, ids="+".join)
@pytest.mark.parametrize("name", ["torch-fp32", "onnx-typed"])
def test_encoders_pool_as_the_folder_says(tiny: Path, name: str, pooling: tuple[str, ...]) -> None:
    ids, types = batch()
    for normalize in (True, False):
        settings = settings_of(tiny, pooling, normalize=normalize)
        ours = opened(settings, name).encode(join(ids), join(types), LENGTHS)
        assert ours.dtype == np.float32
        assert np.abs(ours - expected(settings, ids, types)).max() < 1e-5


@pytest.mark.parametrize("pooling", POOLINGS, ids="+".join)
def test_pooling_in_numpy_is_that_in_torch(tiny: Path, pooling: tuple[str, ...]) -> None:
    ids, types = batch()
    settings = settings_of(tiny, pooling)
    torchs, onnxs = (
        opened(settings, name).encode(join(ids), join(types), LENGTHS)
        for name in ("torch-fp32", "onnx-typed")
    )
    assert np.abs(torchs - onnxs).max() < 1e-6


@pytest.mark.parametrize("name", ["torch-fp32", "onnx-typed", "onnx-plain"])
def test_no_types_are_zeros(tiny: Path, name: str) -> None:
    ids, types = batch()
    settings = settings_of(tiny)
    ours = opened(settings, name).encode(join(ids), None, LENGTHS)
    assert np.abs(ours - expected(settings, ids, np.zeros_like(types))).max() < 1e-5


def test_a_graph_without_types_refuses_them(tiny: Path) -> None:
    ids, types = batch()
    with pytest.raises(ModelFailed, match="without token types"):
        opened(settings_of(tiny), "onnx-plain").encode(join(ids), join(types), LENGTHS)


def test_an_id_beyond_the_vocabulary_fails_the_batch(tiny: Path) -> None:
    ids, types = batch()
    ids[0, 0] = 10 * VOCABULARY
    with pytest.raises(ModelFailed, match="ONNX Runtime"):
        opened(settings_of(tiny), "onnx-typed").encode(join(ids), join(types), LENGTHS)


@pytest.mark.parametrize(
    ("precision", "reason"),
    [("fp16", "fp16 requires a GPU"), ("int8", "do not support int8")],
)
def test_torch_refuses_what_a_cpu_can_not(tiny: Path, precision: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        TorchEncoder(settings_of(tiny), Device("cpu", 1, 1.0), precision).open()


def test_torch_refuses_damaged_weights(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(settings_of(tiny).transformer, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    settings = dataclasses.replace(settings_of(tiny), transformer=folder)
    with pytest.raises(ConfigurationError, match="damaged") as raised:
        TorchEncoder(settings, Device("cpu", 1, 1.0), "fp32").open()
    assert raised.value.field == "source"


def test_onnx_refuses_what_it_can_not_load(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.onnx").write_bytes(b"no graph")
    with pytest.raises(ConfigurationError, match=r"noise\.onnx"):
        OnnxEncoder(settings_of(tiny), tmp_path / "noise.onnx", device="cpu", threads=1).open()
    with pytest.raises(ConfigurationError, match="does not have the required provider"):
        OnnxEncoder(settings_of(tiny), tiny / "typed.onnx", device="tpu", threads=1).open()


def test_onnx_asks_for_the_memory_of_the_gpu_that_cuda_shows(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, arguments = tmp_path / "nvidia-smi", tmp_path / "arguments"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {shlex.quote(str(arguments))}\necho "NVIDIA L4, 23034"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7")
    providers = ["CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    (tmp_path / "noise.onnx").write_bytes(b"no graph")
    with pytest.raises(ConfigurationError, match=r"noise\.onnx"):
        OnnxEncoder(settings_of(tiny), tmp_path / "noise.onnx", device="cuda:1", threads=1).open()
    assert "--id=GPU-7" in arguments.read_text()


def test_an_entry_for_onnx_needs_a_graph(catalog: Catalog, minilm_folder: Path) -> None:
    entry = catalog.default("embedding").model_copy(update={"backend": "onnx"})
    with pytest.raises(ConfigurationError, match="penstock optimize all-MiniLM-L6-v2"):
        model_for(entry, minilm_folder, "cpu")


@pytest.fixture(scope="module")
def minilm_graph(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    model = load_transformer(minilm_folder)
    export_graph(model, folder / "raw.onnx", has_types=False)
    fuse_graph(folder / "raw.onnx", folder / "fused.onnx", model.config)
    return folder / "fused.onnx"


@pytest.fixture(scope="module")
def texts(minilm_preparer: Preparer) -> list[PreparedText]:
    inputs = [TextInput(text) for text in ["", "a cat", "漢字 🐈", *calibration_texts()[::16]]]
    return [item for item in minilm_preparer.prepare(inputs) if isinstance(item, PreparedText)]


def joined(texts: list[PreparedText]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.frombuffer(b"".join(text.ids for text in texts), "<u4")
    return ids, np.array([text.length for text in texts])


@pytest.fixture(scope="module")
def reference(minilm_folder: Path, texts: list[PreparedText]) -> np.ndarray:
    """Each text computed individually, in torch fp32."""
    encoder = TorchEncoder(read_sentence_folder(minilm_folder), Device("cpu", 1, 1.0), "fp32")
    encoder.open()
    rows = [encoder.encode(joined([text])[0], None, joined([text])[1]) for text in texts]
    return np.concatenate(rows)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_minilm_in_onnx_fp32_is_that_in_torch(
    minilm_folder: Path,
    minilm_graph: Path,
    texts: list[PreparedText],
    reference: np.ndarray,
    size: int,
) -> None:
    encoder = OnnxEncoder(
        read_sentence_folder(minilm_folder), minilm_graph, device="cpu", threads=1
    )
    encoder.open()
    parts = [texts[at : at + size] for at in range(0, len(texts), size)]
    ours = np.concatenate(
        [encoder.encode(joined(part)[0], None, joined(part)[1]) for part in parts]
    )
    assert np.abs(ours - reference).max() < 1e-5


def test_minilm_in_bf16_keeps_to_the_default_tolerance(
    catalog: Catalog, minilm_folder: Path, texts: list[PreparedText], reference: np.ndarray
) -> None:
    encoder = TorchEncoder(read_sentence_folder(minilm_folder), Device("cpu", 1, 1.0), "bf16")
    encoder.open()
    ours = encoder.encode(joined(texts)[0], None, joined(texts)[1])
    cosines = (ours * reference).sum(axis=1)
    assert cosines.min() > catalog.default("embedding").tolerance.cosine
    assert np.abs(ours - reference).max() > 1e-5  # otherwise, it was not bf16


def test_minilm_in_int8_is_near(
    minilm_folder: Path,
    minilm_graph: Path,
    tmp_path: Path,
    texts: list[PreparedText],
    reference: np.ndarray,
) -> None:
    graph = tmp_path / "int8.onnx"
    onnxruntime.quantization.quantize_dynamic(
        minilm_graph.with_name("raw.onnx"), graph, per_channel=True
    )
    encoder = OnnxEncoder(read_sentence_folder(minilm_folder), graph, device="cpu", threads=1)
    encoder.open()
    cosines = (encoder.encode(joined(texts)[0], None, joined(texts)[1]) * reference).sum(axis=1)
    assert 0.97 < cosines.min() < 0.9999


def test_the_measured_cost_of_a_call_decides_the_cut(catalog: Catalog, minilm_folder: Path) -> None:
    batch = [PreparedText(key="", length=length, ids=b"") for length in (10, 10, 40, 40)]
    groups = {
        cost: model_for(
            catalog.default("embedding"), minilm_folder, "cpu", backend=Backend(call_tokens=cost)
        ).groups(batch)
        for cost in (1, 1000)
    }
    assert groups == {1: [[0, 1], [2, 3]], 1000: [[0, 1, 2, 3]]}


def test_backend_names_itself() -> None:
    assert Backend(precision="bf16").name == "torch-bf16"
    assert (
        Backend(backend="onnx", variant="onnx-int8-static", precision="int8").name
        == "onnx-int8-static"
    )
