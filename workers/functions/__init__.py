"""Functions that receive Pub/Sub pushes.

One replies to the callers of dead-lettered jobs, and another delivers webhooks.
"""
