"""The shell: the only folder that imports grpc, redis or a `*_pb2`."""
