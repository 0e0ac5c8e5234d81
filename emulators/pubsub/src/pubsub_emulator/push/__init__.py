"""Push subscriptions."""
