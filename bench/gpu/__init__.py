"""Benchmarks on a GPU: texts, images, sharing, scale."""
