"""Text models: causal language models of transformers, step by step."""
