"""OpenAI's API: one module per topic, with its bodies, replies and routes."""
