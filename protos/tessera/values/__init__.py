"""Frozen values that every role shares. No protobuf, no gRPC, no torch: importable by every core."""
