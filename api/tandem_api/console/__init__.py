"""The web console: pages made by the server from what the REST API reads, live by its streams.

Imports nothing: ``python -m tandem_api.console.build`` runs before anything is installed.
"""
