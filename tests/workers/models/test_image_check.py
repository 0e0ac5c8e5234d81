"""`penstock models check NAME`, and workers that compare their models with its output."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from shared.errors import BadInput, ConfigurationError
from shared.models.catalog_file import read_catalog, read_image_entry
from shared.models.image_interface import ImageInterface
from shared.models.tasks.image import ImageInput, ImageResult
from tests.limits import WAIT_LIMIT_S
from tests.penstock_command import penstock
from tests.workers.models.plain_diffusers import plain_pipeline
from tests.workers.models.test_image import FROM_IMAGE, TEXT, pixels
from tests.workers.models.test_image_drawing import joining
from tests.workers.models.test_image_families import far, loaded, write_tiny
from tests.workers.models.test_image_steps import prepared

pytestmark = [
    pytest.mark.slow(about_s=40),
    pytest.mark.filterwarnings("ignore"),
]
CATALOG = """\
models:
  - name: tiny
    task: image
    source: local:{folder}
    batch: {{max_pixel_steps: 2000000, max_items: 8}}
    image: {{width: 64, height: 64, steps: 4, interface: tiny.json}}
    price: {{per_million_pixel_steps_usd: 0.02}}
"""
EDIT = msgspec.structs.replace(
    TEXT, image=FROM_IMAGE.image, scheduler="default", steps=4, guidance_scale=3.5
)


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with FLUX.1 Kontext, which edits whole images, and its catalog next to it."""
    folder = write_tiny("flux", tmp_path_factory.mktemp("kontext") / "model", tiny_folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "FluxKontextPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder.parent / "models.yaml").write_text(CATALOG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def checked(kontext: Path, module_environment: pytest.MonkeyPatch) -> Path:
    """The interface file, as the command wrote it."""
    module_environment.setenv("PENSTOCK_MODELS_FILE", str(kontext.parent / "models.yaml"))
    assert penstock("models", "check", "tiny", "--device", "cpu") == 0
    return kontext.parent / "tiny.json"


@pytest.fixture(scope="module")
def module_environment() -> Any:
    with pytest.MonkeyPatch.context() as environment:
        yield environment


def test_the_command_writes_tasks_and_fields(checked: Path) -> None:
    interface = ImageInterface.model_validate_json(checked.read_bytes())
    assert interface.pipeline == "FluxKontextPipeline"
    assert interface.tasks == ("text", "image", "mask")
    assert interface.fields == ("guidance_scale",)
    assert interface.schedulers == ("default", "euler")
    assert interface.defaults.steps == 28
    (entry,) = read_catalog(checked.with_name("models.yaml")).models
    assert (entry.image.width, entry.image.steps) == (64, 4)
    assert (entry.image.guidance_scale, entry.image.multiple) == (3.5, 16)


def test_an_image_is_edited_as_by_plain_diffusers_and_charged_for_all_steps(
    checked: Path, kontext: Path
) -> None:
    (entry,) = read_catalog(checked.with_name("models.yaml")).models
    tiny = loaded(entry, kontext)
    seeds = [msgspec.structs.replace(EDIT, seed=seed) for seed in (1, 2)]
    alone = msgspec.structs.replace(TEXT, scheduler="default", steps=3, guidance_scale=3.5)
    results = joining(tiny.model, tiny.preparer, [*seeds, alone])
    for result, value in zip(results, seeds, strict=False):
        assert isinstance(result, ImageResult)
        assert result.pixel_steps == 4 * 64 * 64
        assert far(pixels(result), plain_edit(kontext, value)) <= 1


def plain_edit(folder: Path, value: ImageInput) -> np.ndarray:
    assert value.image is not None

    source = Image.open(io.BytesIO(value.image.data or b"")).convert("RGB").resize((64, 64))
    drawn = plain_pipeline(FluxKontextPipeline, folder)(
        image=source,
        prompt=value.prompt,
        width=64,
        height=64,
        max_area=64 * 64,
        _auto_resize=False,
        num_inference_steps=value.steps,
        guidance_scale=value.guidance_scale,
        generator=torch.Generator().manual_seed(value.seed),
    ).images[0]
    return np.asarray(drawn).astype(int)


def test_a_strength_is_refused_where_it_is_ignored(checked: Path, kontext: Path) -> None:
    (entry,) = read_catalog(checked.with_name("models.yaml")).models
    tiny = loaded(entry, kontext)
    (refused,) = tiny.preparer.prepare([msgspec.structs.replace(EDIT, strength=0.5)])
    assert isinstance(refused, BadInput)
    assert refused.field == "strength"


def test_without_the_file_no_image_is_edited(kontext: Path) -> None:
    """Otherwise, the API would reserve and charge for only some of the steps."""
    entry = read_image_entry(kontext.parent / "models.yaml", "tiny").as_model()
    entry = entry.model_copy(
        update={"image": entry.image.model_copy(update={"scheduler": "default"})}
    )
    tiny = loaded(entry, kontext)
    item = prepared(tiny.preparer, EDIT)
    (outcome,) = tiny.model.predict([item], lambda step, steps: None)
    assert isinstance(outcome, BadInput)
    assert outcome.field == "image"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pipeline": "FluxPipeline"}, "pipeline: FluxPipeline in the file"),
        ({"fields": ("strength",)}, "fields: strength in the file"),
        ({"schedulers": ("ddim",)}, "schedulers: ddim in the file"),
    ],
    ids=str,
)
def test_a_worker_refuses_a_file_of_another_pipeline(
    checked: Path, kontext: Path, change: dict[str, Any], reason: str
) -> None:
    (entry,) = read_catalog(checked.with_name("models.yaml")).models
    assert entry.image.interface is not None
    other = entry.image.interface.model_copy(update=change)
    image = entry.image.model_copy(update={"interface": other})
    with pytest.raises(ConfigurationError, match=reason) as caught:
        loaded(entry.model_copy(update={"image": image}), kontext)
    assert "penstock models check tiny" in caught.value.message


