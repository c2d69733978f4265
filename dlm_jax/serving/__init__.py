"""An HTTP server over the engine that speaks the OpenAI protocol (docs/serving.md)."""
