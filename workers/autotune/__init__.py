"""Chooses an embedding model's backend on this machine, before its model processes start.

client.py, in the I/O process, reads the saved choice, or starts `python -m workers.autotune`
(__main__.py) once per worker. That process lists the candidates (candidates.py), loads them in
benchmark processes (benchmark_pool.py), times them, picks the fastest (search.py), and finds the
batch size (batch_budget.py).
"""
