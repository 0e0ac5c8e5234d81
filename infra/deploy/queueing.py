"""How many workers a load needs, for a target utilization and waits within the deadline.

Workers of one model are the servers of one queue, as all of them pull from one subscription.
Arrivals are taken as Poisson and service times as exponential (M/M/c). Batches of one model differ
less than that, and M/D/c waits less than M/M/c at the same load, so what comes out is on the safe
side. Where items join and leave one by one, the servers are the places of all workers, each as slow
as in a full worker. Not counted: a request of more items than a batch holds brings them all at
once.
"""

from __future__ import annotations

import math


def servers_needed(
    load: float,
    service_s: float,
    wait_s: float,
    *,
    utilization: float,
    late_share: float,
    places: int = 1,
) -> int:
    """The least number of servers that keeps to both bounds.

    Args:
        load: offered load in Erlangs: arrivals per second x seconds of one server that each takes.
        service_s: seconds for which one server is taken at a time, or one of its places.
        wait_s: seconds that an arrival may wait for a server. Above 0.
        utilization: the share of its time that a server may be busy, between 0 and 1.
        late_share: the share of arrivals that may wait longer.
        places: of a server whose items join and leave one by one. An arrival waits for any place of
            any server, each of which does its part of the server's work.

    Returns:
        0 for no load, else at least 1. More load never gives fewer.
    """
    if load <= 0:
        return 0
    # A load that fills its servers exactly must not need one more because of the last bit.
    servers = max(1, math.ceil(load / utilization * (1 - 1e-12)))
    while late(servers * places, load * places, service_s, wait_s) > late_share:
        servers += 1
    return servers


def late(servers: int, load: float, service_s: float, wait_s: float) -> float:
    """The share of arrivals that wait longer than `wait_s`: P(W > t) = C(c, a) exp(-(c - a) t / s).

    Source: Gross, Shortle, Thompson, Harris: Fundamentals of Queueing Theory, section "Multiserver
        queues (M/M/c)".
    """
    if load >= servers:
        return 1.0
    return erlang_c(servers, load) * math.exp(-(servers - load) * wait_s / service_s)


def erlang_c(servers: int, load: float) -> float:
    """The share of arrivals that find all servers busy (A. K.

    Erlang, 1917), by way of the loss formula B.

    B(0) = 1, B(k) = a B(k-1) / (k + a B(k-1)), and C = B / (1 - (a / c) (1 - B)), for a < c.
    """
    lost = 1.0
    for count in range(1, servers + 1):
        lost = load * lost / (count + load * lost)
    return lost / (1 - load / servers * (1 - lost))


def mean_wait_s(servers: int, load: float, service_s: float) -> float:
    """Seconds that an arrival waits on average: C(c, a) s / (c - a), for a < c."""
    return erlang_c(servers, load) * service_s / (servers - load) if load else 0.0
