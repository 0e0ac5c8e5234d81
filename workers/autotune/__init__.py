"""Chooses an embedding model's backend on this machine, before its model processes start.

client.py, in the I/O process, reads the saved choice, or starts `python -m workers.autotune`
(__main__.py) once per worker. That process lists the candidates (candidates.py), loads them in
benchmark processes (benchmark_pool.py), waits until the machine is quiet, times them in rounds
(contest.py) and picks one (search.py). If the rounds disagree, it falls back on what is known about
the hardware.
"""
