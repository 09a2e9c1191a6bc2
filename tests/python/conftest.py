"""Fixtures of more than one file."""
import pytest
from launching import RANK_VARIABLES


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working and home folder, and no variables of a surrounding job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path
