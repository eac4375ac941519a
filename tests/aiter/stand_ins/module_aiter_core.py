"""AITER's enums, and its view of a tensor, as the compiled module of its newer versions gives them."""

from tests.aiter.stand_ins.module_aiter_enum import ActivationType, QuantType, _Named

__all__ = ["ActivationType", "MlaVersion", "QuantType"]


class MlaVersion(_Named):
    """Members: of latent attention's compiled kernels."""

    V32 = 0
    V40 = 1
