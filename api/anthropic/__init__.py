"""Anthropic's API: messages, in its shapes."""
