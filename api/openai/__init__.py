"""OpenAI's API: one module per subject, with its bodies, replies and routes."""
