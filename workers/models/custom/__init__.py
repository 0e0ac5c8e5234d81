"""Custom models: a class in the interface of Cog, in a process of its own."""
