"""The `penstock` command, and the code behind its keys, canaries, reports, and load subcommands."""