def test_an_entry_may_have_the_content_of_the_file(checked: Path, tmp_path: Path) -> None:
    (entry,) = read_catalog(checked.with_name("models.yaml")).models
    text = checked.with_name("models.yaml").read_text()
    (tmp_path / "models.yaml").write_text(
        text.replace("tiny.json", json.dumps(json.loads(checked.read_text())))
    )
    assert read_catalog(tmp_path / "models.yaml").models == (entry,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("{", "Invalid JSON"), ('{"tasks": []}', "pipeline: Field required")],
    ids=str,
)
def test_a_catalog_without_its_file_says_how_to_write_it(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    (tmp_path / "models.yaml").write_text(CATALOG.format(folder=tmp_path))
    if text is not None:
        (tmp_path / "tiny.json").write_text(text)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        read_catalog(tmp_path / "models.yaml")
    assert "penstock models check tiny" in caught.value.message


@pytest.mark.parametrize("name", ["../evil", "no_such_class", "UNet2DConditionModel", None])
def test_only_pipelines_of_diffusers_are_loaded(
    tmp_path: Path, kontext: Path, name: str | None
) -> None:
    index = json.loads((kontext / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": name}))
    entry = read_image_entry(kontext.parent / "models.yaml", "tiny").as_model()
    with pytest.raises(ConfigurationError, match="is not a diffusers pipeline"):
        loaded(entry, tmp_path)


@pytest.mark.parametrize(
    ("part", "content", "reason"),
    [
        ("tokenizer", None, "lists tokenizer, but there is no folder for it"),
        ("transformer/diffusion_pytorch_model.safetensors", None, "safetensors"),
        ("transformer/diffusion_pytorch_model.safetensors", b"x" * 100, "safetensors"),
        ("transformer/config.json", b"{", "config"),
    ],
    ids=str,
)
def test_broken_folders_are_refused_with_the_reason(
    tmp_path: Path,
    kontext: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    content: bytes | None,
    reason: str,
) -> None:
    folder = shutil.copytree(kontext, tmp_path / "model")
    place = folder / part
    if content is not None:
        place.write_bytes(content)
    elif place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    assert check_in(tmp_path, CATALOG.format(folder=folder)) == 1
    assert re.search(f"penstock: {folder}: .*(?:{reason})", capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    "parts",
    [["vae"], ["unet"], ["scheduler"], ["tokenizer"], ["text_encoder", "tokenizer"]],
    ids=str,
)
def test_a_part_that_must_not_be_null_is_named(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], parts: list[str]
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    change_json(folder / "model_index.json", **{part: [None, None] for part in parts})
    assert check_in(tmp_path, CATALOG.format(folder=folder)) == 1
    reason = f"null for {' and '.join(parts)}, but StableDiffusionPipeline requires a value"
    assert f"penstock: {folder}: model_index.json has {reason}\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            "multiple: 7",
            "multiple must be a multiple of 16, which FluxKontextPipeline requires, got 7",
        ),
        ("multiple: 48", "width must be a multiple of 48, got 64"),
        ("join: sometimes", "image.join: Input should be 'auto' or 'never'"),
        ("join: [auto]", "image.join: Input should be 'auto' or 'never'"),
    ],
)
def test_an_entry_that_the_pipeline_cannot_have_is_refused(
    tmp_path: Path, kontext: Path, capsys: pytest.CaptureFixture[str], field: str, reason: str
) -> None:
    text = CATALOG.format(folder=kontext).replace("steps: 4", f"steps: 4, {field}")
    assert check_in(tmp_path, text) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "tiny.json").exists()


def test_an_error_while_drawing_is_shown_by_its_cause_alone(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """Runs in a separate process, because pytest captures this process's log."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    change_json(folder / "scheduler/scheduler_config.json", prediction_type="nonsense")
    (tmp_path / "models.yaml").write_text(CATALOG.format(folder=folder))
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", "models", "check", "tiny", "--device", "cpu"],
        env={**os.environ, "PENSTOCK_MODELS_FILE": str(tmp_path / "models.yaml")},
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"penstock: ValueError: prediction_type .*\n", done.stderr)


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def check_in(folder: Path, catalog: str) -> int:
    """The exit status of the command, run with a catalog in a folder."""
    (folder / "models.yaml").write_text(catalog)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PENSTOCK_MODELS_FILE", str(folder / "models.yaml"))
        return penstock("models", "check", "tiny", "--device", "cpu")


def test_an_interface_that_cannot_be_written_is_an_error(
    tmp_path: Path, kontext: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CATALOG.format(folder=kontext).replace("tiny.json", "none/tiny.json")
    assert check_in(tmp_path, text) == 1
    errors = capsys.readouterr().err
    assert "none/tiny.json: No such file or directory" in errors


def test_a_name_that_no_entry_has_is_an_error(
    checked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert penstock("models", "check", "other") == 1
    assert "other: not a folder, and not an image or text model in" in capsys.readouterr().err
