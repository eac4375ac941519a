"""The models, one file each, and what they have in common with each other and with the engine."""
