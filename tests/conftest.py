import sys

import pytest

from helpers import song


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A small text to train on."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_bytes(song(400))
    return path


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(command, *arguments) -> (exit code, stdout, stderr), run in this process."""

    def call(command, *arguments):
        monkeypatch.setattr(sys, "argv", [command.__file__, *map(str, arguments)])
        capsys.readouterr()
        try:
            command.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())

    return call
