"""Text models: transformers' causal language models, run step by step."""
