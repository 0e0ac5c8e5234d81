"""Chooses what computes an embedding model on this machine, before its model processes start.

asking.py, in the I/O process, takes the choice that was kept, or starts `python -m workers.choose` (__main__.py), once
per worker. That lists candidates (candidates.py), opens and times them in probe processes (probe.py), once the machine
is quiet (quiet.py), in rounds (contest.py), and picks (choosing.py), by what is known of the hardware (prior.py) where
the rounds don't agree.
"""
