"""Benchmarks: how much the pipeline adds to the model's cost, on this machine.

`python -m bench` lists them.
"""
