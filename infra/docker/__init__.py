"""Docker images: their inputs, how they are built, and a test that runs them."""
