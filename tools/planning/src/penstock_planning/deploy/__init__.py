"""Plans a deployment before the first apply: resources on Google Cloud, and costs."""
