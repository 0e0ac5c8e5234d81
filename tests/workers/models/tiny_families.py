"""Tiny pipelines of many diffusers families: real classes with random weights.

Most have no text encoders, and their prompts are embeddings. Sizes follow diffusers' tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from PIL import Image

from tests.workers.models.tiny_kandinsky import kandinsky_parts

SIDE = 32
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A family's components, and the arguments for each of its pipelines.

    `parts`: components by name. `prompts`: the arguments for a prompt, keyed by seed. `tasks`:
    pipeline classes. `usual`: other arguments. `takes_image`: True if the first task's pipeline
    requires an image.
    """

    parts: Callable[[], dict[str, Any]]
    prompts: Callable[[int], Arguments]
    tasks: tuple[str, ...]
    usual: Mapping[str, Any] = field(default_factory=dict)
    takes_image: bool = False


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kl_vae(channels: int = 4, **more: Any) -> Any:
    vae = diffusers.AutoencoderKL(
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        **{
            "block_out_channels": (4,),
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "shift_factor": 0.0609,
            "scaling_factor": 1.5035,
        }
        | more,
    )
    vae.decoder.conv_out.weight.data *= 4
    return vae


def ddim() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def flow(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def with_negative(
    width: int, *, tokens: int = 12, pooled: int = 0, masks: torch.dtype | None = None
) -> Callable[[int], Arguments]:
    def prompts(seed: int) -> Arguments:
        given: Arguments = {}
        for at, sign in enumerate(("", "negative_")):
            given[f"{sign}prompt_embeds"] = random(seed + 50 * at, 1, tokens, width)
            if pooled:
                given[f"{sign}pooled_prompt_embeds"] = random(seed + 90 * at, 1, pooled)
            if masks is not None:
                given[f"{sign}prompt_attention_mask"] = torch.ones(1, tokens, dtype=masks)
        return given

    return prompts


def unet(**settings: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        **{
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "sample_size": SIDE,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": (2, 4),
            "norm_num_groups": 2,
        }
        | settings
    )


def xl_unet(pooled: int, sizes: int = 6) -> Any:
    return unet(
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=pooled + sizes * 8,
    )


def sd_parts() -> dict[str, Any]:
    return {
        "unet": unet(),
        "vae": kl_vae(shift_factor=None),
        "scheduler": ddim(),
        "text_encoder": None,
        "tokenizer": None,
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def xl_parts() -> dict[str, Any]:
    return {
        "unet": xl_unet(pooled=32),
        "vae": kl_vae(shift_factor=None),
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        ),
        "text_encoder": None,
        "tokenizer": None,
        "text_encoder_2": None,
        "tokenizer_2": None,
        "add_watermarker": False,
    }


def sd3_parts() -> dict[str, Any]:
    names = ("text_encoder", "tokenizer")
    return {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=SIDE,
            patch_size=1,
            in_channels=16,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            out_channels=16,
        ),
        # Our stand-in adds the shift that the pipeline for masks omits.
        "vae": kl_vae(16, shift_factor=0.0),
        "scheduler": flow(),
    } | {f"{name}{number}": None for name in names for number in ("", "_2", "_3")}


def flux_transformer(**settings: Any) -> Any:
    return diffusers.FluxTransformer2DModel(
        **{
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        }
        | settings
    )


def flux_parts() -> dict[str, Any]:
    return {
        "transformer": flux_transformer(),
        "vae": kl_vae(),
        "scheduler": flow(),
    } | dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


def flux_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": random(seed, 1, 12, 32),
        "pooled_prompt_embeds": random(seed + 9, 1, 32),
    }


def chroma_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.ChromaTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
        "vae": kl_vae(),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def aura_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.AuraFlowTransformer2DModel(
            sample_size=SIDE,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            out_channels=4,
            pos_embed_max_size=256,
        ),
        "vae": kl_vae(),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def pixart_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.PixArtTransformer2DModel(
            sample_size=SIDE,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
        ),
        "vae": kl_vae(),
        "scheduler": ddim(),
        "text_encoder": None,
        "tokenizer": None,
    }


def sana_transformer(**settings: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=SIDE,
        **settings,
    )


def sana_parts() -> dict[str, Any]:
    blocks = ("ResBlock", "EfficientViTBlock")
    return {
        "transformer": sana_transformer(),
        "vae": diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ),
        "scheduler": flow(shift=7.0),
        "text_encoder": None,
        "tokenizer": None,
    }


def sana_sprint_parts() -> dict[str, Any]:
    distilled = sana_transformer(qk_norm="rms_norm_across_heads", guidance_embeds=True)
    return sana_parts() | {"transformer": distilled, "scheduler": diffusers.SCMScheduler()}


def sana_sprint_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": random(seed, 1, 12, 8),
        "prompt_attention_mask": torch.ones(1, 12, dtype=torch.long),
    }


