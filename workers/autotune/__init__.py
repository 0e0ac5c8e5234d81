"""Chooses the backend of an embedding model on this machine, before its model processes start.

client.py, in the I/O process, reads the choice on disk, or starts `python -m workers.autotune`
(__main__.py) once per worker. That lists the candidates (candidates.py), loads them in benchmark
processes (benchmark_pool.py), waits until the machine is quiet, times them in rounds (contest.py)
and picks one (search.py). If the rounds disagree, it uses what is known of the hardware.
"""
