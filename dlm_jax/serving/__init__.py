"""An HTTP server with the OpenAI protocol, on top of the engine (docs/serving.md)."""
