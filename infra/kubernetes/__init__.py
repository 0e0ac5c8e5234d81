"""Kubernetes for the cloud: a Kustomize tree, and what makes one overlay per model of models.yaml from it."""
