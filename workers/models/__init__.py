"""The models a worker can run. Nothing here imports torch until a model is loaded."""
