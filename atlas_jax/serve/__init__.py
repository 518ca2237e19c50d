"""The servers: gRPC and OpenAI-compatible HTTP, both in front of one engine. Needs the extra `serve`."""