def lumina_next_parts() -> dict[str, Any]:
    return lumina_parts() | {
        "transformer": diffusers.LuminaNextDiT2DModel(
            sample_size=SIDE,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            ffn_dim_multiplier=None,
            cross_attention_dim=8,
        )
    }


def lumina_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.Lumina2Transformer2DModel(
            sample_size=SIDE,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            ffn_dim_multiplier=None,
            scaling_factor=1.0,
            axes_dim_rope=(4, 2, 2),
            cap_feat_dim=8,
        ),
        "vae": kl_vae(),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def cogview_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=1,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=4,
        ),
        "vae": kl_vae(),
        "scheduler": flow(
            base_shift=0.25,
            max_shift=0.75,
            base_image_seq_len=256,
            use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
        "text_encoder": None,
        "tokenizer": None,
    }


def cogview3_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.CogView3PlusTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=1,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=2,
            pos_embed_max_size=SIDE // 2,
            sample_size=SIDE,
        ),
        "vae": kl_vae(shift_factor=None),
        "scheduler": diffusers.CogVideoXDDIMScheduler(),
        "text_encoder": None,
        "tokenizer": None,
    }


def kandinsky3_parts() -> dict[str, Any]:
    return {
        "unet": diffusers.Kandinsky3UNet(
            in_channels=4,
            time_embedding_dim=4,
            groups=2,
            attention_head_dim=4,
            layers_per_block=3,
            block_out_channels=(32, 64),
            cross_attention_dim=4,
            encoder_hid_dim=32,
        ),
        "movq": kandinsky_parts()["movq"],
        "scheduler": diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.002, beta_schedule="linear", clip_sample=False
        ),
        "text_encoder": None,
        "tokenizer": None,
    }


def kandinsky3_prompts(seed: int) -> Arguments:
    given: Arguments = {}
    for at, sign in enumerate(("", "negative_")):
        given[f"{sign}prompt_embeds"] = random(seed + 50 * at, 1, 12, 32)
        given[f"{sign}attention_mask"] = torch.ones(1, 12, dtype=torch.long)
    return given


def hunyuan_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.HunyuanDiT2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            cross_attention_dim=32,
            cross_attention_dim_t5=32,
            pooled_projection_dim=16,
            hidden_size=24,
            text_len=12,
            text_len_t5=12,
        ),
        # The pipeline assumes that the VAE downsamples by a factor of eight.
        "vae": kl_vae(
            block_out_channels=(4,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ),
        "scheduler": ddim(),
        "text_encoder": None,
        "tokenizer": None,
        "text_encoder_2": None,
        "tokenizer_2": None,
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def hunyuan_prompts(seed: int) -> Arguments:
    given: Arguments = {}
    for at, sign in enumerate(("", "negative_")):
        for number in ("", "_2"):
            given[f"{sign}prompt_embeds{number}"] = random(seed + at + len(number), 1, 12, 32)
            given[f"{sign}prompt_attention_mask{number}"] = torch.ones(1, 12, dtype=torch.long)
    return given


def z_image_parts() -> dict[str, Any]:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
        t_scale=1000.0,
    )
    # They are created uninitialized.
    transformer.x_pad_token.data.fill_(1)
    transformer.cap_pad_token.data.fill_(1)
    return {
        "transformer": transformer,
        "vae": kl_vae(),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def z_image_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": [random(seed, 9 + seed % 3, 32)],
        "negative_prompt_embeds": [random(seed + 50, 9, 32)],
    }


def qwen_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            guidance_embeds=False,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def qwen_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": random(seed, 1, 12, 16),
        "prompt_embeds_mask": torch.ones(1, 12, dtype=torch.long),
        "negative_prompt_embeds": random(seed + 50, 1, 12, 16),
        "negative_prompt_embeds_mask": torch.ones(1, 12, dtype=torch.long),
    }


class Qwen3Processor:
    """The part of a processor that the pipeline's constructor uses."""

    class tokenizer:
        @staticmethod
        def encode(text: str) -> list[int]:
            return [0]

    def apply_chat_template(self, *given: Any, **named: Any) -> list[list[int]]:
        return [[0]]


def qwen21_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.QwenImage21Transformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=4,
            dim_mult=[1] * 5,
            num_res_blocks=1,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "scheduler": flow(),
        "text_encoder": None,
        "processor": Qwen3Processor(),
    }


def flux2_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    return {
        "transformer": diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            timestep_guidance_channels=256,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance_embeds,
        ),
        "vae": diffusers.AutoencoderKLFlux2(
            sample_size=SIDE,
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(4,),
            layers_per_block=1,
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def lcm_parts() -> dict[str, Any]:
    return sd_parts() | {
        "unet": unet(time_cond_proj_dim=32),
        "scheduler": diffusers.LCMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
        ),
    }


