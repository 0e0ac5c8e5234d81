"""The HTTPS API.

It is stateless and contains no model libraries; it publishes jobs and waits for replies.
"""
