"""What is stored: datasets and tables, their schemas and settings, and rows in and out of them."""
