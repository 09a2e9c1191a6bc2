"""Folders that ranks will write into, tried before the run."""
import os
import tempfile


def why_unusable(path):
    """Make the folder and try to write there. "" or why that can't be."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        return f"the folder can't be made: {error.strerror}"
    try:
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return f"nothing can be written there: {error.strerror}"
