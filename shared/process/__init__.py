"""The Python process itself: tasks, cores, garbage collection, protection from other processes."""
