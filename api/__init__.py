"""The HTTPS API. It is stateless, has no model libraries, publishes jobs and waits for replies."""
