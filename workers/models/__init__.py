"""The models a worker can run, by task; nothing here imports torch before a model is loaded."""
