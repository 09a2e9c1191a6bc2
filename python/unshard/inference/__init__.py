"""Serve trained models: the C++ engine's outputs become text here. `llm` is for Python, `server` for HTTP, `commands` for the terminal."""
