"""Plans and simulates deployments. Both use the rules that are actually deployed."""
