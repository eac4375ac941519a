"""Tessera: client, protobuf stubs and shared values."""
