"""An OpenAI-compatible HTTP server on FastAPI and uvicorn. `app.create_app` builds it, `run.serve` runs it."""
