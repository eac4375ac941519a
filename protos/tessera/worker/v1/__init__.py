"""Stubs of the worker's protocol, generated."""
