"""The same model behind other servers, each set up as documented.

`python -m bench.peers` measures them and Penstock with one load generator and writes the table in
docs/explanation/performance.md.
"""
