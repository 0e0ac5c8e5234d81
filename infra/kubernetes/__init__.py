"""A Kustomize tree, and the code that renders one overlay per model in models.yaml."""
