"""How the system is put up: the local stack here, Terraform and Kubernetes for the cloud."""
