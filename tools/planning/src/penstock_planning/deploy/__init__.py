"""Plans a deployment before the first apply: what it needs of Google Cloud, and what it costs."""
