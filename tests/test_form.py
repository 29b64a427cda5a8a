"""Formatting and lint of the whole repository, by ruff.toml."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
