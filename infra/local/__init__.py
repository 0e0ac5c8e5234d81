"""The local stack: embedded servers that stand in for the cloud, each startable alone."""
