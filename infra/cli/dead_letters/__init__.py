"""Jobs that no worker could finish, from an operator's perspective: `penstock dead-letters`."""
