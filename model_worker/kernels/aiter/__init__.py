"""The backend for AMD GPUs: every call of AITER is made here."""
