"""Webhook events: their messages, signatures, and publication."""
