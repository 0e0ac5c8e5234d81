"""The process that runs a custom class. It imports only the standard library and `cog`.

The class may therefore use any version of any other package. The process isn't started with `python
-m`, because our packages' folder must be removed from `sys.path` before any of the class's code is
imported (process.py).
"""
