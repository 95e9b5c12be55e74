"""Every case of every section, as a test of pytest's: it runs, and what it finds is handed on as it comes."""

from __future__ import annotations

import json

import pytest

from experiments.gpu_suite.cases import Row
from experiments.gpu_suite.conftest import section_module
from experiments.gpu_suite.sizes import Sizes


@pytest.mark.gpu
def test_case(section: str, case: Row, sizes: Sizes, left_s: float, record_property):
    for row in section_module(section).rows(case, sizes, left_s):
        record_property("row", json.dumps(row))
