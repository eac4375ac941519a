"""Speculative decoding: who proposes drafts, and which of them a step accepts."""
