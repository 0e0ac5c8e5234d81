"""What messages of a topic may look like: Avro definitions, and messages against them."""
