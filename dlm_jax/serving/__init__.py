"""An HTTP server on top of the engine with the OpenAI protocol (docs/serving.md)."""
