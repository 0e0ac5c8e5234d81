"""The worker's side: a real process makes choices once, and they hold until something they depend
on changes.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, save
from prometheus_client import REGISTRY

from shared.errors import ConfigurationError
from shared.models.catalog import Model
from shared.settings import WorkerSettings
from workers.autotune.choice import PROVISIONAL_S, Layout, read_choice, write_choice
from workers.autotune.client import choose_backend
from workers.models.artifact import (
    Calibration,
    Manifest,
    Variant,
    new_artifact,
    source_digest,
    write_calibration,
    write_manifest,
)
from workers.models.base import PreparedText

pytestmark = [pytest.mark.slow(about_s=6), pytest.mark.anyio]

WORDS = 9
ENTRY = Model.model_validate(
    {
        "name": "lookup",
        "task": "embedding",
        "source": "local:lookup",
        "backend": "onnx",
        "dimensions": 2,
        "batch": {"max_tokens": 512},
    }
)
TABLE = np.arange(2 * WORDS, dtype=np.float32).reshape(WORDS, 2) + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A minimal embedding model: a plain transformer's folder whose graph looks words up in a
    table.
    """
    made = tmp_path / "model"
    made.mkdir()
    words = ", ".join(f'"w{number}": {number}' for number in range(WORDS))
    (made / "tokenizer.json").write_text(
        '{"version": "1.0", "truncation": null, "padding": null,'
        ' "added_tokens": [], "normalizer": null,'
        ' "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,'
        ' "model": {"type": "WordLevel", "vocab": {' + words + '}, "unk_token": "w0"}}'
    )
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings(
        model="lookup", artifacts_dir=tmp_path / "artifacts", device="cpu", processes=1, threads=1
    )


def make_artifact(settings: WorkerSettings, folder: Path) -> None:
    digest = source_digest(folder, ENTRY.revision)
    texts = [text_of(1, 2, 3), text_of(8)]
    vectors = np.array([TABLE[[1, 2, 3]].mean(axis=0), TABLE[8]])
    with new_artifact(settings.artifacts_dir, "lookup", digest) as made:
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["items", "tokens"])
            for name in ("input_ids", "attention_mask")
        ]
        output = helper.make_tensor_value_info("states", TensorProto.FLOAT, ["items", "tokens", 2])
        table = helper.make_tensor(
            "table", TensorProto.FLOAT, TABLE.shape, TABLE.flatten().tolist()
        )
        graph = helper.make_graph(
            [helper.make_node("Gather", ["table", "input_ids"], ["states"])],
            "lookup",
            inputs,
            [output],
            [table],
        )
        save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
            made / "fp32.onnx",
        )
        write_calibration(made, Calibration(texts, vectors))
        size = (made / "fp32.onnx").stat().st_size
        variant = Variant(
            name="onnx-fp32",
            backend="onnx",
            precision="fp32",
            file="fp32.onnx",
            size_bytes=size,
            cosine_min=1.0,
        )
        write_manifest(
            made,
            Manifest(
                model="lookup",
                revision=ENTRY.revision,
                source_digest=digest,
                made_by={},
                task="embedding",
                variants=[variant],
            ),
        )


def text_of(*ids: int) -> PreparedText:
    return PreparedText(key="", length=len(ids), ids=np.array(ids, "<u4").tobytes())


def kept(settings: WorkerSettings) -> list[Path]:
    return sorted(settings.artifacts_dir.glob("lookup/choice-*.json"))


