"""Stubs of session and journal, generated."""
