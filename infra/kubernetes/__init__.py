"""A Kustomize tree, and the code that renders one overlay per model of models.yaml."""
