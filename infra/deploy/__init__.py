"""Before the first apply: what a catalog and expected rates need of Google Cloud, and what a month of it costs."""
