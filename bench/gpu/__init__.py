"""GPU benchmarks: texts, images, sharing, and scale."""
