"""The Python process: tasks, cores, garbage collection, and protection from other processes."""
