"""Plans a deployment before the first apply: Google Cloud resources and their costs."""
