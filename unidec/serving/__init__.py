"""The server: `unidec serve`."""
