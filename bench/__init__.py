"""The benchmarks: what the pipeline costs beside the model, on the machine they run on.

`python -m bench` runs all.
"""
