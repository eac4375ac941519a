"""Stubs of the internal protocol of the worker."""
