"""Chooses what computes an embedding model on this machine, before its model processes start.

client.py, in the I/O process, takes the choice that was kept, or starts `python -m workers.autotune` (__main__.py),
once per worker. That lists candidates (candidates.py), opens and times them in benchmark processes (benchmark.py), once
the machine is quiet (idle.py), in rounds (contest.py), and picks (search.py), by what is known of the hardware
(prior.py) where the rounds don't agree.
"""
