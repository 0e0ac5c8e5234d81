"""The `penstock` command, and what its subcommands for keys, canaries, reports and load do."""
