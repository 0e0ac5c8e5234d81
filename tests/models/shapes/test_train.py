"""Training with tiny widths and few steps: the results load, and a stopped run resumes as if it had
never stopped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from models.shapes import train as train_module
from models.shapes.parts import Widths, make_text_encoder, make_vae
from models.shapes.train import (
    TextPlan,
    UnetPlan,
    UnetTraining,
    encode_scenes,
    make_tokenizer,
    train,
    train_text,
)
from models.shapes.train_vae import VaePlan, as_input, even_out, make_images, train_vae

pytestmark = pytest.mark.slow

TINY = Widths(vae=(8, 8, 8, 8), latents=4, text=32, text_layers=1, unet=(16, 32))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With two threads, parts this small would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silent(line: str) -> None:
    pass


def test_training_writes_a_pipeline_that_diffusers_loads(tmp_path: Path) -> None:
    lines: list[str] = []
    train(
        tmp_path / "pipeline",
        tmp_path / "state",
        widths=TINY,
        vae_plan=VaePlan(steps=3, batch=4, images=8, full_from=0.5),
        text_plan=TextPlan(steps=2, batch=4),
        unet_plan=UnetPlan(steps=2, batch=4, images=8),
        seed=1,
        look_captions=2,
        say=lines.append,
    )
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path / "pipeline", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline("a red circle", num_inference_steps=2, output_type="np").images
    assert image.shape == (64, 64, 3)
    assert np.isfinite(image).all()
    assert pipeline.vae.config.scaling_factor != 0.18215
    assert (tmp_path / "state" / "sheet-000002.png").exists()
    assert any("two objects both right" in line for line in lines)


def test_autoencoder_learns_from_few_steps(tmp_path: Path) -> None:
    train_vae(tmp_path / "one", VaePlan(steps=1, batch=4, images=16), TINY, 1, say=silent)
    train_vae(
        tmp_path / "more", VaePlan(steps=25, batch=4, images=16, lr=1e-2), TINY, 1, say=silent
    )
    assert difference(tmp_path / "more") < 0.9 * difference(tmp_path / "one")


def difference(state_dir: Path) -> float:
    """A trained autoencoder's mean absolute difference on eight images."""
    vae = make_vae(TINY).eval()
    vae.load_state_dict(torch.load(state_dir / "vae.pt", weights_only=True)["vae"])
    pixels = as_input(make_images(8, seed=77)[0])
    with torch.no_grad():
        drawn = vae.decode(vae.encode(pixels).latent_dist.mean).sample
    return float((drawn - pixels).abs().mean())


def test_evened_out_latents_have_a_deviation_of_one_and_draw_the_same() -> None:
    torch.manual_seed(0)
    vae = make_vae(TINY).eval()
    pixels = as_input(make_images(8, seed=77)[0])
    with torch.no_grad():
        before = vae.encode(pixels).latent_dist
        drawn = vae.decode(before.mean).sample
        mean, std = even_out(vae, before.mean, before.std)
        after = vae.encode(pixels).latent_dist
        torch.testing.assert_close(after.mean, mean, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(after.std, std, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(
            after.mean.std(dim=(0, 2, 3)), torch.ones(4), rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(vae.decode(after.mean).sample, drawn, rtol=1e-3, atol=1e-4)


def test_text_encoder_learns_from_few_steps(tmp_path: Path) -> None:
    lines: list[str] = []
    train_text(
        tmp_path, TextPlan(steps=41, batch=16, lr=5e-3), TINY, 1, make_tokenizer(), say=lines.append
    )
    first, last = (float(lines[index].split()[-1]) for index in (0, -1))
    assert last < 0.8 * first


def test_stopped_training_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "SAVE_EVERY_S", 0.0)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    encoder, vae = make_text_encoder(TINY, tokenizer).eval(), make_vae(TINY).eval()
    plan = UnetPlan(steps=4, batch=4, images=8)
    latents = encode_scenes(tmp_path, vae, plan.images, seed=1, say=silent)

    def training(name: str) -> UnetTraining:
        return UnetTraining(tmp_path / name, plan, TINY, 1, encoder, tokenizer)

    def run(one: UnetTraining, look: Callable[[], None]) -> None:
        one.run(latents, look_every_s=0.0, look=look, say=silent)

    whole = training("whole")
    run(whole, lambda: None)
    stopped = training("stopped")

    def stop_at_two() -> None:
        if stopped.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stopped, stop_at_two)
    resumed = training("stopped")
    assert resumed.step == 2
    run(resumed, lambda: None)
    for left, right in zip(whole.average.parameters(), resumed.average.parameters(), strict=True):
        assert torch.equal(left, right)
