"""Custom models: classes with Cog's interface, each in a separate process."""
