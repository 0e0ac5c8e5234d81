"""Jobs that no worker could finish, as an operator handles them: `penstock dead-letters`."""
