"""Benchmarks: what the pipeline adds to the cost of the model, on this machine.

`python -m bench` lists them.
"""
