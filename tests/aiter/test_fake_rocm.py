"""AITER loads on this machine and takes it for one with the GPU that was asked for; its compiled operators reach the stand-ins."""

import aiter
import pytest
import torch

from tests.aiter.compiled_modules import Call, MissingStandIn


@pytest.mark.each_arch
def test_aiter_takes_this_machine_for_the_architecture(arch: str) -> None:
    from aiter.ops.triton.utils._triton import arch_info

    assert aiter.get_gfx() == arch
    assert arch_info.get_arch() == arch
    assert aiter.dtypes.fp8 == {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}[arch]


def test_a_compiled_operator_is_recorded_as_it_was_called(recorded_calls: list[Call]) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    normed = aiter.rmsnorm2d_fwd(x, weight, epsilon=1e-6)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    (call,) = recorded_calls
    assert (call.module, call.operator) == ("module_rmsnorm", "rmsnorm2d_fwd")
    assert call.arguments["epsilon"] == 1e-6
    assert call.arguments["use_model_sensitive_rmsnorm"] == 0


def test_a_wrong_keyword_fails_in_the_real_declaration() -> None:
    with pytest.raises(RuntimeError, match="eps"):
        aiter.rmsnorm2d_fwd(torch.ones(3, 8), torch.ones(8), eps=1e-6)


def test_an_operator_without_a_stand_in_is_named() -> None:
    with pytest.raises(MissingStandIn, match="gelu_and_mul"):
        aiter.gelu_and_mul(torch.empty(3, 4), torch.ones(3, 8))


def test_a_compiled_module_without_a_stand_in_is_named() -> None:
    with pytest.raises(MissingStandIn, match="module_moe_topk"):
        aiter.topk_sigmoid(torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int32), torch.ones(3, 8))
