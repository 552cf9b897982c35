import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))


def train_tiny(folder, flags, lines):
    """Models of all five schemes, trained for a moment with these flags on so many lines of a song -> the folder --out."""
    import train_compare
    (folder / "words.txt").write_bytes(b"".join(b"%d bottles of beer on the wall\n" % i for i in range(lines)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_compare.py", *flags.split(), "--dtype", "fp32", "--device", "cpu",
                                   "--data", str(folder / "words.txt"), "--out", str(folder / "out")])
        train_compare.main()
    return folder / "out"


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
