"""hipBLASLt's products, of which a machine without tuned sizes takes none."""


def hipb_create_extension() -> None:
    pass
