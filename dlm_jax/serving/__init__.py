"""An HTTP server with the OpenAI protocol (docs/serving.md)."""
