"""Deployment: the local stack, and Terraform and Kubernetes for the cloud."""
