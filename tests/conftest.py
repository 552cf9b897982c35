import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(driver, *arguments) -> (exit code, stdout, stderr), run in this process."""
    def call(driver, *arguments):
        monkeypatch.setattr(sys, "argv", [driver.__file__, *map(str, arguments)])
        capsys.readouterr()
        try:
            driver.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())
    return call
