"""The gateway process: the public API, and the session that feeds it. What it computes is in the package `gateway`."""
