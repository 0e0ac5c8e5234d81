"""Deployment: the local stack here, Terraform and Kubernetes for the cloud."""
