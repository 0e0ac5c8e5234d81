"""What callers send and get, in OpenAI's shapes and in Replicate's."""
