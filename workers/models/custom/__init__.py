"""Custom models: a class with Cog's interface, in a separate process."""
