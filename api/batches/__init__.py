"""OpenAI's Batch API: uploaded files of requests, and the runner that answers them line by line."""
