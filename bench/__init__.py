"""The benchmarks: the cost of the pipeline in addition to the model, on this machine.

`python -m bench` lists them.
"""
