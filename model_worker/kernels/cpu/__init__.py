"""Kernels of our own for x86 processors: C++, compiled by `make setup`; see `backend`."""
