"""The command line in this process, for tests of what a user sees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tandem import cli


@pytest.fixture
def tandem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command in an empty folder; give its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out + err

    return run
