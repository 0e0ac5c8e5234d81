"""Plans and simulations of a deployment. They share the rules that deploy."""
