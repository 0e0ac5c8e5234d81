"""The Pub/Sub client."""
