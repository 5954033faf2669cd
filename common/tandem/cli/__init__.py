"""The command ``tandem``; one module per command."""
