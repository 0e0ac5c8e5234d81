"""Docker images: their inputs, their build, and a test that runs them."""
