"""Who may call the API, and how much of it each caller may use."""
