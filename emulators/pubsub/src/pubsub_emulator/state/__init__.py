"""Topics, subscriptions and their messages, as plain synchronous code."""
