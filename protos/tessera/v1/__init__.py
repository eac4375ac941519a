"""Stubs of the public API."""