def hidream_parts() -> dict[str, Any]:
    names = ("text_encoder", "tokenizer")
    return {
        "transformer": diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, 16],
            text_emb_dim=64,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=(0, 1, 1),
        ),
        "vae": kl_vae(),
        "scheduler": flow(),
    } | {f"{name}{number}": None for name in names for number in ("", "_2", "_3", "_4")}


def hidream_prompts(seed: int) -> Arguments:
    given: Arguments = {}
    for at, sign in enumerate(("", "negative_")):
        given[f"{sign}prompt_embeds_t5"] = random(seed + at, 1, 12, 32)
        given[f"{sign}prompt_embeds_llama3"] = random(seed + at, 3, 1, 12, 16)
        given[f"{sign}pooled_prompt_embeds"] = random(seed + at, 1, 64)
    return given


def ovis_parts() -> dict[str, Any]:
    return {
        "transformer": diffusers.OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": kl_vae(),
        "scheduler": flow(),
        "text_encoder": None,
        "tokenizer": None,
    }


def ovis_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": random(seed, 1, 12, 32),
        "negative_prompt_embeds": random(seed + 50, 1, 12, 32),
    }


def prompts_only(width: int) -> Callable[[int], Arguments]:
    return lambda seed: {"prompt_embeds": random(seed, 1, 12, width)}


def klein_prompts(seed: int) -> Arguments:
    return {
        "prompt_embeds": random(seed, 1, 12, 16),
        "negative_prompt_embeds": random(seed + 50, 1, 12, 16),
    }


