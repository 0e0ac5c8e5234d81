"""The same model behind its competitors: each as its documentation sets it up, in an environment of its own.

`python -m bench.peers` measures them and Penstock with one load generator and writes the table of
docs/performance.md.
"""
