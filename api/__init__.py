"""The HTTPS API.

It is stateless, contains no model libraries, publishes jobs and waits for replies.
"""
