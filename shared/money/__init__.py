"""The charge for an item, amounts in US dollars, and the deadline objective."""