SD = "StableDiffusion"
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "needs a ControlNet, which entries list separately": (
        *(f"{SD}ControlNet{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"{SD}XLControlNet{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"{SD}XLControlNetUnion{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"{SD}3ControlNet{way}Pipeline" for way in ("", "Inpainting")),
        *(f"FluxControlNet{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"ZImageControlNet{way}Pipeline" for way in ("", "Inpaint")),
        "QwenImageControlNetPipeline",
    ),
    "needs a control image, which requests don't have": (
        *(f"FluxControl{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        "CogView4ControlPipeline",
    ),
    "changes its modules, so its images are drawn one at a time": (
        *(f"{SD}PAG{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"{SD}XLPAG{way}Pipeline" for way in ("", "Img2Img", "Inpaint")),
        *(f"{SD}3PAG{way}Pipeline" for way in ("", "Img2Img")),
        *(f"{SD}ControlNetPAG{way}Pipeline" for way in ("", "Inpaint")),
        *(f"{SD}XLControlNetPAG{way}Pipeline" for way in ("", "Img2Img")),
        *(f"{family}PAGPipeline" for family in ("HunyuanDiT", "Sana", "PixArtSigma")),
    ),
    "needs the files of a vision-language encoder": (
        *(f"QwenImageEdit{way}Pipeline" for way in ("", "Inpaint", "Plus")),
        *("QwenImageLayeredPipeline", "GlmImagePipeline", "ZImageOmniPipeline"),
    ),
    "draws a video": ("HeliosPipeline", "HeliosPyramidPipeline"),
    "can't draw in diffusers 0.42.1": ("ChromaInpaintPipeline",),
    "needs sentencepiece, which is not installed": ("KolorsPipeline", "KolorsImg2ImgPipeline"),
    "has not been tried": (
        *(f"Kandinsky{way}CombinedPipeline" for way in ("", "Img2Img", "Inpaint")),
        *("StableCascadeCombinedPipeline", "WuerstchenCombinedPipeline"),
        *(f"IF{way}Pipeline" for way in ("", "Img2Img", "Inpainting")),
        *("Ideogram4Pipeline", "Krea2Pipeline", "NucleusMoEImagePipeline", "PRXPipeline"),
    ),
    "differs by 4e-5 with random weights, for an unknown reason": ("Kandinsky3Img2ImgPipeline",),
}
"""Pipelines that are not in FAMILIES, by reason."""
FAMILIES: dict[str, Family] = {
    "stable-diffusion": Family(
        sd_parts,
        with_negative(32),
        (f"{SD}Pipeline", f"{SD}Img2ImgPipeline", f"{SD}InpaintPipeline"),
        {"guidance_scale": 3.0},
    ),
    "sdxl": Family(
        xl_parts,
        with_negative(32, pooled=32),
        (f"{SD}XLPipeline", f"{SD}XLImg2ImgPipeline", f"{SD}XLInpaintPipeline"),
        {"guidance_scale": 3.0},
    ),
    "sd3": Family(
        sd3_parts,
        with_negative(32, pooled=64),
        (f"{SD}3Pipeline", f"{SD}3Img2ImgPipeline", f"{SD}3InpaintPipeline"),
        {"guidance_scale": 3.0},
    ),
    "flux": Family(
        flux_parts, flux_prompts, ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")
    ),
    "flux-kontext": Family(
        flux_parts,
        flux_prompts,
        ("FluxKontextPipeline",),
        {"max_area": SIDE * SIDE, "_auto_resize": False},
        takes_image=True,
    ),
    "flux-kontext-inpaint": Family(
        flux_parts,
        flux_prompts,
        ("FluxKontextInpaintPipeline",),
        {"max_area": SIDE * SIDE, "_auto_resize": False},
        takes_image=True,
    ),
    "flux-fill": Family(
        lambda: flux_parts() | {"transformer": flux_transformer(in_channels=36, out_channels=16)},
        flux_prompts,
        ("FluxFillPipeline",),
        takes_image=True,
    ),
    "flux2": Family(
        lambda: flux2_parts(guidance_embeds=True), prompts_only(16), ("Flux2Pipeline",)
    ),
    "flux2-klein": Family(
        lambda: flux2_parts(guidance_embeds=False),
        klein_prompts,
        ("Flux2KleinPipeline", "Flux2KleinInpaintPipeline"),
    ),
    "flux2-klein-kv": Family(
        lambda: flux2_parts(guidance_embeds=False),
        klein_prompts,
        ("Flux2KleinKVPipeline",),
        {"image": Image.linear_gradient("L").resize((2 * SIDE, 2 * SIDE)).convert("RGB")},
    ),
    "chroma": Family(
        chroma_parts,
        with_negative(32, masks=torch.float),
        ("ChromaPipeline", "ChromaImg2ImgPipeline"),
        {"guidance_scale": 3.0},
    ),
    "aura-flow": Family(
        aura_parts,
        with_negative(32, masks=torch.long),
        ("AuraFlowPipeline",),
        {"guidance_scale": 3.0},
    ),
    "pixart-sigma": Family(
        pixart_parts,
        with_negative(32, masks=torch.long),
        ("PixArtSigmaPipeline",),
        {"use_resolution_binning": False, "negative_prompt": None},
    ),
    "pixart-alpha": Family(
        pixart_parts,
        with_negative(32, masks=torch.long),
        ("PixArtAlphaPipeline",),
        {"use_resolution_binning": False, "negative_prompt": None},
    ),
    "sana": Family(
        sana_parts,
        with_negative(8, masks=torch.long),
        ("SanaPipeline",),
        {"use_resolution_binning": False, "negative_prompt": None},
    ),
    "sana-sprint": Family(
        sana_sprint_parts,
        sana_sprint_prompts,
        ("SanaSprintPipeline", "SanaSprintImg2ImgPipeline"),
        {"use_resolution_binning": False, "intermediate_timesteps": None},
    ),
    "lumina": Family(lumina_next_parts, with_negative(8, masks=torch.long), ("LuminaPipeline",)),
    "lumina2": Family(lumina_parts, with_negative(8, masks=torch.long), ("Lumina2Pipeline",)),
    "cogview3": Family(cogview3_parts, with_negative(32), ("CogView3PlusPipeline",)),
    "kandinsky-3": Family(kandinsky3_parts, kandinsky3_prompts, ("Kandinsky3Pipeline",)),
    "cogview4": Family(cogview_parts, with_negative(32), ("CogView4Pipeline",)),
    "hunyuan-dit": Family(
        hunyuan_parts,
        hunyuan_prompts,
        ("HunyuanDiTPipeline",),
        {"use_resolution_binning": False},
    ),
    "z-image": Family(
        z_image_parts,
        z_image_prompts,
        ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"),
        {"guidance_scale": 3.0},
    ),
    "qwen-image": Family(
        qwen_parts,
        qwen_prompts,
        ("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
        {"true_cfg_scale": 3.0},
    ),
    "qwen-image-2.1": Family(
        qwen21_parts, qwen_prompts, ("QwenImage21Pipeline",), {"true_cfg_scale": 3.0}
    ),
    "kandinsky-2.2": Family(
        kandinsky_parts,
        lambda seed: {"prompt": f"a {'very ' * seed}red house"},
        ("KandinskyV22CombinedPipeline", "KandinskyV22Img2ImgCombinedPipeline"),
    ),
    "kandinsky-2.2-inpaint": Family(
        lambda: kandinsky_parts(of_masks=True),
        lambda seed: {"prompt": f"a {'very ' * seed}red house"},
        ("KandinskyV22InpaintCombinedPipeline",),
        takes_image=True,
    ),
    "lcm": Family(
        lcm_parts,
        prompts_only(32),
        ("LatentConsistencyModelPipeline", "LatentConsistencyModelImg2ImgPipeline"),
    ),
    "hidream": Family(hidream_parts, hidream_prompts, ("HiDreamImagePipeline",)),
    "ovis-image": Family(
        ovis_parts, ovis_prompts, ("OvisImagePipeline",), {"negative_prompt": None}
    ),
}
