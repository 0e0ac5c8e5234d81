"""The functions behind Pub/Sub push.

One answers the callers of dead letters, one delivers webhooks.
"""
