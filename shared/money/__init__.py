"""Item charges, amounts in US dollars, and the deadline objective."""
