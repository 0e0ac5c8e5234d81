"""Operations on tables: query and load jobs, data definition statements, and expiration."""
