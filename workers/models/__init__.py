"""The models a worker can run. Nothing here imports torch before a model is loaded."""
