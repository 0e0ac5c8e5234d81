"""What callers may use: rates of a minute, items in flight, and the budget of a month."""
