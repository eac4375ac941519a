"""A model that several ranks hold together: rank 0 has the engine and tells the others what to do; see docs/adr/0019."""
