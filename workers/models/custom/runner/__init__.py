"""The process that runs a custom class. It imports only the standard library and `cog`.

The class may therefore bring any version of any other package. It isn't started with `python -m`:
our packages' folder leaves `sys.path` before any of the class's code is imported (process.py).
"""
