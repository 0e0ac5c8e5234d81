"""The process that runs a custom class. It imports the standard library and `cog` only.

So the class may bring any version of any other package. `python -m` is not used to start it: the
folder of our packages leaves `sys.path` before any code of the class is imported (process.py).
"""
