"""What is kept in Redis and in the object store."""
