"""The store port and its adapters: where the journal goes, in memory for tests or in Redis."""
