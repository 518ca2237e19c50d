"""Version 1 of the gRPC protocol: `atlas.proto`, and what `make stubs` makes of it."""
