"""LoRA adapters with random weights for the tiny Llama in tiny.py, as PEFT saves them."""

from pathlib import Path

RANK = 4


def write_adapter(weights: Path, folder: Path, seed: int) -> Path:
    """Writes an adapter that changes most of the model's greedy tokens, as PEFT saves it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(weights),
        LoraConfig(
            r=RANK, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
        ),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.5)
    model.save_pretrained(str(folder))
    return folder


def merge_greedily(weights: Path, adapter: Path | None, ids: list[int], tokens: int) -> list[int]:
    """Returns the tokens that transformers generates with the adapter merged into the weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=0,
            pad_token_id=0,
        )
    tokens_after: list[int] = out[0, len(ids) :].tolist()
    return tokens_after
