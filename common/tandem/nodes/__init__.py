"""What the runs of a node say together: its profile, its verdict, and what it needs next."""
