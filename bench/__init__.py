"""Benchmarks: what the pipeline costs in addition to the model, on this machine.

`python -m bench` lists them.
"""
