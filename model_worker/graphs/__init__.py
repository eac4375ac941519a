"""Decode batches that are recorded once per size and replayed: a GPU then starts a whole pass at one call instead of one per kernel."""
