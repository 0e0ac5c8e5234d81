"""How calls come in: gRPC, REST, and the table of methods that both answer from."""
