import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def check():
    """The module check.py beside this file."""
    spec = importlib.util.spec_from_file_location("gpu_check", Path(__file__).with_name("check.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def report(check):
    """Rows of (what, expected, measured); written to gpu-report.md where the suite was started."""
    rows = []
    yield rows
    if rows:
        Path("gpu-report.md").write_text(check.report(rows, check.machines_here()))
