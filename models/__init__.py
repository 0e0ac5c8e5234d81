"""The models that the project trains itself; nothing here runs in a service."""
