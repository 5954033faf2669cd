"""The API: launches runs, reads records, streams events. Composed by `tandem_api.app.create_app`."""
