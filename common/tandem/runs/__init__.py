"""What the records of one run say: its verdict, its summary, and how both are shown."""
