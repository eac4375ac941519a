"""Stubs of the internal protocols of the scheduler."""
