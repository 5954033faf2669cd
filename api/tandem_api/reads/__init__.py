"""What the API asks the database."""
