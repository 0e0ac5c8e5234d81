"""Plans and simulations of a deployment. Both use the rules that are deployed."""
