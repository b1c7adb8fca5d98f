"""Which errors of a run are a clear word that something is not supported."""

from __future__ import annotations

import pytest
import torch

from sbp.subjects.dtensor import is_refusal, lacks_kernel


def test_a_kernel_that_does_not_take_the_trials_dtype_is_no_fault_of_the_subject() -> None:
    with pytest.raises(NotImplementedError) as raised:
        torch.nn.functional.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16), 2)
    assert lacks_kernel(raised.value, "bfloat16")
    assert not is_refusal(raised.value)
    # A tensor of another dtype than the trial's is the subject's own doing.
    assert not lacks_kernel(raised.value, "float64")
    assert not lacks_kernel(raised.value, "float16")
    assert not lacks_kernel(RuntimeError("shapes do not fit"), "bfloat16")
