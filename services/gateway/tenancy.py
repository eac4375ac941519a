"""Which requests may find each other's prompts in the prefix cache."""


def tenant_salt(principal: str, asked: str, is_shared: bool) -> str:
    """The cache salt of a request of `principal` that asks for the salt `asked`: no two principals have one in common, unless `is_shared`.

    A principal holds no space, so no two pairs give the same salt. Without principals, and where they share, it is what was asked for.
    """
    return f"{principal} {asked}" if principal and not is_shared else asked
