"""The script that compares the kernels on a device, as far as a CPU can run it."""

import check_kernels
import numpy as np
import pytest


@pytest.mark.parametrize("check", [check_kernels.check_norm, check_kernels.check_rotation])
def test_kernels_agree_with_xla(check):
    assert check("pallas_interpret", seed=1) is None


def test_what_is_drawn_agrees_with_xla():
    assert check_kernels.check_sampling("pallas_interpret", seed=1, vocab=5000, num_rows=12) is None


def test_differences_are_seen():
    right = [np.arange(3), np.ones(3, np.float32)]
    off, far = [np.array([0, 1, 3]), right[1]], [right[0], np.array([1, 1, 1.01], np.float32)]
    assert check_kernels.differences(right, right, right, 1e-3) is None
    assert check_kernels.differences(right, off, right, 1e-3) == "two runs differ"
    assert check_kernels.differences(off, off, right, 1e-3) == "1 of 3 integers differ"
    assert check_kernels.differences(far, far, right, 1e-3).startswith("largest error 1.00e-02")
