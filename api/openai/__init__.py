"""OpenAI's API: one module per topic, containing its request bodies, responses, and routes."""
