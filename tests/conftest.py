import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))


SETTINGS = dict(scheme="rope", seed=0, steps=12, batch_size=2, train_len=16, dim=16, n_layer=1, n_head=2, max_len=256, lr=0.02, adam_lr=0.004,
                train_lens=[16], trained_len=16, window=0, random_positions=0, copies=False)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes(b"".join(b"%d bottles of beer on the wall\n" % i for i in range(400)))
    return path


class Bar:
    """Stands in for the progress bar."""
    def set_postfix_str(self, text, refresh): self.text = text
    def update(self): pass


def tree(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


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
