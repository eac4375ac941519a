"""The command line `tessera`: everything on one machine, one role, or one request."""
