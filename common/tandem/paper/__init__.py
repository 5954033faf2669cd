"""The paper: its published values, and the check that Tandem reads back what is known to be there."""
