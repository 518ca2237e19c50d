"""The gRPC server of `v1/atlas.proto`."""