async def test_a_choice_is_measured_kept_and_told(
    folder: Path, settings: WorkerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_artifact(settings, folder)
    choice = await choose_backend(ENTRY, folder, settings)
    assert (choice.backend.name, choice.layout) == ("onnx-fp32", Layout(1, 1))
    (finding,) = choice.findings
    assert finding.cosine_min == pytest.approx(1.0, abs=1e-6)
    assert finding.texts_per_s > 0
    (told,) = [vars(record) for record in caplog.records if record.message == "backend chosen"]
    assert told["candidates"][0]["texts_per_s"] == finding.texts_per_s
    labels = {
        "model": "lookup",
        "backend": "onnx",
        "precision": "fp32",
        "threads": "1",
        "processes": "1",
    }
    assert REGISTRY.get_sample_value("penstock_worker_backend_info", labels) == 1
    # A later start reads the file, so its contents come back.
    (path,) = kept(settings)
    choice.reason = "as it was found"
    write_choice(path, choice)
    assert (await choose_backend(ENTRY, folder, settings)).reason == "as it was found"
    assert await choose_backend(ENTRY, folder, settings) == choice


async def test_a_batch_size_is_found_once_and_used_again(
    folder: Path, settings: WorkerSettings
) -> None:
    make_artifact(settings, folder)
    entry = Model.model_validate(
        ENTRY.model_dump(exclude={"batch"}) | {"batch": {"max_tokens": 4096}}
    )
    choice = await choose_backend(entry, folder, settings)
    assert [timing.tokens for timing in choice.budgets] == [2048, 4096]
    assert choice.batch_tokens in (2048, 4096)
    (path,) = kept(settings)
    choice.batch_tokens = 3000
    write_choice(path, choice)
    again = await choose_backend(entry, folder, settings)
    assert again.batch(entry).max_tokens == 3000
    smaller = await choose_backend(
        entry, folder, settings.model_copy(update={"memory_fraction": 0.5})
    )
    assert smaller.batch_tokens != 3000


async def test_two_workers_at_once_measure_once(folder: Path, settings: WorkerSettings) -> None:
    make_artifact(settings, folder)
    first, second = await asyncio.gather(
        *(choose_backend(ENTRY, folder, settings) for _ in range(2))
    )
    assert first == second
    assert len(kept(settings)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda entry, settings: (entry.model_copy(update={"revision": "2"}), settings),
        lambda entry, settings: (
            entry.model_copy(
                update={"tolerance": entry.tolerance.model_copy(update={"cosine": 0.9})}
            ),
            settings,
        ),
        lambda entry, settings: (entry, settings.model_copy(update={"processes": 2})),
    ],
    ids=["revision", "tolerance", "processes"],
)
async def test_a_choice_is_not_taken_for_another_case(
    folder: Path,
    settings: WorkerSettings,
    change: Callable[[Model, WorkerSettings], tuple[Model, WorkerSettings]],
) -> None:
    make_artifact(settings, folder)
    await choose_backend(ENTRY, folder, settings)
    (path,) = kept(settings)
    choice = read_choice(path)
    assert choice is not None
    choice.reason = "of another case"
    write_choice(path, choice)
    entry, other = change(ENTRY, settings)
    if entry.revision != ENTRY.revision:  # the artifact was created from different files
        with pytest.raises(ConfigurationError, match="requires an artifact"):
            await choose_backend(entry, folder, other)
    else:
        assert (await choose_backend(entry, folder, other)).reason != "of another case"


async def test_a_choice_whose_file_is_broken_or_gone_is_made_anew(
    folder: Path, settings: WorkerSettings
) -> None:
    make_artifact(settings, folder)
    await choose_backend(ENTRY, folder, settings)
    (path,) = kept(settings)
    path.write_text("{")
    assert read_choice(path) is None
    assert (await choose_backend(ENTRY, folder, settings)).backend.name == "onnx-fp32"
    assert read_choice(path) is not None


async def test_onnx_without_an_artifact_names_the_command(
    folder: Path, settings: WorkerSettings
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"create it with `penstock optimize lookup --models-file"
    ):
        await choose_backend(ENTRY, folder, settings)


async def test_an_artifact_outside_the_tolerance_is_refused(
    folder: Path, settings: WorkerSettings
) -> None:
    make_artifact(settings, folder)
    entry = ENTRY.model_copy(update={"dimensions": 3})
    with pytest.raises(ConfigurationError, match="2 dimensions; expected 3"):
        await choose_backend(entry, folder, settings)
    assert kept(settings) == []


async def test_a_provisional_choice_is_used_for_a_day(
    folder: Path, settings: WorkerSettings
) -> None:
    make_artifact(settings, folder)
    await choose_backend(ENTRY, folder, settings)
    (path,) = kept(settings)
    provisional = read_choice(path)
    assert provisional is not None
    provisional.is_provisional, provisional.reason = True, "for want of quiet"
    write_choice(path, provisional)
    assert (await choose_backend(ENTRY, folder, settings)).reason == "for want of quiet"
    written_s = path.stat().st_mtime - PROVISIONAL_S - 1
    os.utime(path, (written_s, written_s))
    assert (await choose_backend(ENTRY, folder, settings)).reason != "for want of quiet"
