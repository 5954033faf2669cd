"""Numbers of mismatches: of one tensor, over steps and over runs, each with its bound."""
