"""Load: closed loop, open loop, and the texts that are sent."""
