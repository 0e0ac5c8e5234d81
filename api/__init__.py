"""The HTTPS API: stateless, torch-free; publishes jobs and waits for their replies."""
