"""The OpenAI-compatible HTTP API. Start reading at `endpoint.py`, which owns a request's flow."""
