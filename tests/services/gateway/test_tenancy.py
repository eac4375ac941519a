"""Salts of the prefix cache: one per principal and salt asked for, or shared."""

import itertools

from services.gateway.tenancy import tenant_salt


def test_no_two_principals_have_a_salt_in_common_whatever_they_ask_for():
    pairs = list(itertools.product(("a", "b", "ab"), ("", "a", "b", " a", "b a")))
    assert len({tenant_salt(principal, asked, is_shared=False) for principal, asked in pairs}) == len(pairs)


def test_principals_that_share_and_nobody_in_particular_have_what_they_ask_for():
    assert (
        tenant_salt("a", "x", is_shared=True)
        == tenant_salt("b", "x", is_shared=True)
        == tenant_salt("", "x", is_shared=False)
        == "x"
    )
    assert tenant_salt("", "", is_shared=False) == ""
