"""Schemas for a topic's messages: definitions, and validation of messages."""
