"""What is done with tables: query and load jobs, statements that define, and expiration."""
